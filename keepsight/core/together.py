"""Serves requests to one model from a thread of its own: the engine's loop, with a front desk.

Requests are rendered in their callers' threads. The desk limits how many are inside, hands out
tickets, and wakes the thread; what is computed next is the engine's business. Direct calls of the
model go on beside it and decode together with the requests.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np

from keepsight.core.answer import asked
from keepsight.core.call import Call
from keepsight.core.engine import MAX_RUNNING, PIECE, Engine
from keepsight.core.order import Order
from keepsight.core.pins import predict_report
from keepsight.core.runtime import Runtime
from keepsight.core.sequence import Sequence
from keepsight.errors import Busy, Closed, InputError, KeepsightError
from keepsight.kinds import Message, Record
from keepsight.report import Piece, Reply, Report, Usage
from keepsight.system import forks
from keepsight.system.accounts import account_of
from keepsight.system.devices import release_team
from keepsight.system.exits import SCHEDULERS, finish_before_exit, when_dropped

logger = logging.getLogger(__name__)

_FOR_OTHERS = 8  # this share of the places is not for the account with the most
_LONG = 60.0  # seconds; a notification by the garbage collector may get lost
_WINDOW = 10.0  # seconds over which the token rate is measured
_CLOSED = "the scheduler was closed before the request was done"
_TAKEN = "requests are no longer taken: the scheduler was closed"


class Ticket:
    """One request, for its caller: iterate over its pieces; the last one carries usage and report.
    All methods may be called from any thread.

    `on_piece` and `on_done` are called on the scheduler's thread, so they must be quick; they serve
    programs that pass pieces to an event loop. With `on_piece` no pieces are kept for iteration.
    """

    def __init__(
        self,
        on_piece: Callable[[Piece], None] | None = None,
        on_done: Callable[[Ticket], None] | None = None,
    ) -> None:
        self._on_piece, self._on_done = on_piece, on_done
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._heard: list[Piece] = []  # all pieces, for result()
        self.wake: Callable[[], None] = lambda: None  # called when it is cancelled
        self.cancelled = False
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.prompt_ids: np.ndarray | None = None  # once it has begun
        self.usage: Usage | None = None
        self.report: Report | None = None
        self.finish_reason: str | None = None

    def __iter__(self) -> Iterator[Piece]:
        """Wait for each piece; raise the error of the request."""
        self._require_kept()
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._pieces.put(None)  # a later reader finds the end too
        if self.error is not None:
            raise self.error

    def result(self) -> Reply:
        """The whole answer, once it is complete; may be called repeatedly."""
        self._require_kept()
        self.done.wait()
        if self.error is not None:
            raise self.error
        if self.usage is None:
            raise KeepsightError("the request was cancelled before it had begun")
        return Reply.of(self._heard)

    def _require_kept(self) -> None:
        if self._on_piece is not None:
            raise KeepsightError("this ticket's pieces go to its on_piece; they are not kept")

    def cancel(self) -> None:
        """Stop after the current step. What was prefilled stays remembered."""
        self.cancelled = True
        self.wake()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.done.is_set():
            self.cancel()

    # -- for the scheduler -----------------------------------------------------------------------

    def put(self, piece: Piece) -> None:
        if piece.usage is not None:
            self.usage, self.report = piece.usage, piece.report
            self.finish_reason = piece.finish_reason
        if self._on_piece is not None:
            self._on_piece(piece)
        else:
            self._heard.append(piece)
            self._pieces.put(piece)

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self.done.set()
        self._pieces.put(None)
        if self._on_done is not None:
            self._on_done(self)


class Desk:
    """How many requests are inside, and whether the thread goes on."""

    def __init__(self, places: int) -> None:
        self._places = places
        self.bell = threading.Condition()
        self.inside: Counter[str] = Counter()  # by account
        self._several = False  # whether two accounts were ever inside together
        self.closed = self.stopped = False
        self._owner: object = None  # kept alive while somebody is inside
        self._recent: deque[float] = deque()  # when tokens were handed out
        self._seconds = 1.0  # of a request, averaged with more weight on the latest
        self.counts = Counter[str]()
        forks.renew(self._in_child)

    def enter(self, account: str, owner: object) -> None:
        """Take a place, before any work for a request. A refusal says when to try again. If there
        are several accounts, one account never gets all places."""
        with self.bell:
            if self.closed:
                raise Closed(_TAKEN)
            self._several |= bool(self.inside) and not self.inside[account]
            reserved = self._places // _FOR_OTHERS + 1 if self._several and self._places > 1 else 0
            count = self.inside.total()
            if count >= self._places or self.inside[account] >= self._places - reserved:
                self.counts["refused"] += 1
                raise Busy(count, max(1.0, self._seconds * count / self._places))
            self.inside[account] += 1
            self._owner = owner

    def bring(self, engine: Engine, *sequences: Sequence) -> None:
        """Add what was made ready, unless the thread has stopped meanwhile."""
        with self.bell:
            if self.stopped:
                raise Closed(_CLOSED)
            for seq in sequences:
                engine.add(seq)
            self.bell.notify_all()

    def leave(self, account: str, outcome: str = "", seconds: float = 0.0) -> None:
        with self.bell:
            self.inside[account] -= 1
            self.inside += Counter()  # drops zeros
            if not self.inside:
                self._owner = None
            if outcome:
                self.counts[outcome] += 1
            if outcome == "finished":
                self._seconds += 0.2 * (seconds - self._seconds)
            self.bell.notify_all()

    def hand_out(self, ticket: Ticket, piece: Piece) -> None:
        """Give a piece to the holder of a ticket, and count its token."""
        if piece.token is not None:
            now = time.monotonic()
            self.counts["tokens"] += 1
            self._recent.append(now)
            while self._recent[0] < now - _WINDOW:
                self._recent.popleft()
        ticket.put(piece)

    def ended(self, ticket: Ticket, seq: Sequence, begun: float) -> None:
        """Take the ticket back at the end of its request."""
        failed = "failed" if seq.error is not None else ""
        outcome = failed or ("cancelled" if seq.cancelled else "finished")
        self.leave(seq.account, outcome, time.perf_counter() - begun)
        seq.on_piece = seq.on_end = None  # they hold it: its pictures would wait for the collector
        ticket.end(seq.error)

    def cancel(self, seq: Sequence) -> None:
        seq.cancelled = True
        with self.bell:
            self.bell.notify_all()

    def rate(self) -> float:
        now = time.monotonic()
        recent = [when for when in list(self._recent) if when >= now - _WINDOW]
        return round(len(recent) / max(1e-3, now - recent[0]), 2) if recent else 0.0

    def close(self, drain: float | None) -> None:
        """Let nobody in; stop when everyone is out, or when the time is over."""
        with self.bell:
            self.closed = True
            self.bell.notify_all()
            self.bell.wait_for(lambda: not self.inside or self.stopped, drain)
            self.stopped = True
            self.bell.notify_all()

    def abandon(self) -> None:
        """The owner was dropped without requests. Never waits: the garbage collector calls it."""
        self.stopped = True
        if self.bell.acquire(blocking=False):
            self.bell.notify_all()
            self.bell.release()

    def _in_child(self) -> None:
        """A forked child has no serving thread."""
        self.bell, self.closed, self.stopped = threading.Condition(), True, True


class Errand:
    """Sequences of one request that end together, for a caller that waits in its own thread."""

    def __init__(self, desk: Desk, engine: Engine, account: str, owner: object) -> None:
        self._desk, self._engine, self._account, self._owner = desk, engine, account, owner
        self._sequences: list[Sequence] = []
        self._left, self._done = 0, threading.Event()
        self._cancelled = False

    def run(self, sequences: Several[Sequence]) -> None:
        """Compute sequences to their ends beside those of others; an error of one is raised at the
        end. They take one place."""
        self._desk.enter(self._account, self._owner)
        begun = time.perf_counter()
        self._sequences, self._left = list(sequences), len(sequences)
        self._done.clear()
        try:
            for seq in self._sequences:
                seq.account, seq.owner = self._account, self._desk
                seq.on_end = self._one_ended
                seq.cancelled = self._cancelled
            self._desk.bring(self._engine, *self._sequences)
        except BaseException:
            self._desk.leave(self._account)
            raise
        self._done.wait()
        failed = next((seq for seq in self._sequences if seq.error is not None), None)
        self._sequences = []  # each holds this errand
        outcome = "cancelled" if self._cancelled else "failed" if failed else "finished"
        self._desk.leave(self._account, outcome, time.perf_counter() - begun)
        if failed is not None:
            failed.raise_error()
        if self._cancelled:
            raise Closed("the request was cancelled")

    def cancel(self) -> None:
        """End the sequences after the current step; from any thread, and also before they run."""
        self._cancelled = True
        for seq in self._sequences:
            self._desk.cancel(seq)

    def _one_ended(self) -> None:
        self._left -= 1
        if not self._left:
            self._done.set()


class Wrapped(Protocol):
    """A `VLM`."""

    runtime: Runtime
    tenant: str


class Together:
    """Serves requests to one model in parallel. `vlm` may still be called directly."""

    def __init__(
        self,
        vlm: Wrapped,
        *,
        max_running: int = MAX_RUNNING,
        max_waiting: int = 64,
        batch_tokens: int | None = None,
        prefill_piece: int = PIECE,
    ) -> None:
        """At most `max_running` requests are computed at a time, and `max_waiting` more are
        accepted. `batch_tokens` limits the total tokens of running requests; by default their
        states may take `cache_budget`. `prefill_piece`: prompt tokens of a pass beside answers."""
        for name, value, least in (
            ("max_running", max_running, 1),
            ("max_waiting", max_waiting, 0),
            ("batch_tokens", 1 if batch_tokens is None else batch_tokens, 1),
            ("prefill_piece", prefill_piece, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}={value!r}; expected a whole number of at least {least}")
        memory = vlm.runtime
        memory.require_answers()
        memory.tokenizer()
        if memory.renderer is None:
            raise InputError("requests are messages: wrap the model with its processor")
        self._vlm, self._memory = vlm, memory
        self.max_running, self.max_waiting = max_running, max_waiting
        with memory.lock:
            memory.engine.serve(max_running, prefill_piece, batch_tokens)
        self._desk = Desk(max_running + max_waiting)
        self._beside: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        release_team()  # from here on another thread computes
        self._thread = threading.Thread(
            target=_serve, args=(memory, self._desk), name="keepsight-together", daemon=True
        )
        self._thread.start()
        when_dropped(self, self._desk.abandon)
        finish_before_exit(self, SCHEDULERS)

    # -- for callers, in any thread --------------------------------------------------------------

    def submit(
        self,
        messages: list[Message],
        *,
        tenant: str | None = None,
        account: str | None = None,
        on_piece: Callable[[Piece], None] | None = None,
        on_done: Callable[[Ticket], None] | None = None,
        **options: object,
    ) -> Ticket:
        """Submit a request for an answer, with the options of `vlm.chat`.

        `account`: whose share of time it uses, if not the tenant's. Pictures are decoded and the
        prompt is rendered here, in the caller's thread. Errors in them or in options are raised
        here, and `Busy` when too many are in flight.
        """
        call = Call.of({**options, "tenant": tenant}, self._vlm.tenant)
        return self._enter(messages, call, Ticket(on_piece, on_done), True, account)

    def prepare(
        self,
        messages: list[Message],
        *,
        tenant: str | None = None,
        account: str | None = None,
        on_done: Callable[[Ticket], None] | None = None,
        **options: object,
    ) -> Ticket:
        """Only encode and prefill; a single piece carries usage and report."""
        options["tenant"] = tenant
        call = Call.before_decoding(options, self._vlm.tenant, "prepare")
        return self._enter(messages, call, Ticket(on_done=on_done), False, account)

    def explain(self, messages: list[Message], **options: object) -> Report:
        call = Call.before_decoding(options, self._vlm.tenant, "explain")
        return predict_report(self._memory, messages, call)

    def named(self, messages: list[Message], tenant: str, learn: bool = False) -> list[Message]:
        """The messages with their media named, in the caller's thread; `learn` remembers the names
        for later calls."""
        order = Order(self._memory, messages, Call(tenant, {}, {}))
        if learn and order.media:
            with self._memory.lock:
                order.learn()
        return order.with_media()

    def errand(self, account: str) -> Errand:
        """Computes sequences for a caller that waits: decisions and scores."""
        if not self._thread.is_alive():
            raise Closed(_TAKEN)
        return Errand(self._desk, self._memory.engine, account, self)

    @contextmanager
    def beside(self, account: str) -> Iterator[None]:
        """Other work with the model, such as pinning: one piece at a time for each account."""
        with self._desk.bell:
            turn = self._beside.setdefault(account, threading.Lock())
        with turn:
            yield

    def stats(self) -> Record:
        """The number of requests in each state, and what was done so far."""
        engine, desk = self._memory.engine, self._desk
        prefilling, running = engine.count()
        inside = desk.inside.total()
        counted = ("finished", "cancelled", "failed", "refused", "tokens")
        return {
            "in_flight": inside,
            "prefilling": prefilling,
            "running": running,
            "waiting": max(0, inside - prefilling - running),
            **{name: desk.counts[name] for name in counted},
            "tokens_per_second": desk.rate(),
            "passes": engine.decoder.passes,
            "towers": engine.towers,
        }

    def close(self, drain: float | None = 30.0) -> None:
        """Accept no more requests; finish those in flight within `drain` seconds (None: no limit),
        and end the rest with `Closed`. Safe to call twice."""
        self._desk.close(drain)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def before_exit(self, seconds: float) -> None:
        """Stop; wait this long for the current computation."""
        self._desk.close(0.0)
        self._thread.join(seconds)

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(0.0 if error[0] is not None else 30.0)

    def _enter(
        self,
        messages: list[Message],
        call: Call,
        ticket: Ticket,
        answers: bool,
        account: str | None,
    ) -> Ticket:
        whose = account_of(call.tenant) if account is None else account
        if not self._thread.is_alive():
            raise Closed(_TAKEN)
        self._desk.enter(whose, self)
        begun = time.perf_counter()
        try:
            seq = asked(self._memory, messages, call, answers)
            seq.account, seq.owner, seq.asked = whose, self._desk, begun
            seq.on_piece = partial(self._desk.hand_out, ticket)
            seq.on_end = partial(self._desk.ended, ticket, seq, begun)
            ticket.prompt_ids = seq.prompt.ids
            ticket.wake = partial(self._desk.cancel, seq)
            self._desk.bring(self._memory.engine, seq)
        except BaseException:
            self._desk.leave(whose)
            raise
        return ticket


def _serve(memory: Runtime, desk: Desk) -> None:
    """The thread's loop. It references no `Together`, so one that is dropped can be collected."""
    engine = memory.engine
    while True:
        with desk.bell:
            desk.bell.wait_for(lambda: desk.stopped or engine.busy, _LONG)
            stopped = desk.stopped
        with memory.lock:
            try:
                if stopped:
                    engine.end_all(Closed(_CLOSED), desk)
                    return
                engine.step()
            except Exception as error:  # our error, not a request's: no client may wait forever
                logger.exception("the scheduler failed; its requests end with this error")
                engine.end_all(error)
