"""The rendering of one prompt: in its caller's thread, and looked at again when it begins.

Files are read, addresses fetched, pictures decoded and preprocessed here, without the model's lock.
So one client's large picture delays no other's tokens, and bad input is refused before it waits for
anything. What was learnt about the pictures is recorded under the lock, when the prompt begins.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from keepsight.core.call import Call
from keepsight.errors import InputError
from keepsight.formats.package import Package
from keepsight.kinds import Message, Record
from keepsight.media.features import Vision
from keepsight.media.medium import PROCESSORS, Medium, opened
from keepsight.media.naming import Inspected
from keepsight.prefix.prompt import Prompt
from keepsight.prompt.render import Renderer

if TYPE_CHECKING:
    from keepsight.core.runtime import Runtime


class Order:
    """The messages of one call, and their prompt."""

    def __init__(
        self, memory: Runtime, messages: list[Message], call: Call, generate: bool = True
    ) -> None:
        self._memory, self.messages, self.call = memory, messages, call
        self._generate = generate
        self._clean: list[Message] = []  # the messages as the template wants them
        self._kinds: list[str] = []
        self.media: list[Medium] = []  # in the order in which they are given
        self.prompt = Prompt.nothing()
        self._bound: object = None  # the settings of their names
        self._looked: list[Inspected] = []
        self._room = 0  # bytes of pixels that may wait for the tower

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
        self._clean, given = self.renderer().read(self.messages, self.call.template)
        vision = self._memory.visions.get(self.call.tenant)
        if vision is None or vision.namer.bound is None:
            with self._memory.lock:
                self._memory.refresh(self.call.tenant)
                vision = self._vision
        self._bound = vision.namer.bound
        self._kinds, self._room = [kind for kind, _ in given], self._memory.caches.pixels.budget
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
        if looked.pixels is not None:
            self._room -= looked.pixels.nbytes
            if self._room < 0:  # later ones are read again when their turn comes
                looked = dataclasses.replace(looked, pixels=None)
        self._looked.append(looked)
        return vision.medium_of(looked)

    def _render(self) -> Prompt:
        named = zip(self._kinds, self.media, strict=True)
        tenant, template = self.call.tenant, self.call.template
        return self.renderer().rendered(self._clean, named, self._generate, tenant, template)

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
        waiting = iter(self.media)

        def part(given: Record) -> Record:
            kind = given.get("type")
            return {**given, kind: next(waiting)} if kind in PROCESSORS else given

        return [
            dict(message, content=[part(given) for given in message["content"]])
            if isinstance(message.get("content"), list)
            else message
            for message in self._clean
        ]
