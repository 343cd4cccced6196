"""The gated delta rule, with results that do not depend on where a sequence is cut.

Tokens are computed in chunks of 64 that start at multiples of 64 of the sequence, and in blocks of
16 inside them, wherever a pass begins or ends. What is kept of a sequence is the state at the last
chunk start, and the keys, values, decays and rates of the tokens after it. The next pass recomputes
the open block, in products of the same sizes, and returns only the new rows. So a token is computed
alike in a prompt, in any piece of it, and in decoding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

GRID = 64
BLOCK = 16
_TRIED = 150  # tokens in a trial
_PIECES = (1, 2, 5, 31, 64, 65, 66, 128, 149)


@dataclass(frozen=True)
class DeltaHeads:
    """The number and width of the heads of keys and of values."""

    keys: int
    values: int
    key_width: int
    value_width: int

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """The sizes of a token's row: keys, values, decays and rates."""
        return self.keys * self.key_width, self.values * self.value_width, self.values, self.values


@dataclass(frozen=True, eq=False)
class GridState:
    """State of a sequence at a token: the state at the last chunk start, and the rows after it."""

    state: torch.Tensor  # value heads x key width x value width
    rows: torch.Tensor


@dataclass(eq=False)
class _ChunkReads:
    """What rows of chunks read: from the keys of their chunk, and from the state before it."""

    system: torch.Tensor  # what they subtract of earlier rows' writes; ones on the diagonal
    scores: torch.Tensor
    readers: torch.Tensor  # the rows as keys, then as queries
    values: torch.Tensor


class OpenSequence:
    """One growing sequence."""

    def __init__(self, heads: DeltaHeads, grid_state: GridState | None = None) -> None:
        self.heads = heads
        self._room = torch.zeros(GRID, sum(heads.parts))
        self._made = False  # the keys and writes below belong to the rows
        self._keys = torch.zeros(heads.values, GRID, heads.key_width)
        self._written = torch.zeros(heads.values, GRID, heads.value_width)
        self.count = 0 if grid_state is None else len(grid_state.rows)
        if grid_state is None:
            self.state = torch.zeros(heads.values, heads.key_width, heads.value_width)
        else:
            self.state = grid_state.state
            self._room[: self.count] = grid_state.rows

    @property
    def rows(self) -> torch.Tensor:
        """The rows after the last chunk start."""
        return self._room[: self.count]

    def grid_state(self) -> GridState:
        return GridState(self.state.clone(), self.rows.clone())

    @property
    def block(self) -> int:
        """The first row of the open block."""
        return self.count // BLOCK * BLOCK

    def advance(
        self, queries: torch.Tensor, rows: torch.Tensor, ends: Iterable[int] = ()
    ) -> tuple[torch.Tensor, dict[int, GridState]]:
        """Add tokens; return what each reads, and the states after the counts in `ends`."""
        before, after = self.count, self.count + len(rows)
        wanted = sorted(ends)
        if self._made and after <= GRID and before // BLOCK == (after - 1) // BLOCK and not wanted:
            return self._in_one_block(queries, rows), {}
        return self._over_chunks(queries, rows, wanted)

    # -- a few rows of one block -----------------------------------------------------------------

    def _in_one_block(self, queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """New rows inside the open block; everything before it is final."""
        before = self.count
        start, self.count = self.block, before + len(rows)
        self._room[before : self.count] = rows
        asking = queries.new_zeros(BLOCK, queries.shape[1])
        asking[before - start : self.count - start] = queries
        found, total = self._read_block(start, asking)
        if self.count == GRID:
            self.state = _next(self.state, self._keys, total, self._written)
            self._clear()
        return found[:, before - start : before - start + len(rows)].transpose(0, 1)

    def _read_block(self, start: int, asking: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What each row of a block reads, and the decays of its chunk."""
        heads, block = self.heads, slice(start, start + BLOCK)
        total = self._total(self._room)[0]
        keys = _keys(heads, self._room[block], 1, BLOCK)
        self._keys[:, block] = keys[0]
        asked = _chunk_reads(
            *(heads, self._room[block], asking, keys, self._keys[None], total[None], start, BLOCK)
        )
        read = asked.readers[0] @ self.state
        _write(self._written, asked.system[0], asked.values[0] - read[:, :BLOCK], start)
        return read[:, BLOCK:] + asked.scores[0] @ self._written, total

    def _clear(self) -> None:
        self.count = 0
        for tensor in (self._room, self._keys, self._written):
            tensor.zero_()

    def _total(self, rows: torch.Tensor) -> torch.Tensor:
        """The decay from the start of its chunk to each row: chunks x heads x rows."""
        first = sum(self.heads.parts[:2])
        decays = rows[:, first : first + self.heads.values]
        return decays.reshape(-1, GRID, self.heads.values).transpose(1, 2).contiguous().cumsum(-1)

    # -- whole chunks ----------------------------------------------------------------------------

    def _over_chunks(
        self, queries: torch.Tensor, rows: torch.Tensor, ends: list[int]
    ) -> tuple[torch.Tensor, dict[int, GridState]]:
        heads, before = self.heads, self.count
        count = before + len(rows)
        chunks = -(-count // GRID)
        whole = rows.new_zeros(chunks * GRID, rows.shape[1])
        whole[:before], whole[before:count] = self._room[:before], rows
        asking = queries.new_zeros(chunks * GRID, queries.shape[1])
        asking[before:count] = queries
        total, keys = self._total(whole), _keys(heads, whole, chunks, GRID)
        asked = _chunk_reads(heads, whole, asking, keys, keys, total, 0, GRID)
        found, states = torch.empty_like(asked.values), {}
        for chunk in range(chunks):
            first = chunk * GRID
            for end in [end for end in ends if first <= before + end < first + GRID]:
                states[end] = GridState(self.state.clone(), whole[first : before + end].clone())
            read = asked.readers[chunk] @ self.state
            values = asked.values[chunk] - read[:, :GRID]
            written = torch.zeros_like(values)
            for start in range(0, min(GRID, count - first), BLOCK):
                block = slice(start, start + BLOCK)
                _write(written, asked.system[chunk, :, block], values[:, block], start)
            found[chunk] = read[:, GRID:] + asked.scores[chunk] @ written
            if first + GRID <= count:
                self.state = _next(self.state, keys[chunk], total[chunk], written)
        for end in [end for end in ends if before + end == chunks * GRID]:
            states[end] = GridState(self.state.clone(), whole[:0].clone())
        self._clear()
        self._made = True
        if count % GRID:
            self.count = count % GRID
            self._room.copy_(whole[-GRID:])
            self._keys.copy_(keys[-1])
            self._written.copy_(written)
        return found.transpose(1, 2).flatten(0, 1)[before:count], states


def _rows_of(rows: torch.Tensor, chunks: int, size: int, heads: int) -> torch.Tensor:
    """Chunks x heads x rows x width."""
    return rows.reshape(chunks, size, heads, -1).transpose(1, 2).contiguous()


def _normal(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)


def _keys(heads: DeltaHeads, rows: torch.Tensor, chunks: int, size: int) -> torch.Tensor:
    keys = _normal(_rows_of(rows[:, : heads.parts[0]], chunks, size, heads.keys))
    return keys.repeat_interleave(heads.values // heads.keys, dim=1)


def _chunk_reads(
    heads: DeltaHeads,
    rows: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    among: torch.Tensor,
    total: torch.Tensor,
    start: int,
    size: int,
) -> _ChunkReads:
    """What `size` rows of each chunk from `start` on read, among all keys of the chunk."""
    chunks = len(among)
    _, values, _, rates = rows.split(heads.parts, dim=1)
    query = _normal(_rows_of(queries, chunks, size, heads.keys)) * heads.key_width**-0.5
    query = query.repeat_interleave(heads.values // heads.keys, dim=1)
    rate = _rows_of(rates, chunks, size, heads.values)
    own = total[..., start : start + size, None]
    ahead = torch.ones(size, GRID, dtype=torch.bool).triu(1 + start)
    between = (own - total[..., None, :]).masked_fill(ahead, float("-inf")).exp()
    both = torch.cat([keys * rate, query], dim=-2)
    found, since = both @ among.transpose(-1, -2), own.exp().repeat(1, 1, 2, 1)
    return _ChunkReads(
        found[..., :size, :] * between,
        found[..., size:, :] * between,
        both * since,
        _rows_of(values, chunks, size, heads.values) * rate,
    )


def _write(written: torch.Tensor, system: torch.Tensor, values: torch.Tensor, start: int) -> None:
    """What a block of rows writes: its values minus what earlier rows already wrote."""
    block = slice(start, start + BLOCK)
    if start:
        values = values - system[..., :start].contiguous() @ written[:, :start].contiguous()
    own = system[..., block]
    written[:, block] = torch.linalg.solve_triangular(
        own.contiguous(), values.contiguous(), upper=False, unitriangular=True
    )


def _next(
    state: torch.Tensor, keys: torch.Tensor, total: torch.Tensor, written: torch.Tensor
) -> torch.Tensor:
    """The state after a whole chunk."""
    last = total[..., -1:]
    writers = keys * (last - total).exp()[..., None]
    return state * last.exp()[..., None] + writers.transpose(-1, -2) @ written


def delta_rows_are_equal(heads: DeltaHeads) -> bool:
    """Whether rows are equal when computed in one pass, in pieces and one by one."""
    generator = torch.Generator().manual_seed(heads.values * 31 + heads.value_width)

    def noise(width: int) -> torch.Tensor:
        return torch.randn(_TRIED, width, generator=generator)

    keys, values, decays, rates = map(noise, heads.parts)
    rows = torch.cat([keys, values, -decays.abs() / 9, rates.sigmoid()], dim=1)
    queries = noise(heads.parts[0])
    wanted, states = OpenSequence(heads).advance(queries, rows, _PIECES)
    for step in (_PIECES, range(1, _TRIED)):
        here, start, found = OpenSequence(heads), 0, []
        for end in (*step, _TRIED):
            found.append(here.advance(queries[start:end], rows[start:end])[0])
            start = end
            if end in states and not _same(here.grid_state(), states[end]):
                return False
            if end in states:
                here = OpenSequence(heads, here.grid_state()) if end % 2 else here
        if not torch.equal(torch.cat(found), wanted):
            return False
    return True


def _same(one: GridState, other: GridState) -> bool:
    return torch.equal(one.state, other.state) and torch.equal(one.rows, other.rows)
