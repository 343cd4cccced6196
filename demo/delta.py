"""The gated delta rule of Qwen3.5, written to be differentiated quickly on a processor.

Transformers' own fallback fills its result chunk by chunk in place, and autograd then copies all
of it once for every chunk; it also solves two triangular systems with the same matrix, and larger
ones than such small heads need. Short chunks collected in a list and one solution give the same
numbers in less time. Training alone uses this; the models are measured with Transformers as it is.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

CHUNK = 16


def install() -> None:
    """Use this rule in place of the fallback, in this process."""
    modeling_qwen3_5.torch_chunk_gated_delta_rule = delta_rule


@torch.autocast("cpu", enabled=False)
def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Outputs of shape (batch, length, heads, width) for a whole sequence from an empty state."""
    length = query.shape[1]
    query, key = (F.normalize(x.float(), dim=-1, eps=1e-3) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    query, key, value = (_chunks(x.float()) for x in (query, key, value))
    decay, beta = (_chunks(x.float()[..., None])[..., 0] for x in (g, beta))
    past = decay.cumsum(-1)
    between = torch.tril((past[..., :, None] - past[..., None, :]).clamp(max=0).exp())
    system = (key @ key.transpose(-1, -2)).float() * between * beta[..., None]
    written = torch.cat((value, key * past.exp()[..., None]), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    new, old = solved.split(value.shape[-1], -1)
    inside = (query @ key.transpose(-1, -2)) * between
    out = _scan(
        (query * past.exp()[..., None]).unbind(2),
        (key * (past[..., -1:] - past).exp()[..., None]).transpose(-1, -2).unbind(2),
        new.unbind(2),
        old.unbind(2),
        inside.unbind(2),
        past[..., -1].exp()[..., None, None].unbind(2),
    )
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), None


def _scan(*chunks: tuple[Tensor, ...]) -> Tensor:
    """Walk over the chunks with the state that one leaves for the next."""
    outputs, state = [], None
    for query, key, new, old, inside, decay in zip(*chunks, strict=True):
        if state is None:
            outputs.append(inside @ new)
            state = key @ new
            continue
        fresh = new - old @ state
        outputs.append(query @ state + inside @ fresh)
        state = state * decay + key @ fresh
    return torch.stack(outputs, 2)


def _chunks(x: Tensor) -> Tensor:
    """(batch, length, heads, width) to (batch, heads, chunks, CHUNK, width), padded with zeros."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(2, (-1, CHUNK))
