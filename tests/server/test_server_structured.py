"""Answers of a form and forced calls over HTTP, in the syntax of each family."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from support.forms import Hurry, made
from support.models import build
from support.server_harness import TEMPLATE, Live, live
from tokenizers import AddedToken

import keepsight as ks
from keepsight.core.structured.formats import Format
from keepsight.core.structured.grammars import Grammars
from keepsight.errors import GrammarError
from keepsight.server.errors import ApiError
from keepsight.server.forms import CallSyntax, form_of
from keepsight.server.parser import OutputParser, OutputPiece
from keepsight.server.schema import ChatRequest, Unused

TAGGED = TEMPLATE.replace("{{ tools | tojson }}", "{{ tools | tojson }}<function=")
USER = {"role": "user", "content": "x"}
PLACE = {
    "type": "object",
    "properties": {"at": {"type": "integer", "minimum": 0, "maximum": 9}, "why": {"enum": ["a b"]}},
    "required": ["at"],
}
BAD: dict[str, Any] = {"schema": {"not": {}}}
SCHEMA = "function.parameters"
NAMED = {"type": "function", "function": {"name": "go"}}


def tool(name: str, parameters: Any = PLACE, **more: Any) -> dict[str, Any]:
    about = {"name": name, "parameters": parameters, **more}
    return {"type": "function", "function": about}


@pytest.fixture(scope="module", params=["json", "tagged"])
def server(request: pytest.FixtureRequest) -> Iterator[Live]:
    model, processor = build("qwen3_vl")
    template = TEMPLATE if request.param == "json" else TAGGED
    with ks.wrap(model, processor, chat_template=template) as vlm, live(vlm) as it:
        yield it


@pytest.fixture(scope="module")
def hurry() -> dict[str, float]:
    """Biases that let a random model end its texts, lists and numbers some time."""
    last, closing, more = Hurry(build("qwen3_vl")[1].tokenizer)._liked
    bias = {str(token): 30.0 for token in more} | {str(token): 60.0 for token in closing}
    return bias | {str(token): 100.0 for token in last} | {"206": 60.0}  # and line ends


def sent(server: Live, **body: Any) -> dict[str, Any]:
    status, answer, headers = server.chat(
        {"messages": [USER], "max_tokens": 600, "seed": 1, **body}
    )
    assert status == 200 and "x-keepsight-unused" not in headers, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def ended(server: Live, **body: Any) -> dict[str, Any]:
    """An answer of a random model that came to its end: one that was cut shows nothing."""
    for seed in range(12):
        choice = sent(server, **body, seed=seed)
        if choice["finish_reason"] != "length":
            return choice
    raise AssertionError("no answer came to its end")


# -- forced calls ----------------------------------------------------------------------------------


def test_a_call_that_has_to_come_comes(server: Live, hurry: dict[str, float]) -> None:
    tools = [tool("look"), tool("go")]
    one = sent(server, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert one["finish_reason"] == "tool_calls" and not one["message"]["content"]
    [(name, arguments)] = calls_of(one)
    assert name in ("look", "go")
    jsonschema.validate(arguments, PLACE)
    [(name, arguments)] = calls_of(sent(server, tools=tools, tool_choice=NAMED))
    assert name == "go"
    jsonschema.validate(arguments, PLACE)
    several = sent(server, tools=tools, tool_choice="required", logit_bias={"206": 90.0})
    assert all(name in ("look", "go") for name, _ in calls_of(several))


def test_it_comes_in_a_stream_and_as_an_item(server: Live) -> None:
    body = {"messages": [USER], "tools": [tool("go")], "tool_choice": NAMED, "max_tokens": 600}
    body["seed"] = 1
    chunks = server.stream(body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk != "[DONE]"]
    [call] = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    jsonschema.validate(json.loads(call["arguments"]), PLACE)
    flat = {"type": "function", "name": "go", "parameters": PLACE}
    asked = {"model": "demo", "input": "x", "tools": [flat], "max_output_tokens": 600, "seed": 1}
    for choice in ("required", {"type": "function", "name": "go"}):
        answer = server.call("/v1/responses", {**asked, "tool_choice": choice})[1]
        item = answer["output"][0]
        assert answer["tool_choice"] == choice and item["name"] == "go"
        jsonschema.validate(json.loads(item["arguments"]), PLACE)


def test_of_all_tools_that_are_shown_only_some_may_be_called(
    server: Live, hurry: dict[str, float]
) -> None:
    tools = [tool("look"), tool("go")]
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "go"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": some}
    for seed in range(3):
        found = sent(server, tools=tools, tool_choice=choice, seed=seed, temperature=1.0)
        assert {name for name, _ in calls_of(found)} == {"go"}
    flat = [{"type": "function", "name": name, "parameters": PLACE} for name in ("look", "go")]
    only = [{"type": "function", "name": "go"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": only}
    asked = {"model": "demo", "input": "x", "tools": flat, "max_output_tokens": 600, "seed": 1}
    free = server.call("/v1/responses", {**asked, "max_output_tokens": 1})[1]
    answer = server.call("/v1/responses", {**asked, "tool_choice": choice, "logit_bias": hurry})[1]
    assert answer["output"][0]["name"] == "go" and answer["tool_choice"] == choice
    assert answer["usage"]["input_tokens"] == free["usage"]["input_tokens"]  # the same prompt


def test_arguments_fit_their_schema(server: Live, hurry: dict[str, float]) -> None:
    """Of 20 tools; what cannot be written without quotes is refused with the tool's name."""
    refused = 0
    for number in range(20):
        rng = random.Random(number)
        properties = {name: made(rng, 1) for name in ("a", "b_c", "d")}
        schema = {"type": "object", "properties": properties, "required": ["a", "d"]}
        body = {
            "messages": [USER],
            "max_tokens": 900,
            "tools": [tool("go", schema)],
            "tool_choice": NAMED,
            "logit_bias": hurry,
            "seed": number,
            "temperature": number % 2,
        }
        status, answer, _ = server.chat(body)
        if status == 400:
            refused += 1
            assert "without quotes" in answer["error"]["message"], answer
            assert answer["error"]["param"] == "tools[0].function.parameters"
            continue
        assert answer["choices"][0]["finish_reason"] == "tool_calls", (schema, answer)
        [(_, arguments)] = calls_of(answer["choices"][0])
        jsonschema.validate(arguments, schema)
    assert refused < 16


def test_arguments_that_need_not_fit_are_records(server: Live, hurry: dict[str, float]) -> None:
    loose = [tool("go", {**PLACE, "not": {}}, strict=False)]
    [(name, arguments)] = calls_of(ended(server, tools=loose, tool_choice=NAMED, logit_bias=hurry))
    assert name == "go" and isinstance(arguments, dict)
    none = [tool("go", {"type": "object", "properties": {}})]
    assert calls_of(sent(server, tools=none, tool_choice=NAMED)) == [("go", {})]
    bare = [{"type": "function", "function": {"name": "go"}}]
    [(name, arguments)] = calls_of(ended(server, tools=bare, tool_choice=NAMED, logit_bias=hurry))
    assert name == "go" and isinstance(arguments, dict)


def test_a_form_beside_tools(server: Live, hurry: dict[str, float]) -> None:
    """Either a call or an answer of the form."""
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PLACE}}
    both: dict[str, Any] = {"tools": [tool("go", strict=True)], "response_format": form}
    for seed in range(6):
        choice = sent(server, **both, temperature=2.0, seed=seed)
        calls = calls_of(choice)
        found = calls[0][1] if calls else json.loads(choice["message"]["content"])
        jsonschema.validate(found, PLACE)
    free = sent(server, **both, tool_choice="none")
    assert not calls_of(free)
    jsonschema.validate(json.loads(free["message"]["content"]), PLACE)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [tool("look")], "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [tool("go")], "tool_choice": {"type": "allowed_tools", "mode": "auto",
            "tools": [NAMED, {"type": "function", "name": "look"}]}}, "tool_choice"),
        ({"tools": [tool("go")], "tool_choice": {"type": "allowed_tools", "mode": "auto",
            "tools": []}}, "tool_choice.tools"),
        ({"tools": [tool("go")], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "tools": [NAMED]}}}, "tool_choice.mode"),
        ({"tools": [tool("a"), tool("b", {"not": {}}, strict=True)]},
            "tools[1].function.parameters"),
        ({"tools": [tool("a"), tool("b", {"not": {}})], "tool_choice": "required"},
            "tools[1].function.parameters"),
        ({"tools": [tool("go", {"type": "strin"})], "tool_choice": NAMED}, f"tools[0].{SCHEMA}"),
        ({"response_format": {"type": "json_schema", "json_schema": BAD}}, "response_format"),
        ({"guided_json": {"type": "strin"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_grammar": "x"}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"format": "xml"}, "format"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server: Live, body: dict[str, Any], param: str) -> None:
    status, answer, _ = server.chat({"messages": [USER], **body})
    assert status == 400 and answer["error"]["param"] == param, answer
    assert sent(server, guided_choice=["on"])["message"]["content"] == "on"
    server.service.vlm.runtime.check()


def test_responses_name_their_own_fields(server: Live) -> None:
    body = {"model": "demo", "input": "x"}
    form = {"type": "json_schema", "name": "a", "schema": {"not": {}}}
    bad = {"type": "function", "name": "a", "parameters": BAD["schema"], "strict": True}
    for more, param in (
        ({"text": {"format": form}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"tools": [bad]}, "tools[0].parameters"),
    ):
        status, answer, _ = server.call("/v1/responses", {**body, **more})
        assert status == 400 and answer["error"]["param"] == param, answer
        assert param in answer["error"]["message"]
        assert "response_format" not in answer["error"]["message"]
    status, answer, _ = server.call("/v1/responses", {**body, "response_format": form})
    assert status == 400 and "send text.format" in answer["error"]["message"]
    form = {"type": "json_schema", "name": "a", "schema": PLACE, "strict": True}
    answer = server.call("/v1/responses", {**body, "text": {"format": form}})[1]
    assert answer["text"]["format"] == form
    jsonschema.validate(json.loads(answer["output"][0]["content"][0]["text"]), PLACE)


# -- where a call begins ---------------------------------------------------------------------------


def formed(tokenizer: Any, tagged: bool = False, **body: Any) -> Any:
    """The form of what a request asks for, in the syntax of a model of this tokenizer."""
    own = frozenset(tokenizer.get_added_vocab()) & {"<tool_call>", "</tool_call>"}
    request = ChatRequest.model_validate({"messages": [USER], **body})
    return form_of(request, CallSyntax(tagged, own), Unused())


@pytest.fixture(params=["words", "tokens"])
def speaker(request: pytest.FixtureRequest) -> Any:
    """A tokenizer in which the marks of calls are words, or tokens of their own."""
    tokenizer = build("qwen3_vl")[1].tokenizer
    if request.param == "tokens":
        marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    return tokenizer


def follows(tokenizer: Any, form: Format, text: str, **how: bool) -> tuple[bool, bool]:
    """Whether a text may be said, and whether it may end there."""
    grammars = Grammars(tokenizer, len(tokenizer), (2,))
    matcher = grammars.compiled(form, **how).matcher.deep_copy()
    ids = tokenizer(text)["input_ids"]
    fits = matcher.try_consume_tokens(ids) == len(ids)
    return fits, fits and matcher.is_accepting()


@pytest.mark.parametrize("tagged", [False, True], ids=["json", "tags"])
def test_a_strict_tool_is_free_until_it_is_called(speaker: Any, tagged: bool) -> None:
    form = formed(speaker, tagged, tools=[tool("go", strict=True), tool("no")])

    def call(name: str, at: object) -> str:
        if tagged:
            inside = f"<parameter=at>\n{json.dumps(at)}\n</parameter>\n"
            return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"
        about = json.dumps({"name": name, "arguments": {"at": at}})
        return f"<tool_call>\n{about}\n</tool_call>"

    assert follows(speaker, form, "I look at it") == (True, True)
    assert follows(speaker, form, f"I go. {call('go', 5)}") == (True, True)
    assert follows(speaker, form, f"{call('go', 5)}\n{call('go', 6)} there") == (True, True)
    assert follows(speaker, form, call("go", 5)[:-4])[1] is False
    assert follows(speaker, form, f"I go. {call('go', 12)}")[0] is False
    assert follows(speaker, form, call("walk", 5))[0] is False
    assert follows(speaker, form, call("no", "anything")) == (True, True)  # not strict
    marked = "<tool_call>" in speaker.get_added_vocab()
    thought = "hm, walk?" if marked else f"hm {call('walk', 5)}"
    said = f"{thought}</think>\n\nI go. {call('go', 5)}"
    assert follows(speaker, form, said, opened=True) == (True, True)
    assert formed(speaker, tagged, tools=[tool("go")]) is None
    assert formed(speaker, tagged, tools=[tool("go", strict=True)], tool_choice="none") is None


def test_calls_one_after_the_other_of_tools_that_may_be_called(speaker: Any) -> None:
    call = '<tool_call>\n{"name": "go", "arguments": {"at": 5}}\n</tool_call>'
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "go"}]}
    form = formed(speaker, tools=[tool("look"), tool("go")], tool_choice=some)
    assert follows(speaker, form, "Hello.")[0] and follows(speaker, form, call)[0]
    assert not follows(speaker, form, call.replace("go", "look"))[0]
    asked: dict[str, Any] = {"tools": [tool("go")], "tool_choice": "required"}
    for one, fits in ((None, True), (False, False)):
        form = formed(speaker, **asked, parallel_tool_calls=one)
        assert follows(speaker, form, call) == (True, True)
        assert follows(speaker, form, f"{call}\n{call}") == (fits, fits)
        assert follows(speaker, form, "x")[0] is False


def test_a_text_between_tags_has_the_lengths_and_choices_of_its_schema() -> None:
    tokenizer = build("qwen3_vl")[1].tokenizer

    def of(**schema: Any) -> Any:
        tools = [tool("go", {"type": "object", **schema})]
        return formed(tokenizer, True, tools=tools, tool_choice=NAMED)

    root: dict[str, Any] = {
        "properties": {
            "short": {"type": "string", "minLength": 2, "maxLength": 4},
            "maybe": {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]},
        },
        "required": ["short"],
        "$defs": {"word": {"enum": ["this", "that"]}},
    }
    form = of(**root)

    def call(**values: str) -> str:
        inside = "".join(f"<parameter={n}>\n{v}\n</parameter>\n" for n, v in values.items())
        return f"<tool_call>\n<function=go>\n{inside}</function>\n</tool_call>"

    for values, fits in (
        ({"short": "a\"b"}, True), ({"short": "a\nb"}, True), ({"short": "a"}, False),
        ({"short": "abcde"}, False), ({"short": "abc", "maybe": "that"}, True),
        ({"short": "abc", "maybe": "null"}, True), ({"short": "abc", "maybe": "other"}, False),
        ({"maybe": "that"}, False), ({"short": "</p>"}, True), ({"short": "\n\n"}, True),
    ):  # fmt: skip
        assert follows(tokenizer, form, call(**values))[1] is fits, values
    form = of(properties={"x": {"type": "string"}})
    assert follows(tokenizer, form, call(x="<b>a</b>"))[1]
    for text in ("a</parameter>b", "</tool_call>", "</function>"):
        assert not follows(tokenizer, form, call(x=text))[1], text
    with pytest.raises(GrammarError, match="the name 'a b'"):
        of(properties={"a b": {}})
    for bound in ({"pattern": "a"}, {"format": "date"}):
        with pytest.raises(GrammarError, match="without quotes") as caught:
            of(properties={"x": {"type": "string", **bound}})
        assert caught.value.place == "tools[0].function.parameters"
    with pytest.raises(ApiError, match="no tool 'go'; tools: none"):
        formed(tokenizer, tool_choice=NAMED)


def test_a_value_between_tags_is_read_as_its_schema_says() -> None:
    properties = {
        "text": {"type": "string"}, "maybe": {"type": ["integer", "null"]},
        "number": {"type": "number"}, "either": {"anyOf": [{"type": "string"}, {"type": "object"}]},
        "some": {"enum": ["1", 1]}, "any": {}, "later": {"$ref": "#/$defs/t"},
    }  # fmt: skip
    schemas = {"go": {"properties": properties, "$defs": {"t": {"type": "string"}}}}
    values = {
        "text": ("5", "5"), "maybe": ("null", None), "number": ("5", 5), "either": ("5", "5"),
        "some": ("1", 1), "any": ("[1]", [1]), "later": ("true", "true"), "unknown": ("7", 7),
        "other": ("x", "x"),
    }  # fmt: skip
    inside = "".join(f"<parameter={n}>\n{v}\n</parameter>\n" for n, (v, _) in values.items())
    parser = OutputParser(False, False, True, schemas)
    text = f"<tool_call>\n<function=go>\n{inside}</function>\n</tool_call>"
    pieces: list[OutputPiece] = [*parser.push(text), *parser.finish()]
    found = json.loads(pieces[0].text)
    assert found == {name: value for name, (_, value) in values.items()}
