"""Who asks for much does not hold up who asks for little; answers are those of one alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build, picture, turn

import keepsight as ks
from keepsight.core.call import Call
from keepsight.core.decoding.lane_batch import LaneBatch
from keepsight.core.turn import Turn
from keepsight.errors import Busy
from keepsight.scheduler import Ticket, Together
from keepsight.scheduler.admission import Admission
from keepsight.scheduler.shares import Shares, SideJobs
from keepsight.system.accounts import under_salt

GREEDY = {"do_sample": False}


def submit(together: Together, text: str, tenant: str | None, count: int, **options: Any) -> Ticket:
    return together.submit([turn(text)], tenant=tenant, max_new_tokens=count, **GREEDY, **options)


# -- time -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(0, 10**6))
def test_nobody_waits_for_more_than_as_much_again(counts: list[int], seed: int) -> None:
    """Rounds of work in which all who are not held back take part, one after the other."""
    chance, shares = random.Random(seed), Shares()
    accounts = [f"account {n}" for n, count in enumerate(counts) for _ in range(count)]
    for account in accounts:
        shares.enter(account)
    had = dict.fromkeys(accounts, 0.0)
    longest = 0.0
    for _ in range(400):
        going = [one for one in accounts if not shares.is_held_back(one)]
        assert going or all(count > 1 for count in counts) or len(counts) == 1
        for account in going or accounts:
            seconds = chance.random()
            longest = max(longest, seconds)
            shares.spend([account], seconds)
            had[account] += seconds
    single = [had[f"account {n}"] for n, count in enumerate(counts) if count == 1]
    many = {n: had[f"account {n}"] for n, count in enumerate(counts) if count > 1}
    if single:  # whoever asks for more has no more, but for pieces that are not broken off
        assert all(many[n] <= min(single) + 2 * counts[n] * longest for n in many)
    for account in accounts:
        shares.leave(account)
    assert not shares.under_way and not shares._spent


def test_one_account_has_the_whole_model() -> None:
    shares = Shares()
    for _ in range(2):
        shares.enter("a")
    shares.spend(["a"], 5.0)
    assert shares.is_held_back("a") is False


def test_who_comes_is_not_paid_for_having_been_away() -> None:
    shares = Shares()
    for _ in range(2):
        shares.enter("greedy")
    for _ in range(1000):
        shares.spend(["greedy"], 0.1)
    shares.enter("small")
    assert shares.is_held_back("greedy")
    shares.spend(["small"], 0.4)
    assert shares.is_held_back("greedy") is False


def test_who_asks_for_little_does_not_wait_for_a_large_piece_of_others() -> None:
    shares = Shares()
    for _ in range(12):
        shares.enter("greedy")
    shares.spend(["greedy"] * 12, 0.1)
    shares.enter("small")
    for _ in range(3):  # its prompt and two tokens, together less than one step of the twelve
        shares.spend(["small"], 0.01)
        assert shares.is_held_back("greedy")
    shares.spend(["small"], 0.4)
    assert not shares.is_held_back("greedy")


def test_nobody_is_held_back_for_good() -> None:
    shares = Shares()
    for account in ("greedy", "greedy", "small"):
        shares.enter(account)
    went = 0
    for _ in range(1000):
        shares.spend(["small"], 0.01)
        if not shares.is_held_back("greedy"):
            shares.spend(["greedy"] * 2, 0.1)
            went += 1
    assert 30 <= went <= 35  # 0.3 each, beside 10 of the small one


def test_time_beside_the_model_is_charged_to_who_asks_for_much() -> None:
    shares = Shares()
    for account in ("greedy", "greedy", "small"):
        shares.enter(account)
    shares.spend_beside("greedy", 0.1)
    shares.spend_beside("small", 0.1)
    shares.spend(["small"], 0.2)
    assert shares.is_held_back("greedy")  # its 0.3 against 0.2
    shares.spend(["small"], 0.2)
    assert not shares.is_held_back("greedy")


# -- other work with the model --------------------------------------------------------------------


class Visits:
    """Other work of accounts, each in a thread of its own."""

    def __init__(self) -> None:
        self.shares, self.admission = Shares(), Admission(1)
        self.guests = SideJobs(self.shares, self.admission)
        self.inside: list[str] = []
        self.ends: dict[str, threading.Event] = {}
        self.threads: list[threading.Thread] = []

    def come(self, account: str, number: int = 0) -> str:
        name = f"{account} {number}"
        begun, self.ends[name] = len(self.guests._came), threading.Event()

        def work() -> None:
            with self.guests.turn(account):
                self.inside.append(name)
                self.ends[name].wait(20)

        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()
        until(lambda: len(self.guests._came) == begun + 1)
        return name

    def go(self, name: str) -> None:
        left = len(self.guests._left)
        self.ends[name].set()
        until(lambda: len(self.guests._left) == left + 1)

    def look(self, count: int) -> list[str]:
        """Who has had a turn, once so many have."""
        self.guests.look()
        until(lambda: len(self.inside) >= count)
        return self.inside


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_account_has_one_other_work_at_a_time() -> None:
    visits = Visits()
    first, second = visits.come("greedy", 0), visits.come("greedy", 1)
    visits.come("small")
    assert sorted(visits.look(2)) == [first, "small 0"]
    visits.guests.look()
    assert visits.guests._waiting[0].account == "greedy"
    visits.go(first)
    assert visits.look(3)[-1] == second


def test_other_work_waits_for_who_asks_for_little() -> None:
    visits = Visits()
    for number in range(3):
        visits.come("greedy", number)
    visits.shares.enter("small")
    visits.look(0)
    visits.guests.look()
    assert not visits.inside and len(visits.guests._waiting) == 3
    visits.shares.spend(["small"], 0.01)
    visits.look(1)
    visits.shares.leave("small")
    for number in range(3):
        visits.go(f"greedy {number}")
        visits.look(min(number + 2, 3))
    visits.guests.look()
    assert len(visits.inside) == 3
    assert not (visits.shares.under_way or visits.shares._spent or visits.guests._inside)


def test_what_other_work_took_is_charged() -> None:
    visits = Visits()
    names = [visits.come("greedy", number) for number in range(3)]
    visits.look(1)
    visits.go(names[0])
    visits.guests.look()
    assert visits.shares._spent["greedy"] > 0


def test_other_work_takes_no_place_of_requests() -> None:
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm, max_running=1) as together:
        for account in ("a", "b", "b"):
            together._line.shares.enter(account)
        for account in ("a", "c"):
            ticket = submit(together, "Little.", None, 2, account=account)
            assert ticket.done.wait(20)


def test_other_work_needs_no_scheduler_that_is_there() -> None:
    visits = Visits()
    visits.come("greedy", 0)
    visits.admission.close(0.0)
    until(lambda: visits.inside == ["greedy 0"])
    with ks.wrap(*build("qwen3_vl")) as vlm:
        with Together(vlm) as together:
            with together.beside("a"):
                assert together._guests._inside
            until(lambda: not together._guests._inside)
        with together.beside("a"):
            pass


# -- a scheduler under one who asks for much ------------------------------------------------------


@pytest.mark.parametrize("grain", [None, 16])
def test_a_small_chat_is_answered_before_the_long_ones_of_another(grain: int | None) -> None:
    with ks.wrap(*build("qwen3_vl"), grain=grain) as vlm, Together(vlm, max_running=3) as together:
        order: list[str] = []
        begun = threading.Event()
        for n in range(6):
            submit(
                together,
                f"Much {n}.",
                "greedy",
                200,
                on_done=lambda ticket: order.append("greedy"),
                on_piece=lambda piece: begun.set(),
            )
        begun.wait(20)
        submit(together, "Little.", "small", 4, on_done=lambda t: order.append("small")).result()
        assert order[0] == "small"


def test_all_that_the_model_does_for_a_request_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    real = {name: getattr(Turn, name) for name in ("begin", "keep_decoded")}

    def slow(name: str, seconds: float) -> Callable[..., Any]:
        def method(self: Turn, *given: Any, **more: Any) -> Any:
            nonlocal now
            now += seconds
            return real[name](self, *given, **more)

        return method

    monkeypatch.setattr(Turn, "begin", slow("begin", 8.0))
    monkeypatch.setattr(Turn, "keep_decoded", slow("keep_decoded", 64.0))
    clock = SimpleNamespace(perf_counter=lambda: now, thread_time=time.thread_time)
    monkeypatch.setattr("keepsight.scheduler.scheduler.time", clock)
    charged: list[float] = []
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        shares = together._line.shares
        monkeypatch.setattr(shares, "spend", lambda accounts, seconds: charged.append(seconds))
        submit(together, "Little.", None, 4).result()
    assert sum(charged) == 72.0


def test_text_is_made_ready_while_others_have_the_model() -> None:
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        submit(together, "Little.", None, 2).result()
        ready: list[Any] = []

        def receive() -> None:
            call = Call.of(dict(GREEDY), vlm.tenant)
            chat = [turn("Little.")]
            ready.append(together._reception.receive(chat, call, Ticket(), True, 0.0))

        with vlm.runtime.lock:
            thread = threading.Thread(target=receive, daemon=True)
            thread.start()
            thread.join(20)
            assert ready


def test_salts_are_no_accounts_of_their_own() -> None:
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        for salt in ("a", "b", "c"):
            submit(together, "Much.", under_salt("greedy", salt), 8).result()
            assert set(together._line.shares.under_way) <= {"greedy"}
        assert not together._line.shares.under_way


def test_one_tenant_may_be_several_accounts() -> None:
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm, max_running=2) as together:
        order: list[str] = []
        begun = threading.Event()
        for n in range(4):
            submit(
                together,
                f"Much {n}.",
                None,
                200,
                account="from 192.0.2.1",
                on_done=lambda ticket: order.append("greedy"),
                on_piece=lambda piece: begun.set(),
            )
        begun.wait(20)
        submit(together, "Little.", None, 4, account="from 192.0.2.2").result()
        assert not order


def test_the_last_places_are_not_for_who_has_most() -> None:
    admission = Admission(16)
    for _ in range(16):
        admission.take_place(lambda: 1.0, account="greedy")
    with pytest.raises(Busy):
        admission.take_place(lambda: 1.0, account="small")
    for _ in range(3):
        admission.free_place("greedy")
    with pytest.raises(Busy):
        for _ in range(3):
            admission.take_place(lambda: 1.0, account="greedy")
    admission.take_place(lambda: 1.0, account="small")
    assert admission.in_flight == 14


def test_who_rests_has_the_bits_of_who_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    chats = [[turn("Look.", picture(1))], [turn("Much. " * 20)], [turn("Little.")]]
    with ks.wrap(*build("qwen3_vl")) as vlm:
        alone = [vlm.chat(chat, max_new_tokens=12, **GREEDY).tokens for chat in chats]
    sizes: set[int] = set()
    real = LaneBatch.step

    def step(self: LaneBatch, tokens: list[int]) -> Any:
        sizes.add(len(tokens))
        return real(self, tokens)

    monkeypatch.setattr(LaneBatch, "step", step)
    chance = random.Random(1)
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        monkeypatch.setattr(
            together._line.shares, "is_held_back", lambda account: chance.random() < 0.4
        )
        tickets = [
            together.submit(chat, tenant=f"t{n}", max_new_tokens=12, **GREEDY)
            for n, chat in enumerate(chats)
        ]
        assert [ticket.result().tokens for ticket in tickets] == alone
    assert len(sizes) > 1


def test_a_pass_that_fails_while_others_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    chats = [[turn(f"Much {n}.")] for n in range(3)]
    with ks.wrap(*build("qwen3_vl")) as vlm:
        alone = [vlm.chat(chat, max_new_tokens=10, **GREEDY).tokens for chat in chats]
    real, failed = LaneBatch.step, []

    def step(self: LaneBatch, tokens: list[int]) -> Any:
        if len(tokens) == 2 and not failed:
            failed.append(tokens)
            raise RuntimeError("no memory")
        return real(self, tokens)

    monkeypatch.setattr(LaneBatch, "step", step)
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        resting = iter([set(), set(), set(), set()])
        line = together._line
        real_held = line.held_back

        def held() -> Any:
            if len(line.running) == 3 and next(resting, None) is None:
                return {next(iter(line.running.values()))}
            return real_held()

        monkeypatch.setattr(line, "held_back", held)
        tickets = [together.submit(chat, max_new_tokens=10, **GREEDY) for chat in chats]
        assert [ticket.result().tokens for ticket in tickets] == alone
    assert failed
