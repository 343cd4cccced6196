"""OpenAI's own client: chat and responses, whole and streamed, with its strict validation on."""

from __future__ import annotations

import json

import openai
from common import PICTURE, QUESTION, TOOL, URL, check

client = openai.OpenAI(
    base_url=URL, api_key="none", max_retries=0, _strict_response_validation=True
)


def image_message() -> dict:
    parts = [
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "auto"}},
        {"type": "text", "text": QUESTION},
    ]
    return {"role": "user", "content": parts}


def chat() -> None:
    first = client.chat.completions.create(model="demo", messages=[image_message()], max_tokens=24)
    check(first.usage.prompt_tokens > 0 and first.usage.completion_tokens > 0, "usage")
    again = client.chat.completions.create(
        model="demo",
        messages=[
            image_message(),
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
        messages=[image_message()],
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
    try:
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "x"}],
            tools=[strict],
            tool_choice="required",
        )
    except openai.BadRequestError as error:
        check(error.param == "tool_choice", "a forced call is refused by name")
    else:
        check(False, "a forced call is refused by name")


def responses() -> None:
    content = [
        {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    first = client.responses.create(
        model="demo",
        input=[{"role": "user", "content": content}],
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
            {"role": "user", "content": content},
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


for step in (chat, tools, responses):
    step()
