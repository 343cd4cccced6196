"""Renders messages to a prompt with the checkpoint's own chat template and tokenizer.

Images are only named here. Text of a caller stays text (control_tokens.py), so every placeholder in
a rendered conversation was written by the template, one per image, and their ranges are known.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from keepsight.errors import (
    InputError,
    MessagesError,
    ModelError,
    PlaceholderMismatch,
    UnsupportedInput,
)
from keepsight.kinds import Message, Processor, Record
from keepsight.media.medium import Medium
from keepsight.models import upstream
from keepsight.models.families import Family
from keepsight.models.families.pixels import embedding_of
from keepsight.prefix.prompt import Prompt
from keepsight.prompt.control_tokens import END, MARKED, ControlTokens
from keepsight.prompt.encodings import Encodings, tokenizer_state
from keepsight.prompt.lengths import Lengths
from keepsight.prompt.messages import parse_messages
from keepsight.system.words import check_text

Name = Callable[[object, str], Medium]  # makes a medium of a part's value and modality


class Renderer:
    """Renders for one family and one processor; thread-safe."""

    def __init__(
        self,
        family: Family,
        processor: Processor,
        chat_template: str | None = None,
        sanitize: bool = True,
    ) -> None:
        """Without `sanitize` the template itself keeps a caller's control tokens apart."""
        self._family, self._processor, self._given = family, processor, chat_template
        self._sanitize = sanitize
        self.tokenizer = processor.tokenizer
        self.template = _template_of(processor, chat_template)
        to_token = self.tokenizer.convert_ids_to_tokens
        self._placeholders = {kind: to_token(token) for kind, token in family.placeholders.items()}
        # What the template writes for a medium -> the processor's placeholder.
        named = {kind: getattr(processor, f"{kind}_token", None) for kind in self._placeholders}
        self._words: dict[str, str] = {
            kind: word if isinstance(word, str) and word else self._placeholders[kind]
            for kind, word in named.items()
        }
        more = {*self._words.values(), *self._placeholders.values()}
        self.tokens = ControlTokens(self.template, self.tokenizer, more)
        self.encodings = Encodings(self.tokenizer, self.tokens)
        shared = os.path.commonprefix([*self._words.values()])  # noqa: RUF071 - found fast
        rests = ((kind, re.escape(word[len(shared) :])) for kind, word in self._words.items())
        either = "|".join(f"(?P<{kind}>{rest})" for kind, rest in rests)
        self._written = re.compile(f"{re.escape(shared)}(?:{either})(?!{END})")  # none is marked
        self.lengths = Lengths(family.model, self.tokenizer)
        self._state = self._look()

    def current(self) -> Renderer:
        """This renderer, unless the tokenizer or the template changed since; then a new one."""
        if self._look() == self._state:
            return self
        return Renderer(self._family, self._processor, self._given, self._sanitize)

    def _look(self) -> tuple[object, ...]:
        """Read everything needed from the processor, which may change at any time."""
        tokenizer = self._processor.tokenizer
        words = [getattr(self._processor, f"{kind}_token", None) for kind in self._placeholders]
        applies = vars(tokenizer).get("apply_chat_template")
        said = (_template_of(self._processor, self._given), applies, words)
        media, special = dict(self._family.placeholders), tokenizer.special_tokens_map
        return (tokenizer, *said, media, special, *tokenizer_state(tokenizer))

    def render(
        self,
        messages: list[Message],
        name: Name,
        generate: bool = True,
        tenant: str | None = None,
        /,
        **template: Any,
    ) -> Prompt:
        """The prompt of a conversation, ready for an answer unless `generate` is false. Texts
        of the same `tenant` are not tokenized again.

        With `continue_final_message` among the template's options the answer continues the last
        message; with `add_generation_prompt=False` the model writes its own start of an answer.
        """
        clean, given = self.read(messages, template)
        named = [(kind, name(medium, kind)) for kind, medium in given]
        return self.rendered(clean, named, generate, tenant, template)

    def read(
        self, messages: list[Message], template: Record
    ) -> tuple[list[Message], list[tuple[str, object]]]:
        """Messages as the template wants them, and their media, none of them opened yet."""
        clean, given = parse_messages(messages)
        self.lengths.check(clean, template)
        for kind in {kind for kind, _ in given} - self._words.keys():
            raise UnsupportedInput(
                f"{self._family.model.config.model_type} takes no {kind} here; it takes "
                f"{', '.join(self._words)}"
            )
        return clean, given

    def rendered(
        self,
        clean: list[Message],
        named: list[tuple[str, Medium]],
        generate: bool,
        tenant: str | None,
        template: Record,
    ) -> Prompt:
        """The prompt of messages that were `read`, and their named media."""
        template = dict(template)
        generate = template.pop("add_generation_prompt", generate)
        generate = generate and not template.get("continue_final_message")
        text = self._apply(clean, template, generate)
        check_text(text, "the conversation")
        text = self._family.prompt_text(self._processor, text, self._written)
        # Each image's own text comes at its place, with one placeholder for a whole run.
        spots = list(self._written.finditer(text))
        media = _in_order(spots, named)
        parts: list[str] = []
        runs: list[tuple[int, int]] = []  # number of a medium, length
        cursor = 0
        for j, (spot, medium) in enumerate(zip(spots, media, strict=True)):
            parts.append(text[cursor : spot.start()])
            cursor = spot.end()
            for part in self._family.placed(medium.layout, j):
                if isinstance(part, int):
                    runs.append((j, part))
                    part = self._placeholders[medium.modality]
                else:
                    self._check_layout(part)
                parts.append(part)
        text = "".join([*parts, text[cursor:]])
        self.lengths.check_rendered(text, self.tokenizer)
        ids = self.encodings.encode(text, tenant)
        size = embedding_of(self._family.model).num_embeddings
        if len(ids) and int(ids.max()) >= size:
            raise InputError(
                f"the tokenizer makes the token {int(ids.max())} of this conversation, and the "
                f"model knows {size}: call model.resize_token_embeddings(len(tokenizer))"
            )
        return self._expanded(ids, runs, media, MARKED.sub(r"\1", text))

    def continuation(self, text: str) -> np.ndarray:
        """The ids of a text as it could follow a prompt. Control tokens in it are text."""
        check_text(text, "the continuation")
        messages, _ = self.tokens.broken([{"role": "user", "content": text}], {})
        return self.encodings.behind(self.tokens.marked(messages[0]["content"]))

    def _apply(self, messages: list[Message], options: Record, generate: bool) -> str:
        """The text of a conversation; what a caller typed as a control token is marked."""
        applies = getattr(self.tokenizer.apply_chat_template, "__func__", None)
        try:
            if self._sanitize:
                messages, options = self.tokens.broken(messages, options)
            stock = applies is PreTrainedTokenizerBase.apply_chat_template
            if stock and not options and all(map(_is_simple, messages)):
                text = upstream.rendered(self.template, self.tokenizer, messages, generate)
            else:
                text = self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=generate,
                    chat_template=self.template,
                    **options,
                )
        except Exception as error:  # a template raises any exception its author chose
            raise MessagesError(f"the chat template refused the messages: {error}") from error
        return self.tokens.marked(text)

    def _check_layout(self, text: str) -> None:
        """Refuse control tokens of turns in the layout that a package gives for its medium."""
        for token in self.tokens.find.findall(text):
            if token in self._turns:
                raise InputError(
                    f"the layout of a package would write {token!r} into the prompt, which only "
                    "the chat template may; encode the image again"
                )

    @functools.cached_property
    def _turns(self) -> frozenset[str]:
        """The control tokens that the template writes for turns, seen in a short conversation."""
        texts = [self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""]
        for said in ("x", [{"type": "text", "text": "x"}]):
            roles = ("user", "assistant", "user")
            with contextlib.suppress(MessagesError):  # it takes no such conversation
                talk: list[Message] = [{"role": role, "content": said} for role in roles]
                texts.append(self._apply(talk, {}, True))
        return frozenset(token for text in texts for token in self.tokens.find.findall(text))

    def _expanded(
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


def _is_simple(message: Message) -> bool:
    """Whether Transformers passes this message to a template unchanged."""
    if message.keys() != {"role", "content"} or type(message["role"]) is not str:
        return False
    content = message["content"]
    return type(content) is str or (
        type(content) is list and all(type(s) is str for part in content for s in part.values())
    )


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
