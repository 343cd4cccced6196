"""LangChain: chat, tools, streams, pictures, and answers that come back as history."""

from __future__ import annotations

from typing import Literal

from common import PICTURE, QUESTION, SCHEMA, URL, check, look
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from shape import Shape


def asked() -> HumanMessage:
    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    return HumanMessage(content=[picture, {"type": "text", "text": QUESTION}])


def chat(model: ChatOpenAI, what: str) -> None:
    first = model.invoke([SystemMessage("Answer."), asked()])
    check(first.usage_metadata["input_tokens"] > 0, f"{what}: usage")
    again = model.invoke([SystemMessage("Answer."), asked(), first, HumanMessage("And now?")])
    check(again.usage_metadata["input_token_details"]["cache_read"] > 0, f"{what}: cached tokens")
    pieces = list(model.stream([asked()]))
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    check(total.usage_metadata["output_tokens"] > 0, f"{what}: usage of a stream")
    bound = model.bind_tools([tool(look)], strict=True)
    reply = bound.invoke([asked()])
    if reply.tool_calls:
        result = ToolMessage("A ring.", tool_call_id=reply.tool_calls[0]["id"])
        bound.invoke([asked(), reply, result])
    standard = [{"type": "image", "base64": PICTURE.partition(",")[2], "mime_type": "image/png"}]
    model.invoke([HumanMessage(content=[*standard, {"type": "text", "text": QUESTION}])])


@tool
def describe(colour: Literal["red", "green", "blue"]) -> str:
    """Describe the shape."""
    return colour


def structured(model: ChatOpenAI, what: str) -> None:
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Shape, method=method).invoke([asked()])
        check(isinstance(found, Shape), f"{what}: structured output by {method}")
    found = model.with_structured_output(SCHEMA | {"title": "shape"}).invoke([asked()])
    check(found["colour"] in ("red", "green", "blue"), f"{what}: a plain schema")
    [first, *_] = model.bind_tools([describe], tool_choice="any").invoke([asked()]).tool_calls
    check(first["args"]["colour"] in ("red", "green", "blue"), f"{what}: any tool")
    named = model.bind_tools([describe], tool_choice="describe").invoke([asked()])
    check(named.tool_calls[0]["name"] == "describe", f"{what}: a named tool")


def options(**more: object) -> dict:
    return {
        "model": "demo",
        "base_url": URL,
        "api_key": "none",
        "max_retries": 0,
        "max_tokens": 12,
        "stream_usage": True,
        **more,
    }


chat(ChatOpenAI(**options(temperature=0, seed=1)), "chat")
chat(ChatOpenAI(**options(use_responses_api=True)), "responses")
chat(ChatOpenAI(**options(use_responses_api=True, use_previous_response_id=True)), "kept responses")
structured(ChatOpenAI(**options(max_tokens=200)), "chat")
structured(ChatOpenAI(**options(max_tokens=200, use_responses_api=True)), "responses")
ChatOpenAI(**options(reasoning_effort="low", metadata={"a": "b"}, store=True)).invoke("Hello!")
agent = create_agent(ChatOpenAI(**options()), [tool(look)])
agent.invoke({"messages": [asked()]}, {"recursion_limit": 6})
check(True, "an agent")
