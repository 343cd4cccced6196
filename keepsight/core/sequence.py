"""One prompt and its answer, as data.

The engine owns the steps; this says how far they have come and what came out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from keepsight.core.decoding.drafts import DraftCounts, Guesses
from keepsight.core.decoding.sampling import Detokenizer, Draws, Sampler
from keepsight.core.decoding.state import Lane
from keepsight.core.explain import CHANGED, Findings, Origin, explain
from keepsight.core.kernels.passes import Kernels
from keepsight.core.structured.grammars import Grammar
from keepsight.errors import KeepsightError
from keepsight.formats.package import Package
from keepsight.kinds import Options
from keepsight.media.features import Vision
from keepsight.prefix.match import Match
from keepsight.prefix.node import Node
from keepsight.prefix.prompt import Prompt, Range, Rule
from keepsight.report import Piece, Report, Usage, stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


def there(value: T | None) -> T:
    """What a sequence has once it has begun."""
    if value is None:
        raise KeepsightError("this sequence has not come so far")
    return value


@dataclass
class Wanted:
    """The places of a prompt behind which logits are wanted, in runs, and who takes them.

    `take` gets the place of the first row, and rows. It may get them again, if the prompt is read
    again.
    """

    runs: list[Range]
    take: Callable[[int, torch.Tensor], None]

    def cut(self, start: int, stop: int, rows: int) -> tuple[int, int]:
        """The end of a stretch that begins at `start`, and how many of its last tokens need
        logits: one run, of at most so many rows."""
        for first, last in self.runs:
            first = max(first, start)
            if first < min(last, stop):
                end = min(last, stop, first + max(1, rows))
                return end, end - first
        return stop, 0


@dataclass(eq=False)
class Sequence:
    """A prompt on its way to an answer. With `options` None only the prompt is read."""

    prompt: Prompt
    tenant: str = ""
    options: Options | None = None
    default_tokens: int = 1
    draws: Draws | None = None  # of all rows of its batch
    row: int = 0
    current: Callable[[], Prompt] | None = None  # the prompt again, if settings changed meanwhile
    tokenizer: PreTrainedTokenizerBase | None = None  # to turn tokens into text
    account: str = ""  # whose share of the model's time it uses
    owner: object = None  # who ends it with all others of its own
    keeps_node: bool = False  # its path stays held at the end, for the caller to release
    reads_again: bool = False  # compute the last logits even if they are remembered
    wanted: Wanted | None = None  # logits inside the prompt
    shares: tuple[int, ...] = ()  # where other prompts of its group part from it
    passing: bool = False  # what stands behind the last of these is not remembered
    on_piece: Callable[[Piece], None] | None = None  # called between two steps
    on_end: Callable[[], None] | None = None  # called once, with everything released

    # What stands, written by the engine.
    asked: float = field(default_factory=time.perf_counter)
    namespace: str = ""
    rule: Rule = field(default_factory=Rule)
    vision: Vision | None = None
    found: Findings | None = None
    told: Findings | None = None  # those that the report is made of
    lane: Lane | None = None  # from the first pass to the end
    node: Node | None = None  # the deepest snapshot on its path; held
    since: int = 0  # when the prompt was matched
    changes: int = 0  # of the model, when it began
    kernels: Kernels | None = None  # those that it began with
    changed: bool = False  # other weights computed a part: nothing more is remembered
    ends: list[int] = field(default_factory=list)  # where its next snapshots end
    packages: dict[int, Package] = field(default_factory=dict)  # features on their way
    sources: dict[int, str] = field(default_factory=dict)  # where features came from
    notes: dict[int, str] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)  # media that the store has from elsewhere
    sampler: Sampler | None = None
    detokenizer: Detokenizer | None = None
    guesses: Guesses | None = None
    tally: DraftCounts = field(default_factory=DraftCounts)
    generated: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None  # after the prompt
    again: Prompt | None = None  # prompt and answer so far, where a lost lane is read again
    pieces: deque[Piece] = field(default_factory=deque)
    milliseconds: dict[str, float] = field(default_factory=dict)
    computed: int = 0  # tokens that went through the model
    restarts: int = 0  # because the model changed while the prompt was read
    number: int = 0  # in the order in which they came
    passed: int = 0  # tokens computed for others while it waited
    served: int = 0  # the round in which it last had its turn
    alone: bool = False  # a pass beside others failed: it runs by itself
    cancelled: bool = False
    ended: bool = False
    error: BaseException | None = None

    @property
    def done(self) -> int:
        return 0 if self.lane is None else self.lane.length

    @property
    def reading(self) -> bool:
        """Whether what it reads is not read to its end."""
        return self.logits is None or self.again is not None

    @property
    def read(self) -> Prompt:
        """What has to be on its lane before it decodes."""
        return self.again or self.prompt

    @property
    def sought(self) -> Prompt:
        """What may be taken from memory: all before the first place whose logits are wanted."""
        if self.wanted is None or self.again is not None:
            return self.read
        first = self.wanted.runs[0][0] + 1
        if first >= len(self.prompt):
            return self.prompt
        return Prompt(self.prompt.ids[:first], self.prompt.media, self.prompt.ranges)

    @property
    def remaining(self) -> int:
        return len(self.read) - self.done

    @property
    def match(self) -> Match:
        """The longest remembered prefix found at first."""
        return there(self.found).match

    @property
    def room(self) -> int:
        """The most tokens that may follow the prompt."""
        return 0 if self.sampler is None else self.sampler.max_new_tokens

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Ids of the prompt and what follows it."""
        length = len(self.prompt)
        if start >= length:
            return np.array(self.generated[start - length : stop - length], dtype=np.int64)
        return self.prompt.ids[start:stop]

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """Positions of the prompt and what follows it. They go on as in `generate` of Transformers:
        behind the last token, not behind the largest position, which may belong to the last frame
        of a slow video."""
        known, length = there(there(self.lane).placed).positions, len(self.prompt)
        if stop <= length:
            return known[..., start:stop]
        return known[..., -1:] + torch.arange(start - length + 1, stop - length + 1)

    def whole(self, length: int) -> Prompt:
        """Prompt and answer as one prompt, cut to a length."""
        ids = np.concatenate([self.prompt.ids, self.generated])[:length].astype(np.int64)
        return Prompt(ids, self.prompt.media, self.prompt.ranges)

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    # -- what a call returns besides its text ------------------------------------------------------

    def stage(self, name: str) -> AbstractContextManager[None]:
        return stage(self.milliseconds, name)

    def last(self) -> Piece:
        """The piece that ends the answer, with its measurements."""
        rest, reason = "", self.sampler.finish_reason if self.sampler is not None else "stop"
        if self.detokenizer is not None:
            rest = self.detokenizer.rest()
            reason = "stop" if self.detokenizer.stopped else reason
        if self.cancelled:
            reason = "cancelled"
        grammar = (self.options or {}).get("response_format")
        reads = grammar.read if isinstance(grammar, Grammar) else None
        return Piece(rest, None, self.usage(), self.report(), reason, reads)

    def usage(self) -> Usage:
        images = len(self.prompt.media)
        encoded = sum(where == "tower" for where in self.sources.values())
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.generated),
            cached_tokens=self.told.cached_tokens if self.told is not None else 0,
            images=images,
            images_encoded=encoded,
            images_reused=images - encoded,
            **vars(self.tally),
        )

    def report(self) -> Report:
        """Why each stretch of the prompt was reused or computed."""
        if self.told is None:
            return Report()
        notes = dict(self.notes)
        if self.changed:
            notes[len(self.prompt.media)] = CHANGED
        return Report(
            segments=explain(self.prompt, self.rule, self.told, self._origin),
            milliseconds=dict(self.milliseconds),
            prompt_tokens=len(self.prompt),
            cached_tokens=self.told.cached_tokens,
            exactness="bits" if self.rule.kernels else "rounding",
            notes=[notes[medium] for medium in sorted(notes)],
        )

    def _origin(self, medium: int) -> Origin:
        its, vision, other = self.prompt.media[medium], self.vision, medium in self.others
        if vision is None:
            return Origin("tower")
        where = self.sources.get(medium) or vision.where(its)
        return Origin(where, where == "tower" and (other or vision.made_elsewhere(its)))
