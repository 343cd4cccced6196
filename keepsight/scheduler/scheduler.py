"""Serves requests to one model together on one thread.

Each round is at most one piece of prefill (of one prompt, or one picture through the tower) and one
decode step of all running sequences. The model's lock is taken for each of the two, so direct calls
of `chat` get turns in between. `policy.py` decides which prompt is next. A prompt that can be cut
anywhere runs in short pieces, others in their usual chunks. Without requests, answers are prefilled
for their next turns (`prefill_ahead.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

import torch

from keepsight.core.call import Call
from keepsight.errors import Closed, InputError
from keepsight.kinds import Message, Record
from keepsight.report import Piece, Report
from keepsight.scheduler.admission import Admission, Arrivals, begin_serving, closed
from keepsight.scheduler.counters import Counts
from keepsight.scheduler.decoding import Decoding
from keepsight.scheduler.intake import Follow, Intake, Request
from keepsight.scheduler.joint import JointPasses
from keepsight.scheduler.policy import (
    PREFILL_PIECE,
    WITHOUT_PASSES,
    SequenceSizes,
    check_bounds,
    had_its_turn,
)
from keepsight.scheduler.prefill_ahead import PrefillAhead, plain_answer
from keepsight.scheduler.request_queue import RequestQueue
from keepsight.scheduler.shares import SideJobs
from keepsight.scheduler.ticket import Listener, Ticket
from keepsight.system.accounts import account_of
from keepsight.system.devices import release_team
from keepsight.system.exits import SCHEDULERS, finish_before_exit
from keepsight.system.units import parse_bytes
from keepsight.vlm import VLM

logger = logging.getLogger(__name__)


class Together:
    """Serves requests to one model in parallel. `vlm` may still be called directly."""

    def __init__(
        self,
        vlm: VLM,
        *,
        max_running: int = 16,
        max_waiting: int = 64,
        batch_tokens: int | None = None,
        ahead: float | None = None,
        prefill_piece: int = PREFILL_PIECE,
    ) -> None:
        """At most `max_running` requests are computed at a time, and `max_waiting` more are
        accepted.

        `batch_tokens` limits the total tokens of running requests; by default their states may take
        `cache_budget`. `ahead`: quiet seconds before answers are prefilled for next turns.
        `prefill_piece`: prompt tokens between two steps of others, if it can be cut anywhere.
        """
        check_bounds(max_running, max_waiting, batch_tokens, ahead, prefill_piece)
        vlm.runtime.require_answers()
        vlm.runtime.tokenizer()
        if vlm.runtime.renderer is None:
            raise InputError("requests are messages: wrap the model with its processor")
        self._vlm, self._runtime = vlm, vlm.runtime
        self.max_running, self.max_waiting = max_running, max_waiting
        self._pause = ahead
        with vlm.runtime.lock:
            self._sizes = SequenceSizes(vlm.model, self._runtime.engine)
        self._budget = parse_bytes(self._runtime.settings.cache_budget)
        if batch_tokens is not None:
            self._budget = batch_tokens * self._sizes.column + max_running * self._sizes.state
        self._reception = Intake(vlm, vlm.runtime.renderer, prefill_piece)
        self._decoding = Decoding(vlm.model, vlm.runtime.family, vlm.runtime.engine, self._sizes)
        self.counts = Counts()
        self._ahead = PrefillAhead(vlm, self._reception.render, self.counts)
        self._admission = Admission(max_running + max_waiting)
        self._joint = JointPasses(vlm.runtime.joint, vlm.runtime.engine, prefill_piece)
        self._line = RequestQueue(self._sizes, self._decoding, max_running, self._budget)
        self._guests = SideJobs(self._line.shares, self._admission)
        self.beside = self._guests.turn  # other work with the model, from any thread
        self._rounds = 0
        release_team()  # from here on another thread computes
        self._thread = begin_serving(self, self._admission)
        finish_before_exit(self, SCHEDULERS)

    # -- for callers, in any thread --------------------------------------------------------------

    def submit(
        self,
        messages: list[Message],
        *,
        tenant: str | None = None,
        account: str | None = None,
        on_piece: Listener | None = None,
        on_done: Callable[[Ticket], None] | None = None,
        follow: Follow | None = plain_answer,
        **options: object,
    ) -> Ticket:
        """Submit a request for an answer, with the options of `vlm.chat`.

        `account`: whose share of time it uses, if not the tenant's. `follow` gives the message that
        the answer becomes in the next turn, or None. Pictures are decoded and the prompt is
        rendered here, in the caller's thread. Errors in them or in options are raised here, and
        `Busy` when too many are in flight.
        """
        call = Call.of({**options, "tenant": tenant}, self._vlm.tenant)
        return self._enter(messages, call, Ticket(on_piece, on_done), True, account, follow)

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
        """The report that this request would get."""
        return self._reception.explain(messages, options)

    def named(self, messages: list[Message], tenant: str, learn: bool = False) -> list[Message]:
        """The messages with their media named, in the caller's thread."""
        return self._reception.named(messages, tenant, learn)

    def stats(self) -> Record:
        """The number of requests in each state, and what was done so far."""
        return {
            **self._line.stats(self._admission.in_flight),
            "budget": self._budget,
            **self._decoding.stats(),
            **self.counts.stats(),
        }

    def close(self, drain: float | None = 30.0) -> None:
        """Accept no more requests; finish those in flight within `drain` seconds (None: no limit),
        and end the rest with `Closed`. Safe to call twice."""
        self._admission.close(drain)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def before_exit(self, seconds: float) -> None:
        """Stop; wait this long for the current computation."""
        self._admission.close(0.0)
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
        sample: bool,
        account: str | None,
        follow: Follow | None = None,
    ) -> Ticket:
        asked = time.perf_counter()
        account = account_of(call.tenant) if account is None else account
        self._take_place(account)
        try:
            self._vlm.runtime.require_answers()
            begun = time.thread_time()
            request = self._reception.receive(messages, call, ticket, sample, asked)
            request.account, request.made_in = account, time.thread_time() - begun
            request.follow = follow if self._pause is not None else None
            ticket.awake_with(self._admission.hang_up)
            self._admission.bring(request)
        except BaseException:
            self._admission.free_place(account)
            raise
        return ticket

    def _take_place(self, account: str) -> None:
        if not self._thread.is_alive():
            raise closed()
        wait = partial(self.counts.refuse, self.max_waiting, self.max_running)
        self._admission.take_place(wait, self, account)

    # -- the serving thread ----------------------------------------------------------------------

    def waits(self) -> tuple[bool, float | None]:
        """Whether there is anything to do, and after how much quiet time to prefill ahead."""
        active = bool(self._line.waiting or self._line.prefilling or self._line.running)
        return active, self._pause if len(self._ahead) else None

    def go_on(self, news: Arrivals) -> bool:
        """Do what there is to do now; False at the end."""
        self._line.came(news.came)
        if news.stopped:
            self._end_all(Closed("the scheduler was closed before the request was done"))
            self._ahead.clear()
            return False
        try:
            self._guests.look()
            if news.asked:
                self._round(news.hung_up)
            else:
                self._ahead.piece()
        except Exception as error:  # our error, not a request's: no client may wait forever
            logger.exception("the scheduler failed; its requests end with this error")
            self._end_all(error)
        return True

    def _end_all(self, error: Exception) -> None:
        for request in self._line.all():
            self._end(request, error)

    def _round(self, hung_up: bool) -> None:
        self._rounds += 1
        self._ahead.put_aside()
        if hung_up:
            for request in self._line.all():
                if request.ticket.cancelled:
                    self._end(request, outcome="cancelled")
        self._admit()
        self._prefill_some(self._line.held_back())
        if self._line.running:
            with self._vlm.runtime.lock:
                self._step(self._line.held_back())

    def _guarded(self, request: Request, work: Callable[[Request], None]) -> None:
        """Run something for one request; any error ends that request only."""
        with self._vlm.runtime.lock:
            begun = time.perf_counter()
            try:
                work(request)
            except Exception as error:
                self._end(request, error)
            self._line.shares.spend([request.account], time.perf_counter() - begun)

    # -- admitting -------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Begin waiting requests while there is room."""
        while (request := self._line.next_to_begin()) is not None:
            self._guarded(request, self._begin)

    def _begin(self, request: Request) -> None:
        self._line.shares.spend_beside(request.account, request.made_in)
        request.turn.begin(sample=request.room > 0)
        request.tokens = len(request.turn.prompt)
        request.ticket.prompt_ids = request.turn.prompt.ids
        request.work = request.turn.work(shared=True)
        request.looked_at = self._rounds

    # -- prefilling ------------------------------------------------------------------------------

    def _prefill_some(self, held: Collection[Request]) -> None:
        """Run one pass. Prompts of which all is remembered need none, so several of them begin."""
        until, passes = time.perf_counter() + WITHOUT_PASSES, self.counts.passes
        while prefilling := [one for one in self._line.prefilling if one not in held]:
            self._prefill_next(prefilling)
            if self.counts.passes > passes or time.perf_counter() > until:
                break

    def _prefill_next(self, prefilling: list[Request]) -> None:
        """Run a joint pass over the ends of several prompts, or one piece of one."""
        with self._vlm.runtime.lock:
            begun = time.perf_counter()
            others = [*self._line.prefilling, *self._line.waiting]
            group = self._joint.group(prefilling, self._rounds)
            costs = self._joint.prefill(group, others)
            self.counts.joint += bool(costs)
            accounts = [one.account for one in costs or group[:1]]
            self._line.shares.spend(accounts, time.perf_counter() - begun)
            for request, cost in costs.items():
                self._guarded(request, partial(self._prefilled, cost=cost))
            if not costs:
                self._guarded(group[0], self._prefill)

    def _prefill(self, request: Request) -> None:
        """Run one piece of one prompt."""
        turn, counts = request.turn, self.counts
        waited = 1e3 * (time.perf_counter() - request.ready)
        turn.milliseconds.setdefault("queued", waited)
        if request.looked_at != self._rounds and turn.out_of_date():
            # Weights or settings changed between two pieces: start again.
            turn.finish()
            request.count_restart()
            self._begin(request)
        before = turn.done_tokens
        tokens = next(request.work, 0) if request.work is not None else 0
        if tokens and turn.done_tokens == before:
            counts.towers += 1  # the next work is the chunk for which it was encoded
        elif tokens:
            counts.chunks += 1
            had_its_turn(request, [*self._line.prefilling, *self._line.waiting], tokens)
        if turn.done_tokens == request.tokens:
            self._prefilled(request)

    def _prefilled(self, request: Request, cost: float | None = None) -> None:
        turn = request.turn
        if cost is not None:
            self._joint.remember(request, cost)
        for _ in request.work or ():  # only its end remains to be reported
            pass
        self._line.prefilling.remove(request)
        if turn.sampler is None:
            self._complete(request)
            return
        self._line.running[turn.run] = request
        request.begin_decoding(self._vlm.runtime.tokenizer())
        self.counts.took(1)
        if turn.run.logits is not None and not self._take(request, turn.run.logits):
            self._decoding.join(turn.run, request.keeps_lane)

    # -- decoding --------------------------------------------------------------------------------

    def _step(self, held: Collection[Request]) -> None:
        """Run one token of every sequence, except those held back."""
        begun = time.perf_counter()
        tokens = {run: request.token for run, request in self._line.running.items()}
        resting = {run for run, request in self._line.running.items() if request in held}
        answers = {run: one.turn.generated for run, one in self._line.running.items()}
        found = list(self._decoding.step(tokens, answers.__getitem__, resting))
        taken = time.perf_counter()
        spent = 1e3 * (taken - begun)
        self._line.shares.spend([self._line.running[run].account for run, _ in found], spent / 1e3)
        self.counts.steps += 1
        self.counts.took(len(found))
        for run, logits in found:
            request = self._line.running[run]
            stages = request.turn.milliseconds
            stages["decode"] = stages.get("decode", 0.0) + spent
            try:
                if isinstance(logits, Exception):
                    raise logits
                self._take(request, logits)
            except Exception as error:
                self._end(request, error)
            before, taken = taken, time.perf_counter()
            self._line.shares.spend([request.account], taken - before)

    def _take(self, request: Request, logits: torch.Tensor) -> bool:
        """Choose a token and hand it out; return whether it was the last."""
        if over := request.take(logits):
            self._complete(request)
        return over

    # -- ending ----------------------------------------------------------------------------------

    def _complete(self, request: Request) -> None:
        turn = request.turn
        text, reason = request.last_words()
        self._leave(request, ended=True)
        turn.keep_decoded()
        if request.follow is not None:
            self._ahead.follow(request)
        turn.finish()
        request.ticket.put(Piece(text, None, turn.usage(), turn.report(), reason))
        self._end(request, outcome="finished")

    def _leave(self, request: Request, ended: bool = False) -> None:
        """Remove it from every list, and from the batch."""
        run = self._line.leave(request)
        if run is not None:
            self._decoding.leave(run, ended)

    def _end(
        self, request: Request, error: BaseException | None = None, outcome: str = "failed"
    ) -> None:
        """Release everything that a request holds, however it ends."""
        with self._vlm.runtime.lock:
            leave, keep = partial(self._leave, request), request.keep_decoded
            first = (leave, keep) if outcome == "cancelled" else (leave,)
            for release in (*first, request.close, request.turn.finish):
                try:
                    release()
                except Exception as failure:  # it is already off every list, and must end
                    logger.exception("not all that a request held could be let go of")
                    error = error or failure
        self.counts.ended(outcome, time.perf_counter() - request.ready)
        self._admission.free_place(request.account)
        try:
            if request.work is not None and outcome == "cancelled":
                turn = request.turn
                request.ticket.put(Piece("", None, turn.usage(), turn.report(), outcome))
            request.ticket.end(error)
        except Exception:  # a listener's error: it is over for that one anyway
            logger.exception("a listener of a request failed")
