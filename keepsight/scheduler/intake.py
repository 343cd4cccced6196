"""Where requests are made ready, in the threads of those who send them: options are checked,
pictures decoded and preprocessed, the prompt is rendered. So a large picture of one client delays
no other's tokens, and bad input is refused before it waits for anything.

Only a moment of the model's lock is needed, to see whether weights or settings have changed. What
was learnt about the pictures is noted when the request begins, by the thread that has the model.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from keepsight.core.call import Call
from keepsight.core.lengths import characters
from keepsight.core.messages import parse_messages
from keepsight.core.render import Renderer
from keepsight.core.sampling import (
    DEFAULT_CHAT_TOKENS,
    Detokenizer,
    Sampler,
    SequenceSampler,
    check_length,
    sampler,
)
from keepsight.core.turn import Turn
from keepsight.errors import ModelKeepsChanging
from keepsight.formats.package import Package
from keepsight.kinds import Message, Options, Record
from keepsight.media.features import Vision
from keepsight.media.medium import PROCESSORS, Medium
from keepsight.media.naming import Looked
from keepsight.prefix.prompt import Prompt
from keepsight.report import Report
from keepsight.scheduler.ticket import Ticket
from keepsight.system.accounts import account_of
from keepsight.system.lock import Mutex
from keepsight.vlm import VLM

_LONG = 1 << 15  # characters of texts that are tokenized beside the others
MAX_RESTARTS = 8  # of one prompt, because the model changed
_LONGEST_ROOM = 4096  # an answer may get longer; this much is planned for

Follow = Callable[[str], Message | None]  # from the text of an answer to the message it becomes


@dataclass(eq=False)
class Request:
    """One request on its way through the scheduler."""

    ticket: Ticket
    turn: Turn
    tokens: int  # of its prompt
    room: int  # the longest answer; 0 where only the prompt is prefilled
    account: str = ""
    number: int = 0
    passed: int = 0  # tokens of work done for others since it last had its turn
    ready: float = field(default_factory=time.perf_counter)  # when it began to wait
    made_in: float = 0.0  # seconds of a processor that making it ready has taken
    work: Iterator[int] | None = None
    sampler: SequenceSampler | None = None
    detokenizer: Detokenizer | None = None
    restarts: int = 0  # how often it was begun again because the model changed
    looked_at: int = 0  # the round in which weights and settings were compared last
    token: int = 0  # the last one, which the next step takes in
    keeps_lane: bool = False  # decoded state is remembered (`exact=False`)
    order: PromptOrder | None = None  # what was asked, for who makes the next turn ready
    follow: Follow | None = None
    texts: list[str] = field(default_factory=list)  # the answer so far

    def close(self) -> None:
        """End its work, whatever its state."""
        if self.work is not None:
            self.work.close()  # type: ignore[attr-defined]

    def keep_decoded(self) -> None:
        """Remember a prompt and an answer as far as they came, where they are exact anywhere."""
        if self.turn.begun and self.turn.rule.any_cut:
            self.turn.keep_decoded()

    def count_restart(self) -> None:
        """Refuse to begin one prompt without end: the model may change in each pass."""
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
        """Tokens of the prompt that are still to be computed, as far as one knows."""
        if self.work is None:
            return self.tokens
        return self.tokens - self.turn.done_tokens

    @property
    def longest(self) -> int:
        """Tokens that it may come to have."""
        return self.tokens + min(self.room, _LONGEST_ROOM)


class SharedRenderer:
    """A renderer whose tokenizer one thread has at a time: it is changed while it encodes text with
    control tokens in it."""

    def __init__(self, renderer: Renderer) -> None:
        self._turn = Mutex()
        self._take(renderer)

    def _take(self, renderer: Renderer) -> None:
        self._of, self._own = renderer, copy.copy(renderer)
        self._own.tokenizer = copy.deepcopy(renderer.tokenizer)

    @contextmanager
    def like(self, renderer: Renderer) -> Iterator[Renderer]:
        """A renderer that does what this one does, for one thread."""
        with self._turn:
            if renderer is not self._of:
                self._take(renderer)
            yield self._own


class Intake:
    """Makes requests to one model ready. Its methods may be called in many threads."""

    def __init__(self, vlm: VLM, renderer: Renderer, piece: int) -> None:
        self._vlm, self._first, self._piece = vlm, renderer, piece
        # Long texts have a tokenizer of their own, so that no short one waits for them.
        self._short, self._long = SharedRenderer(renderer), SharedRenderer(renderer)

    @property
    def _renderer(self) -> Renderer:
        """The one of now: templates and tokenizers may be changed."""
        return self._vlm.runtime.renderer or self._first

    def receive(
        self, messages: list[Message], call: Call, ticket: Ticket, sample: bool, asked: float
    ) -> Request:
        """A request that is ready to wait for its turn."""
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
        """The prompt of messages whose media were named before."""
        waiting = iter(media)
        long = characters([messages, call.template]) > _LONG
        earlier = self._vlm.runtime.engine.answers.prompts.of(call.tenant)
        with (self._long if long else self._short).like(self._renderer) as renderer:
            given = (messages, lambda image, kind: next(waiting), True, earlier)
            return renderer.render(*given, **call.template)

    def explain(self, messages: list[Message], options: Options) -> Report:
        """The report that such a request would get. Its pictures are looked at as those of a
        request are, in this thread, and nothing of that is remembered."""
        vlm = self._vlm
        call = Call.before_decoding(options, vlm.tenant, "explain")
        vlm.runtime.require_answers()
        order = PromptOrder(vlm, messages, call)
        order.look(self._renderer)
        order.prompt = self.render(messages, order.media, call)
        order.forget()
        with vlm.runtime.lock:
            turn = Turn(vlm.runtime, order.current, {}, call.exact, tenant=call.tenant)
            return turn.foresee()

    def named(self, messages: list[Message], tenant: str, learn: bool) -> list[Message]:
        """The same messages with their media looked at, in this thread; with `learn` who shows them
        again need not."""
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
    """The rendering of one request: done when it comes, looked at again when it begins."""

    def __init__(self, vlm: VLM, messages: list[Message], call: Call) -> None:
        self._vlm, self.messages, self.call = vlm, messages, call
        self.media: list[Medium] = []  # in the order in which they are given
        self.bound: object = None  # the weights and settings under which they are named
        self._looked: list[Looked] = []
        self._fresh = True
        self.prompt = _NOTHING
        self.turn: Turn | None = None

    @property
    def _vision(self) -> Vision:
        return self._vlm.runtime.vision_of(self.call.tenant)

    def look(self, renderer: Renderer) -> None:
        """Look at the media of the messages."""
        clean, given = parse_messages(self.messages)
        renderer.lengths.check(clean, self.call.template)  # before anything of theirs is opened
        renderer.refuse_unseen(given)
        known = None if given else self._vlm.runtime.visions.get(self.call.tenant)
        if known is not None:  # text alone need not wait for the model: it is compared at the begin
            self.bound = known.namer.bound
            return
        with self._vlm.runtime.lock:
            self._vlm.runtime.refresh(self.call.exact, self.call.tenant)
            vision = self._vision
            self.bound = vision.namer.bound
        self.media = [self._look_at(vision, medium, kind) for kind, medium in given]

    def _look_at(self, vision: Vision, medium: object, kind: str) -> Medium:
        if isinstance(medium, Medium | Package):
            return vision.name(medium, kind)
        looked = vision.namer.look(medium, kind)
        self._looked.append(looked)
        return vision.medium_of(looked)

    def forget(self) -> None:
        """Let nothing that was found out about the media be noted."""
        self._looked.clear()

    def current(self) -> Prompt:
        """The prompt under the weights and settings of now; the caller has the model's lock."""
        vision = self._vision
        same = vision.namer.bound is self.bound
        if not same or not all(self._unchanged(vision, m) for m in self.prompt.media):
            self.prompt = self._vlm.runtime.render(self.messages, self.call)
            self.bound, self.media = vision.namer.bound, []
            if self.turn is not None:
                self.turn.sampler = None  # it was made for the length of the other prompt
        elif self._fresh:
            self.learn()
        self._fresh = False
        self._looked.clear()
        return self.prompt

    def learn(self) -> None:
        """Note what was found out about the media; the caller has the model's lock."""
        vision = self._vision
        if vision.namer.bound is self.bound:
            for looked in self._looked:
                self._learn(vision, looked)
        self._looked.clear()

    def _unchanged(self, vision: Vision, medium: Medium) -> bool:
        return vision.again(medium).feature_id == medium.feature_id

    def _learn(self, vision: Vision, looked: Looked) -> None:
        if vision.where(vision.medium_of(looked)) == "tower":
            vision.admit_looked(looked)
        else:  # another request had the same picture: its pixels will not be needed
            vision.namer.learn(looked)


def with_media(messages: list[Message], media: list[Medium]) -> list[Message]:
    """Messages with media that were looked at in the places of what was given."""
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
