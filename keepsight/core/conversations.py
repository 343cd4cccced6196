"""Conversations that go on: only messages that were added are parsed, counted and searched.

The latest conversations of each tenant are remembered message by message. Two messages are the
same where all data in them is, types and order too: 1 is neither True nor 1.0, and what is no plain
data is never the same. Messages with media are parsed each time, for what they show is named anew;
the places of media in the text are as they were.

A text that was rendered of exactly these messages is taken as it was, unless the template asks for
the time or for chance.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from keepsight.core.control_tokens import Rendered
from keepsight.core.encodings import Encodings, TenantEncodings
from keepsight.core.latest import Latest
from keepsight.core.lengths import characters
from keepsight.core.messages import listed, parse_message
from keepsight.core.template import ChatTemplate
from keepsight.kinds import Message

_FIELDS = ["role", "content"]
_TEXTS = 4  # rendered texts of one conversation: with and without the beginning of an answer
_CHANGES = re.compile(r"\b(strftime_now|random)\b")  # what a template may ask for that is not given

Key = Hashable  # of plain data


@dataclass(frozen=True)
class ReadMessage:
    """A message as the template wants it, and what must be known of it."""

    message: Message
    characters: int
    is_simple: bool  # a role and texts or places of media, and nothing else
    may_forge: bool  # something in it could be a part of a control token


@dataclass(frozen=True, eq=False)
class Conversation:
    """Messages by their keys, as they were read for one template."""

    tenant: str
    template: ChatTemplate
    keys: list[Key]
    read: list[ReadMessage]
    texts: dict[Key, Rendered] = field(default_factory=dict)


class EarlierPrompts:
    """What is remembered of the latest prompts: their messages, and their texts with ids."""

    def __init__(self) -> None:
        self.texts, self.conversations = Encodings(), Latest[Conversation]()

    def of(self, tenant: str) -> TenantPrompts:
        """Those of one tenant."""
        return TenantPrompts(tenant, self.texts.of(tenant), self.conversations)

    def clear(self, tenant: str | None = None) -> None:
        """Forget those of one tenant, or of all."""
        self.texts.clear(tenant)
        self.conversations.clear(tenant)

    def __len__(self) -> int:
        return len(self.texts) + len(self.conversations)


@dataclass(frozen=True)
class TenantPrompts:
    """The latest prompts of one tenant."""

    tenant: str
    texts: TenantEncodings
    conversations: Latest[Conversation]

    def read(self, messages: object, template: ChatTemplate) -> ReadConversation:
        """A conversation, of which only what was added is read."""
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
            if not one.is_simple:  # what the caller may change in place is copied
                one = replace(one, message=copy.deepcopy(message))
            read.append(one)
        made = Conversation(self.tenant, template, keys, read)
        goes_on = known is not None and count == len(known.keys)
        self.conversations.put(made, known if goes_on else None)
        return ReadConversation(read, media, made)


@dataclass(frozen=True)
class ReadConversation:
    """What a conversation says and shows; as what it is remembered, where it is plain data."""

    read: list[ReadMessage]
    media: list[tuple[str, object]]
    conversation: Conversation | None = None

    @property
    def characters(self) -> int:
        """Of all texts in it."""
        return sum(one.characters for one in self.read)

    def rendered(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        generate: bool,
        options: Mapping[str, object],
    ) -> Rendered:
        """Its text."""
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
        """The texts among which one of these messages is looked for, and by what."""
        if self.conversation is None or _CHANGES.search(template.source):
            return {}, ""
        try:
            return self.conversation.texts, _key(how)
        except TypeError:
            return {}, ""


def read_anew(messages: object, template: ChatTemplate) -> ReadConversation:
    """A conversation of which nothing is remembered."""
    media: list[tuple[str, object]] = []
    parsed = [parse_message(one, i, media) for i, one in enumerate(listed(messages))]
    return ReadConversation([_read(message, template) for message in parsed], media)


def _read(message: Message, template: ChatTemplate) -> ReadMessage:
    simple, forges = _is_simple(message), template.may_be_forged_in(message)
    return ReadMessage(message, characters(message), simple, forges)


def _key_of_text(message: object) -> Key | None:
    """The key of a message of the usual form that shows nothing; None for all others."""
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
    """Plain data so that two are equal only where everything is; a TypeError for other data."""
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
    """Whether Transformers hands a message to a template as it is."""
    if message.keys() != {"role", "content"} or type(message["role"]) is not str:
        return False
    content = message["content"]
    return type(content) is str or (
        type(content) is list and all(type(s) is str for part in content for s in part.values())
    )
