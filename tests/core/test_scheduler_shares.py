"""Who asks for much does not hold up who asks for little; answers are those of one alone."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import Any

import pytest
from support.common import entered, until
from support.models import build, picture, turn

import keepsight as ks
from keepsight import Ticket, Together
from keepsight.core.decoding.forward import LanguageModel
from keepsight.errors import Busy
from keepsight.system.accounts import under_salt

GREEDY = {"do_sample": False}


def submit(
    together: Together, text: str, tenant: str | None = None, count: int = 1, **options: Any
) -> Ticket:
    return together.submit(
        [turn(text)], tenant=tenant, max_new_tokens=count, min_new_tokens=count, **GREEDY, **options
    )


# -- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(1, 5), (2, 3), (1, 1, 6)])
def test_each_account_gets_as_many_tokens_whoever_asks_for_more(counts: tuple[int, ...]) -> None:
    """While all are there, the tokens of no two accounts are further apart than a round."""
    came: list[str] = []
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        with vlm.runtime.lock:
            asked = [f"account {n}" for n, count in enumerate(counts) for _ in range(count)]
            tickets = [
                submit(together, f"{n}?", None, 40, account=who, on_piece=entered(came, who))
                for n, who in enumerate(asked)
            ]
        assert all(ticket.done.wait(60) for ticket in tickets)
    ends = [max(at for at, one in enumerate(came) if one == each) for each in set(asked)]
    had = Counter(came[: min(ends)])
    assert len(had) == len(counts) and max(had.values()) < 1.3 * min(had.values()) + max(counts)


def test_nobody_is_held_back_for_good() -> None:
    """Of an account with many, each goes on in its turn."""
    came: list[str] = []
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        with vlm.runtime.lock:
            small = submit(together, "Little.", None, 120, account="small")
            greedy = [
                submit(together, f"{n}?", None, 10, account="greedy", on_piece=entered(came, n))
                for n in "0123"
            ]
        assert all(ticket.done.wait(60) for ticket in [*greedy, small])
    assert max(map(came.index, "0123")) < len(came) - 20, (
        "the last begins long before the others end"
    )


@pytest.mark.parametrize(
    ("greedy", "small"),
    [
        ({"tenant": "greedy"}, {"tenant": "small"}),
        ({"account": "from 192.0.2.1"}, {"account": "from 192.0.2.2"}),
    ],
    ids=["tenants", "accounts of one tenant"],
)
def test_a_small_chat_is_answered_before_the_long_ones_of_another(
    vlm: Any, greedy: dict[str, str], small: dict[str, str]
) -> None:
    """Also where all places are taken: one more of another account may run."""
    with Together(vlm, max_running=3) as together:
        begun = threading.Event()
        how: dict[str, Any] = {"on_piece": lambda piece: begun.set(), **greedy}
        long = [submit(together, f"Much {n}.", count=200, **how) for n in range(6)]
        begun.wait(20)
        submit(together, "Little.", count=4, **small).result()
        assert not any(ticket.done.is_set() for ticket in long)
        for ticket in long:
            ticket.cancel()


def test_a_long_prompt_begins_however_many_short_ones_come() -> None:
    """What is computed for others while it waits counts for it."""
    order: list[str] = []
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm, max_running=1) as together:
        long, numbers = [turn("One more line of a long text. " * 20)], itertools.count()
        over = threading.Event()

        def ask(ticket: Ticket | None = None) -> None:
            """Whenever a short one ends, the next is there."""
            order.append("short")
            if not over.is_set() and len(order) < 200:
                together.submit(
                    [turn(f"Short {next(numbers)}")], max_new_tokens=1, on_done=ask, **GREEDY
                )

        def end(ticket: Ticket) -> None:
            order.append("long")
            over.set()

        with vlm.runtime.lock:
            ask()
            ask()
            together.submit(long, max_new_tokens=1, on_done=end, **GREEDY)
        assert over.wait(60)
    assert order.index("long") < 150


def test_text_is_made_ready_while_others_have_the_model(vlm: Any) -> None:
    with Together(vlm) as together:
        submit(together, "Little.", None, 2).result()
        ready: list[Ticket] = []
        with vlm.runtime.lock:
            thread = threading.Thread(
                target=lambda: ready.append(submit(together, "Little.", None, 2)), daemon=True
            )
            thread.start()
            thread.join(20)
            assert ready
        assert ready[0].result().tokens


# -- accounts -------------------------------------------------------------------------------------


def test_salts_are_no_accounts_of_their_own(vlm: Any) -> None:
    with Together(vlm, max_waiting=0) as together:
        with vlm.runtime.lock:
            small = submit(together, "Little.", "small", 2)
            tenants = [under_salt("greedy", f"salt {n}") for n in range(15)]
            with pytest.raises(Busy):
                for tenant in tenants:
                    submit(together, "Much.", tenant, 2)
        assert small.result().tokens


def test_the_last_places_are_not_for_who_has_most(vlm: Any) -> None:
    with Together(vlm, max_running=8, max_waiting=8) as together:
        with vlm.runtime.lock:
            asked = [submit(together, "Much.", "greedy", 2) for _ in range(16)]
            with pytest.raises(Busy):
                submit(together, "Little.", "small", 2)
        assert all(ticket.result().tokens for ticket in asked)
        with vlm.runtime.lock:
            asked = [submit(together, "Little.", "small", 2)]
            with pytest.raises(Busy):
                asked += [submit(together, "Much.", "greedy", 2) for _ in range(16)]
        assert all(ticket.result().tokens for ticket in asked)
        with vlm.runtime.lock:
            with pytest.raises(Busy):
                asked += [submit(together, "Much.", "greedy", 2) for _ in range(16)]
            asked.append(submit(together, "Little.", "small", 2))
        assert all(ticket.result().tokens for ticket in asked)


# -- other work with the model --------------------------------------------------------------------


def test_an_account_has_one_other_work_at_a_time() -> None:
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm, max_running=1) as together:
        inside: list[str] = []
        go = {name: threading.Event() for name in ("greedy 0", "greedy 1", "small 0")}

        def work(name: str) -> None:
            with together.beside(name.split()[0]):
                inside.append(name)
                go[name].wait(20)

        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in go]
        for thread in threads:
            thread.start()
        until(lambda: len(inside) == 2)
        first = next(name for name in inside if name != "small 0")
        assert "small 0" in inside
        for account in ("greedy", "small", "other"):  # it takes no place of requests
            assert submit(together, "Little.", None, 2, account=account).done.wait(20)
        assert len(inside) == 2
        go[first].set()
        until(lambda: len(inside) == 3)
        for one in go.values():
            one.set()
        for thread in threads:
            thread.join(20)
    with together.beside("greedy"):  # it needs no scheduler that is there
        pass


# -- the same answers -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_who_rests_has_the_bits_of_who_does_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one account three take turns beside one of another: passes of ever other sequences."""
    chats = [[turn("Look.", picture(1))], [turn("Much. " * 20)], [turn("Little.")], [turn("More.")]]
    with ks.wrap(*build(kind)) as vlm:
        alone = [vlm.chat(chat, max_new_tokens=12, **GREEDY).tokens for chat in chats]
    together_in: set[tuple[int, ...]] = set()
    real = LanguageModel.forward

    def forward(self: LanguageModel, segments: Any, *kernels: Any) -> Any:
        together_in.add(tuple(sorted(len(one.prompt) for one in segments)))
        return real(self, segments, *kernels)

    monkeypatch.setattr(LanguageModel, "forward", forward)
    with ks.wrap(*build(kind)) as vlm, Together(vlm) as together:
        with vlm.runtime.lock:
            tickets = [
                together.submit(chat, account=f"{n == 2}", max_new_tokens=12, **GREEDY)
                for n, chat in enumerate(chats)
            ]
        assert [ticket.result().tokens for ticket in tickets] == alone
    assert len(together_in) > 3


def test_a_pass_that_fails_while_others_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    chats = [[turn(f"Much {n}.")] for n in range(3)]
    with ks.wrap(*build("qwen3_vl")) as vlm:
        alone = [vlm.chat(chat, max_new_tokens=10, **GREEDY).tokens for chat in chats]
    real, failed = LanguageModel.forward, []

    def forward(self: LanguageModel, segments: Any, *kernels: Any) -> Any:
        if len(segments) == 2 and len(segments[0].ids) == 1 and not failed:
            failed.append(segments)
            raise RuntimeError("no memory")
        return real(self, segments, *kernels)

    monkeypatch.setattr(LanguageModel, "forward", forward)
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        with vlm.runtime.lock:
            tickets = [
                together.submit(chat, account=f"{n == 0}", max_new_tokens=10, **GREEDY)
                for n, chat in enumerate(chats)
            ]
        assert [ticket.result().tokens for ticket in tickets] == alone
    assert failed
