"""Request bodies as clients really send them, recorded from their current releases or taken from
the documents of the servers they were written for. All that does not constrain an answer is
answered, and what is not used is named. `test_server_refusals.py` has what is refused.

`tests/clients/` runs the clients themselves.
"""

from __future__ import annotations

import base64
from typing import Any

import pytest
from support.hostile import encoded
from support.server_harness import Live, scene, uri

PICTURE = uri(scene(1))
BARE = PICTURE.partition(",")[2]


# A photo in base64 alone; its first characters, /9j/, look like a path.
JPEG = base64.b64encode(encoded(scene(2), "JPEG")).decode()
ASKED = "What is in the picture?"
IMAGE = {"type": "image_url", "image_url": {"url": PICTURE}}
TEXT = {"type": "text", "text": ASKED}
USER = {"role": "user", "content": [IMAGE, TEXT]}
LOOK = {
    "name": "look",
    "description": "Look closer.",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}},
        "required": ["where"], "additionalProperties": False},
}  # fmt: skip
TOOL = {"type": "function", "function": LOOK}
STRICT = {"type": "function", "function": {**LOOK, "strict": True}}
FLAT = {"type": "function", **LOOK, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where":"x"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "A ring."}
NEXT = {"role": "user", "content": "And now?"}
SHOWN_PARTS = [
    {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
    {"type": "input_text", "text": ASKED},
]
SHOWN = {"role": "user", "content": SHOWN_PARTS}
HM = [{"type": "reasoning_text", "text": "hm"}]
THOUGHT: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "status": "completed"}
THOUGHT |= {"summary": [], "content": HM, "encrypted_content": None}
RING = [{"type": "output_text", "text": "A ring.", "annotations": [], "logprobs": []}]
ITEM: dict[str, Any] = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "phase": "final_answer",
}
ITEM |= {"role": "assistant", "content": RING}
MADE = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"}
GIVEN = {"type": "function_call_output", "call_id": "c1", "output": "A ring."}
SCHEMA = {"name": "a", "schema": {"type": "object", "properties": {}}, "strict": True}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages) or [USER], **more}


def responses(*items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"input": list(items) or [SHOWN], **more}


def part(**more: Any) -> dict[str, Any]:
    return chat({"role": "user", "content": [{**IMAGE, **more}, TEXT]})


def answer(**more: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": "A ring.", **more}
    return chat(USER, said, NEXT)


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
# What is sent, and what of it is named as not used.
TAKEN: dict[str, tuple[dict[str, Any], str]] = {
    # OpenAI's own, chat
    "openai: a follow-up": (answer(refusal=None, annotations=[], reasoning_content="hm"), ""),
    "openai: parsed": (answer(parsed=None, tool_calls=None, function_call=None, audio=None), ""),
    "openai: neutral": (chat(n=1, seed=1, user="ann", logprobs=False, frequency_penalty=0,
        presence_penalty=0, top_p=1, logit_bias={}, service_tier="auto",
        response_format={"type": "text"}, modalities=["text"], parallel_tool_calls=True,
        tool_choice="auto", tools=[], functions=[], store=False, stop=None), ""),
    "openai: stored": (chat(store=True, metadata={"run": "1"}, verbosity="low",
        service_tier="flex"), "store, metadata, verbosity, service_tier"),
    "openai: effort": (chat(reasoning_effort="low"), "reasoning_effort"),
    "openai: strict tool": (chat(tools=[STRICT], tool_choice="auto"), ""),
    "openai: parsed arguments": (chat(USER, {**CALLED, "parsed": None, "tool_calls": [{**CALL,
        "function": {**CALL["function"], "parsed_arguments": {}}}]}, TOLD, tools=[STRICT]), ""),
    # OpenAI's own, responses
    "openai: response": (responses(metadata={"run": "1"}, store=True), ""),
    "openai: encrypted": (responses(include=["reasoning.encrypted_content"], store=False,
        truncation="disabled"), "include[0]"),
    "openai: reasoning": (responses(reasoning={"effort": "none", "summary": "auto",
        "generate_summary": None}), "reasoning.summary"),
    "openai: items": (responses(SHOWN, THOUGHT, ITEM, NEXT, text={"format": {"type": "text"}}), ""),
    # LangChain
    "langchain": ({"stream": False, **chat({"content": "Answer.", "role": "system"}, USER,
        {"content": "A ring.", "role": "assistant"}, NEXT), "seed": 1, "temperature": 0.0}, ""),
    "langchain: tools": (chat(USER, CALLED, TOLD, tools=[STRICT], seed=1), ""),
    "langchain: responses": (responses({"content": "Answer.", "role": "system", "type": "message"},
        {**SHOWN, "type": "message"}, THOUGHT, {k: v for k, v in ITEM.items() if k != "status"},
        {**NEXT, "type": "message"}), ""),
    # LiteLLM
    "litellm: a follow-up": (answer(reasoning_content="hm",
        provider_specific_fields={"refusal": None}, thinking_blocks=[{"type": "thinking",
        "thinking": "hm"}], images=[], annotations=[]), ""),
    "litellm: cache_control": (chat({"role": "user", "content": [{**TEXT,
        "cache_control": {"type": "ephemeral"}}]}), ""),
    "litellm: tools": (chat(USER, {**CALLED, "provider_specific_fields": {"a": 1},
        "function_call": None}, {**TOLD, "name": "look"}, tools=[TOOL]), ""),
    "litellm: thinking": (chat(thinking={"type": "enabled", "budget_tokens": 9}), ""),
    # pydantic-ai
    "pydantic-ai": (chat({"role": "system", "content": "Answer."}, USER, {"role": "assistant",
        "reasoning_content": "hm", **CALLED}, TOLD, tools=[STRICT], tool_choice="auto",
        parallel_tool_calls=True, **STREAMED), ""),
    "pydantic-ai: responses": (responses(SHOWN, {k: v for k, v in THOUGHT.items() if k != "status"},
        {k: v for k, v in MADE.items() if k != "id"}, GIVEN, {"role": "assistant",
        "content": "A ring."}, NEXT, instructions="Answer.", tools=[FLAT], tool_choice="auto"), ""),
    # openai-agents
    "openai-agents: responses": (responses(SHOWN, THOUGHT, MADE, GIVEN, include=[],
        instructions="Answer.", metadata={"run": "1"}, reasoning={"effort": "low"}, store=True,
        tools=[FLAT]), "reasoning.effort"),
    # smolagents, Hugging Face
    "smolagents": (chat({"role": "system", "content": [{"type": "text",
        "text": "You are an expert."}]}, USER, {"role": "assistant", "content": [{"type": "text",
        "text": "A ring.</code>"}]}, USER, stop=["Observation:", "Calling tools:", "</code>"]), ""),
    "hugging face: a call": (chat(USER, {"role": "assistant", "tool_calls": [{"type": "function",
        "function": {"name": "look", "arguments": {"a": 1}}}]}, TOLD, tools=[TOOL]), ""),
    # Vercel's AI SDK
    "vercel: tools": (chat(USER, {**CALLED, "content": ""}, TOLD, tools=[TOOL], tool_choice="auto",
        **STREAMED), ""),
    # LlamaIndex
    "llama-index: tools": (chat(tools=[{**STRICT, "function": {**LOOK, "strict": False}}],
        tool_choice="auto", parallel_tool_calls=False, temperature=0.1), ""),
    "llama-index: responses": (responses(include=None, instructions=None, metadata=None,
        previous_response_id=None, store=False, temperature=0.1, tools=[], top_p=1.0,
        truncation="disabled", user=None), ""),
    # guidellm, aiperf, vLLM
    "guidellm": (chat({"role": "user", "content": [TEXT]}, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True}, ignore_eos=True),
        ""),
    "aiperf": (chat(**STREAMED, ignore_eos=True, min_tokens=4), ""),
    "vllm: sampling": (chat(top_k=-1, min_p=0.0, repetition_penalty=1.0, stop_token_ids=[5],
        min_tokens=0, skip_special_tokens=True, spaces_between_special_tokens=True,
        include_stop_str_in_output=False, length_penalty=1.0, use_beam_search=False, best_of=1,
        truncate_prompt_tokens=None, prompt_logprobs=None, guided_json=None,
        structured_outputs=None, echo=False, add_special_tokens=False, priority=0,
        return_token_ids=True), "spaces_between_special_tokens, length_penalty, priority"),
    "vllm: uuid": (part(uuid="picture-1"), ""),
    "vllm: processor": (chat(mm_processor_kwargs={"max_pixels": 12000, "fps": 1}), ""),
    "vllm: another template": (chat(chat_template_kwargs={"xyz": True}),
        "chat_template_kwargs.xyz"),
    "vllm: reasoning": (answer(reasoning="hm"), ""),
    # llama.cpp
    "llama.cpp": (chat(cache_prompt=True, id_slot=-1, n_predict=-1, max_tokens=8,
        timings_per_token=False, samplers=[], mirostat=0, dry_multiplier=0.5,
        reasoning_format="auto"), "id_slot, n_predict, mirostat, dry_multiplier, reasoning_format"),
    "llama.cpp: no end": (chat(NEXT, max_tokens=-1, stop=["."]), ""),
    # Ollama, LM Studio
    "ollama": (chat(options={"num_ctx": 4096}, keep_alive="5m"), "options, keep_alive"),
    "ollama: think": (chat(think=False), ""),
    "lm studio": (chat(max_tokens=-1, stop=["."], ttl=300, draft_model=""), "ttl"),
    # Qwen
    "qwen: pixels": (part(min_pixels=9216, max_pixels=12288), ""),
    "qwen: thinking": (chat(enable_thinking=False, top_k=20), ""),
    # browser-use
    "browser-use": (chat({"role": "system", "content": "a"}, {"role": "user", "content": [TEXT,
        {**IMAGE, "image_url": {"url": PICTURE, "detail": "auto"}}]}, frequency_penalty=0.3,
        temperature=0.2), ""),
    # Anthropic's parts, OpenRouter's fields
    "anthropic: source": (chat({"role": "user", "content": [{"type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]},
        "cache_control": {"type": "ephemeral"}}, TEXT]}), ""),
    "anthropic: a thought": (answer(content=[{"type": "thinking", "thinking": "hm",
        "signature": "s"}, TEXT]), ""),
    "openrouter": (chat(reasoning={"enabled": True, "exclude": True}, provider={"order": ["a"]}),
        "provider"),
    "two lengths": (chat(max_tokens=50, max_completion_tokens=4), "max_tokens"),
    "two equal lengths": (chat(max_tokens=4, max_completion_tokens=4), ""),
    "many stops": (chat(stop=[f"<stop {n}>" for n in range(128)]), ""),
    "nested options of a template": (chat(chat_template_kwargs={"enable_thinking": {"a": [1]},
        "xyz": {"a": [True, None]}}), "chat_template_kwargs.xyz"),
    "bare base64": (part(image_url={"url": BARE}), ""),
    "bare base64 of a photo": (part(image_url=JPEG), ""),
    "openai: a tool of its own kind": (chat(tools=[TOOL, {"type": "custom",
        "custom": {"name": "a"}}]), "tools[1]"),
    "openai: hosted tools": (responses(tools=[{"type": "web_search"}, FLAT, {"type": "file_search",
        "vector_store_ids": ["vs_1"]}, {"type": "mcp", "server_label": "a",
        "server_url": "https://a.example"}, {"type": "custom", "name": "a"}]),
        "tools[0], tools[2], tools[3], tools[4]"),
    "openai: what hosted tools did": (responses(SHOWN, THOUGHT, {"type": "web_search_call",
        "id": "ws_1", "status": "completed", "action": {"a": 1}}, {"type": "mcp_list_tools",
        "id": "m_1", "server_label": "a", "tools": []}, ITEM, NEXT), "input[2], input[3]"),
    "a speaker": (chat({**USER, "name": "ann"}), "messages[0].name"),
    "a typo": (chat(tempature=1), "tempature"),
}  # fmt: skip
FORMED = {"type": "json_schema", "json_schema": SCHEMA}
LOOKS = {"type": "function", "function": {"name": "look"}}
NEAR = {**LOOK, "parameters": {**LOOK["parameters"], "properties": {"where": {"enum": ["near"]}}}}
FLAT_TOOLS = [{"type": "function", **NEAR}]
TOOLS = [{"type": "function", "function": NEAR}, {"type": "function", "function": {"name": "no"}}]
# What constrains an answer, and the answer: a text, or the name of a called tool.
FORCED: dict[str, tuple[dict[str, Any], str]] = {
    "langchain: structured output": (chat(response_format=FORMED), "{}"),
    "langchain, smolagents: any tool": (chat(tools=TOOLS[:1], tool_choice="required"), "look"),
    "instructor": (chat(tools=TOOLS, tool_choice=LOOKS), "look"),
    "vllm: guided": (chat(guided_json=SCHEMA["schema"]), "{}"),
    "vllm: guided choice": (chat(guided_choice=["ring"]), "ring"),
    "vllm: guided expression": (chat(guided_regex="r[i]ng"), "ring"),
    "vllm: guided grammar": (chat(guided_grammar='start: "ring"'), "ring"),
    "vllm: structured": (chat(structured_outputs={"regex": "a"}), "a"),
    "llama.cpp: grammar": (chat(grammar='root ::= [r] "ing"'), "ring"),
    "llama.cpp: schema": (chat(json_schema=SCHEMA["schema"]), "{}"),
    "sglang: expression": (chat(regex="ring"), "ring"),
    "sglang: grammar": (chat(ebnf='root ::= "ring"'), "ring"),
    "ollama: format": (chat(format={"const": "ring"}), '"ring"'),
    "openai: output": (responses(text={"format": {"type": "json_schema", **SCHEMA}}), "{}"),
    "openai: a forced tool": (responses(tools=FLAT_TOOLS, tool_choice="required"), "look"),
    "openai: a named tool": (responses(tools=FLAT_TOOLS,
        tool_choice={"type": "function", "name": "look"}), "look"),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tooled: Live) -> Live:
    return tooled


def sent(server: Live, body: dict[str, Any]) -> tuple[int, Any, Any]:
    if "input" in body:
        return server.call("/v1/responses", {"model": "demo", "max_output_tokens": 4, **body})
    limit = {} if "max_completion_tokens" in body else {"max_tokens": 4}
    return server.chat({**limit, **body})


@pytest.mark.parametrize("what", TAKEN)
def test_what_constrains_nothing_is_answered(server: Live, what: str) -> None:
    body, unused = TAKEN[what]
    status, answer, headers = sent(server, body)
    assert status == 200, answer
    assert headers.get("x-keepsight-unused", "") == unused


@pytest.mark.parametrize("what", FORCED)
def test_what_constrains_an_answer_is_honoured(server: Live, what: str) -> None:
    body, wanted = FORCED[what]
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    status, answer, headers = sent(server, {**body, limit: 90})
    assert status == 200 and "x-keepsight-unused" not in headers, answer
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
        found = [message["content"]] if message["content"] else calls
    else:
        items = answer["output"]
        found = [one.get("name") or one["content"][0]["text"] for one in items]
    assert found[0] == wanted, answer
