"""openai-agents: strict tools are its default; both APIs, with and without a response before."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import PICTURE, QUESTION, URL, check, look
from openai.types.shared import Reasoning
from shape import Shape

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)


@function_tool
def mark(colour: Literal["red", "green", "blue"]) -> str:
    """Mark the shape."""
    return colour


def agent(model: object, **settings: object) -> Agent:
    # What ends by its length is an error to this client.
    ends = {"max_tokens": 200, "extra_body": {"stop": [".", "1"]}}
    chosen = ModelSettings(include_usage=True, **ends, **settings)
    return Agent(
        name="seer",
        instructions="Answer.",
        model=model,
        tools=[function_tool(look)],
        model_settings=chosen,
    )


def asked() -> list[dict]:
    content = [
        {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    return [{"role": "user", "content": content}]


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        seer = agent(kind(model="demo", openai_client=client))
        first = await Runner.run(seer, asked())
        check(first.context_wrapper.usage.input_tokens > 0, f"{kind.__name__}: usage")
        again = [*first.to_input_list(), {"role": "user", "content": "And now?"}]
        await Runner.run(seer, again)
        streamed = Runner.run_streamed(seer, asked())
        async for _ in streamed.stream_events():
            pass
        check(streamed.final_output is not None, f"{kind.__name__}: a stream")
        few = ModelSettings(max_tokens=200)
        typed = seer.clone(tools=[], output_type=Shape, model_settings=few)
        found = (await Runner.run(typed, asked())).final_output
        check(isinstance(found, Shape), f"{kind.__name__}: a typed output")
        forced = seer.clone(
            tools=[mark],
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(max_tokens=200, tool_choice="required"),
        )
        found = (await Runner.run(forced, asked())).final_output
        check(found in ("red", "green", "blue"), f"{kind.__name__}: a forced tool")
    model = OpenAIResponsesModel(model="demo", openai_client=client)
    seer = agent(model, reasoning=Reasoning(effort="low"), store=True, metadata={"run": "1"})
    first = await Runner.run(seer, asked())
    second = await Runner.run(seer, "And now?", previous_response_id=first.last_response_id)
    check(
        second.context_wrapper.usage.input_tokens > first.context_wrapper.usage.input_tokens,
        "the history is in the prompt",
    )


asyncio.run(main())
