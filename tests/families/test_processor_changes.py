"""A live processor may be changed between two calls: its code, its tokenizer, its chat template.

Every change is compared with a fresh wrap of the same model and processor, and so is its end. With
a store the changed processor finds nothing that the other one named.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.changes import Undo, put
from support.models import build, picture
from tokenizers import normalizers, processors

import keepsight as ks
from keepsight import Together
from keepsight.core.call import Call
from keepsight.models.identity import ProcessorCode

CHANGES: dict[str, Callable[[Any], Undo]] = {}
ASKED = "what is the <|tall|> thing here?"


def change(function: Callable[[Any], Undo]) -> Callable[[Any], Undo]:
    """Enter a change of a processor in the table; it returns the way back."""
    CHANGES[function.__name__] = function
    return function


def darker(preprocess: Callable[..., Any], *given: Any, **options: Any) -> Any:
    found = preprocess(*given, **options)
    found["pixel_values"] = found["pixel_values"] * 0.3
    return found


@change
def a_method_of_the_object(processor: Any) -> Undo:
    part = processor.image_processor
    return put(part, "preprocess", functools.partial(darker, part.preprocess))


@change
def a_method_of_its_class(processor: Any) -> Undo:
    kind = next(k for k in type(processor.image_processor).__mro__ if "preprocess" in vars(k))
    before = kind.preprocess
    kind.preprocess = lambda self, *a, **k: darker(functools.partial(before, self), *a, **k)
    return lambda: setattr(kind, "preprocess", before)


@change
def a_class_of_the_same_name(processor: Any) -> Undo:
    part, kind = processor.image_processor, type(processor.image_processor)

    def preprocess(self: Any, *given: Any, **options: Any) -> Any:
        return darker(functools.partial(kind.preprocess, self), *given, **options)

    part.__class__ = type(kind.__name__, (kind,), {"preprocess": preprocess})
    return lambda: setattr(part, "__class__", kind)


@change
def what_an_image_becomes_in_the_text(processor: Any) -> Undo:
    before = processor.replace_image_token
    return put(processor, "replace_image_token", lambda *a, **k: before(*a, **k) + " hm ")


@change
def another_chat_template(processor: Any) -> Undo:
    home = processor if processor.chat_template else processor.tokenizer
    return put(home, "chat_template", "zz top " + home.chat_template)


@change
def another_way_to_apply_it(processor: Any) -> Undo:
    apply = processor.tokenizer.apply_chat_template
    return put(
        processor.tokenizer, "apply_chat_template", lambda *a, **k: "zz " + str(apply(*a, **k))
    )


@change
def another_tokenizer(processor: Any) -> Undo:
    before = processor.tokenizer
    processor.tokenizer = copy.deepcopy(before)
    processor.tokenizer.add_tokens(["thing here"])
    return lambda: setattr(processor, "tokenizer", before)


@change
def another_normaliser(processor: Any) -> Undo:
    backend = processor.tokenizer.backend_tokenizer
    before = backend.normalizer
    backend.normalizer = normalizers.Replace("t", "e")
    return lambda: setattr(backend, "normalizer", before)


@change
def what_stands_before_a_text(processor: Any) -> Undo:
    backend, name = processor.tokenizer.backend_tokenizer, processor.tokenizer.decode([2])
    before = backend.post_processor
    backend.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, 2)]
    )
    return lambda: setattr(backend, "post_processor", before)


@pytest.fixture
def parts() -> tuple[Any, Any]:
    model, processor = build("qwen3_vl")
    return model, copy.deepcopy(processor)


def messages() -> list[Any]:
    text = {"type": "text", "text": ASKED}
    return [{"role": "user", "content": [{"type": "image", "image": picture(1)}, text]}]


def said(vlm: Any) -> tuple[Any, ...]:
    reply = vlm.chat(messages(), max_new_tokens=6)
    return (*reply.tokens, reply.usage.prompt_tokens)


def afresh(model: Any, processor: Any, **options: Any) -> tuple[Any, ...]:
    with ks.wrap(model, processor, **options) as vlm:
        return said(vlm)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_processor_is_noticed_and_so_is_its_end(
    parts: tuple[Any, Any], name: str, tmp_path: Path
) -> None:
    model, processor = parts
    with ks.wrap(model, processor, store=tmp_path) as vlm:
        before = said(vlm)
        vlm.flush()
        undo = CHANGES[name](processor)
        try:
            wanted = afresh(model, processor)
            assert wanted != before  # it does change the answer
            assert said(vlm) == wanted
            assert afresh(model, processor, store=tmp_path) == wanted
        finally:
            undo()
        assert said(vlm) == before == afresh(model, processor, store=tmp_path)


@pytest.mark.parametrize("name", ["another_chat_template", "another_tokenizer"])
def test_requests_that_are_served_together_notice_it_too(parts: tuple[Any, Any], name: str) -> None:
    model, processor = parts
    with ks.wrap(model, processor) as vlm, Together(vlm) as together:

        def served() -> tuple[Any, ...]:
            reply = together.submit(messages(), max_new_tokens=6).result()
            return (*reply.tokens, reply.usage.prompt_tokens)

        before = served()
        undo = CHANGES[name](processor)
        wanted = afresh(model, processor)
        assert served() == wanted != before
        undo()
        assert served() == before


def test_a_token_added_to_the_tokenizer_stays_text_where_a_caller_writes_it(
    parts: tuple[Any, Any],
) -> None:
    model, processor = parts
    with ks.wrap(model, processor) as vlm:
        said(vlm)
        processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<|tall|>"]})
        added = processor.tokenizer.convert_tokens_to_ids("<|tall|>")
        assert added not in vlm.runtime.render(messages(), Call.of({}, vlm.tenant)).ids
        assert said(vlm) == afresh(model, processor)


def test_what_nothing_shows_is_announced(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl as home

    model, processor = parts
    with ks.wrap(model, processor) as vlm:
        first = said(vlm)
        monkeypatch.setattr(home, "smart_resize", lambda height, width, **more: (64, 64))
        vlm.refresh()
        assert said(vlm) == afresh(model, processor) != first


def test_code_of_a_processor_is_read_once(parts: tuple[Any, Any]) -> None:
    part = parts[1].image_processor

    class Halved(type(part)):  # type: ignore[misc]
        def preprocess(self, *given: Any, **options: Any) -> Any:
            return super().preprocess(*given, **options)

    part.__class__ = Halved
    code = ProcessorCode(parts[1])
    first = code.look()
    assert first and code.look() == first


def test_processors_of_a_library_have_the_names_they_had(demo_parts: dict[str, Any]) -> None:
    """Stores and packages of before are known: nothing is named where nothing was replaced."""
    for _, processor in demo_parts.values():
        assert ProcessorCode(processor).look() == ""
