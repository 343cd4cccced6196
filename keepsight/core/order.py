"""The rendering of one prompt: in its caller's thread, and looked at again when it begins.

Files are read, addresses fetched, pictures decoded and preprocessed here, without the model's lock.
So one client's large picture delays no other's tokens, and bad input is refused before it waits for
anything. What was learnt about the pictures is recorded under the lock, when the prompt begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keepsight.core.call import Call
from keepsight.errors import ImageError, InputError
from keepsight.formats.package import Package
from keepsight.kinds import Message
from keepsight.media.medium import Medium, opened
from keepsight.media.naming import Inspected
from keepsight.prefix.prompt import Prompt
from keepsight.prompt.messages import with_media
from keepsight.prompt.render import Renderer

if TYPE_CHECKING:
    from keepsight.core.runtime import Runtime


class Order:
    """The messages of one call, their named media, and their prompt."""

    def __init__(
        self,
        memory: Runtime,
        messages: list[Message],
        call: Call,
        generate: bool = True,
        renderer: Renderer | None = None,
        beside: Sequence[Medium] = (),
    ) -> None:
        """`renderer`: another than the model's own; `beside`: images that the template places from
        other variables than the messages."""
        if (renderer := renderer or memory.renderer) is None:
            raise InputError("this model was wrapped without a processor: use generate(**tensors)")
        self._memory, self._renderer, self._call = memory, renderer, call
        self._generate = generate
        self._clean, self._given = renderer.read(messages, call.template)
        self._given += [(medium.modality, medium) for medium in beside]
        self.prompt = Prompt.nothing()
        self._look()

    def _look(self) -> None:
        """Look at the media, in this thread."""
        vision = self._memory.bound_vision_of(self._call.tenant)
        self._bound = vision.namer.bound  # the settings of the names
        self.media: list[Medium] = []  # in the order in which they are given
        self._looked: list[Inspected] = []
        room = self._memory.caches.pixels.budget  # bytes of pixels that may wait for the tower
        for number, (kind, given) in enumerate(self._given, 1):
            try:
                thing = opened(given)
                if isinstance(thing, Medium | Package):
                    self.media.append(vision.name(thing, kind))
                    continue
                looked = vision.namer.look(thing, kind)
            except ImageError as error:
                if len(self._given) == 1:
                    raise
                place = f"{kind} {number} of {len(self._given)}"
                raise type(error)(f"{place}: {error}") from error
            if looked.pixels is not None:
                room -= looked.pixels.nbytes
                if room < 0:  # later ones are read again when their turn comes
                    looked = dataclasses.replace(looked, pixels=None)
            self._looked.append(looked)
            self.media.append(vision.medium_of(looked))

    def rendered(self) -> Order:
        kinds = [kind for kind, _ in self._given]
        named = list(zip(kinds, self.media, strict=True))
        tenant, template = self._call.tenant, self._call.template
        self.prompt = self._renderer.rendered(self._clean, named, self._generate, tenant, template)
        return self

    def current(self) -> Prompt:
        """The prompt under the present settings; the caller holds the model's lock."""
        if self._memory.vision_of(self._call.tenant).namer.bound is not self._bound:
            self._look()
            self.rendered()
        self.learn()
        return self.prompt

    def learn(self) -> None:
        """Record what was learnt about the media; the caller holds the model's lock."""
        vision = self._memory.vision_of(self._call.tenant)
        if vision.namer.bound is self._bound:
            for looked in self._looked:
                if vision.where(vision.medium_of(looked)) == "tower":
                    vision.admit_looked(looked)
                else:  # its features are known, so its pixels are not needed
                    vision.namer.learn(looked)
        self._looked.clear()

    def with_media(self) -> list[Message]:
        return with_media(self._clean, self.media)
