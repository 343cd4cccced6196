"""What a turn does and what it says of itself: steps, counts, streaming, reasons.

Reasons are provoked one by one and their indices compared with the true first difference of the
prompts, found by comparing ids here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.answers import logits
from support.changes import kept
from support.models import build, picture, stock_inputs, turn

import keepsight as ks
from keepsight.errors import InputError, PromptTooLong, UnknownOption

LONG = "Please look at this picture very carefully and then tell me all that you see in it."


@contextmanager
def counted_tokens(vlm: Any) -> Iterator[list[int]]:
    """Tokens of each pass through the language model."""
    passes: list[int] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        passes.append(kwargs["inputs_embeds"].shape[1])

    handle = vlm.model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def boom(*args: Any, **kwargs: Any) -> Any:
    """Stands where nothing may be called."""
    raise AssertionError("this must not run on a warm turn")


def test_warm_turn_touches_no_tower_no_processor_no_package(
    demo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def counting(thing: Any, name: str) -> None:
        usual = getattr(thing, name)

        def counted(*given: Any, **options: Any) -> Any:
            ran.append(name)
            return usual(*given, **options)

        monkeypatch.setattr(thing, name, counted)

    counting(demo.model.base_model.visual, "forward")
    counting(type(demo.processor.image_processor), "preprocess")
    demo.chat([turn("Hello!")], max_new_tokens=1)  # from now on this processor's code is known
    session = demo.session()
    session.ask(LONG, picture(1))
    assert sorted(ran) == ["forward", "preprocess"]
    monkeypatch.setattr(demo.runtime.vision, "package", boom)
    reply = session.ask("And what colour is it?")
    again = demo.ask(picture(1), LONG)
    assert sorted(ran) == ["forward", "preprocess"]
    assert reply.usage.images_encoded == again.usage.images_encoded == 0
    assert reply.usage.images_reused == 1


def test_exactly_the_uncached_tokens_pass_through(demo_parts: Any) -> None:
    for model, processor in demo_parts.values():
        with ks.wrap(model, processor) as vlm, counted_tokens(vlm) as passes:
            session = vlm.session("You look at pictures and you answer briefly and politely.")
            for images in (picture(1), None, [picture(2), picture(3)], None):
                passes.clear()
                reply = session.ask(LONG, images, max_new_tokens=5)
                usage = reply.usage
                steps = usage.completion_tokens - 1
                assert sum(passes) - steps == usage.prompt_tokens - usage.cached_tokens
                assert passes[len(passes) - steps :] == [1] * steps
            assert usage.cached_tokens > 0


def test_first_piece_comes_before_the_second_step(demo: Any) -> None:
    """Also where it is remembered with the whole prompt."""
    messages, tokens = [turn("Describe it.", picture(1))], []
    for _ in range(2):
        steps = demo.stats()["engine"]["decode_steps"]
        stream = demo.stream(messages, max_new_tokens=8, do_sample=False)
        pieces = [next(stream)]
        assert pieces[0].token is not None and demo.stats()["engine"]["decode_steps"] == steps
        pieces.append(next(stream))
        assert demo.stats()["engine"]["decode_steps"] == steps + 1
        pieces += stream
        assert pieces[-1].usage is not None and pieces[-1].report is not None
        assert all(piece.usage is None for piece in pieces[:-1])
        tokens.append([piece.token for piece in pieces[:-1]])
    assert tokens[0] == tokens[1]


def test_what_is_forgotten_takes_only_its_own_lanes_along(demo: Any) -> None:
    """A conversation that is deleted leaves others as quick as they were."""
    sessions = [demo.session(), demo.session()]
    for number, session in enumerate(sessions):
        session.ask(f"{number} {LONG}", max_new_tokens=2)
    lanes = demo.runtime.engine.lanes
    before = lanes.nbytes
    assert demo.delete(sessions[0].messages) > 0
    assert 0 < lanes.nbytes < before
    demo.delete(picture(1))  # of a picture nothing stays anywhere
    assert lanes.nbytes == 0
    demo.runtime.tree.check()


def test_a_tower_that_fails_once(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(dense.runtime.family, "encode", boom)
        with pytest.raises(AssertionError):
            dense.chat([turn(LONG, picture(1)), turn("Two.", picture(2))])
    dense.runtime.tree.check()
    assert dense.runtime.tree.held_bytes() == 0
    assert dense.chat([turn(LONG, picture(1)), turn("Two.", picture(2))]).text


def test_a_prompt_with_one_token_behind_a_turn_is_answered_whole(demo: Any) -> None:
    (end, *_) = sorted(demo.runtime.rule.turn_ends)
    ids = torch.tensor([[*range(20, 60), end, 21]])
    for _ in range(2):
        demo.generate(input_ids=ids, max_new_tokens=1)
    assert demo.stats()["engine"]["prefill_tokens"] == ids.shape[1]


def test_explain_computes_nothing_and_tells_the_truth(demo: Any) -> None:
    messages = [turn(LONG, picture(1)), turn("Yes.", role="assistant"), turn("Two?", picture(2))]
    with counted_tokens(demo) as passes:
        demo.chat(messages[:1], max_new_tokens=1)
        passes.clear()
        told = demo.explain(messages)
        assert not passes
        report = demo.chat(messages, max_new_tokens=1).report
    assert told.segments == report.segments and told.cached_tokens == report.cached_tokens


def reasons(report: Any) -> list[tuple[int, str]]:
    """(start, reason) of what was computed."""
    return [(s.start, s.reason) for s in report.segments if s.status == "computed"]


def first_difference(vlm: Any, one: list[Any], other: list[Any]) -> int:
    """The first token where two prompts differ; images differ at their first token."""
    a, b = vlm.render(one), vlm.render(other)
    n = min(len(a), len(b))
    codes = []
    for prompt in (a, b):
        code = [(int(i), "", 0) for i in prompt.ids]
        for span in prompt.spans:
            for k in range(span.start, span.end):
                code[k] = (-1, span.feature_id, k - span.start)
        codes.append(code)
    return next((i for i in range(n) if codes[0][i] != codes[1][i]), n)


def test_reason_diverged_in_text_and_in_a_medium(demo: Any) -> None:
    seen = [turn(LONG, picture(1)), turn("Yes.", role="assistant"), turn("And now?", picture(2))]
    demo.chat(seen, max_new_tokens=1)
    text = [turn(LONG, picture(1)), turn("No.", role="assistant"), turn("And now?", picture(2))]
    image = [turn(LONG, picture(1)), turn("Yes.", role="assistant"), turn("And now?", picture(3))]
    for changed, what in ((text, "text"), (image, "medium 1")):
        at = first_difference(demo, seen, changed)
        found = reasons(demo.explain(changed))
        assert (at, f"diverged at token {at} ({what})") in found


def test_reason_diverged_among_many_siblings(dense: Any) -> None:
    texts = [f"Tell me something about the number {i * 37} please." for i in range(20)]
    for text in texts:
        dense.prepare([turn(text)])
    changed = [turn("Tell me something about the number 407 and more.")]
    at = max(first_difference(dense, [turn(text)], changed) for text in texts)
    found = [r for r in reasons(dense.explain(changed)) if r[1].startswith("diverged")]
    assert found == [(at, f"diverged at token {at} (text)")]


def test_reason_no_snapshot_between(demo_parts: Any) -> None:
    """Where layers have states of fixed size, prompts go on only where one was captured."""
    with ks.wrap(*demo_parts["demo-hybrid"]) as vlm:
        wordy, changed = ([turn(" ".join([LONG] * count))] for count in (12, 11))
        vlm.chat(wordy, max_new_tokens=1)
        until = first_difference(vlm, wordy, changed)
        assert until > 150
        found = reasons(vlm.explain(changed))
        assert any(reason == f"no snapshot between {at} and {until}" for at, reason in found)


def test_reason_evicted(demo: Any) -> None:
    messages = [turn(LONG, picture(1))]
    demo.chat(messages, max_new_tokens=1)
    demo.runtime.tree.evict(demo.runtime.tree.nbytes)
    assert reasons(demo.explain(messages))[0] == (0, "evicted")


def test_reason_other_weights(demo: Any) -> None:
    messages = [turn(LONG, picture(1))]
    demo.chat(messages, max_new_tokens=1)
    undo = kept(demo.model.get_decoder().layers[0].mlp.down_proj.weight, lambda w: w.mul_(1.01))
    try:
        assert {reason for _, reason in reasons(demo.explain(messages))} == {"other weights"}
    finally:
        undo()
    assert demo.explain(messages).cached_tokens == demo.explain(messages).prompt_tokens


def test_weights_of_which_nothing_is_remembered_leave_nothing_behind(demo: Any) -> None:
    """As in a training: each step makes a namespace, and only those with snapshots are kept."""
    messages = [turn("What is it?", picture(1))]
    weight = demo.model.get_decoder().layers[0].mlp.down_proj.weight
    undo, memory = kept(weight, torch.Tensor.detach), demo.runtime
    try:
        for step in range(8):
            if step % 4 == 0:
                demo.chat(messages, max_new_tokens=1)
            with torch.no_grad():
                weight.mul_(1.01)
            assert {reason for _, reason in reasons(demo.explain(messages))} == {"other weights"}
            memory.tree.check()
        assert len(memory.made_under) == len(memory.tree.roots) == len(memory.tree._homes) == 3
    finally:
        undo()


def test_nobody_asks_for_other_weights_where_the_whole_prompt_is_known(
    dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [turn("What is it?", picture(1))]
    dense.prepare(messages)
    dense.prepare(messages)
    asked: list[Any] = []
    monkeypatch.setattr(dense.runtime.tree, "elsewhere", lambda *a: asked.append(a) or (0, ""))
    dense.explain(messages)
    assert not asked


def test_reason_made_elsewhere(dense: Any, tmp_path: Path) -> None:
    package = dense.encode(picture(1))
    foreign = dataclasses.replace(package, provenance=dict(package.provenance, maker="onnx"))
    dense.chat([turn(LONG, foreign)], max_new_tokens=1)
    found = reasons(dense.explain([turn(LONG, picture(1))]))
    assert any(reason == "made elsewhere" for _, reason in found)


def test_a_package_that_somebody_changed_never_changes_an_exact_answer(
    demo: Any, tmp_path: Path
) -> None:
    """Neither one that says so, nor one whose provenance was left, nor one changed in place."""
    messages = [turn(LONG, picture(1))]
    expected = logits(demo, messages)
    demo.clear()
    package = demo.encode(picture(1))
    changed = dataclasses.replace(package, tensors={n: t + 0.5 for n, t in package.tensors.items()})
    lossy = dataclasses.replace(changed, provenance=dict(package.provenance, codec="int8"))
    foreign = ks.Package.load(lossy.save(tmp_path / "foreign.sight"))
    assert not torch.equal(logits(demo, [turn(LONG, foreign)]), expected)
    assert torch.equal(logits(demo, messages), expected)
    demo.clear()
    assert not torch.equal(logits(demo, [turn(LONG, changed)]), expected)
    assert torch.equal(logits(demo, messages), expected)
    for tensor in (*package.tensors.values(), *demo.encode(picture(1)).tensors.values()):
        tensor.zero_()
    demo.runtime.tree.evict(demo.runtime.tree.nbytes)
    assert torch.equal(logits(demo, messages), expected)


def test_features_alone_among_others_and_under_two_budgets(demo_parts: Any) -> None:
    model, processor = demo_parts["demo"]
    model = copy.deepcopy(model).bfloat16()  # the others' is not cast: its frequencies would round
    found = []
    for budget in (0, "1GiB"):
        for together in (False, True):
            with ks.wrap(model, processor, vision_budget=budget) as vlm:
                images = [picture(2), picture(1), picture(3)] if together else [picture(1)]
                packs = vlm.encode(images)
                found.append(packs[1 if together else 0].tensors)
    for tensors in found[1:]:
        assert all(torch.equal(tensors[name], found[0][name]) for name in tensors)


def test_sampling_equals_stock_with_the_same_seed() -> None:
    model, processor = build("qwen3_vl")
    messages = [turn("Look at it.", picture(1))]
    settings = {
        "do_sample": True,
        "temperature": 1.3,
        "top_p": 0.9,
        "top_k": 40,
        "repetition_penalty": 1.2,
        "max_new_tokens": 12,
    }
    inputs = stock_inputs(processor, messages)
    torch.manual_seed(7)
    stock = model.generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :].tolist()
    with ks.wrap(model, processor) as vlm:
        for _ in range(2):  # cold, then warm
            assert vlm.chat(messages, seed=7, **settings).tokens == stock
        assert vlm.chat(messages, seed=8, **settings).tokens != stock


def test_unknown_and_impossible_options(dense: Any) -> None:
    messages = [turn("Hello!")]
    with pytest.raises(UnknownOption, match="vision_budget"):
        ks.wrap(dense.model, dense.processor, vision_buget="1GiB")
    with pytest.raises(UnknownOption, match="image_options has no option 'foo'"):
        ks.wrap(dense.model, dense.processor, image_options={"foo": 3})
    for call in (dense.prepare, dense.explain, dense.inputs):
        with pytest.raises(UnknownOption, match="temperature"):
            call(messages, temperature=0.5)
    with pytest.raises(InputError, match="num_beams"):
        dense.chat(messages, num_beams=4)
    wrong: dict[str, Any] = {"max_new_tokens": 0, "eos_token_id": "x", "stop": 3}
    wrong |= {"generation_config": {"max_new_tokens": 3}, "template_kwargs": 3}
    wrong |= {"logits_processor": 5, "watermarking_config": {"x": 1}}
    for name, value in wrong.items():
        with pytest.raises(InputError):
            dense.chat(messages, **{name: value})
    session = dense.session()
    session.ask("Hello!", max_new_tokens=1)
    with pytest.raises(UnknownOption, match="regenerate has no option 'images'"):
        session.regenerate(images=[picture(1)])
    with pytest.raises(UnknownOption, match="edit has no option 'colour'"):
        session.edit(0, "Hello?", colour="red")
    with pytest.raises(InputError, match="system is a int"):
        dense.session(system=3)
    nothing = {"suppress_tokens": list(range(len(dense.processor.tokenizer)))}
    with pytest.raises(InputError, match="no token can be drawn"):
        dense.chat(messages, do_sample=True, **nothing)
    assert len(dense.chat(messages, max_tokens=2).tokens) == 2


def test_a_prompt_beyond_the_context(dense: Any) -> None:
    limit = dense.model.config.text_config.max_position_embeddings
    ids = torch.full((1, limit), 300)
    with pytest.raises(PromptTooLong, match=str(limit)):
        dense.generate(ids, max_new_tokens=1)
    assert dense.chat([turn("Hello!")]).text


def test_stream_of_partial_characters(dense: Any) -> None:
    """Text comes out whole even when a character takes several tokens."""
    from keepsight.core.decoding.sampling import Detokenizer

    tokenizer = dense.processor.tokenizer
    text = "naïve – 画 🙂 done"
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.push(t) for t in tokenizer(text)["input_ids"]]
    assert "".join([*pieces, detokenizer.rest()]) == text
    assert "\ufffd" not in "".join(pieces)


def test_tensor_paths_of_one_image_agree(dense: Any) -> None:
    """A picture named through messages and one given as pixel values are one picture."""
    messages = [turn(LONG, picture(1))]
    dense.chat(messages, max_new_tokens=1)
    inputs = dense.inputs(messages)
    pixels = dense.runtime.family.preprocess(
        dense.processor, picture(1), dense.runtime.image_options
    ).tensors
    inputs.pop("mm_encoder_outputs")
    out = dense.generate(**{**inputs, **pixels}, max_new_tokens=1, return_dict_in_generate=True)
    assert out.usage.cached_tokens == out.usage.prompt_tokens
    assert np.array_equal(out.sequences[0, :-1], inputs["input_ids"][0])


def test_a_warm_turn_does_not_walk_over_the_model(
    dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a tower was left out matters to pictures that are new, and to nothing else."""
    asked = [turn("Look.", picture(1))]
    first = dense.chat(asked, max_new_tokens=2, do_sample=False)
    monkeypatch.setattr("keepsight.models.families.base.absent_parts", boom)
    goes_on = [*asked, turn(first.text, role="assistant"), turn("And?")]
    assert dense.chat(goes_on, max_new_tokens=2).usage.images_encoded == 0
