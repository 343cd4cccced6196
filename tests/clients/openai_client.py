"""OpenAI's own client: chat and responses, whole and streamed, with its strict validation on."""

from __future__ import annotations

import json

import openai
from common import ASKED, PICTURE, QUESTION, SCHEMA, TOOL, URL, check
from shape import Shape

client = openai.OpenAI(
    base_url=URL, api_key="none", max_retries=0, _strict_response_validation=True
)
LOOKED = {"type": "input_image", "image_url": PICTURE, "detail": "auto"}
SHOWN = {"role": "user", "content": [LOOKED, {"type": "input_text", "text": QUESTION}]}


def chat() -> None:
    first = client.chat.completions.create(model="demo", messages=[ASKED], max_tokens=24)
    check(first.usage.prompt_tokens > 0 and first.usage.completion_tokens > 0, "usage")
    again = client.chat.completions.create(
        model="demo",
        messages=[
            ASKED,
            first.choices[0].message,  # with refusal, annotations and all else it has
            {"role": "user", "content": "And now?"},
        ],
        max_tokens=8,
        metadata={"run": "1"},
        store=True,
        user="somebody",
        seed=1,
        n=1,
        frequency_penalty=0,
        service_tier="auto",
        logprobs=False,
        reasoning_effort="low",
    )
    check(again.usage.prompt_tokens_details.cached_tokens > 0, "cached tokens")
    stream = client.chat.completions.create(
        model="demo",
        messages=[ASKED],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    check(chunks[-1].usage.completion_tokens == 8, "usage of a stream")


def tools() -> None:
    strict = json.loads(json.dumps(TOOL))
    strict["function"]["strict"] = True
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    reply = client.chat.completions.create(
        model="demo",
        messages=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "A ring."},
        ],
        tools=[strict],
        tool_choice="auto",
        parallel_tool_calls=True,
        max_tokens=4,
    )
    check(reply.usage.prompt_tokens > 0, "a tool's result")

    class Describe(Shape):
        """Describe the shape."""

    forced = client.chat.completions.parse(
        model="demo",
        messages=[ASKED],
        tools=[openai.pydantic_function_tool(Describe)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    [call] = forced.choices[0].message.tool_calls
    check(isinstance(call.function.parsed_arguments, Describe), "a forced call, parsed")
    try:
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "x"}],
            tools=[strict],
            tool_choice={"type": "function", "function": {"name": "other"}},
        )
    except openai.BadRequestError as error:
        check(error.param == "tool_choice", "a tool that is not there is refused by name")
    else:
        check(False, "a tool that is not there is refused by name")


def structured() -> None:
    reply = client.beta.chat.completions.parse(
        model="demo", messages=[ASKED], response_format=Shape, max_tokens=200
    )
    check(isinstance(reply.choices[0].message.parsed, Shape), "chat: a parsed answer")
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
    plain = client.chat.completions.create(
        model="demo", messages=[ASKED], response_format=form, max_tokens=200
    )
    Shape.model_validate_json(plain.choices[0].message.content)
    with client.chat.completions.stream(
        model="demo", messages=[ASKED], response_format=Shape, max_tokens=200
    ) as stream:
        for _ in stream:
            pass
        check(stream.get_final_completion().choices[0].message.parsed, "chat: a parsed stream")
    response = client.responses.parse(
        model="demo", input=[SHOWN], text_format=Shape, max_output_tokens=200
    )
    check(isinstance(response.output_parsed, Shape), "responses: a parsed answer")
    guided = client.chat.completions.create(
        model="demo",
        messages=[ASKED],
        extra_body={"structured_outputs": {"choice": ["a ring", "a star"]}},
    )
    check(guided.choices[0].message.content in ("a ring", "a star"), "vLLM's field")
    try:
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        client.chat.completions.create(model="demo", messages=[ASKED], response_format=bad)
    except openai.BadRequestError as error:
        check(error.param == "response_format", "what cannot be enforced is refused by name")
    else:
        check(False, "what cannot be enforced is refused by name")


def responses() -> None:
    first = client.responses.create(
        model="demo",
        input=[SHOWN],
        metadata={"run": "1"},
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": None},
        max_output_tokens=24,
    )
    check(first.metadata == {"run": "1"}, "metadata come back")
    check(first.usage.input_tokens_details.cached_tokens >= 0, "usage")
    second = client.responses.create(
        model="demo", input="And now?", previous_response_id=first.id, max_output_tokens=8
    )
    check(second.previous_response_id == first.id, "the response before")
    check(second.usage.input_tokens > first.usage.input_tokens, "the history is in the prompt")
    echoed = client.responses.create(
        model="demo",
        input=[
            SHOWN,
            *[item.to_dict() for item in first.output],
            {"role": "user", "content": "And now?"},
        ],
        max_output_tokens=8,
        store=False,
    )
    check(echoed.usage.input_tokens == second.usage.input_tokens, "the same prompt by both ways")
    check(client.responses.retrieve(first.id).output_text == first.output_text, "kept")
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError:
        pass
    else:
        check(False, "deleted")
    with client.responses.stream(model="demo", input="Hello!", max_output_tokens=8) as stream:
        for _ in stream:
            pass
        check(stream.get_final_response().usage.output_tokens > 0, "a stream of events")


for step in (chat, tools, structured, responses):
    step()
