"""Control tokens as text: their spelling, a code for them, and token ids of text that holds some.

The renderer writes text that only looks like a control token in code. This module reads the code
back and gives such text the ids of ordinary text.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from keepsight.core.rendering.encodings import TenantEncodings
from keepsight.errors import MessagesError
from keepsight.models import upstream

# Rare ideographs. Unlike private-use characters they print, so no tool escapes them when it writes
# a list or a record as text.
_RARE = (range(0x30000, 0x3134B), range(0x20000, 0x2A6D7))
_IS_RARE = re.compile("[\U00030000-\U0003134a\U00020000-\U0002a6d6]")
_NEVER = "(?!)"  # a pattern that nothing matches


class Code:
    """A code: one rare character for each of some characters; all outside of `taken`."""

    def __init__(self, characters: Collection[str], taken: Collection[str] = ()) -> None:
        free = (new for block in _RARE for new in map(chr, block) if new not in taken)
        pairs = list(zip(sorted(characters), free, strict=False))
        if len(pairs) < len(characters):
            raise MessagesError("the messages use every character that the code could use")
        self.characters = frozenset(new for _, new in pairs)
        self._put = {ord(old): new for old, new in pairs}
        self._read = {ord(new): old for old, new in pairs}
        self.runs = re.compile(f"([{''.join(new for _, new in pairs)}]+)" if pairs else "((?!))")

    def put(self, text: str) -> str:
        """Encode a text."""
        return text.translate(self._put)

    def read(self, text: str) -> str:
        """Decode a text, including its coded control tokens."""
        return self.runs.sub(lambda run: run[0].translate(self._read), text)


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation. Text that only looks like a control token is written in `code`."""

    text: str
    code: Code | None = None

    def plain(self, text: str) -> str:
        """Decode a text that was cut out of this one."""
        return text if self.code is None else self.code.read(text)


class ControlTokens:
    """The control tokens of a model: their spelling and their ids."""

    def __init__(self, names: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> None:
        # A single character occurs in ordinary text, even if a tokenizer calls it special.
        self.names = sorted({n for n in names if len(n) > 1 and not n.isspace()})
        pattern = _any_of(self.names) or _NEVER
        self.find, self._cut = re.compile(pattern), re.compile(f"({pattern})")
        self.characters = frozenset("".join(self.names))
        edges = {c for name in self.names for c in (name[0], name[-1])}
        marks = edges | {c for c in self.characters if not (c.isalnum() or c.isspace() or c == "_")}
        # To forge a token, a text must hold its beginning, its end or its punctuation.
        self.marks = marks_of(marks)
        ids = {name: tokenizer.convert_tokens_to_ids(name) for name in self.names}
        self._ids = {n: i for n, i in ids.items() if i not in (None, tokenizer.unk_token_id)}

    def in_code(self, code: Code) -> re.Pattern[str]:
        """A pattern that finds control tokens written in code."""
        return re.compile(_any_of(map(code.put, self.names)) or _NEVER)

    def encode(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rendered: Rendered,
        start: list[int],
        earlier: TenantEncodings | None = None,
    ) -> list[int] | np.ndarray:
        """The ids of a text; only control tokens outside of the code become control tokens.

        `start` is what the tokenizer puts before every text. If the text begins like an `earlier`
        one, only the rest is tokenized.
        """
        text, code = rendered.text, rendered.code
        bos = tokenizer.bos_token
        written = bos is not None and text.startswith(bos)
        lead = [] if written else start
        pieces = [text] if code is None else code.runs.split(text)
        if len(pieces) == 1 and earlier is not None:

            def clean(ids: np.ndarray, text: str, begins: bool) -> bool:
                return not self._among(ids) - self._written(text) - Counter(lead if begins else ())

            found = earlier.encode(tokenizer, text, not written, clean)
            if found is not None:
                return found
        if len(pieces) == 1:
            ids: list[int] = tokenizer(text, add_special_tokens=not written)["input_ids"]
        else:
            ids = [*lead, *self._joined(tokenizer, [*map(rendered.plain, pieces)], 1)]
        allowed = self._written(text) + Counter(lead)
        if self._among(ids) - allowed:  # the tokenizer also makes control tokens of other text
            pieces = [rendered.plain(piece) for piece in self._cut.split(text)]
            ids = [*lead, *self._joined(tokenizer, pieces, 0)]
        if forged := self._among(ids) - allowed:
            names = ", ".join(tokenizer.convert_ids_to_tokens(list(forged)))
            raise MessagesError(f"the tokenizer makes control tokens of plain text: {names}")
        return ids

    def _joined(
        self, tokenizer: PreTrainedTokenizerBase, pieces: list[str], literal: int
    ) -> Iterator[int]:
        """Ids of a text in pieces. Every second one, starting with `literal`, is plain text."""

        def encode(texts: list[str]) -> list[list[int]]:
            found: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
            return found

        def spell(texts: list[str]) -> list[list[int]]:
            known = {text: self._as_text(tokenizer, text) for text in set(texts)}
            return [known[text] for text in texts]

        ids: list[list[int]] = [[]] * len(pieces)
        ids[literal::2] = _behind(pieces[literal::2], spell)
        ids[1 - literal :: 2] = _behind(pieces[1 - literal :: 2], encode)
        ids[0] = (encode if literal else spell)(pieces[:1])[0]
        return itertools.chain.from_iterable(ids)

    def _as_text(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        ids = upstream.encode_as_text(tokenizer, text)
        if self._among(ids):  # some vocabulary models know them as words: spell them in characters
            return [i for c in text for i in upstream.encode_as_text(tokenizer, c)]
        return ids

    def _among(self, ids: list[int] | np.ndarray) -> Counter[int]:
        """How often each control token occurs in a list of ids."""
        found = np.asarray(ids, dtype=np.int64)
        return Counter(found[np.isin(found, list(self._ids.values()))].tolist())

    def _written(self, text: str) -> Counter[int]:
        """How often each control token is written in a text, by id."""
        return Counter(self._ids[name] for name in self.find.findall(text) if name in self._ids)


def marks_of(characters: Collection[str]) -> re.Pattern[str]:
    """A pattern that matches any of these characters."""
    return re.compile(f"[{re.escape(''.join(sorted(characters)))}]" if characters else _NEVER)


def rare_characters(texts: Iterable[str]) -> frozenset[str]:
    """The characters of some texts that their code may not use."""
    return frozenset(c for t in texts if not t.isascii() for c in _IS_RARE.findall(t))


def _any_of(words: Iterable[str]) -> str:
    """A pattern for the longest of some words; its run time does not grow with their number."""
    rests: dict[str, list[str]] = {}
    ends = False
    for word in words:
        ends = ends or not word
        if word:
            rests.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(first) + _any_of(rest) for first, rest in sorted(rests.items())]
    if len(branches) > 1 or (branches and ends):
        return f"(?:{'|'.join(branches)})" + ("?" if ends else "")
    return branches[0] if branches else ""


def _behind(texts: list[str], encode: Callable[[list[str]], list[list[int]]]) -> list[list[int]]:
    """The ids of texts that follow other text."""
    # After a line break, because SentencePiece adds a space before the start of a text.
    newline, *found = encode(["\n", *(f"\n{text}" for text in texts)])
    cut = len(newline)
    alone = [not cut or ids[:cut] != newline for ids in found]
    again = iter(encode([text for text, odd in zip(texts, alone, strict=True) if odd] or [""]))
    return [next(again) if odd else ids[cut:] for odd, ids in zip(alone, found, strict=True)]
