"""Control tokens as text: how they are written, a code for them, and the ids of texts with some.

Whoever renders text puts what looks like a control token and is none in code. Here it is read again
and becomes the ids of ordinary text.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from keepsight.core.encodings import TenantEncodings
from keepsight.errors import MessagesError
from keepsight.models import upstream

# Ideographs that hardly any text holds. Unlike private-use characters they print, so that nothing
# which writes a list or a record as text escapes them.
_RARE = (range(0x30000, 0x3134B), range(0x20000, 0x2A6D7))
_IS_RARE = re.compile("[\U00030000-\U0003134a\U00020000-\U0002a6d6]")
_NEVER = "(?!)"  # a pattern that nothing matches


class Code:
    """One rare character for each of some characters; none of those is in `taken`."""

    def __init__(self, characters: Collection[str], taken: Collection[str] = ()) -> None:
        free = (new for block in _RARE for new in map(chr, block) if new not in taken)
        pairs = list(zip(sorted(characters), free, strict=False))
        if len(pairs) < len(characters):
            raise MessagesError("the messages hold every character that could be used for another")
        self.characters = frozenset(new for _, new in pairs)
        self._put = {ord(old): new for old, new in pairs}
        self._read = {ord(new): old for old, new in pairs}
        self.runs = re.compile(f"([{''.join(new for _, new in pairs)}]+)" if pairs else "((?!))")

    def put(self, text: str) -> str:
        """A text in code."""
        return text.translate(self._put)

    def read(self, text: str) -> str:
        """The text, with coded control tokens decoded."""
        return self.runs.sub(lambda run: run[0].translate(self._read), text)


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation. What looks like a control token and is none is written in `code`."""

    text: str
    code: Code | None = None

    def plain(self, text: str) -> str:
        """A text made of this one, out of code."""
        return text if self.code is None else self.code.read(text)


class ControlTokens:
    """The control tokens of a model: how they are written, and their ids."""

    def __init__(self, names: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> None:
        # A single character is in every text, even where a tokenizer calls it special.
        self.names = sorted({n for n in names if len(n) > 1 and not n.isspace()})
        pattern = _any_of(self.names) or _NEVER
        self.find, self._cut = re.compile(pattern), re.compile(f"({pattern})")
        self.characters = frozenset("".join(self.names))
        edges = {c for name in self.names for c in (name[0], name[-1])}
        marks = edges | {c for c in self.characters if not (c.isalnum() or c.isspace() or c == "_")}
        # Whoever gives a token its beginning, its end or its punctuation gives one of these.
        self.marks = marks_of(marks)
        ids = {name: tokenizer.convert_tokens_to_ids(name) for name in self.names}
        self._ids = {n: i for n, i in ids.items() if i not in (None, tokenizer.unk_token_id)}

    def in_code(self, code: Code) -> re.Pattern[str]:
        """A pattern that finds control tokens as they are written in code."""
        return re.compile(_any_of(map(code.put, self.names)) or _NEVER)

    def encode(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rendered: Rendered,
        start: list[int],
        earlier: TenantEncodings | None = None,
    ) -> list[int] | np.ndarray:
        """The ids of a text, in which no control token is but those that it writes out of code.

        `start` is what the tokenizer puts before a text of its own accord. A text that begins as an
        `earlier` one did is tokenized from there on.
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
        if self._among(ids) - allowed:  # the tokenizer makes them of something else too
            pieces = [rendered.plain(piece) for piece in self._cut.split(text)]
            ids = [*lead, *self._joined(tokenizer, pieces, 0)]
        if forged := self._among(ids) - allowed:
            names = ", ".join(tokenizer.convert_ids_to_tokens(list(forged)))
            raise MessagesError(f"the tokenizer makes control tokens of plain text: {names}")
        return ids

    def _joined(
        self, tokenizer: PreTrainedTokenizerBase, pieces: list[str], literal: int
    ) -> Iterator[int]:
        """The ids of a text in pieces; in every second one, from `literal` on, all is text."""

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
        if self._among(ids):  # some models of a vocabulary know them as words: spell them
            return [i for c in text for i in upstream.encode_as_text(tokenizer, c)]
        return ids

    def _among(self, ids: list[int] | np.ndarray) -> Counter[int]:
        """How often each control token occurs among some ids."""
        found = np.asarray(ids, dtype=np.int64)
        return Counter(found[np.isin(found, list(self._ids.values()))].tolist())

    def _written(self, text: str) -> Counter[int]:
        """How often each is written in a text, by id."""
        return Counter(self._ids[name] for name in self.find.findall(text) if name in self._ids)


def marks_of(characters: Collection[str]) -> re.Pattern[str]:
    """A pattern that finds any of these characters."""
    return re.compile(f"[{re.escape(''.join(sorted(characters)))}]" if characters else _NEVER)


def rare_characters(texts: Iterable[str]) -> frozenset[str]:
    """The characters in some texts that a code may not use for them."""
    return frozenset(c for t in texts if not t.isascii() for c in _IS_RARE.findall(t))


def _any_of(words: Iterable[str]) -> str:
    """A pattern of the longest of some words; its time does not grow with their number."""
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
    """The ids of texts that follow others."""
    # Behind a line break, because SentencePiece puts a space before what begins a text.
    newline, *found = encode(["\n", *(f"\n{text}" for text in texts)])
    cut = len(newline)
    alone = [not cut or ids[:cut] != newline for ids in found]
    again = iter(encode([text for text, odd in zip(texts, alone, strict=True) if odd] or [""]))
    return [next(again) if odd else ids[cut:] for odd, ids in zip(alone, found, strict=True)]
