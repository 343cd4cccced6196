"""Chat templates, and which control tokens of a rendered conversation the template itself wrote.

Everything from a caller is text: in messages, tools and template options, in values and keys, split
over several strings or completed by the template's characters. Only the template's own text writes
control tokens.

If no string of the caller could be part of a control token, the template is used as it is.
Otherwise the conversation is also rendered by a copy of the template whose own control tokens are
written in code, one rare character for each of theirs. Decoded, the text must be the same; then
everything in code is the template's and all else is text. A template that searches for tokens it
wrote itself may give another text. Then the caller's characters are put in code instead.

Templates also search for tokens in messages. They find them in answers of an assistant, so that
thoughts are cut out of a history as usual; in other messages they find none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from keepsight.core.rendering.control_tokens import (
    Code,
    ControlTokens,
    Rendered,
    marks_of,
    rare_characters,
)
from keepsight.core.rendering.template_source import TemplateSource
from keepsight.errors import InputError, MessagesError
from keepsight.kinds import Message, Record
from keepsight.models import upstream

Spans = set[tuple[int, int]]

# The role. Templates may build tokens from it, as Phi's does: '<|' + message.role + '|>'.
_ROLES = frozenset(
    {
        *("system", "user", "assistant", "tool", "developer", "function", "model", "observation"),
        *("ipython", "environment", "System", "User", "Assistant", "human", "gpt", "bot"),
    }
)
_ANSWERS = ("assistant", "model")
# Two short conversations for the trial of a copy.
_PROBES: tuple[list[Message], ...] = tuple(
    [{"role": role, "content": content} for role in ("user", "assistant", "user")]
    for content in ("x", [{"type": "text", "text": "x"}])
)


class ChatTemplate:
    """A template for one tokenizer's control tokens; `more` are texts that count as such."""

    def __init__(
        self, source: str, tokenizer: PreTrainedTokenizerBase, more: Iterable[str] = ()
    ) -> None:
        self.source = source
        self._parsed = TemplateSource(source)
        self.tokens = ControlTokens({*_names(tokenizer, self._parsed.texts), *more}, tokenizer)
        self._gaps = self._parsed.gaps(self.tokens)
        sought = "".join(self._parsed.looked_for(self.tokens))
        self._sought = marks_of(set(self.tokens.marks.findall(sought)))
        self._copy = self._in_code(frozenset())
        self._tried: bool | None = None
        self._turns: frozenset[str] | None = None

    def render(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: list[Message],
        generate: bool,
        options: Mapping[str, object],
        forges: bool | None = None,
        simple: bool = False,
    ) -> Rendered:
        """Render a conversation; what a caller typed as a control token is in code.

        `forges` gives `may_be_forged_in(messages)` if known; `simple` says that messages are plain
        data with only roles and texts.
        """
        call = _Call(tokenizer, messages, generate, options)
        if forges is None:
            forges = any(map(self.may_be_forged_in, messages))
        if not forges and not self._may_forge(options):
            plain = call.as_it_is(self.source) if simple else None
            return Rendered(call.apply(self.source) if plain is None else plain)
        call.apply(self.source)  # the error names what the template refuses
        call = call.as_data()
        taken = rare_characters(_strings([call.messages, call.options]))
        copy = self._in_code(taken) if taken else self._copy
        call = call.each(lambda given: _coded(given, self._sought, copy.callers), _ANSWERS)
        text = call.apply(self.source)
        own = self._by_copy(call, text, copy) if self._usable(tokenizer) else None
        if own is None:
            text = call.each(lambda given: self._hidden(given, copy.callers)).apply(self.source)
            own = {found.span() for found in self.tokens.find.finditer(text)}
        return self._guarded(copy.callers.read(text), own, copy.callers)

    def check_layout(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        """Refuse control tokens of turns in the layout that a package gives for its medium."""
        if self._turns is None:
            calls = [_Call(tokenizer, probe, True, {}) for probe in _PROBES]
            texts = [call.tried(self.source) or "" for call in calls]
            texts += [tokenizer.bos_token or "", tokenizer.eos_token or ""]
            self._turns = frozenset(t for text in texts for t in self.tokens.find.findall(text))
        for token in self.tokens.find.findall(text):
            if token in self._turns:
                raise InputError(
                    f"the layout of a package would write {token!r} into the prompt, which only "
                    "the chat template may; encode the image again"
                )

    def _guarded(self, text: str, own: Spans, code: Code) -> Rendered:
        """A text with everything in code that looks like a control token, except the template's own
        tokens."""
        made, cursor = [], 0
        for start, end in [*sorted(own), (len(text), len(text))]:
            if start >= cursor:
                between = self.tokens.find.sub(lambda found: code.put(found[0]), text[cursor:start])
                made += [between, text[start:end]]
                cursor = end
        return Rendered("".join(made), code)

    # -- whose text it is ------------------------------------------------------------------------

    def may_be_forged_in(self, message: Message) -> bool:
        """Whether anything in a message could be part of a control token."""
        return any(map(self._may_forge, _given(message)))

    def _may_forge(self, given: object) -> bool:
        """Whether any string of the caller could be part of a control token."""
        if isinstance(given, str):
            return self.tokens.marks.search(given) is not None or self._fills_gap(given)
        if given is None or isinstance(given, int | float):
            return self._fills_gap(str(given))
        if isinstance(given, Mapping):
            return any(self._may_forge(one) for pair in given.items() for one in pair)
        return not isinstance(given, list | tuple) or any(map(self._may_forge, given))

    def _fills_gap(self, text: str) -> bool:
        """Whether the template's own text could complete it to a control token."""
        inner = text.strip()
        return bool(inner) and inner in self._gaps

    def _hidden(self, given: str, code: Code) -> str:
        """A caller's string with everything in code that could be part of a control token."""
        if given not in self._parsed.looked_up and self._fills_gap(given):
            return code.put(given)
        return _coded(given, self.tokens.marks, code)

    def _usable(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the copy writes every control token of an empty conversation in code."""
        if self._tried is None:
            self._tried = bool(self._parsed.words) and all(
                self._writes_all(_Call(tokenizer, probe, True, {})) for probe in _PROBES
            )
        return self._tried

    def _writes_all(self, call: _Call) -> bool:
        text = call.tried(self.source)
        if text is None:  # it accepts no such conversation
            return True
        own = self._by_copy(call, text, self._copy)
        return own is not None and {m.span() for m in self.tokens.find.finditer(text)} <= own

    def _by_copy(self, call: _Call, text: str, copy: _Copy) -> Spans | None:
        """Places of the template's own tokens in a text; None if the copy renders another text."""
        marked = call.in_code(copy.templates).tried(copy.source)
        if marked is None or copy.templates.read(marked) != text:
            return None
        own = {found.span() for found in copy.own.finditer(marked)}
        for found in self.tokens.find.finditer(text):
            parts = copy.templates.runs.split(marked[slice(*found.span())])
            if len(parts) == 5 and parts[0] == parts[4] == "" and parts[2] in _ROLES:
                own.add(found.span())
        return own

    def _in_code(self, taken: frozenset[str]) -> _Copy:
        taken |= rare_characters([self.source, *self.tokens.names])
        templates = Code(self.tokens.characters, taken)
        callers = Code(self.tokens.characters, taken | templates.characters)
        source = self._parsed.rewritten(self.tokens, templates)
        return _Copy(source, self.tokens.in_code(templates), templates, callers)


@dataclass(frozen=True)
class _Copy:
    """A copy of a template with its own control tokens in code, as found by `own`."""

    source: str
    own: re.Pattern[str]
    templates: Code
    callers: Code


@dataclass(frozen=True)
class _Call:
    """One rendering: template, messages and options."""

    tokenizer: PreTrainedTokenizerBase
    messages: list[Message]
    generate: bool
    options: Mapping[str, object]

    def apply(self, source: str) -> str:
        """Render the conversation."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                self.messages,
                tokenize=False,
                add_generation_prompt=self.generate,
                chat_template=source,
                **self.options,
            )
        except Exception as error:  # a template raises any exception its author chose
            raise MessagesError(f"the chat template refused the messages: {error}") from error
        return text

    def tried(self, source: str) -> str | None:
        """Render the conversation; None if the template refuses it."""
        try:
            return self.apply(source)
        except MessagesError:
            return None

    def as_it_is(self, source: str) -> str | None:
        """Render messages that Transformers would pass to the template unchanged; None if it may
        change them."""
        template = upstream.compiled_template(source)
        apply = getattr(self.tokenizer.apply_chat_template, "__func__", None)
        if template is None or apply is not PreTrainedTokenizerBase.apply_chat_template:
            return None
        named = self.tokenizer.special_tokens_map
        try:
            return template.render(
                messages=self.messages,
                tools=None,
                documents=None,
                add_generation_prompt=self.generate,
                **named,
            )
        except Exception as error:  # a template raises any exception its author chose
            raise MessagesError(f"the chat template refused the messages: {error}") from error

    def as_data(self) -> _Call:
        """The value as plain data, as a template sees it."""
        options = dict(self.options)
        if isinstance(tools := options.get("tools"), list | tuple):
            options["tools"] = [_schema(tool) for tool in tools]
        messages, options = upstream.plain_data(self.messages), upstream.plain_data(options)
        return _Call(self.tokenizer, messages, self.generate, options)

    def each(self, change: Callable[[str], str], but_of: Collection[str] = ()) -> _Call:
        """Messages with every string of the caller changed, except in messages of some roles."""

        def changed(value: object) -> Any:
            if isinstance(value, dict):
                return {changed(name): changed(one) for name, one in value.items()}
            if isinstance(value, list | tuple):
                return [changed(one) for one in value]
            return change(value) if isinstance(value, str) else value

        messages = []
        for message in self.messages:
            role = message["role"]
            made = message if role in but_of else changed(message)
            messages.append({**made, "role": role} if role in _ROLES else made)
        options = {name: changed(value) for name, value in self.options.items()}
        return _Call(self.tokenizer, messages, self.generate, options)

    def in_code(self, code: Code) -> _Call:
        """The same rendering with the special tokens of the tokenizer in code."""

        def put(value: object) -> object:
            if isinstance(value, list | tuple):
                return [put(one) for one in value]
            return code.put(value) if isinstance(value, str) else value

        own = {name: put(value) for name, value in self.tokenizer.special_tokens_map.items()}
        return _Call(self.tokenizer, self.messages, self.generate, {**own, **self.options})


def _given(message: Message) -> Iterator[object]:
    """The caller's data in a message, without its structure."""
    for name, value in message.items():
        if name == "content" and isinstance(value, list):
            yield from (part["text"] for part in value if "text" in part)
        elif name != "role" or value not in _ROLES:
            yield from (name, value)


def _schema(tool: Record | Callable[..., object]) -> Record:
    """A tool as a record, from a record or from a function with type hints and a docstring."""
    return tool if isinstance(tool, dict) else dict(transformers.utils.get_json_schema(tool))


def _coded(text: str, marks: re.Pattern[str], code: Code) -> str:
    return marks.sub(lambda mark: code.put(mark[0]), text)


def _names(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[str]:
    """Special tokens, and other added tokens that the template writes or the tokenizer lists."""
    listed = set(getattr(tokenizer, "chat_control_tokens", None) or ())
    written = "\0".join(texts)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or token.content in listed or token.content in written:
            yield token.content
    yield from tokenizer.all_special_tokens


def _strings(value: object) -> Iterator[str]:
    """Every string in plain data, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _strings(pair)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)
