"""Tokenizes only the added part of a text that begins like an earlier one.

A tokenizer first splits a text at its added tokens and tokenizes each part by itself. So a text may
be cut before an added token: the ids before it do not change. Only tokenizers that pass a trial
(`Seams`) are treated so; the trial is repeated when the tokenizer changes. A few tokens before the
new ones are always made again and compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from keepsight.core.rendering.latest import RecentEntries

LEAST = 512  # characters; shorter texts are tokenized whole
_AGAIN = 2  # how many seams before the end of the common part tokenizing starts again
# Texts beside a seam in the trial: all kinds of spaces, combining accents, ligatures, scripts
# without spaces, joined emoji, digits, signs.
_BESIDE = (
    "x", " x", "x ", "  ", "\n", "\n\n x", "\t", "\u00a0", "\u2581", "\u0301e", "e\u0301", "\ufb01",
    "\u4e2d\u6587", "\U0001f469\u200d\U0001f467", "12 345", "'s", "<|", "|>", "\u0e33", "\uac01",
    "A.",
)  # fmt: skip
Clean = Callable[[np.ndarray, str, bool], bool]


@dataclass(frozen=True, eq=False)
class EncodedText:
    """A text and its ids. It may be cut before each seam, given as (character, token)."""

    tenant: str
    seams_of: Seams
    special: bool
    text: str
    ids: np.ndarray
    characters: list[int]
    tokens: list[int]


class Seams:
    """The added tokens before which a tokenizer's texts may be cut."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._state = _state(tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        added = {} if backend is None else backend.get_added_tokens_decoder()
        self.longest = max((len(token.content) for token in added.values()), default=0)
        self.names = {
            number: token.content
            for number, token in added.items()
            if token.special
            and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
            and len(token.content) > 1
        }
        if not self._are_shown(tokenizer):
            self.names = {}
        self.ids = np.array(sorted(self.names), dtype=np.int64)

    def hold(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the tokenizer is unchanged since the trial."""
        return self._state == _state(tokenizer)

    def _are_shown(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        # Only Transformers' own classes, which pass a text to the library unchanged.
        if not self.names or not type(tokenizer).__module__.startswith("transformers."):
            return False
        name = next(iter(self.names.values()))
        befores = [f"a{beside}" for beside in _BESIDE]
        behinds = [f"{name}{beside}b" for beside in _BESIDE]
        wholes = [before + behind for before in befores for behind in behinds]
        first = tokenizer(befores)["input_ids"]
        last = tokenizer(behinds, add_special_tokens=False)["input_ids"]
        joined = [before + behind for before in first for behind in last]
        return bool(tokenizer(wholes)["input_ids"] == joined)

    def find(self, text: str, ids: np.ndarray, places: list[tuple[int, int]]) -> list[list[int]]:
        """The seams of a text, given the place of each token: (character, token) pairs."""
        found: list[list[int]] = [[], []]
        for token in np.flatnonzero(np.isin(ids, self.ids)).tolist():
            start, end = places[token]
            if end > start and text[start:end] == self.names[int(ids[token])]:
                found[0].append(start)
                found[1].append(token)
        return found


class Encodings(RecentEntries[EncodedText]):
    """The latest texts, and the tokenizers whose texts may be cut.

    Thread-safe if each thread has its own tokenizer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tried: list[tuple[PreTrainedTokenizerBase, Seams]] = []

    def of(self, tenant: str) -> TenantEncodings:
        """The texts of one tenant."""
        return TenantEncodings(self, tenant)

    def seams(self, tokenizer: PreTrainedTokenizerBase) -> Seams:
        """Where texts of this tokenizer may be cut, in its present state."""
        with self._lock:
            tried = next((seams for known, seams in self._tried if known is tokenizer), None)
        if tried is not None and tried.hold(tokenizer):
            return tried
        seams = Seams(tokenizer)
        with self._lock:
            self._tried = [pair for pair in self._tried if pair[0] is not tokenizer][-7:]
            self._tried.append((tokenizer, seams))
        return seams


@dataclass(frozen=True)
class TenantEncodings:
    """The latest texts of one tenant."""

    _all: Encodings
    tenant: str

    def encode(
        self, tokenizer: PreTrainedTokenizerBase, text: str, special: bool, clean: Clean
    ) -> np.ndarray | None:
        """The ids of a text, or None if it must be tokenized in another way.

        With `special` the tokenizer adds its start tokens. `clean` is called with new ids, their
        text and whether that text is the beginning; it tells whether the ids are as expected.
        """
        if len(text) < LEAST:
            return None
        seams = self._all.seams(tokenizer)
        if not seams.names:
            return None

        def alike(one: EncodedText) -> str | None:
            same = one.tenant == self.tenant and one.seams_of is seams and one.special == special
            return one.text if same else None

        begun, shared = self._all.longest(text, alike)
        character, token, until = (0, 0, 0) if begun is None else _cut(begun, shared, seams)
        rest = text[character:]
        made = tokenizer(
            rest, add_special_tokens=special and not character, return_offsets_mapping=True
        )
        ids = np.asarray(made["input_ids"], dtype=np.int64)
        if begun is not None and not np.array_equal(ids[: until - token], begun.ids[token:until]):
            self._all.clear(self.tenant)
            return None
        if not clean(ids, rest, not character):
            return None
        characters, tokens = seams.find(rest, ids, made["offset_mapping"])
        if begun is not None:
            count = bisect_right(begun.characters, character - 1)
            ids = np.concatenate([begun.ids[:token], ids])
            characters = begun.characters[:count] + [character + one for one in characters]
            tokens = begun.tokens[:count] + [token + one for one in tokens]
        goes_on = begun is not None and shared == len(begun.text)
        whole = EncodedText(self.tenant, seams, special, text, ids, characters, tokens)
        self._all.put(whole, begun if goes_on else None)
        return ids


def _cut(begun: EncodedText, shared: int, seams: Seams) -> tuple[int, int, int]:
    """Where to cut a text that shares this much: the character, its token, and the token up to
    which both texts surely agree."""
    # A longer token could begin at or before the last seam and end in the new text.
    count = bisect_right(begun.characters, shared - seams.longest)
    place = max(count - _AGAIN, 0)
    if not count or not begun.characters[place]:
        return 0, 0, 0
    return begun.characters[place], begun.tokens[place], begun.tokens[count - 1]


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
    """Everything that decides the ids of a text and can be changed on a live tokenizer, except what
    changes while it encodes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return (tokenizer,)
    model = backend.model
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    names = ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
    return (
        *(type(tokenizer), backend, type(model), *map(repr, parts)),
        *(getattr(model, name, None) for name in names),
        *(backend.get_added_tokens_decoder(), backend.get_vocab_size(with_added_tokens=False)),
    )


def _state(tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    literal = getattr(backend, "encode_special_tokens", None)
    split = getattr(tokenizer, "split_special_tokens", None)
    return (*tokenizer_state(tokenizer), literal, split)
