"""The ids of a rendered text. What stands between control tokens is tokenized once.

A tokenizer first splits a text at its added tokens and tokenizes each part by itself, so a text may
be cut before such a token. Tokenizers are treated so that pass a trial; for others a text is
tokenized whole. A tenant only finds parts of its own, so timing tells nothing about other tenants.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np
from transformers import PreTrainedTokenizerBase

from keepsight.errors import MessagesError
from keepsight.models import upstream
from keepsight.prompt.control_tokens import END, MARKED, START, ControlTokens, any_of

_BUDGET = 16 << 20  # bytes of parts, of all tenants
_BESIDES = 512  # approximate bytes of a part beside its text and ids
# Texts beside a cut in the trial: all kinds of spaces, combining accents, ligatures, scripts
# without spaces, joined emoji, digits, signs.
_BESIDE = (
    "x", " x", "x ", "  ", "\n", "\n\n x", "\t", "\u00a0", "\u2581", "\u0301e", "e\u0301", "\ufb01",
    "\u4e2d\u6587", "\U0001f469\u200d\U0001f467", "12 345", "'s", "<|", "|>", "\u0e33", "\uac01",
    "A.",
)  # fmt: skip


class Encodings:
    """Encodes texts with one tokenizer in its present state; thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: ControlTokens) -> None:
        self._tokenizer, self._tokens = tokenizer, tokens
        self._control = frozenset(tokens.ids.values())
        self._start: list[int] = tokenizer("")["input_ids"]  # put before every text
        backend = getattr(tokenizer, "backend_tokenizer", None)
        added = [] if backend is None else [*backend.get_added_tokens_decoder().values()]
        pattern = any_of(token.content for token in added if not token.normalized) or "(?!)"
        self._split = re.compile(f"({START}.*?{END}|{pattern})", re.DOTALL)
        self._seams = frozenset(
            token.content
            for token in added
            if token.special
            and not (token.normalized or token.lstrip or token.rstrip)
            and len(token.content) > 1
        )
        if any(token.single_word for token in added) or not self._may_be_cut():
            self._seams = frozenset()
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], np.ndarray] = OrderedDict()
        self.nbytes = 0

    def encode(self, text: str, tenant: str | None) -> np.ndarray:
        """The ids of a text with marked control tokens; without a tenant nothing is remembered."""
        bos = self._tokenizer.bos_token
        begun = bos is not None and text.startswith(bos)
        lead = [] if begun else self._start
        if not self._seams and START not in text:
            ids = self._tokenizer(text, add_special_tokens=not begun)["input_ids"]
            return self._checked(text, ids, lead)
        parts = self._parts(text) if self._seams else [text]
        if not self._seams:  # whole texts do not come again
            tenant = None
        known: dict[str, np.ndarray] = {}
        if tenant is not None:
            with self._lock:
                for part in parts:
                    if (made := self._kept.get((tenant, part))) is not None:
                        self._kept.move_to_end((tenant, part))
                        known[part] = made
        new = [part for part in dict.fromkeys(parts) if part not in known]
        known.update(zip(new, self._made(new), strict=True))
        if tenant is not None:
            with self._lock:
                for part in new:
                    if (tenant, part) not in self._kept:
                        self._kept[tenant, part] = known[part]
                        self.nbytes += _size(part, known[part])
                while self.nbytes > _BUDGET:
                    self._drop(next(iter(self._kept)))
        return np.concatenate([np.asarray(lead, dtype=np.int64), *(known[part] for part in parts)])

    def behind(self, text: str) -> np.ndarray:
        """The ids of a text that stands behind others; nothing is put before it."""
        return self._made([text])[0]

    def clear(self, tenant: str | None = None) -> None:
        """Forget the texts of one tenant, or of all."""
        with self._lock:
            for key in [key for key in self._kept if tenant in (None, key[0])]:
                self._drop(key)

    def __len__(self) -> int:
        return len(self._kept)

    def _drop(self, key: tuple[str, str]) -> None:
        self.nbytes -= _size(key[1], self._kept.pop(key))

    def _parts(self, text: str) -> list[str]:
        """The text, cut before each token where it may be cut."""
        first, *others = self._split.split(text)
        parts = [first]
        for token, behind in zip(others[::2], others[1::2], strict=True):
            if token in self._seams:
                parts.append(token + behind)
            else:
                parts[-1] += token + behind
        return [part for part in parts if part]

    def _made(self, parts: list[str]) -> list[np.ndarray]:
        """The ids of parts, without what the tokenizer puts before a text."""
        plain = [part for part in parts if START not in part]
        ids = iter(self._tokenizer(plain, add_special_tokens=False)["input_ids"] if plain else [])
        return [self._checked(p, self._typed(p) if START in p else next(ids)) for p in parts]

    def _typed(self, part: str) -> list[int]:
        try:
            return upstream.encode_marked(self._tokenizer, part)
        except ValueError:  # its vocabulary has a control token as a word: spell it
            spelled = MARKED.sub(lambda token: START.join(["", *token[1], ""]), part)
            return upstream.encode_marked(self._tokenizer, spelled)

    def _checked(self, part: str, ids: list[int], lead: Iterable[int] = ()) -> np.ndarray:
        """These ids, if all control tokens in them, but for a `lead`, are written in the text."""
        if not self._control.isdisjoint(ids):
            names = self._tokens.find.findall(MARKED.sub("\0", part) if START in part else part)
            written = Counter(self._tokens.ids.get(name, -1) for name in names)
            forged = Counter(i for i in ids if i in self._control) - written - Counter(lead)
            if forged:
                said = ", ".join(self._tokenizer.convert_ids_to_tokens(list(forged)))
                raise MessagesError(f"the tokenizer makes control tokens of plain text: {said}")
        return np.asarray(ids, dtype=np.int64)

    def _may_be_cut(self) -> bool:
        # Only Transformers' own classes, which pass a text to the library unchanged.
        tokenizer = self._tokenizer
        if not self._seams or not type(tokenizer).__module__.startswith("transformers."):
            return False
        befores = [f"a{beside}" for beside in _BESIDE]
        behinds = [f"{min(self._seams)}{beside}b" for beside in _BESIDE]
        wholes = [before + behind for before in befores for behind in behinds]
        first = tokenizer(befores, add_special_tokens=False)["input_ids"]
        last = tokenizer(behinds, add_special_tokens=False)["input_ids"]
        joined = [[*self._start, *before, *behind] for before in first for behind in last]
        return bool(tokenizer(wholes)["input_ids"] == joined)


def _size(part: str, ids: np.ndarray) -> int:
    return _BESIDES + 4 * len(part) + int(ids.nbytes)


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
    """Everything that decides the ids of a text and can be changed on a live tokenizer."""
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
