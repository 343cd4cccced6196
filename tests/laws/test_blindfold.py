"""Inside `vlm.blindfold()` no run of a tower goes unseen, and nothing is left behind."""

from __future__ import annotations

import pytest
from support.common import in_threads
from support.models import ALL, build, picture, stock_inputs, turn

import keepsight as ks
from keepsight.errors import ModelError, TowerRan
from keepsight.models.families.tower_absent import tower_parts
from keepsight.stock.verify import certify

KINDS = ("qwen2_vl", "qwen3_vl", "gemma3", "llava", "internvl", "idefics3", "ovis2", "llama4")
FIRST = [turn("What is it?", picture(1))]
THEN = [*FIRST, turn("A pattern.", role="assistant"), turn("Where?")]
OTHER = [turn("What is it?", picture(2))]
ONE = {"max_new_tokens": 1, "do_sample": False}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ALL])
def test_known_pictures_are_answered_and_new_ones_refused(kind: str) -> None:
    model, processor = build(kind)
    with ks.wrap(model, processor) as vlm:
        parts = tower_parts(vlm.runtime.family)
        assert parts
        vlm.encode(picture(1))
        named = vlm.runtime.refresh()
        with vlm.blindfold():
            assert vlm.runtime.refresh() == named, "the hook is no part of what the model is"
            for messages in (FIRST, THEN):
                assert vlm.chat(messages, **ONE).usage.images_encoded == 0
            with pytest.raises(TowerRan, match="features were expected"):
                vlm.chat(OTHER, **ONE)
            inputs = stock_inputs(processor, OTHER)
            with pytest.raises(TowerRan) as caught:
                model.generate(**inputs, **ONE)
            assert caught.value.tower in parts
        assert not any(part._forward_pre_hooks for part in parts.values())
        assert vlm.chat(OTHER, **ONE).usage.images_encoded == 1


def test_nested_in_threads_and_after_errors() -> None:
    model, processor = build("qwen3_vl")
    caught: list[BaseException] = []

    def stock() -> None:
        try:
            model.generate(**stock_inputs(processor, OTHER), **ONE)
        except BaseException as error:
            caught.append(error)

    def tried() -> int:
        in_threads(stock)
        return len(caught)

    with ks.wrap(model, processor) as vlm, ks.wrap(model, processor) as second:
        with pytest.raises(ZeroDivisionError), vlm.blindfold():
            with second.blindfold(), vlm.blindfold():
                assert tried() == 1
            assert tried() == 2
            with pytest.raises(TowerRan):
                second.encode(picture(1))
            raise ZeroDivisionError
        assert tried() == 2 and all(isinstance(error, TowerRan) for error in caught)
        assert second.encode(picture(1)).tokens
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_compiled_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        monkeypatch.setattr(model.model.visual, "_compiled_call_impl", lambda *_: None)
        with pytest.raises(ModelError, match=r"model.visual is compiled"), vlm.blindfold():
            pass


def test_certify_counts_runs_and_bytes() -> None:
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        found = certify(vlm.runtime, [picture(1), picture(2)], "What?")
        checks = {one.what: one for one in found.checks}
        package = vlm.encode(picture(1))
    runs = checks["the encoder does not run for known pictures"]
    assert runs.ok and runs.note == "2 runs of its parts for new pictures, 0 for known ones"
    note = checks["pixels beside features"].note
    assert "bytes of pixels" in note and f"{2 * package.nbytes:,} bytes of features" in note
