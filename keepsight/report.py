"""The measurements that a call returns besides its text: usage and a report. May import errors,
kinds and system.

The report answers "why was this slow?": for each stretch of the prompt it says what was reused and
from where, or that it was computed, and why (law 6: no silent miss).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.system import html


@dataclass(frozen=True)
class Segment:
    """One stretch of a prompt, reused or computed. Tokens `start` to `end`, end excluded."""

    kind: str  # "text" or the modality of a medium
    start: int
    end: int
    status: str  # "reused" or "computed"
    reason: str  # for reused: the tier; for computed: the reason
    medium: int | None = None  # index of the medium in the prompt
    features: str | None = None  # origin of a medium's features: memory, disk, tower, caller
    tier: str | None = None  # for reused: its tier, even if the reason is "whole prompt"
    key: str | None = None  # the image key of a medium, for pinning and deleting it

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """Its name for people: text, or a medium with its number, counted from 1."""
        return self.kind if self.medium is None else f"{self.kind} {self.medium + 1}"

    @property
    def why(self) -> str:
        """The reason for people; with the tier, if it is neither named nor memory."""
        said = self.tier in (None, "memory", self.reason)
        return self.reason if said else f"{self.reason}, from {self.tier}"


@dataclass
class Usage:
    """Counts as in the OpenAI API, plus images."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    images_encoded: int = 0
    images_reused: int = 0
    drafted_tokens: int = 0  # tokens guessed from earlier text and checked several in one pass
    accepted_tokens: int = 0  # how many of these were right

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def summary(self) -> str:
        """One line for people."""
        tokens = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens reused"
        if not self.images:
            return f"{tokens}, {self.completion_tokens} written"
        seen = f"{self.images_encoded} of {self.images} images encoded"
        return f"{tokens}, {seen}, {self.completion_tokens} written"


@dataclass(repr=False)
class Report:
    """What was reused, what was computed, and why; milliseconds per stage."""

    segments: list[Segment] = field(default_factory=list)
    milliseconds: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    exactness: str = "bits"  # how far it equals a fresh computation: "bits" or "rounding"
    notes: list[str] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the language model."""
        return self.prompt_tokens - self.cached_tokens

    def to_dict(self) -> Record:
        """Plain data for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "exactness": self.exactness,
            "segments": [dict(vars(segment)) for segment in self.segments],
            "milliseconds": {name: round(ms, 3) for name, ms in self.milliseconds.items()},
            "notes": self.notes,
        }

    @property
    def headline(self) -> str:
        """One line: tokens of the prompt, and how many of them were reused."""
        share = 100 * self.cached_tokens // max(1, self.prompt_tokens)
        return f"prompt {self.prompt_tokens} tokens, {self.cached_tokens} reused ({share} %)"

    def __str__(self) -> str:
        lines = [self.headline]
        for s in self.segments:
            seen = f"  [features: {s.features}]" if s.features else ""
            lines.append(f"  {s.start:>6}-{s.end:<6} {s.name:<9} {s.status:<8} {s.why}{seen}")
        if self.milliseconds:
            lines.append(f"  ms: {self._stages()}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Report: {self.headline}, {len(self.segments)} segments; print() shows them>"

    def _repr_html_(self) -> str:
        colours = {"reused": html.REUSED}
        parts = [
            (s.tokens, colours.get(s.status, html.COMPUTED), f"{s.name}: {s.status}, {s.why}")
            for s in self.segments
        ]
        rows = [
            (f"{s.start}-{s.end}", s.name, s.status, s.why, s.features or "") for s in self.segments
        ]
        head = ("tokens", "what", "status", "from, or why", "features")
        notes = [html.paragraph(f"note: {note}", soft=True) for note in self.notes]
        stages = [html.paragraph(f"ms: {self._stages()}", soft=True)] if self.milliseconds else []
        shown = [html.paragraph(self.headline), html.bar(parts), html.table(rows, head)]
        return "".join([*shown, *stages, *notes])

    def _stages(self) -> str:
        return ", ".join(f"{name} {ms:.1f}" for name, ms in self.milliseconds.items())


@dataclass(frozen=True)
class Shared:
    """One stretch that several prompts of a group have in common: read once."""

    start: int
    end: int
    prompts: int


@dataclass(repr=False)
class GroupReport:
    """What a group of prompts shared, what was computed, and how long it took."""

    prompts: int = 0  # different ones
    prompt_tokens: int = 0  # of all prompts, as if each was read alone
    computed_tokens: int = 0  # that went through the language model
    images: int = 0  # different ones
    images_encoded: int = 0
    shared: list[Shared] = field(default_factory=list)
    milliseconds: dict[str, float] = field(default_factory=dict)
    exactness: str = "bits"
    reports: list[Report] = field(default_factory=list)  # one for each prompt

    @property
    def cached_tokens(self) -> int:
        """Tokens that were remembered, or read once for several prompts."""
        return self.prompt_tokens - self.computed_tokens

    @property
    def usage(self) -> Usage:
        """The same as counts."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            images=self.images,
            images_encoded=self.images_encoded,
            images_reused=self.images - self.images_encoded,
        )

    def to_dict(self) -> Record:
        """Plain data for JSON."""
        return {
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "cached_tokens": self.cached_tokens,
            "images": self.images,
            "images_encoded": self.images_encoded,
            "shared": [vars(one) for one in self.shared],
            "milliseconds": {name: round(ms, 3) for name, ms in self.milliseconds.items()},
            "exactness": self.exactness,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.prompts} prompts of {self.prompt_tokens} tokens, {self.computed_tokens} "
            f"computed; {self.images_encoded} of {self.images} images encoded"
        ]
        lines += [f"  {s.start:>6}-{s.end:<6} shared by {s.prompts}" for s in self.shared]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<GroupReport: {str(self).splitlines()[0]}>"


@dataclass(repr=False)
class Reply:
    """An answer with its measurements. `str(reply)` is the text."""

    text: str
    usage: Usage
    report: Report
    tokens: list[int]
    finish_reason: str  # "stop" or "length"

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Reply:
        """Gather a streamed answer."""
        text, tokens, last = "", list[int](), None
        for piece in pieces:
            text += piece.text
            tokens += [] if piece.token is None else [piece.token]
            last = piece
        if last is None or last.usage is None or last.report is None:
            raise InputError("nothing was generated")
        return cls(text, last.usage, last.report, tokens, last.finish_reason or "stop")

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Reply {html.shortened(self.text)!r}: {self.usage.summary}>"

    def _repr_html_(self) -> str:
        report = html.details(self.usage.summary, self.report._repr_html_())
        return html.paragraph(self.text) + report


@dataclass(repr=False)
class Piece:
    """One streamed piece of an answer. The last one carries usage, report and finish reason."""

    text: str
    token: int | None = None
    usage: Usage | None = None
    report: Report | None = None
    finish_reason: str | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        last = f", the last: {self.usage.summary}" if self.usage else ""
        return f"<Piece {self.text!r}{last}>"


@contextmanager
def stage(milliseconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of a block to one stage of a report."""
    start = time.perf_counter()
    try:
        yield
    finally:
        spent = 1e3 * (time.perf_counter() - start)
        milliseconds[name] = milliseconds.get(name, 0.0) + spent
