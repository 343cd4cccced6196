"""Policies of the scheduler, as arithmetic: the next piece of work, and how much fits.

The prompt with the fewest remaining tokens comes first, so short chats do not wait for long ones;
of two equal ones the first is finished before the second begins. Each token computed for others
while one waits reduces its rank by a token, until it gets a turn. So a long prompt advances chunk
by chunk, however many short ones come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from transformers import PreTrainedModel

from keepsight.core.engine import Engine
from keepsight.errors import InputError

_OVERHEAD = 64 << 20  # bytes that could be read in a pass's fixed time


class Waiting(Protocol):
    """Something that waits for a turn."""

    number: int
    passed: int

    @property
    def remaining(self) -> int:
        """Tokens still to be computed."""


W = TypeVar("W", bound=Waiting)


def next_of(waiting: Sequence[W]) -> W:
    """The one whose turn it is."""
    return min(waiting, key=lambda one: (one.remaining - one.passed, one.number))


def had_its_turn(chosen: Waiting, others: Iterable[Waiting], tokens: int) -> None:
    """Note that tokens were computed for one while the others waited."""
    before = chosen.remaining + tokens
    for other in others:
        if other is not chosen:
            other.passed += tokens
            if other.remaining < before:  # it overtook a shorter one because it had waited
                chosen.passed = 0


class SequenceSizes:
    """The memory of sequences of one model."""

    def __init__(self, model: PreTrainedModel, engine: Engine) -> None:
        self.column = self.state = 0  # bytes per token, and bytes independent of length
        config = model.config.get_text_config()
        window = getattr(config, "sliding_window", None) or 4096
        for name, (dtype, *sizes) in engine.snapshot_pattern().items():
            count = dtype.itemsize
            for size in sizes:
                count *= size
            if name.startswith("kv "):
                self.column += count
            else:
                self.state += count * (window if ".keys." in name or ".values." in name else 1)
        exported = getattr(model, "exported", None)
        held = sum(p.nbytes for p in model.get_decoder().parameters())
        weights: int = held if exported is None else exported.decoder_bytes
        # A pass reads all weights once, however many take part.
        self.pass_: int = _OVERHEAD + weights

    def of(self, rows: int, columns: int) -> int:
        """Bytes of some sequences side by side, including padding."""
        return rows * (columns * self.column + self.state)

    def cost(self, rows: int, columns: int) -> int:
        """Bytes that one step of them reads; reading takes most of the time."""
        return self.pass_ + self.of(rows, columns)


PREFILL_PIECE = 512  # prompt tokens between two decode steps of others
WITHOUT_PASSES = 0.02  # seconds between two of them for prompts that need no pass


def check_bounds(
    running: int, waiting: int, tokens: int | None, ahead: float | None, piece: int = 1
) -> None:
    """Refuse impossible bounds by name."""
    for name, value, least in (
        ("max_running", running, 1),
        ("max_waiting", waiting, 0),
        ("batch_tokens", 1 if tokens is None else tokens, 1),
        ("prefill_piece", piece, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{name}={value!r}; expected a whole number of at least {least}")
    if ahead is not None and not (isinstance(ahead, int | float) and ahead >= 0):
        raise InputError(f"ahead={ahead!r}; expected seconds, or None for never")
