"""Prepares requests in the threads of their senders: options are checked, pictures decoded and
preprocessed, the prompt is rendered. So one client's large picture delays no other's tokens, and
bad input is refused before it waits for anything.

The model's lock is needed only briefly, to see whether weights or settings changed. What was learnt
about the pictures is recorded when the request begins, by the thread that holds the lock.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from keepsight.core.call import Call
from keepsight.core.decoding.sampling import (
    DEFAULT_CHAT_TOKENS,
    Detokenizer,
    Sampler,
    SequenceSampler,
    check_length,
    sampler,
)
from keepsight.core.rendering.lengths import characters
from keepsight.core.rendering.messages import parse_messages
from keepsight.core.rendering.render import Renderer
from keepsight.core.turn import Turn
from keepsight.errors import Closed, ModelKeepsChanging
from keepsight.formats.package import Package
from keepsight.kinds import Message, Options, Record
from keepsight.media.features import Vision
from keepsight.media.medium import PROCESSORS, Medium, opened
from keepsight.media.naming import Inspected
from keepsight.prefix.prompt import Prompt
from keepsight.report import Piece, Report
from keepsight.scheduler.ticket import Ticket
from keepsight.system.accounts import account_of
from keepsight.system.lock import Mutex
from keepsight.vlm import VLM

_LONG = 1 << 15  # characters from which texts use a separate tokenizer
MAX_RESTARTS = 8  # restarts of one prompt because the model changed
_LONGEST_ROOM = 4096  # planned length of an answer, which may get longer

Follow = Callable[[str], Message | None]  # from the text of an answer to its message


@dataclass(eq=False)
class Request:
    """One request on its way through the scheduler."""

    ticket: Ticket
    turn: Turn
    tokens: int  # tokens of its prompt
    room: int  # longest answer; 0 if only the prompt is prefilled
    account: str = ""
    number: int = 0
    passed: int = 0  # tokens computed for others since its last turn
    ready: float = field(default_factory=time.perf_counter)  # when it began to wait
    made_in: float = 0.0  # CPU seconds spent on preparing it
    work: Iterator[int] | None = None
    sampler: SequenceSampler | None = None
    detokenizer: Detokenizer | None = None
    restarts: int = 0  # restarts because the model changed
    looked_at: int = 0  # the round in which weights and settings were last compared
    token: int = 0  # the last token, input of the next step
    keeps_lane: bool = False  # decoded state is remembered (`exact=False`)
    order: PromptOrder | None = None  # the messages, to prepare the next turn
    follow: Follow | None = None
    texts: list[str] = field(default_factory=list)  # the answer so far

    def begin_decoding(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make ready to take tokens."""
        self.sampler = self.turn.sequence_sampler()
        self.detokenizer = Detokenizer.of(self.turn.sampler, tokenizer)

    def take(self, logits: torch.Tensor) -> bool:
        """Choose a token and hand it out; return whether it was the last."""
        if self.sampler is None or self.detokenizer is None:
            raise Closed("this request has not begun to decode")
        self.token = self.sampler.take(logits)
        piece = Piece(self.detokenizer.push(self.token), self.token)
        self.texts.append(piece.text)
        self.ticket.put(piece)
        # Transformers' criterion misses some stop strings that end inside a token.
        return self.sampler.over or self.detokenizer.stopped

    def last_words(self) -> tuple[str, str | None]:
        """The text that was held back for a stop string, and why the answer ended."""
        sampler, detokenizer = self.turn.sampler, self.detokenizer
        text = detokenizer.rest() if detokenizer is not None else ""
        self.texts.append(text)
        if detokenizer is not None and detokenizer.stopped:
            return text, "stop"
        return text, sampler.finish_reason if sampler is not None else None

    def close(self) -> None:
        """End its work in any state."""
        if self.work is not None:
            self.work.close()  # type: ignore[attr-defined]

    def keep_decoded(self) -> None:
        """Remember prompt and answer so far, if any cut is exact."""
        if self.turn.begun and self.turn.rule.any_cut:
            self.turn.keep_decoded()

    def count_restart(self) -> None:
        """Refuse endless restarts of one prompt: the model may change in each pass."""
        self.restarts += 1
        if self.restarts > MAX_RESTARTS:
            raise ModelKeepsChanging(
                f"weights, settings or hooks of the model changed {self.restarts} times while one "
                "prompt was prefilled, so its parts do not belong together; stop what changes them "
                "(training in another thread, or a hook that changes its own state in each pass), "
                "and ask again"
            )

    @property
    def remaining(self) -> int:
        """Prompt tokens still to be computed, as far as known."""
        if self.work is None:
            return self.tokens
        return self.tokens - self.turn.done_tokens

    @property
    def longest(self) -> int:
        """The most tokens it may have."""
        return self.tokens + min(self.room, _LONGEST_ROOM)


class SharedRenderer:
    """A renderer whose tokenizer is used by one thread at a time: encoding control tokens changes
    it temporarily."""

    def __init__(self, renderer: Renderer) -> None:
        self._turn = Mutex()
        self._take(renderer)

    def _take(self, renderer: Renderer) -> None:
        self._of, self._own = renderer, copy.copy(renderer)
        self._own.tokenizer = copy.deepcopy(renderer.tokenizer)

    @contextmanager
    def like(self, renderer: Renderer) -> Iterator[Renderer]:
        """An equal renderer for one thread."""
        with self._turn:
            if renderer is not self._of:
                self._take(renderer)
            yield self._own


class Intake:
    """Prepares requests to one model. Its methods may be called in many threads."""

    def __init__(self, vlm: VLM, renderer: Renderer, piece: int) -> None:
        self._vlm, self._first, self._piece = vlm, renderer, piece
        # Long texts have a separate tokenizer, so that no short one waits for them.
        self._short, self._long = SharedRenderer(renderer), SharedRenderer(renderer)

    @property
    def _renderer(self) -> Renderer:
        """The current renderer: templates and tokenizers may change."""
        return self._vlm.runtime.renderer or self._first

    def receive(
        self, messages: list[Message], call: Call, ticket: Ticket, sample: bool, asked: float
    ) -> Request:
        """A prepared request, ready to wait for its turn."""
        order = PromptOrder(self._vlm, messages, call)
        order.look(self._renderer)
        order.prompt = self.render(messages, order.media, call)
        check_length(self._vlm.model, len(order.prompt))
        chosen = self._sampler(order.prompt, call) if sample else None
        order.turn = turn = Turn(
            self._vlm.runtime,
            order.current,
            call.decoding,
            call.exact,
            DEFAULT_CHAT_TOKENS,
            call.tenant,
        )
        turn.asked, turn.sampler, turn.piece = asked, chosen, self._piece
        room = chosen.max_new_tokens if chosen is not None else 0
        tokens, loose = len(order.prompt), not call.exact
        account = account_of(call.tenant)
        return Request(ticket, turn, tokens, room, account, keeps_lane=loose, order=order)

    def render(self, messages: list[Message], media: list[Medium], call: Call) -> Prompt:
        """The prompt of messages whose media are already named."""
        waiting = iter(media)
        long = characters([messages, call.template]) > _LONG
        earlier = self._vlm.runtime.engine.answers.prompts.of(call.tenant)
        with (self._long if long else self._short).like(self._renderer) as renderer:
            given = (messages, lambda image, kind: next(waiting), True, earlier)
            return renderer.render(*given, **call.template)

    def explain(self, messages: list[Message], options: Options) -> Report:
        """The report that this request would get. Its pictures are looked at in this thread, and
        nothing of that is remembered."""
        vlm = self._vlm
        call = Call.before_decoding(options, vlm.tenant, "explain")
        vlm.runtime.require_answers()
        order = PromptOrder(vlm, messages, call)
        order.look(self._renderer)
        order.prompt = self.render(messages, order.media, call)
        order.forget()
        with vlm.runtime.lock:
            turn = Turn(vlm.runtime, order.current, {}, call.exact, tenant=call.tenant)
            return turn.predict_report()

    def named(self, messages: list[Message], tenant: str, learn: bool) -> list[Message]:
        """The messages with their media named, in this thread; `learn` remembers the names for
        later calls."""
        order = PromptOrder(self._vlm, messages, Call(True, tenant, {}, {}))
        order.look(self._renderer)
        if learn and order.media:
            with self._vlm.runtime.lock:
                order.learn()
        return with_media(messages, order.media)

    def _sampler(self, prompt: Prompt, call: Call) -> Sampler:
        model = self._vlm.model
        ids = torch.from_numpy(prompt.ids)[None].to(model.device)
        with self._short.like(self._renderer) as renderer:
            return sampler(model, renderer.tokenizer, ids, call.decoding, DEFAULT_CHAT_TOKENS)


class PromptOrder:
    """The rendering of one request: done when it arrives, checked again when it begins."""

    def __init__(self, vlm: VLM, messages: list[Message], call: Call) -> None:
        self._vlm, self.messages, self.call = vlm, messages, call
        self.media: list[Medium] = []  # in the order in which they are given
        self.bound: object = None  # the weights and settings of their names
        self._looked: list[Inspected] = []
        self._fresh = True
        self.prompt = _NOTHING
        self.turn: Turn | None = None

    @property
    def _vision(self) -> Vision:
        return self._vlm.runtime.vision_of(self.call.tenant)

    def look(self, renderer: Renderer) -> None:
        """Look at the media of the messages."""
        clean, given = parse_messages(self.messages)
        renderer.lengths.check(clean, self.call.template)  # before opening any of them
        renderer.refuse_unseen(given)
        known = None if given else self._vlm.runtime.visions.get(self.call.tenant)
        if known is not None:  # text alone need not wait for the model: it is compared at the start
            self.bound = known.namer.bound
            return
        with self._vlm.runtime.lock:
            self._vlm.runtime.refresh(self.call.exact, self.call.tenant)
            vision = self._vision
            self.bound = vision.namer.bound
        self.media = [self._look_at(vision, medium, kind) for kind, medium in given]

    def _look_at(self, vision: Vision, medium: object, kind: str) -> Medium:
        medium = opened(medium)
        if isinstance(medium, Medium | Package):
            return vision.name(medium, kind)
        looked = vision.namer.look(medium, kind)
        self._looked.append(looked)
        return vision.medium_of(looked)

    def forget(self) -> None:
        """Drop everything that was learnt about the media."""
        self._looked.clear()

    def current(self) -> Prompt:
        """The prompt under the current weights and settings; the caller holds the model's lock."""
        vision = self._vision
        same = vision.namer.bound is self.bound
        if not same or not all(self._unchanged(vision, m) for m in self.prompt.media):
            self.prompt = self._vlm.runtime.render(self.messages, self.call)
            self.bound, self.media = vision.namer.bound, []
            if self.turn is not None:
                self.turn.sampler = None  # it was made for the earlier prompt's length
        elif self._fresh:
            self.learn()
        self._fresh = False
        self._looked.clear()
        return self.prompt

    def learn(self) -> None:
        """Record what was learnt about the media; the caller holds the model's lock."""
        vision = self._vision
        if vision.namer.bound is self.bound:
            for looked in self._looked:
                self._learn(vision, looked)
        self._looked.clear()

    def _unchanged(self, vision: Vision, medium: Medium) -> bool:
        return vision.again(medium).feature_id == medium.feature_id

    def _learn(self, vision: Vision, looked: Inspected) -> None:
        if vision.where(vision.medium_of(looked)) == "tower":
            vision.admit_looked(looked)
        else:  # another request had the same picture, so its pixels are not needed
            vision.namer.learn(looked)


def with_media(messages: list[Message], media: list[Medium]) -> list[Message]:
    """The messages with named media in place of the given ones."""
    clean, _ = parse_messages(messages)
    waiting = iter(media)

    def part(given: Record) -> Record:
        kind = given.get("type")
        return {**given, kind: next(waiting)} if kind in PROCESSORS else given

    return [
        dict(message, content=[part(given) for given in message["content"]])
        if isinstance(message.get("content"), list)
        else message
        for message in clean
    ]


_NOTHING = Prompt(torch.empty(0, dtype=torch.int64).numpy())
