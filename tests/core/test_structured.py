"""Answers of a form that was asked for: they fit it, and it changes nothing else."""

from __future__ import annotations

import json
import pathlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
import torch
from support.cuts import BOTH
from support.forms import Hurry, made
from support.model_parts import TEMPLATE
from support.models import build, picture, stock_inputs, turn

import keepsight as ks
from keepsight import Together
from keepsight.core.decoding import drafts
from keepsight.core.decoding.drafts import PassCosts
from keepsight.core.engine import Engine
from keepsight.core.structured.formats import DEEPEST, LARGEST, wanted
from keepsight.core.structured.grammars import Constraint, Grammars
from keepsight.core.structured.thoughts import may_open, opened
from keepsight.errors import GrammarError, MissingExtra, UnfinishedAnswer

CHAT = [turn("What is it?", picture(1))]
SHAPE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "sides": {"type": "integer", "minimum": 3, "maximum": 12},
        "name": {"type": "string", "maxLength": 6},
    },
    "required": ["colour", "sides", "name"],
}
SLOW = pytest.mark.slow
HOWS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "seed": 3, "temperature": 1.5, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def vlm() -> Iterator[ks.VLM]:
    with ks.wrap(*build("qwen3_vl")) as it:
        yield it


@pytest.fixture(scope="module")
def hurry(vlm: ks.VLM) -> Hurry:
    return Hurry(vlm.runtime.tokenizer())


# -- 200 schemas -----------------------------------------------------------------------------------


SCHEMAS = [made(random.Random(number)) for number in range(200)]


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(n, marks=SLOW) for n in range(2, 10))])
def test_every_answer_fits_its_schema(vlm: ks.VLM, hurry: Hurry, part: int) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for number in range(20 * part, 20 * part + 20):
        schema, how = SCHEMAS[number], HOWS["sampled"] | {"seed": number}
        how = how if number % 2 else HOWS["greedy"]
        reply = vlm.chat(
            CHAT, response_format=schema, max_new_tokens=400, logits_processor=[hurry], **how
        )
        assert reply.finish_reason == "stop", (schema, reply.text)
        jsonschema.validate(reply.parsed, schema, format_checker=checker)
        assert reply.parsed == json.loads(reply.text)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_5", "llava", "internvl"])
def test_every_family_writes_it(kind: str) -> None:
    with ks.wrap(*build(kind)) as vlm:
        hurry = Hurry(vlm.runtime.tokenizer())
        for how in HOWS.values():
            reply = vlm.chat(CHAT, response_format=SHAPE, logits_processor=[hurry], **how)
            jsonschema.validate(reply.parsed, SHAPE)


# -- the ways to say it ----------------------------------------------------------------------------


class Shape(pydantic.BaseModel):
    colour: Literal["red", "blue"]
    sides: int = pydantic.Field(ge=3, le=12)


class Near(pydantic.BaseModel):
    at: Literal["near"]


class Far(pydantic.BaseModel):
    at: Literal["far"]
    miles: Literal[1, 2]


NUMBER = 'start: "n" DIGIT\nDIGIT: /[0-9]/'


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        (Shape, lambda it: isinstance(it, Shape) and 3 <= it.sides <= 12),
        (Shape.model_json_schema(), lambda it: Shape.model_validate(it)),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SHAPE}}, dict),
        ({"type": "json_schema", "name": "a", "schema": SHAPE, "strict": True}, dict),
        ({"type": "json_object", "schema": SHAPE}, dict),
        ({"type": "json_object"}, lambda it: isinstance(it, dict)),
        ({"json": SHAPE}, dict),
        ({"enum": ["a", 5]}, lambda it: it in ("a", 5)),
        ({"type": "regex", "regex": "[ab]{3}x"}, lambda it: len(it) == 4 and it[-1] == "x"),
        ({"regex": "/[ab]/"}, lambda it: it in ("/a/", "/b/")),
        ({"type": "choice", "choice": ["yes", 'n"o\n']}, lambda it: it in ("yes", 'n"o\n')),
        ({"choice": ("é", "ü")}, lambda it: it in ("é", "ü")),
        ({"type": "grammar", "grammar": NUMBER}, lambda it: it[0] == "n" and it[1:].isdigit()),
        ({"grammar": 'root ::= "x" [0-9]'}, lambda it: it[0] == "x" and it[1:].isdigit()),
    ],
)
def test_it_is_said_in_many_ways(
    vlm: ks.VLM, hurry: Hurry, given: Any, fits: Callable[[Any], object]
) -> None:
    reply = vlm.chat(CHAT, response_format=given, logits_processor=[hurry], do_sample=False)
    assert reply.finish_reason == "stop" and fits(reply.parsed), reply.text


@pytest.mark.parametrize("given", [None, {"type": "text"}])
def test_plain_text_is_plain(vlm: ks.VLM, given: Any) -> None:
    reply = vlm.chat(CHAT, response_format=given, max_new_tokens=4)
    assert reply.parsed is None and reply.tokens == vlm.chat(CHAT, max_new_tokens=4).tokens


def test_every_call_takes_it(vlm: ks.VLM, hurry: Hurry) -> None:
    import asyncio

    how: dict[str, Any] = {"response_format": Shape, "logits_processor": [hurry]}
    asked = vlm.ask(picture(1), "What is it?", **how)
    chat = vlm.session()
    said = chat.ask("What is it?", images=[picture(1)], **how)
    again = chat.regenerate(**how)
    other = asyncio.run(vlm.achat(CHAT, **how))
    *_, last = vlm.stream(CHAT, **how)
    for reply in (asked, said, again, other):
        assert isinstance(reply.parsed, Shape) and reply.parsed == asked.parsed
    assert last.reads is not None and last.reads(asked.text, "stop") == asked.parsed
    made = vlm.generate(**stock_inputs(vlm.processor, CHAT), max_new_tokens=64, **how)
    assert vlm.runtime.tokenizer().decode(made[0]).endswith(asked.text)


def test_an_answer_that_was_cut_says_so(vlm: ks.VLM) -> None:
    reply = vlm.chat(CHAT, response_format=Shape, max_new_tokens=5)
    assert reply.finish_reason == "length"
    with pytest.raises(UnfinishedAnswer, match="max_new_tokens"):
        _ = reply.parsed
    ended = vlm.chat(CHAT, response_format=SHAPE, stop="sides", max_new_tokens=60)
    assert ended.finish_reason == "stop" and "sides" not in ended.text
    with pytest.raises(UnfinishedAnswer, match="stop string"):
        _ = ended.parsed


def test_properties_that_nobody_named_do_not_come(vlm: ks.VLM) -> None:
    """A schema that says nothing about more properties is closed, but never where that would shut
    out the properties of another schema that it is combined with."""

    def form(schema: Any) -> dict[str, Any]:
        found = wanted(schema)
        assert found is not None
        record: dict[str, Any] = found.grammars[0]["json_schema"]
        return record

    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    closed = form({"type": "object", "properties": {"a": inner}})
    assert closed["additionalProperties"] is False
    within = closed["properties"]["a"]
    assert within["additionalProperties"] is False and [*within["properties"]] == ["properties"]
    for free in (
        {"type": "object"},
        {**inner, "additionalProperties": True},
        {**inner, "patternProperties": {"^x": {}}},
        {**inner, "required": ["b"]},
        {"allOf": [inner, {"properties": {"b": {}}}]},
        {**inner, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        {"oneOf": [inner, {"type": "object", "properties": {"b": {}}, "required": ["b"]}]},
    ):
        assert form(free) == {**free, "x-guidance": form(free)["x-guidance"]}


def test_words_that_say_nothing_are_left_out(vlm: ks.VLM, hurry: Hurry) -> None:
    class Place(pydantic.BaseModel):
        where: pathlib.Path
        marks: Annotated[list[bool], pydantic.Field(json_schema_extra={"uniqueItems": False})]
        kind: Annotated[Near | Far, pydantic.Field(discriminator="at")]

    reply = vlm.chat(CHAT, response_format=Place, logits_processor=[hurry])
    assert isinstance(reply.parsed, Place) and isinstance(reply.parsed.kind, Near | Far)
    closed = {"type": "object", "properties": {"a": {"const": 1}}, "unevaluatedProperties": False}
    reply = vlm.chat(CHAT, response_format=closed, logits_processor=[hurry])
    jsonschema.validate(reply.parsed, closed)


# -- nothing else changes --------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@BOTH
def test_tokens_that_are_allowed_have_the_same_bits(dtype: torch.dtype, how: str) -> None:
    with ks.wrap(*build("qwen3_vl", dtype)) as vlm:
        inputs = stock_inputs(vlm.processor, CHAT)
        same: dict[str, Any] = {**inputs, "max_new_tokens": 12, "return_dict_in_generate": True}
        texts = [vlm.runtime.tokenizer().decode([n]) for n in range(576)]
        others = [n for n, text in enumerate(texts) if n < 8 or not text or "\ufffd" in text]
        same |= {"output_logits": True, "suppress_tokens": others, **HOWS[how]}
        free = vlm.generate(**same)
        bound = vlm.generate(**same, response_format={"regex": "(.|\n)*"})
        assert torch.equal(free.sequences, bound.sequences)
        assert all(torch.equal(a, b) for a, b in zip(free.logits, bound.logits, strict=True))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_forced_tokens_are_read_in_one_pass(
    kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fewer passes, with the same tokens and the same bits behind them."""
    with ks.wrap(*build(kind), drafts=False) as vlm, ks.wrap(*build(kind), drafts=False) as plain:
        same: dict[str, Any] = {"response_format": SHAPE, "max_new_tokens": 64, **HOWS[how]}
        decoders = [one.runtime.engine.decoder for one in (vlm, plain)]
        for one in (vlm, plain):
            one.chat(CHAT, max_new_tokens=2)  # tries its kernels
        before = [decoder.passes for decoder in decoders]
        fast = vlm.chat(CHAT, **same)
        with monkeypatch.context() as slow:
            slow.setattr(Engine, "_forced", lambda *_: [])
            wanted = plain.chat(CHAT, **same)
        assert fast.tokens == wanted.tokens and not wanted.usage.forced_tokens
        assert fast.usage.forced_tokens > 20
        fewer, more = (decoder.passes - was for decoder, was in zip(decoders, before, strict=True))
        assert more - fewer == fast.usage.forced_tokens
        said = [*CHAT, {"role": "assistant", "content": fast.text}, turn("Go on.")]
        rows = [one.chat(said, max_new_tokens=3).tokens for one in (vlm, plain)]
        assert rows[0] == rows[1] and vlm.chat(said, max_new_tokens=3).usage.cached_tokens
        vlm.runtime.check()


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_an_answer_that_ends_amid_forced_tokens(kind: str) -> None:
    """By a stop string, or by its length: what stays remembered is what was chosen."""
    with ks.wrap(*build(kind)) as vlm, ks.wrap(*build(kind), drafts=False) as plain:
        for form, how in (
            *((SHAPE, {"stop": stop}) for stop in ("ol", "ides", '":')),
            (SHAPE, {"max_new_tokens": 9}),
            ({"choice": ["certainly"]}, {}),
        ):
            reply = vlm.chat(CHAT, response_format=form, **how)
            assert len(reply.tokens) < 30
            said = [*CHAT, {"role": "assistant", "content": reply.text}, turn("Go on.")]
            assert (
                vlm.chat(said, max_new_tokens=4).tokens == plain.chat(said, max_new_tokens=4).tokens
            )
            vlm.runtime.check()


def test_logits_before_forced_tokens_are_recorded_if_asked_for(vlm: ks.VLM) -> None:
    inputs = stock_inputs(vlm.processor, CHAT)
    out = vlm.generate(
        **inputs,
        response_format={"regex": "certain"},
        max_new_tokens=30,
        output_logits=True,
        return_dict_in_generate=True,
    )
    made = out.sequences.shape[1] - inputs["input_ids"].shape[1]
    assert out.usage.forced_tokens and len(out.logits) == made
    assert all(torch.isfinite(row).all() for row in out.logits)


def test_guesses_and_grammars_go_together(vlm: ks.VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said before is guessed only as far as it may follow, and taken back if wrong."""
    monkeypatch.setattr(PassCosts, "best", lambda _, agreeing, there: min(7, there))
    monkeypatch.setattr(drafts, "LOSS", 1e9)  # however long a pass takes on this machine
    texts = {"regex": "(red |blue |green ){12}"}
    with ks.wrap(*build("qwen3_vl"), drafts=False) as plain:
        for seed in range(4):
            how: dict[str, Any] = {"do_sample": True, "seed": seed, "response_format": texts}
            for _ in range(2):
                reply = vlm.chat(CHAT, **how)
                assert reply.tokens == plain.chat(CHAT, **how).tokens
                assert reply.finish_reason == "stop"
            assert reply.usage.accepted_tokens and reply.usage.drafted_tokens > 3
    vlm.runtime.check()


def test_a_form_does_not_touch_what_is_remembered(vlm: ks.VLM, hurry: Hurry) -> None:
    chat = [turn("Which colour has this?", picture(4))]
    vlm.prepare(chat)
    reply = vlm.chat(chat, response_format=SHAPE, logits_processor=[hurry])
    assert reply.usage.cached_tokens == reply.usage.prompt_tokens
    free = vlm.chat(chat, max_new_tokens=4)
    assert free.usage.cached_tokens == free.usage.prompt_tokens


def test_answers_of_many_forms_are_decoded_together(vlm: ks.VLM, hurry: Hurry) -> None:
    forms = [SHAPE, {"regex": "[ab]{9}"}, None, {"choice": ["yes", "no"]}, SHAPE]
    chats = [[turn(f"Number {n}?", picture(n))] for n in range(len(forms))]
    same: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "seed": 5}
    asked = list(zip(chats, forms, strict=True))
    alone = [vlm.chat(chat, response_format=form, **same) for chat, form in asked]
    with Together(vlm) as together:
        tickets = [together.submit(chat, response_format=form, **same) for chat, form in asked]
        found = [ticket.result() for ticket in tickets]
    assert [one.tokens for one in found] == [one.tokens for one in alone]
    assert found[3].parsed in ("yes", "no") and found[2].parsed is None


# -- thoughts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "words"])
def test_the_form_begins_behind_a_thought(special: bool) -> None:
    """Where the prompt has opened one, or where the model may open one itself."""

    from tokenizers import AddedToken

    tokenizer = build("qwen3_vl")[1].tokenizer
    marks = [AddedToken(mark, special=special) for mark in ("<think>", "</think>")]
    tokenizer.add_tokens(marks, special_tokens=special)
    grammars = Grammars(tokenizer, len(tokenizer), (2,))
    form = wanted({"choice": ["yes", "no"]})
    assert form is not None

    def follows(text: str, **how: bool) -> tuple[bool, bool]:
        """Whether a text may be said, and whether it may end there."""
        ids, matcher = tokenizer(text)["input_ids"], grammars.compiled(form, **how).matcher
        copied = matcher.deep_copy()
        fits = copied.try_consume_tokens(ids) == len(ids)
        return fits, fits and copied.is_accepting()

    assert follows("hm. yes? </think>\n\nno", opened=True) == (True, True)
    assert follows("no", opened=True) == (True, False)  # still a thought
    assert follows("</think>maybe", opened=True)[0] is False
    assert follows("<think>no {</think>\nyes", thinks=True) == (True, True)
    assert follows("yes", thinks=True) == (True, True)
    assert follows("<think>", thinks=False)[0] is False
    grammar = grammars.compiled(form, opened=True)
    assert grammar.read("well</think>\n\nyes", "stop") == "yes"
    begun = tokenizer("x <think>\n")["input_ids"]
    assert opened(tokenizer, begun) and not opened(tokenizer, tokenizer("x")["input_ids"])
    closed = tokenizer("<think>\n\n</think>\n\n")["input_ids"]
    assert may_open(tokenizer, "<think>", begun[:1]) and not may_open(tokenizer, TEMPLATE, begun)
    assert not may_open(tokenizer, "<think>", closed)


# -- what cannot be enforced -----------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def many(names: int, each: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": each for n in range(names)}}


CIRCLE: dict[str, Any] = {"type": "object"}
CIRCLE["properties"] = {"a": CIRCLE}
BAD: dict[str, tuple[Any, str]] = {
    "not": ({"type": "object", "not": {}}, "not"),
    "conditions": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    "unique items": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    "names of properties": ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
    "dependent": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "unknown type": ({"type": "strin"}, "strin"),
    "unknown format": ({"type": "string", "format": "shoe size"}, "shoe size"),
    "look ahead": ({"type": "string", "pattern": "^(?!a)b$"}, "look-around"),
    "bad pattern": ({"type": "string", "pattern": "(a"}, "unclosed group"),
    "nothing fits": ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
    "nothing fits both": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    "empty enum": ({"enum": []}, "enum|empty"),
    "no such reference": ({"$ref": "#/$defs/x"}, r"\$defs/x"),
    "another server's reference": ({"$ref": "http://127.0.0.1/x"}, "127.0.0.1"),
    "a reference to itself": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, ""),
    "settings of ours": ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
    "no JSON": ({"enum": [object()]}, "JSON"),
    "infinite": ({"const": float("inf")}, "JSON"),
    "too deep": (nested(DEEPEST), "deeper"),
    "in a circle": (CIRCLE, "deeper|larger"),
    "too large": ({"enum": ["x" * LARGEST]}, "larger"),
    "a number": (5, "int"),
    "a class": (int, "type"),
    "no schema": ({"type": "json_schema"}, "json_schema.schema"),
    "no JSON schema": ({"type": "json_schema", "json_schema": {"schema": "{"}}, "JSON"),
    "bad expression": ({"regex": "(a"}, "unclosed group"),
    "no expression": ({"regex": ""}, "regular expression"),
    "no choice": ({"choice": []}, "at least one"),
    "two forms": ({"choice": ["a"], "regex": "b"}, "'regex' is no word of a JSON schema"),
    "two forms and a type": ({"type": "choice", "choice": ["a"], "regex": "b"}, "two forms"),
    "choices by another name": ({"choices": ["a"]}, "'choices' is no word of a JSON schema"),
    "an empty choice": ({"choice": ["a", ""]}, "not empty"),
    "a choice that is no text": ({"choice": [1]}, "text"),
    "bad grammar": ({"grammar": "start: x"}, "x"),
    "bad grammar of llama.cpp": ({"grammar": "root ::= [a"}, ""),
    "endless grammar": ({"grammar": 'start: "a" start'}, ""),
    "a grammar without a start": ({"grammar": 'x: "a"'}, "start"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_enforced_is_refused_by_name(vlm: ks.VLM, name: str) -> None:
    given, said = BAD[name]
    before = vlm.stats()
    with pytest.raises(GrammarError, match=f"(?s)^response_format: .*({said})") as caught:
        vlm.chat(CHAT, response_format=given)
    assert caught.value.place == "response_format" and len(str(caught.value)) < 700
    told = vlm.stats()
    assert told["features"] == before["features"]
    assert told["prefix"]["bytes"] == before["prefix"]["bytes"]
    vlm.runtime.check()
    assert vlm.chat(CHAT, response_format={"choice": ["on"]}).text == "on"


HOSTILE: dict[str, Any] = {
    "doubling": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{n}": {"type": "object", "properties": {
            "l": {"$ref": f"#/$defs/d{n + 1}"}, "r": {"$ref": f"#/$defs/d{n + 1}"}}}
            for n in range(30)} | {"d30": {"type": "integer"}},
    },
    "products of unions": {"allOf": [
        {"anyOf": [{"type": "object", "properties": {f"a{i}{j}": {"type": "integer"}}}
                   for j in range(4)]} for i in range(12)]},
    "many properties": many(1500, {"type": "integer"}),
    "many values": {"enum": [f"value {n}" for n in range(12_000)]},
    "repeated repetitions": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "an automaton of 2**30 states": {"type": "string", "pattern": "(a|b)*a(a|b){30}"},
    "a million items": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
    "a million letters": {"type": "string", "minLength": 10**6},
    "expression": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "ambiguous": {"grammar": 'start: s\ns: "a" | s s | s s s'},
    "left and right": {"grammar": 'start: start start | "a"? start | "b"'},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_takes_little_time(vlm: ks.VLM, name: str) -> None:
    """It is refused, or answered at a pace that others can bear."""
    begun = time.process_time()
    try:
        reply = vlm.chat(CHAT, response_format=HOSTILE[name], max_new_tokens=24, seed=1)
    except GrammarError:
        pass
    else:
        assert len(reply.tokens) == 24 or reply.finish_reason == "stop"
    assert time.process_time() - begun < 8
    assert vlm.chat(CHAT, response_format={"choice": ["on"]}).text == "on"
    vlm.runtime.check()


def test_one_that_fails_on_the_way_ends_alone(vlm: ks.VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = Constraint.__call__

    def fail(self: Constraint, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._place == "response_format" and ids.shape[1] % 7 == 6:
            raise GrammarError(self._place, "too complex")
        return masks(self, ids, scores)

    with Together(vlm) as together:
        monkeypatch.setattr(Constraint, "__call__", fail)
        bad = together.submit(CHAT, response_format={"regex": "[ab]{20}"}, max_new_tokens=30)
        good = together.submit(CHAT, max_new_tokens=30, min_new_tokens=30)
        assert len(good.result().tokens) == 30
        with pytest.raises(GrammarError, match="too complex"):
            bad.result()
    vlm.runtime.check()


def test_other_options_that_leave_nothing_are_named(vlm: ks.VLM) -> None:
    ids = [n for n in range(576) if vlm.runtime.tokenizer().decode([n])[:1] in ("y", "n")]
    with pytest.raises(GrammarError, match="no token is left"):
        vlm.chat(CHAT, response_format={"regex": "[yn][yn]"}, suppress_tokens=ids)


def test_a_grammar_is_compiled_once(vlm: ks.VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[str]()
    before = Grammars._compile

    def count(self: Grammars, text: str, *more: Any) -> Any:
        compiled.append(text)
        return before(self, text, *more)

    monkeypatch.setattr(Grammars, "_compile", count)
    asked = [
        threading.Thread(
            target=lambda: vlm.chat(CHAT, response_format={"regex": "once"}, max_new_tokens=9)
        )
        for _ in range(3)
    ]
    asked[0].run()
    for one in asked[1:]:
        one.start()
    for one in asked[1:]:
        one.join()
    assert len(compiled) == 1


def test_without_the_library_it_says_what_to_install(
    vlm: ks.VLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"llguidance.*structured.*pip install"):
        vlm.chat(CHAT, response_format=SHAPE)
    assert vlm.chat(CHAT, max_new_tokens=2).tokens
