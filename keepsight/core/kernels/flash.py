"""Torch's flash attention over keys where they lie, on an accelerator.

`scaled_dot_product_attention` takes no groups of heads beside a mask without copying all keys, or
without its slowest kernel; and a piece of a prompt behind a prefix needs a mask there. The kernel
itself needs none: rows of queries stand at the end of the keys. Torch has a public function for it
since 2.10 (`torch.nn.attention.varlen`), whose arguments differ by version; the operator below it
does not.
"""

from __future__ import annotations

import torch

_WIDEST = 256  # of a head


def fits(query: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel takes them."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and width == values.shape[-1] <= _WIDEST
        and width % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def at_the_end(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of the last tokens of one sequence; `window`: how many keys each of them sees.
    Shapes as in `scaled_dot_product_attention`, with fewer heads of keys than of queries."""
    rows, seen, held = (x.transpose(1, 2) for x in (query, keys, values))
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        *(rows, seen, held, None, None, rows.shape[1], seen.shape[1], 0.0, True, False),
        scale=scale,
        window_size_left=None if window is None else window - 1,
    )[0]
    return found.transpose(1, 2)


def in_a_pool(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    edges: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    rows: int,
    longest: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention of several sequences, `rows` queries of each between `edges`, over a pool of keys:
    (rows, heads, width) all of them. Sequence `i` has its first key at `starts[i]`, and
    `lengths[i]` keys, `longest` at most."""
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        *(query, keys, values, edges, starts, rows, longest, 0.0, True, False),
        scale=scale,
        window_size_left=None if window is None else window - 1,
        seqused_k=lengths,
    )[0]
    return found
