"""LiteLLM: every answer comes back with fields of its own (provider_specific_fields)."""

from __future__ import annotations

import json

import litellm
from common import ASKED, QUESTION, SCHEMA, TOOL, URL, check

litellm.telemetry = False
litellm.suppress_debug_info = True


def complete(provider: str, messages: list, **more: object) -> object:
    return litellm.completion(
        model=f"{provider}/demo",
        api_base=URL,
        api_key="none",
        num_retries=0,
        messages=messages,
        **{"max_tokens": 12, **more},
    )


for provider in ("openai", "hosted_vllm", "lm_studio", "litellm_proxy"):
    first = complete(provider, [ASKED])
    check(first.usage.prompt_tokens > 0, f"{provider}: usage")
    answer = first.choices[0].message
    messages = [ASKED, answer, {"role": "user", "content": "And now?"}]
    again = complete(provider, messages)
    check(again.usage.prompt_tokens_details.cached_tokens > 0, f"{provider}: cached tokens")
    history = [ASKED, answer.model_dump(), {"role": "user", "content": "And now?"}]
    complete(provider, history, metadata={"run": "1"}, user="ann")
    stream = complete(provider, [ASKED], stream=True, stream_options={"include_usage": True})
    pieces = list(stream)
    check(pieces[-1].usage.completion_tokens > 0, f"{provider}: usage of a stream")
    rebuilt = litellm.stream_chunk_builder(pieces).choices[0].message
    complete(provider, [ASKED, rebuilt, {"role": "user", "content": "And now?"}])
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
    formed = complete(provider, [ASKED], response_format=form, max_tokens=200)
    colour = json.loads(formed.choices[0].message.content)["colour"]
    check(colour in ("red", "green", "blue"), f"{provider}: a form")
    called = complete(provider, [ASKED], tools=[TOOL], tool_choice="auto").choices[0].message
    if called.tool_calls:
        told = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "A ring."}
        complete(provider, [ASKED, called, told], tools=[TOOL])
marked = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
complete("openai", [{"role": "user", "content": [marked]}], extra_body={"top_k": -1})
check(True, "cache_control")
response = litellm.responses(
    model="openai/demo", api_base=URL, api_key="none", input="Hello!", max_output_tokens=8
)
check(response.usage.input_tokens > 0, "responses")
