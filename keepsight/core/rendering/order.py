"""The rendering of one prompt: in its caller's thread, and looked at again when it begins.

Files are read, addresses fetched, pictures decoded and preprocessed here, without the model's lock.
So one client's large picture delays no other's tokens, and bad input is refused before it waits for
anything. What was learnt about the pictures is recorded under the lock, when the prompt begins.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keepsight.core.call import Call
from keepsight.core.rendering.lengths import characters
from keepsight.core.rendering.messages import parse_messages
from keepsight.core.rendering.render import Renderer
from keepsight.errors import InputError
from keepsight.formats.package import Package
from keepsight.kinds import Message, Record
from keepsight.media.features import Vision
from keepsight.media.medium import PROCESSORS, Medium, opened
from keepsight.media.naming import Inspected
from keepsight.prefix.prompt import Prompt
from keepsight.system.lock import Mutex

if TYPE_CHECKING:
    from keepsight.core.runtime import Runtime

_LONG = 1 << 15  # characters from which texts use a separate tokenizer


class Renderers:
    """The renderer, used by one thread at a time: encoding control tokens changes its tokenizer for
    a moment. Long texts have a tokenizer of their own, so that no short one waits for them."""

    def __init__(self) -> None:
        self._short, self._long = Mutex(), Mutex()
        self._of: Renderer | None = None
        self._copy: Renderer | None = None

    @contextmanager
    def turn(self, renderer: Renderer, size: int) -> Iterator[Renderer]:
        """The renderer for a text of so many characters."""
        if size <= _LONG:
            with self._short:
                yield renderer
            return
        with self._long:
            if self._copy is None or renderer is not self._of:
                self._of, self._copy = renderer, copy.copy(renderer)
                self._copy.tokenizer = copy.deepcopy(renderer.tokenizer)
            yield self._copy


class Order:
    """The messages of one call, and their prompt."""

    def __init__(
        self, memory: Runtime, messages: list[Message], call: Call, generate: bool = True
    ) -> None:
        self._memory, self.messages, self.call = memory, messages, call
        self._generate = generate
        self.media: list[Medium] = []  # in the order in which they are given
        self.prompt = Prompt.nothing()
        self._bound: object = None  # the settings of their names
        self._looked: list[Inspected] = []

    @property
    def _vision(self) -> Vision:
        return self._memory.vision_of(self.call.tenant)

    def rendered(self) -> Order:
        """Look at the media and render the prompt, in this thread."""
        self.look()
        self.prompt = self._render()
        return self

    def look(self) -> None:
        """Look at the media of the messages."""
        renderer = self.renderer()
        clean, given = parse_messages(self.messages)
        renderer.lengths.check(clean, self.call.template)  # before opening any of them
        renderer.refuse_unseen(given)
        vision = self._memory.visions.get(self.call.tenant)
        if vision is None or vision.namer.bound is None:
            with self._memory.lock:
                self._memory.refresh(self.call.tenant)
                vision = self._vision
        self._bound = vision.namer.bound
        self.media = [self._look_at(vision, medium, kind) for kind, medium in given]

    def renderer(self) -> Renderer:
        """The current renderer: templates and tokenizers may change."""
        renderer = self._memory.renderer
        if renderer is None:
            raise InputError("this model was wrapped without a processor: use generate(**tensors)")
        return renderer

    def _look_at(self, vision: Vision, medium: object, kind: str) -> Medium:
        medium = opened(medium)
        if isinstance(medium, Medium | Package):
            return vision.name(medium, kind)
        looked = vision.namer.look(medium, kind)
        self._looked.append(looked)
        return vision.medium_of(looked)

    def _render(self) -> Prompt:
        waiting = iter(self.media)
        size = characters([self.messages, self.call.template])
        earlier = self._memory.engine.answers.prompts.of(self.call.tenant)
        with self._memory.renderers.turn(self.renderer(), size) as renderer:
            given = (self.messages, lambda image, kind: next(waiting), self._generate, earlier)
            return renderer.render(*given, **self.call.template)

    def current(self) -> Prompt:
        """The prompt under the present settings; the caller holds the model's lock."""
        if self._vision.namer.bound is not self._bound:
            self.look()
            self.prompt = self._render()
        self.learn()
        return self.prompt

    def learn(self) -> None:
        """Record what was learnt about the media; the caller holds the model's lock."""
        vision = self._vision
        if vision.namer.bound is self._bound:
            for looked in self._looked:
                if vision.where(vision.medium_of(looked)) == "tower":
                    vision.admit_looked(looked)
                else:  # its features are known, so its pixels are not needed
                    vision.namer.learn(looked)
        self._looked.clear()

    def with_media(self) -> list[Message]:
        """The messages with named media in place of the given ones."""
        clean, _ = parse_messages(self.messages)
        waiting = iter(self.media)

        def part(given: Record) -> Record:
            kind = given.get("type")
            return {**given, kind: next(waiting)} if kind in PROCESSORS else given

        return [
            dict(message, content=[part(given) for given in message["content"]])
            if isinstance(message.get("content"), list)
            else message
            for message in clean
        ]
