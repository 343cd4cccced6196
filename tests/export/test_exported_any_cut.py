"""Law 2 in exported runtimes, where their graphs are shown to give it: any cut, the same bits.

Everything is compared bit for bit with a memory that has seen nothing and computes the prompt in
one pass, and the rows that go through the decoder are counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import Catch
from support.exported_models import exported, exported_demo, small
from support.models import picture, turn
from torch import Tensor

import keepsight as ks
from keepsight import Together
from keepsight.core.any_cut import AnyCut
from keepsight.runtimes.onnx import OnnxSession

KINDS = ("qwen3_vl", "llava")
GREEDY: dict[str, Any] = {"do_sample": False}


@contextmanager
def wrapped(kind: str, **options: Any) -> Iterator[ks.VLM]:
    with ks.wrap(exported(kind), small(kind)[1], **options) as vlm:
        yield vlm


def ids_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(10, 400, (1, count), generator=torch.Generator().manual_seed(seed))


def logits_of(vlm: ks.VLM, ids: Tensor) -> Tensor:
    catch = Catch()
    vlm.generate(input_ids=ids, max_new_tokens=1, logits_processor=[catch])
    assert catch.seen is not None
    return catch.seen


def rows(vlm: ks.VLM) -> int:
    return int(vlm.stats()["engine"]["prefill_tokens"])


def holds(vlm: ks.VLM) -> bool:
    engine = vlm.stats()["engine"]
    assert (engine["exactness"] == "bits") == (not engine["rounding_because"])
    return bool(engine["exactness"] == "bits")


# -- the promise -----------------------------------------------------------------------------------


def test_the_demo_model_end_to_end(tmp_path: Path) -> None:
    """Turns with pictures, a reply kept as it was decoded, an edit, a fork, a restart."""
    folder = exported_demo("demo")
    with ks.load(folder, store=tmp_path) as vlm, ks.load(folder) as fresh:
        assert vlm.verify([turn("What do you see?", picture(1))], stock=True)
        assert holds(vlm) and "promised: equal bits" in str(vlm.verify([turn("Hello.")]))
        chat = vlm.session()
        first = chat.ask("What do you see? Say all of it.", images=[picture(1)], max_new_tokens=20)
        assert first.report.to_dict()["exactness"] == "bits"
        before = rows(vlm)
        chat.ask("And where is it?", images=[picture(2)], max_new_tokens=20)
        computed = rows(vlm) - before
        talk = [*chat.messages, turn("Which is larger?")]
        for messages in (talk, [*talk[:2], turn("Which colour?")], [*talk[:1]]):
            catch, again = Catch(), Catch()
            vlm.chat(messages, max_new_tokens=6, logits_processor=[catch], **GREEDY)
            fresh.clear()
            fresh.chat(messages, max_new_tokens=6, logits_processor=[again], **GREEDY)
            assert catch.seen is not None and again.seen is not None
            assert torch.equal(catch.seen, again.seen)
        second = len(vlm.render(talk[:3]).ids) - first.usage.prompt_tokens
        assert computed <= second - first.usage.completion_tokens + 2
        vlm.runtime.check()
        wanted = vlm.chat(talk, max_new_tokens=8, **GREEDY).tokens
        vlm.flush()
    with ks.load(folder, store=tmp_path) as vlm:
        reply = vlm.chat(talk, max_new_tokens=8, **GREEDY)
        assert reply.tokens == wanted and not rows(vlm)


@pytest.mark.parametrize("kind", KINDS)
def test_any_prefix_is_used_to_its_last_token(kind: str) -> None:
    with wrapped(kind) as vlm, wrapped(kind) as other:
        ids = ids_of(150)
        logits_of(vlm, ids)
        for shared in (1, 2, 31, 32, 33, 77, 128, 149, 150):
            prompt = torch.cat([ids[:, :shared], ids_of(9, seed=shared) + 100], dim=1)
            before = rows(vlm)
            found = logits_of(vlm, prompt)
            assert rows(vlm) - before == 9
            other.clear()
            assert torch.equal(found, logits_of(other, prompt))
        vlm.runtime.check()


def test_decoded_together_is_decoded_alone() -> None:
    """Sampling with a seed included; who joins and leaves changes no bit."""
    chats = [
        [turn("Look.", picture(1))],
        [turn("Only words here.")],
        [turn("Look at this one. " * 9, picture(2, 160, 96))],
        [turn("Compare. " * 3, picture(1), picture(2)), turn("And?")],
    ]
    counts, options = (6, 15, 3, 11), {"do_sample": True, "temperature": 1.5}
    with wrapped("qwen3_vl") as vlm, wrapped("qwen3_vl") as own:
        asked = list(enumerate(zip(chats, counts, strict=True)))
        seen, alone = [Catch() for _ in chats], [Catch() for _ in chats]
        with Together(vlm, prefill_piece=17) as together:
            with vlm.runtime.lock:  # nothing is computed until all have come
                tickets = [
                    together.submit(
                        c, max_new_tokens=n, seed=i, logits_processor=[seen[i]], **options
                    )
                    for i, (c, n) in asked
                ]
            replies = [ticket.result().tokens for ticket in tickets]
            assert vlm.stats()["engine"]["decode_steps"] < sum(counts) - len(counts)
        for i, (chat, count) in asked:
            catch = {"logits_processor": [alone[i]]}
            reply = own.chat(chat, max_new_tokens=count, seed=i, **catch, **options)
            assert reply.tokens == replies[i]
            assert seen[i].seen is not None and alone[i].seen is not None
            assert torch.equal(seen[i].seen, alone[i].seen)
        for chat in chats:  # what was decoded beside others is what a prefill gives
            talk = [*chat, turn("So.", role="assistant"), turn("Go on.")]
            catch, again = Catch(), Catch()
            vlm.chat(talk, max_new_tokens=1, logits_processor=[catch])
            own.clear()
            own.chat(talk, max_new_tokens=1, logits_processor=[again])
            assert catch.seen is not None and again.seen is not None
            assert torch.equal(catch.seen, again.seen)


# -- shown, not assumed ----------------------------------------------------------------------------


@pytest.mark.tries_anew
def test_a_runtime_that_rounds_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that adds in another order for odd numbers of rows falls back and says so."""
    run = OnnxSession.run

    def odd(self: OnnxSession, feeds: dict[str, Tensor], into: Any = None) -> dict[str, Tensor]:
        found = run(self, feeds, into)
        if "hidden" in found and found["hidden"].shape[1] % 2:
            found["hidden"].mul_(1 + 2**-22)
        return found

    def beside(self: OnnxSession, feeds: dict[str, Tensor], into: Any = None) -> dict[str, Tensor]:
        found = run(self, feeds, into)
        if "hidden" in found and len(found["hidden"]) > 1:
            found["hidden"].mul_(1 + 2**-22)
        return found

    for wrong, why in ((odd, "cut"), (beside, "beside other sequences")):
        monkeypatch.setattr(OnnxSession, "run", wrong)
        with wrapped("qwen3_vl") as vlm:
            assert not holds(vlm) and why in vlm.stats()["engine"]["rounding_because"]
            found = vlm.verify([turn("What do you see?", picture(1)), turn("And?")])
            assert found and why in str(found)
            reply = vlm.ask(picture(1), "What?", max_new_tokens=1)
            assert reply.report.to_dict()["exactness"] == "rounding"


@pytest.mark.parametrize("kind", KINDS)
def test_random_edits_forks_and_budgets(kind: str) -> None:
    """Conversations interleaved, cut, forked and edited anywhere, under a small budget."""
    rng = random.Random(7)
    with wrapped(kind, cache_budget="300KB") as vlm, wrapped(kind) as other:
        talks = [ids_of(20, seed=one) for one in range(12)]
        pictures = sorted(vlm.runtime.family.placeholders.values())
        for step in range(48):
            one = rng.randrange(len(talks))
            talk = talks[one]
            kept = talk[:, : rng.randint(1, talk.shape[1])] if rng.random() < 0.5 else talk
            prompt = torch.cat([kept, ids_of(rng.randint(1, 40), 100 + step)], dim=1)
            many = rng.randint(1, 24)  # some of them guessed
            options = {"max_new_tokens": many, "min_new_tokens": many, **GREEDY}
            given: Any = vlm.generate(input_ids=prompt, suppress_tokens=pictures, **options)
            talks[one] = given
            vlm.runtime.check()
            if step % 4 == 0:
                other.clear()
                assert torch.equal(logits_of(vlm, given), logits_of(other, given))
        assert vlm.stats()["engine"]["drafted_tokens"]


@pytest.mark.tries_anew
def test_what_was_found_is_kept_in_the_store_and_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    fails = AnyCut._graphs_fail

    def counted(self: AnyCut, *given: Any) -> str:
        tried.append("")
        return fails(self, *given)

    monkeypatch.setattr(AnyCut, "_graphs_fail", counted)
    counts = []
    for _ in range(2):
        with wrapped("qwen3_vl", store=tmp_path) as vlm:
            assert holds(vlm)
            vlm.flush()
        counts.append(len(tried))
    assert counts[0] == counts[1] > 0
    monkeypatch.setattr(AnyCut, "_graphs_agree", lambda self, kernels: False)
    with wrapped("qwen3_vl", store=tmp_path) as vlm:
        assert holds(vlm) and len(tried) > counts[1]
