"""Requests served together: the same answers as alone, whoever comes and goes, and nothing left.

The scheduler's thread waits for the model's lock, so a test that holds it (`at_once`) decides what
has arrived before the first piece of work is done.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.common import entered
from support.models import build, picture, turn

import keepsight as ks
from keepsight import Ticket, Together
from keepsight.core.decoding.forward import LanguageModel
from keepsight.core.decoding.lanes import Lanes
from keepsight.errors import Busy, Closed, ImageError, InputError, PromptTooLong, UnknownOption
from keepsight.system.lock import FairLock

GREEDY = {"do_sample": False}
LONG = "One more line of a long text. " * 40


def chats() -> list[list[Any]]:
    """Prompts of quite different lengths, with and without pictures."""
    return [
        [turn("Look.", picture(1))],
        [turn("Only words here.")],
        [turn("Look at this one. " * 6, picture(2, 160, 96))],
        [turn("Compare. " * 3, picture(1), picture(2)), turn("And?")],
        [turn("Words. " * 25)],
    ]


def submit(together: Together, messages: list[Any], count: int, **options: Any) -> Ticket:
    return together.submit(messages, max_new_tokens=count, **GREEDY, **options)


@functools.cache
def alone(kind: str, count: int = 24) -> list[list[int]]:
    """What each of the chats is answered by itself."""
    with ks.wrap(*build(kind)) as vlm:
        return [vlm.chat(c, max_new_tokens=count, **GREEDY).tokens for c in chats()]


@contextmanager
def served(kind: str = "qwen3_vl", **options: Any) -> Iterator[Together]:
    """A scheduler over a model with an empty memory; at the end nothing may be held."""
    with ks.wrap(*build(kind)) as vlm:
        with Together(vlm, **options) as together:
            yield together
        check(vlm)


def check(vlm: Any) -> None:
    vlm.runtime.tree.check()
    assert vlm.stats()["prefix"]["held_bytes"] == 0 and not vlm.runtime.engine.busy


@contextmanager
def at_once(together: Together) -> Iterator[None]:
    """Nothing is computed until all have come."""
    with together._vlm.runtime.lock:
        yield


# -- the same answers as alone -------------------------------------------------------------------


SHARED = ("qwen3_vl", "qwen3_5", "molmo2")  # the others: one by one


@pytest.mark.parametrize("kind", [*SHARED, "llama4"])
def test_each_is_answered_as_alone(kind: str) -> None:
    counts = [6, 17, 3, 24, 11]
    with served(kind) as together:
        together._vlm.prepare([turn("How does this model compute?")])  # it is tried once
        before, asked = together.stats()["passes"], zip(chats(), counts, strict=True)
        with at_once(together):
            tickets = [submit(together, c, n) for c, n in asked]
        replies = [ticket.result() for ticket in tickets]
        stats = together.stats()
    for reply, wanted, count in zip(replies, alone(kind), counts, strict=True):
        assert reply.tokens == wanted[:count]
    assert stats["finished"] == 5 and stats["failed"] == stats["in_flight"] == 0
    if kind in SHARED:
        assert stats["passes"] - before < 0.85 * stats["tokens"], (
            "tokens of several come from one pass"
        )


SCHEDULES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 23)), min_size=5, max_size=5
)  # for each chat: after how many tokens of all it comes, and how many it gets


@pytest.mark.parametrize("examples", [4, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["sliding", "gemma3_sliding", "qwen3_5", "mllama", "lfm2_vl"])
def test_whoever_joins_and_leaves(kind: str, examples: int) -> None:
    wanted = alone(kind)
    with ks.wrap(*build(kind)) as vlm, Together(vlm) as together:

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(SCHEDULES)
        def try_one(schedule: list[tuple[int, int]]) -> None:
            vlm.clear()
            follow(together, schedule, wanted)

        try_one()
        check(vlm)


def follow(together: Together, schedule: list[tuple[int, int]], wanted: list[list[int]]) -> None:
    coming = sorted((start, number) for number, (start, _) in enumerate(schedule))
    given: list[list[int]] = [[] for _ in schedule]
    over = threading.Semaphore(0)

    def heard(number: int, piece: Any) -> None:
        if piece.token is not None:
            given[number].append(piece.token)
            come(sum(map(len, given)))

    def ended(ticket: Ticket) -> None:
        come(coming[0][0] if coming else 0)  # nobody else may be there
        over.release()

    def come(now: int) -> None:
        while coming and coming[0][0] <= now:
            _, number = coming.pop(0)
            more = {"on_piece": functools.partial(heard, number), "on_done": ended}
            options = {"max_new_tokens": schedule[number][1], **GREEDY}
            together.submit(chats()[number], **more, **options)

    come(coming[0][0])
    assert all(over.acquire(timeout=60) for _ in schedule)
    for number, (_, count) in enumerate(schedule):
        assert given[number] == wanted[number][:count], (number, schedule)


# -- once and not twice --------------------------------------------------------------------------


def test_one_picture_and_one_prefix_are_computed_once() -> None:
    """As if the requests had come one after another, each finding what the one before left."""
    asked = [[turn(LONG, picture(1)), turn(f"Number {n % 3}?")] for n in range(6)]
    with ks.wrap(*build("qwen3_vl")) as vlm:
        for messages in asked:
            vlm.chat(messages, max_new_tokens=2, **GREEDY)
        wanted = vlm.runtime.engine.prefill_tokens
    with served() as together:
        vlm = together._vlm
        with at_once(together):
            tickets = [submit(together, m, 2) for m in asked]
        replies = [ticket.result() for ticket in tickets]
        assert vlm.runtime.engine.prefill_tokens == wanted
        assert vlm.stats()["features"]["encoded"] == together.stats()["towers"] == 1
        assert sum(r.report.computed_tokens for r in replies) == wanted
        assert sum(r.usage.images_encoded for r in replies) == 1
        for reply in replies:
            reused = sum(s.tokens for s in reply.report.segments if s.status == "reused")
            assert reused == reply.usage.cached_tokens == reply.report.cached_tokens


def test_what_another_has_come_to_is_taken_over_half_way() -> None:
    """Two long prompts that begin together: each chunk is computed by one of them only."""
    same = [turn(LONG, picture(1)), turn(LONG, picture(2)), turn(LONG)]
    with served() as together:
        vlm = together._vlm
        with at_once(together):
            one = submit(together, [*same, turn("One?")], 2)
            two = submit(together, [*same, turn("Two?")], 2)
        replies = [one.result(), two.result()]
        computed = sum(r.report.computed_tokens for r in replies)
        assert computed == vlm.runtime.engine.prefill_tokens
        assert computed < replies[0].usage.prompt_tokens + 40
        tiers = {s.reason for r in replies for s in r.report.segments if s.status == "reused"}
        assert tiers == {"memory"}
        assert [r.usage.images_encoded for r in replies] in ([2, 0], [0, 2], [1, 1])


# -- who comes next ------------------------------------------------------------------------------


def test_of_prompts_alike_the_first_is_finished_first() -> None:
    """Each waits for those before it, and not all of them for the last."""
    order: list[str] = []
    with served() as together:
        with at_once(together):
            tickets = [
                submit(
                    together, [turn(LONG * 2 + n, picture(int(n)))], 2, on_piece=entered(order, n)
                )
                for n in "012"
            ]
        assert all(ticket.done.wait(60) for ticket in tickets)
    assert order == sorted(order)


def test_short_chats_do_not_wait_for_a_long_prefill() -> None:
    order: list[str] = []
    with served() as together:
        with at_once(together):
            long = submit(together, [turn(LONG)] * 4, 2, on_piece=entered(order, "long"))
            for name in ("short 0", "short 1", "short 2"):
                submit(together, [turn(name)], 6, on_piece=entered(order, name))
        assert long.done.wait(60)
    assert list(dict.fromkeys(order)) == ["short 0", "short 1", "short 2", "long"]
    assert order.index("long") > order.index("short 2") + 4, "tokens come between its chunks"


def test_what_does_not_fit_waits() -> None:
    seen: list[int] = []
    with served(batch_tokens=330) as together:

        def look(piece: Any) -> None:
            told = together.stats()
            seen.append(told["running"] + told["prefilling"])

        with at_once(together):
            tickets = [
                together.submit(chats()[1], on_piece=look, max_new_tokens=100, seed=i)
                for i in range(6)
            ]
        assert all(ticket.done.wait(60) for ticket in tickets)
        assert [ticket.error for ticket in tickets] == [None] * 6
    assert 1 < max(seen) <= 3


def test_one_that_is_larger_than_the_budget_is_served_alone() -> None:
    with served(batch_tokens=1) as together:
        replies = [submit(together, c, 3) for c in chats()[:3]]
        assert [len(r.result().tokens) for r in replies] == [3, 3, 3]
        stats = together.stats()
        assert stats["passes"] >= stats["tokens"] == 9


# -- outside of the scheduler's thread -----------------------------------------------------------


def test_pictures_are_prepared_while_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[str] = []
    with served() as together:
        vlm, tokens = together._vlm, threading.Semaphore(0)
        original = vlm.runtime.family.preprocess

        def slow(*arguments: Any) -> Any:
            where.append(threading.current_thread().name)
            for _ in range(5):  # it takes as long as five tokens of somebody else
                assert tokens.acquire(timeout=60)
            return original(*arguments)

        monkeypatch.setattr(vlm.runtime.family, "preprocess", slow)
        talking = submit(
            together, chats()[1], 400, on_piece=lambda piece: tokens.release(), min_new_tokens=400
        )
        reply = submit(together, chats()[0], 3).result()
        assert reply.tokens == alone("qwen3_vl")[0][:3]
        talking.cancel()
        assert where == [threading.current_thread().name]


def test_bad_input_is_refused_at_once() -> None:
    with served() as together:
        ask = functools.partial(together.submit, chats()[1])
        with pytest.raises(UnknownOption, match="max_new_tokens"):
            ask(max_new_token=3)
        with pytest.raises(InputError):
            ask(temperature=-1.0, do_sample=True)
        with pytest.raises(InputError, match="num_beams"):
            ask(num_beams=3)
        with pytest.raises(ImageError):
            together.submit([turn("Look.", b"no picture")])
        with pytest.raises(PromptTooLong):
            together.submit([turn("word " * 9000)])
        with pytest.raises(UnknownOption):
            together.prepare(chats()[1], seed=3)
        assert together.stats()["in_flight"] == 0
        assert len(ask(max_new_tokens=2, **GREEDY).result().tokens) <= 2


@pytest.mark.parametrize("name", ["max_running", "max_waiting", "batch_tokens"])
def test_settings_are_checked(vlm: Any, name: str) -> None:
    with pytest.raises(InputError, match=name):
        Together(vlm, **{name: -1})


# -- who hangs up, and who fails -----------------------------------------------------------------


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=3, max_size=3))
def test_who_hangs_up_frees_its_place(when: list[int]) -> None:
    """Each of three hangs up after some pieces; the other two are answered as alone."""
    with served() as together:
        tickets: list[Ticket] = []
        counts = [0, 0, 0]

        def heard(number: int, piece: Any) -> None:
            counts[number] += 1
            if counts[number] == when[number]:
                tickets[number].cancel()

        with at_once(together):
            for number in range(3):
                listens = functools.partial(heard, number)
                tickets.append(submit(together, chats()[number], 16, on_piece=listens))
                if when[number] == 0:
                    tickets[number].cancel()
            stays = [submit(together, c, 16) for c in chats()[:2]]
        for number, ticket in enumerate(stays):
            assert ticket.result().tokens == alone("qwen3_vl")[number][:16]
        assert all(ticket.done.wait(60) for ticket in tickets)
        stats = together.stats()
        assert stats["cancelled"] + stats["finished"] == 5 and stats["in_flight"] == 0
        for number, ticket in enumerate(tickets):
            if 0 < when[number] < len(alone("qwen3_vl")[number][:16]):
                assert ticket.finish_reason == "cancelled" and ticket.usage.completion_tokens
                assert ticket.usage.completion_tokens <= when[number] + 1


def test_an_error_ends_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(piece: Any) -> None:
        raise ValueError("a listener that fails")

    tokens = itertools.count(1)

    def breaks(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if next(tokens) == 3:
            raise RuntimeError("a processor of somebody")
        return scores

    with served() as together:
        vlm = together._vlm
        vision = vlm.runtime.vision_of("")
        original = vision.package

        def package(medium: Any, *more: Any) -> Any:
            if medium.key == broken.media[0].key:
                raise ImageError("the tower refused it")
            return original(medium, *more)

        broken = vlm.render([turn("Broken.", picture(7))])
        monkeypatch.setattr(vision, "package", package)
        with vlm.runtime.lock:
            processor = submit(together, chats()[1], 9, logits_processor=[breaks])
            listener = submit(together, chats()[1], 9, on_piece=deaf)
            tower = submit(together, [turn("Broken.", picture(7))], 9)
            good = [submit(together, c, 12) for c in chats()[:3]]
        for number, ticket in enumerate(good):
            assert ticket.result().tokens == alone("qwen3_vl")[number][:12]
        with pytest.raises(RuntimeError, match="of somebody"):
            processor.result()
        with pytest.raises(ImageError, match="refused"):
            tower.result()
        assert listener.done.wait(60) and isinstance(listener.error, ValueError)
        assert together.stats()["failed"] == 3
        monkeypatch.undo()
        assert together.submit([turn("Broken.", picture(7))], max_new_tokens=1).result().tokens


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "gemma3_sliding"])
@pytest.mark.parametrize("of", ["a pass", "prompts"])
def test_a_pass_that_runs_out_of_memory(
    kind: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the layers have taken the tokens in by then: all are computed again, one by one."""
    failed = []
    original = LanguageModel.forward

    def forward(self: LanguageModel, segments: Any, *kernels: Any) -> Any:
        found = original(self, segments, *kernels)
        if len(segments) == 3 and (of == "prompts" or len(failed) in range(2)):
            reads = max(len(one.ids) for one in segments) > 1
            if reads == (of == "prompts"):
                failed.append(len(segments))
                raise torch.OutOfMemoryError("no room for this pass")
        return found

    monkeypatch.setattr(LanguageModel, "forward", forward)
    with served(kind) as together:
        with at_once(together):
            tickets = [submit(together, c, 16) for c in chats()[:3]]
        replies = [ticket.result() for ticket in tickets]
        assert together.stats()["failed"] == 0
    assert failed
    for reply, wanted in zip(replies, alone(kind), strict=False):
        assert reply.tokens == wanted[:16]


@pytest.mark.parametrize("where", ["before", "behind"])
def test_one_that_cannot_let_go_ends_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails when a request ends: it has an end, its place is free, the others go on."""
    wanted, failed = alone("qwen3_vl"), []
    with served(max_running=3, max_waiting=0) as together:
        sound = Lanes.give_back

        def fail(self: Lanes, lane: Any) -> None:
            if where == "behind":
                sound(self, lane)
            if not failed:
                failed.append(lane)
                raise MemoryError("no room to let go")
            if where == "before":
                sound(self, lane)

        monkeypatch.setattr(Lanes, "give_back", fail)
        with at_once(together):
            first = submit(together, chats()[0], 3)
            others = [submit(together, chats()[n], 24) for n in (1, 2)]
        with pytest.raises(MemoryError):
            first.result()
        assert [ticket.result().tokens for ticket in others] == [wanted[1], wanted[2]]
        assert failed and together.stats()["in_flight"] == 0


def test_one_for_whom_there_is_no_memory_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LanguageModel.forward

    def forward(self: LanguageModel, segments: Any, *kernels: Any) -> Any:
        for one in segments:
            if len(one.prompt) == longest and one.end > longest + 3:
                raise torch.OutOfMemoryError("no room for this one")
        return original(self, segments, *kernels)

    with served() as together:
        longest = len(together._vlm.render(chats()[4]))
        monkeypatch.setattr(LanguageModel, "forward", forward)
        with at_once(together):
            tickets = [submit(together, chats()[n], 16) for n in (0, 4, 1)]
        for number, ticket in ((0, tickets[0]), (1, tickets[2])):
            assert ticket.result().tokens == alone("qwen3_vl")[number][:16]
        with pytest.raises(torch.OutOfMemoryError):
            tickets[1].result()


def test_a_full_house_says_when_to_come_again() -> None:
    with served(max_running=1, max_waiting=1) as together:
        with at_once(together):
            tickets = [submit(together, chats()[1], 2) for _ in range(2)]
            with pytest.raises(Busy) as caught:
                together.submit(chats()[1])
        assert caught.value.retry_after >= 1 and caught.value.in_flight == 2
        assert [len(t.result().tokens) for t in tickets] == [2, 2]
        assert together.stats()["refused"] == 1
        assert together.submit(chats()[1], max_new_tokens=1).result().tokens


def test_closing_finishes_or_ends_what_is_left(vlm: Any) -> None:
    together = Together(vlm, max_running=1)
    with vlm.runtime.lock:
        tickets = [submit(together, c, 4) for c in chats()[:3]]
    together.close(60)
    assert [len(t.result().tokens) for t in tickets] == [4, 4, 4]
    with pytest.raises(Closed):
        together.submit(chats()[1])
    together.close()
    hasty = Together(vlm, max_running=1)
    options = {"max_new_tokens": 4000, "min_new_tokens": 4000}
    with vlm.runtime.lock:
        tickets = [hasty.submit(c, **options, **GREEDY) for c in chats()[:2]]
    hasty.close(0)
    for ticket in tickets:
        with pytest.raises(Closed):
            ticket.result()
    check(vlm)


def test_closing_ends_nobody_elses_answer(vlm: Any) -> None:
    together = Together(vlm)
    direct = vlm.stream(chats()[1], max_new_tokens=24, **GREEDY)
    tokens = [next(direct).token]
    with vlm.runtime.lock:
        ticket = submit(together, chats()[4], 400, min_new_tokens=400)
        threading.Thread(target=together.close, args=(0.0,)).start()
    with pytest.raises(Closed):
        ticket.result()
    tokens += [piece.token for piece in direct if piece.token is not None]
    assert tokens == alone("qwen3_vl")[1]
    check(vlm)


# -- with the rest of the house ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_direct_calls_take_their_turns(kind: str) -> None:
    wanted = alone(kind)
    found: dict[int, Any] = {}
    with served(kind) as together:
        vlm = together._vlm

        def ask(number: int) -> None:
            found[number] = vlm.chat(chats()[number], max_new_tokens=10, **GREEDY).tokens

        tickets = [submit(together, c, 20) for c in chats()[:3]]
        threads = [threading.Thread(target=ask, args=(n,)) for n in (3, 4)]
        for thread in threads:
            thread.start()
        rows = vlm.generate(torch.tensor([[15, 19, 11], [17, 18, 15]]), max_new_tokens=4, **GREEDY)
        for thread in threads:
            thread.join()
        for number, ticket in enumerate(tickets):
            assert ticket.result().tokens == wanted[number][:20]
        assert rows.shape == (2, 7)
    assert found == {n: wanted[n][:10] for n in (3, 4)}


def changing(weight: torch.Tensor) -> Callable[..., None]:
    """What changes a weight when it is called first."""
    kept = weight.detach().clone()

    def change(*_: Any) -> None:
        if torch.equal(weight, kept):
            with torch.no_grad():
                weight.mul_(1.5)

    return change


def test_weights_that_change_between_two_chunks() -> None:
    """The prompt is begun again: no snapshot may be half of the old weights, half of the new."""
    long = [turn(LONG), turn(LONG), turn("What?")]
    with served() as together:
        vlm = together._vlm
        norm = vlm.model.get_decoder().layers[0].input_layernorm.weight
        change = changing(norm)
        with vlm.runtime.lock:
            asked = submit(together, long, 6)
            submit(together, chats()[1], 12, on_piece=change)
        reply = asked.result()
        vlm.clear()
        assert vlm.chat(long, max_new_tokens=6, **GREEDY).tokens == reply.tokens


def test_a_prompt_that_is_begun_again_tells_where_its_features_came_from_then() -> None:
    """Other weights make other features: what the first beginning had found is of no use."""
    asked = [turn(LONG, picture(1)), turn(LONG, picture(2)), turn("What?")]
    with served() as together:
        vlm = together._vlm
        weight = vlm.model.base_model.visual.patch_embed.proj.weight
        vlm.encode([picture(1), picture(2)])
        change = changing(weight)
        with vlm.runtime.lock:
            ticket = submit(together, asked, 2)
            submit(together, chats()[1], 12, on_piece=change)
        usage = ticket.result().usage
        assert vlm.stats()["features"]["encoded"] == 4
        assert (usage.images_encoded, usage.images_reused) == (2, 0)


def test_decoded_state_of_two_weights_is_not_kept(vlm: Any) -> None:
    """It would be found by whoever goes back to the weights that began it: as with adapters."""
    asked = [turn("Look. " * 20, picture(1))]
    change = changing(vlm.model.get_decoder().layers[0].input_layernorm.weight)
    pieces = vlm.stream(asked, max_new_tokens=8, **GREEDY)
    next(pieces)
    change()
    list(pieces)
    vlm.explain(asked)
    assert all(node.end <= vlm.render(asked).ids.size for node in vlm.runtime.tree.nodes())


def test_prepare_and_explain() -> None:
    with served() as together:
        ticket = together.prepare(chats()[0])
        (piece,) = ticket
        assert piece.token is None and piece.report.computed_tokens == piece.usage.prompt_tokens
        report = together.explain(chats()[0])
        assert {s.reason for s in report.segments} == {"whole prompt"}
        reply = submit(together, chats()[0], 3).result()
        assert reply.usage.cached_tokens == reply.usage.prompt_tokens
        assert reply.tokens == alone("qwen3_vl")[0][:3]


def test_a_report_tells_what_a_direct_call_would() -> None:
    with ks.wrap(*build("qwen3_vl")) as vlm:
        wanted = vlm.chat(chats()[3], max_new_tokens=5, **GREEDY)
    with served() as together:
        ticket = submit(together, chats()[3], 5)
        pieces = list(ticket)
    reply = pieces[-1]
    assert reply.usage == wanted.usage and reply.finish_reason == wanted.finish_reason
    assert reply.report.segments == wanted.report.segments
    assert "".join(p.text for p in pieces) == wanted.text
    assert ticket.result().text == ticket.result().text == wanted.text  # as often as it is asked
    spent = reply.report.milliseconds
    assert {"queued", "prefill", "encode", "decode", "first_token"} <= spent.keys()
    assert spent["first_token"] > spent["queued"] + spent["prefill"] + spent["encode"]


# -- the lock ------------------------------------------------------------------------------------


def test_the_lock_serves_in_order_and_lets_its_holder_in_again() -> None:
    lock, order = FairLock(), []

    def wait(number: int) -> None:
        with lock, lock:
            order.append(number)

    threads = [threading.Thread(target=wait, args=(n,)) for n in range(5)]
    with lock:
        for number, thread in enumerate(threads):
            thread.start()
            while len(lock._waiting) <= number:
                time.sleep(0.001)
        with lock:
            assert order == []
    with lock:  # who comes later waits for all who came before
        assert order == [0, 1, 2, 3, 4]
    for thread in threads:
        thread.join()
    with pytest.raises(RuntimeError, match="does not have it"):
        lock.release()
