"""Reuses the work on earlier turns: only added messages are parsed, counted and searched.

The latest conversations of each tenant are kept message by message. Two messages are equal if all
their data is, including types and order: 1 equals neither True nor 1.0. Anything but plain data
never equals. Messages with media are parsed each time, because their media need new names; the
places of media in the text are reused.

The rendered text of exactly these messages is reused too, unless the template asks for the time or
for random numbers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from keepsight.core.rendering.control_tokens import Rendered
from keepsight.core.rendering.encodings import Encodings, TenantEncodings
from keepsight.core.rendering.latest import RecentEntries
from keepsight.core.rendering.lengths import characters
from keepsight.core.rendering.messages import listed, parse_message
from keepsight.core.rendering.template import ChatTemplate
from keepsight.kinds import Message

_FIELDS = ["role", "content"]
_TEXTS = 4  # rendered texts per conversation: with and without the beginning of an answer
_CHANGES = re.compile(r"\b(strftime_now|random)\b")  # functions that make a template's output vary

Key = Hashable  # types of plain data


@dataclass(frozen=True)
class ReadMessage:
    """A message as the template wants it, with facts needed later."""

    message: Message
    characters: int
    is_simple: bool  # only a role, texts and places of media
    may_forge: bool  # some text in it could be part of a control token


@dataclass(frozen=True, eq=False)
class Conversation:
    """Messages by their keys, as read for one template."""

    tenant: str
    template: ChatTemplate
    keys: list[Key]
    read: list[ReadMessage]
    texts: dict[Key, Rendered] = field(default_factory=dict)


class EarlierPrompts:
    """The latest prompts of all tenants: messages, texts and ids."""

    def __init__(self) -> None:
        self.texts, self.conversations = Encodings(), RecentEntries[Conversation]()

    def of(self, tenant: str) -> TenantPrompts:
        """The prompts of one tenant."""
        return TenantPrompts(tenant, self.texts.of(tenant), self.conversations)

    def clear(self, tenant: str | None = None) -> None:
        """Forget the prompts of one tenant, or of all."""
        self.texts.clear(tenant)
        self.conversations.clear(tenant)

    def __len__(self) -> int:
        return len(self.texts) + len(self.conversations)


@dataclass(frozen=True)
class TenantPrompts:
    """The latest prompts of one tenant."""

    tenant: str
    texts: TenantEncodings
    conversations: RecentEntries[Conversation]

    def read(self, messages: object, template: ChatTemplate) -> ReadConversation:
        """Read a conversation; parse only messages that were added."""
        given = listed(messages)
        media: list[tuple[str, object]] = []
        keys: list[Key] = []
        parsed: dict[int, Message] = {}
        for i, one in enumerate(given):
            key = _key_of_text(one)
            if key is None:
                parsed[i] = parse_message(one, i, media)
                try:
                    key = _key(parsed[i])
                except TypeError:
                    return read_anew(given, template)
            keys.append(key)

        def alike(one: Conversation) -> list[Key] | None:
            same = one.tenant == self.tenant and one.template is template
            return one.keys if same else None

        known, count = self.conversations.longest(keys, alike)
        if known is not None and count == len(keys) == len(known.keys):
            return ReadConversation(known.read, media, known)
        read = [] if known is None else known.read[:count]
        for i in range(count, len(given)):
            message = parsed[i] if i in parsed else parse_message(given[i], i, [])
            one = _read(message, template)
            if not one.is_simple:  # copy what the caller may change in place
                one = replace(one, message=copy.deepcopy(message))
            read.append(one)
        made = Conversation(self.tenant, template, keys, read)
        goes_on = known is not None and count == len(known.keys)
        self.conversations.put(made, known if goes_on else None)
        return ReadConversation(read, media, made)


@dataclass(frozen=True)
class ReadConversation:
    """A conversation as read: its messages and media, and the record to keep if it is plain
    data."""

    read: list[ReadMessage]
    media: list[tuple[str, object]]
    conversation: Conversation | None = None

    @property
    def characters(self) -> int:
        """The number of characters in all texts."""
        return sum(one.characters for one in self.read)

    def rendered(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        generate: bool,
        options: Mapping[str, object],
    ) -> Rendered:
        """The rendered text."""
        texts, how = self._texts(template, generate, options, tokenizer.special_tokens_map)
        if found := texts.get(how):
            return found
        messages = [one.message for one in self.read]
        simple = not options and all(one.is_simple for one in self.read)
        forges = any(one.may_forge for one in self.read)
        made = template.render(tokenizer, messages, generate, options, forges, simple)
        if len(texts) >= _TEXTS:
            texts.clear()
        texts[how] = made
        return made

    def _texts(self, template: ChatTemplate, *how: object) -> tuple[dict[Key, Rendered], Key]:
        """The remembered texts to search for one of these messages, and the key to search by."""
        if self.conversation is None or _CHANGES.search(template.source):
            return {}, ""
        try:
            return self.conversation.texts, _key(how)
        except TypeError:
            return {}, ""


def read_anew(messages: object, template: ChatTemplate) -> ReadConversation:
    """Read a conversation that nothing is remembered of."""
    media: list[tuple[str, object]] = []
    parsed = [parse_message(one, i, media) for i, one in enumerate(listed(messages))]
    return ReadConversation([_read(message, template) for message in parsed], media)


def _read(message: Message, template: ChatTemplate) -> ReadMessage:
    simple, forges = _is_simple(message), template.may_be_forged_in(message)
    return ReadMessage(message, characters(message), simple, forges)


def _key_of_text(message: object) -> Key | None:
    """The key of a usual message without media; None for all others."""
    if type(message) is not dict or [*message] != _FIELDS or type(message["role"]) is not str:
        return None
    content = message["content"]
    if type(content) is str:
        return message["role"], content
    if type(content) is not list:
        return None
    texts = [
        part["text"]
        for part in content
        if type(part) is dict and len(part) == 2 and part.get("type") == "text" and "text" in part
    ]
    if len(texts) < len(content) or not all(type(text) is str for text in texts):
        return None
    return message["role"], tuple(texts)


def _key(value: object) -> Key:
    """A key for plain data that is equal only if everything is; TypeError for other data."""
    kind = type(value)
    if kind is str or value is None:
        return value
    if kind in (bool, int):
        return kind, value
    if kind is float:
        return kind, repr(value)
    if kind in (list, tuple) and isinstance(value, list | tuple):
        return kind, *map(_key, value)
    if isinstance(value, dict):
        return kind, *((_key(name), _key(inside)) for name, inside in value.items())
    raise TypeError(f"a {kind.__name__} is no plain data")


def _is_simple(message: Message) -> bool:
    """Whether Transformers passes this message to a template unchanged."""
    if message.keys() != {"role", "content"} or type(message["role"]) is not str:
        return False
    content = message["content"]
    return type(content) is str or (
        type(content) is list and all(type(s) is str for part in content for s in part.values())
    )
