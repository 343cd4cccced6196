"""Renders messages to a prompt with the checkpoint's own chat template and tokenizer.

Images are only named here. Text of a caller stays text (template.py), so every placeholder in a
rendered conversation was written by the template, one per image, and their ranges are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keepsight.core.rendering.control_tokens import Rendered
from keepsight.core.rendering.conversations import TenantPrompts, read_anew
from keepsight.core.rendering.encodings import tokenizer_state
from keepsight.core.rendering.lengths import Lengths, characters
from keepsight.core.rendering.template import ChatTemplate
from keepsight.errors import (
    InputError,
    ModelError,
    PlaceholderMismatch,
    UnsupportedInput,
)
from keepsight.kinds import Message, Processor, Record
from keepsight.media.medium import Medium
from keepsight.models.families import Family
from keepsight.prefix.prompt import Prompt
from keepsight.system.words import check_text

Name = Callable[[object, str], Medium]  # makes a medium of a part's value and modality


class Renderer:
    """Renders for one family and one processor."""

    def __init__(
        self, family: Family, processor: Processor, chat_template: str | None = None
    ) -> None:
        self._family, self._processor, self._given = family, processor, chat_template
        self.tokenizer = processor.tokenizer
        self.template = _template_of(processor, chat_template)
        to_token = self.tokenizer.convert_ids_to_tokens
        self._placeholders: dict[str, str] = {
            kind: to_token(token) for kind, token in family.placeholders.items()
        }
        # What the template writes for a medium -> the processor's placeholder.
        self._words = {kind: self._word(kind) for kind in self._placeholders}
        more = {*self._words.values(), *self._placeholders.values()}
        self._chat = ChatTemplate(self.template, self.tokenizer, more)
        words = (f"(?P<{kind}>{re.escape(word)})" for kind, word in self._words.items())
        self._written = re.compile("|".join(words))
        self._bos = self._implicit_bos()
        self.lengths = Lengths(family.model, self.tokenizer)
        self._state = self._look()

    def current(self) -> Renderer:
        """This renderer, unless the tokenizer or the template changed since; then a new one."""
        if self._look() == self._state:
            return self
        return Renderer(self._family, self._processor, self._given)

    def _look(self) -> tuple[object, ...]:
        """Read everything needed from the processor, which may change at any time."""
        tokenizer = self._processor.tokenizer
        words = [getattr(self._processor, f"{kind}_token", None) for kind in self._placeholders]
        applies = vars(tokenizer).get("apply_chat_template")
        said = (_template_of(self._processor, self._given), applies, words)
        media, special = dict(self._family.placeholders), tokenizer.special_tokens_map
        return (tokenizer, *said, media, special, *tokenizer_state(tokenizer))

    def _word(self, kind: str) -> str:
        word = getattr(self._processor, f"{kind}_token", None)
        return word if isinstance(word, str) and word else self._placeholders[kind]

    def _implicit_bos(self) -> list[int]:
        """The tokens that the tokenizer puts before every text."""
        ids: list[int] = self.tokenizer("")["input_ids"]
        return ids

    def render(
        self,
        messages: list[Message],
        name: Name,
        generate: bool = True,
        earlier: TenantPrompts | None = None,
        /,
        **template: Any,
    ) -> Prompt:
        """The prompt of a conversation, ready for an answer unless `generate` is false. `earlier`
        are prompts of the same tenant that this one may continue.

        With `continue_final_message` among the template's options the answer continues the last
        message; with `add_generation_prompt=False` the model writes its own start of an answer.
        """
        generate = template.pop("add_generation_prompt", generate)
        generate = generate and not template.get("continue_final_message")
        chat = self._chat
        read = read_anew(messages, chat) if earlier is None else earlier.read(messages, chat)
        self.refuse_unseen(read.media)
        self.lengths.check_count(read.characters + characters(template))
        rendered = read.rendered(self.tokenizer, chat, generate, template)
        check_text(rendered.text, "the conversation")
        named = [(kind, name(medium, kind)) for kind, medium in read.media]
        text = self._family.prompt_text(self._processor, rendered.text, self._written)
        spots = list(find_words(self._written, text, [*self._words.values()]))
        media = _in_order(spots, named)
        text, runs = self._insert(text, spots, media)
        self.lengths.check_rendered(text, self.tokenizer)
        whole = Rendered(text, rendered.code)
        texts = None if earlier is None else earlier.texts
        ids = chat.tokens.encode(self.tokenizer, whole, self._bos, texts)
        return self._expand(np.asarray(ids, dtype=np.int64), runs, media, rendered.plain(text))

    def refuse_unseen(self, given: list[tuple[str, object]]) -> None:
        """Refuse media of a kind that this family does not take."""
        for kind in {kind for kind, _ in given} - self._words.keys():
            raise UnsupportedInput(
                f"{self._family.model.config.model_type} takes no {kind} here; it takes "
                f"{', '.join(self._words)}"
            )

    def _insert(
        self, text: str, spots: list[re.Match[str]], media: tuple[Medium, ...]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Put each image's own text at its place, with one placeholder for a whole run."""
        parts, runs, cursor = [], [], 0
        for j, (spot, medium) in enumerate(zip(spots, media, strict=True)):
            parts.append(text[cursor : spot.start()])
            cursor = spot.end()
            for part in self._family.placed(medium.layout, j):
                if isinstance(part, int):
                    runs.append((j, part))
                    part = self._placeholders[medium.modality]
                else:
                    self._chat.check_layout(self.tokenizer, part)
                parts.append(part)
        return "".join([*parts, text[cursor:]]), runs

    def _expand(
        self, ids: np.ndarray, runs: list[tuple[int, int]], media: tuple[Medium, ...], text: str
    ) -> Prompt:
        """Expand each placeholder to the length of its run; from here on the ranges are known."""
        spots = np.flatnonzero(np.isin(ids, list(self._family.placeholders.values())))
        if len(spots) != len(runs):
            raise PlaceholderMismatch(
                f"the tokenizer made {len(spots)} image placeholders of {len(runs)} runs"
            )
        counts = np.ones(len(ids), dtype=np.int64)
        counts[spots] = [count for _, count in runs]
        ends = np.cumsum(counts)
        ranges: list[list[tuple[int, int]]] = [[] for _ in media]
        for (j, count), spot in zip(runs, spots, strict=True):
            end = int(ends[spot])
            ranges[j].append((end - count, end))
        return Prompt(np.repeat(ids, counts), media, tuple(map(tuple, ranges)), text)


def user_message(text: object, images: object = None) -> Message:
    """One user turn: pictures first, then the text."""
    if images is None:
        images = []
    elif not isinstance(images, list | tuple):
        images = [images]
    parts: list[Record] = [{"type": "image", "image": image} for image in images]
    if not isinstance(text, str):
        raise InputError(f"the question is a {type(text).__name__}, expected a string")
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def find_words(pattern: re.Pattern[str], text: str, words: list[str]) -> Iterator[re.Match[str]]:
    """All matches of a pattern of alternative words; fast if a long text has few of them."""
    places = {word: text.find(word) for word in words}
    while any(place >= 0 for place in places.values()):
        match = pattern.match(text, min(place for place in places.values() if place >= 0))
        if match is None:
            return
        yield match
        for word, place in places.items():
            if 0 <= place < match.end():
                places[word] = text.find(word, match.end())


def _in_order(spots: list[re.Match[str]], named: list[tuple[str, Medium]]) -> tuple[Medium, ...]:
    """The media in the order of their placeholders in the text; each kind keeps its own order."""
    kinds = [spot.lastgroup for spot in spots]
    for kind in {*kinds, *(kind for kind, _ in named)}:
        wrote, have = kinds.count(kind), sum(k == kind for k, _ in named)
        if wrote != have:
            raise PlaceholderMismatch(
                f"the chat template wrote {wrote} {kind} placeholders for {have} {kind}s"
            )
    waiting = {kind: iter([m for k, m in named if k == kind]) for kind in set(kinds)}
    return tuple(next(waiting[kind]) for kind in kinds)


def _template_of(processor: Processor, given: str | None) -> str:
    template = given or getattr(processor, "chat_template", None)
    template = template or getattr(processor.tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise ModelError(
            "the processor has no chat template; pass chat_template=..., or use generate() with "
            "tensors"
        )
    return template
