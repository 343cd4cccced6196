"""Recovers token ids from embeddings, for pipelines that pass `inputs_embeds` without `input_ids`.

A row that equals the embedding of a token is that token. If several tokens share an embedding, the
placeholder of a picture is taken, as Transformers does; otherwise any of them, since all give one
answer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from keepsight.errors import InputError, UnsupportedInput
from keepsight.models.families import Family
from keepsight.models.families.pixels import embedding_of

_AT_ONCE = 8192  # rows of the table compared at a time


def ids_behind(family: Family, embeddings: object) -> torch.Tensor:
    """The ids for a batch of embeddings, shape (batch, tokens)."""
    model, marks = family.model, torch.tensor(sorted(family.placeholders.values()))
    width = embedding_of(model).embedding_dim
    if not isinstance(embeddings, torch.Tensor) or embeddings.dim() != 3:
        raise InputError(f"inputs_embeds must be a tensor of shape (batch, tokens, {width})")
    if embeddings.shape[-1] != width or not embeddings.numel():
        raise InputError(
            f"inputs_embeds has shape {tuple(embeddings.shape)}, expected (batch, tokens, {width})"
        )
    rows = embeddings.detach().reshape(-1, width)
    ids = torch.full(rows.shape[:1], -1, dtype=torch.long, device=rows.device)
    for begin, table in _table(model):
        if table.dtype != rows.dtype:
            raise InputError(f"inputs_embeds is {rows.dtype}, the model embeds in {table.dtype}")
        waiting = torch.nonzero(ids < 0)[:, 0]
        if not len(waiting):
            break
        order = torch.argsort(table[:, 0])
        firsts = table[order, 0].contiguous()
        left = torch.searchsorted(firsts, rows[waiting, 0].contiguous())
        right = torch.searchsorted(firsts, rows[waiting, 0].contiguous(), right=True)
        near = torch.nonzero(left < right)[:, 0]
        for row, a, b in zip(waiting[near].tolist(), left[near], right[near], strict=True):
            same = order[a:b][(table[order[a:b]] == rows[row]).all(-1)].cpu() + begin
            if len(same):
                shown = same[torch.isin(same, marks)]
                ids[row] = int((shown if len(shown) else same).min())
    if bool((ids < 0).any()):
        row, token = divmod(int(torch.nonzero(ids < 0)[0, 0]), embeddings.shape[1])
        raise UnsupportedInput(
            f"token {token} of row {row} of inputs_embeds equals the embedding of no token (a "
            "soft prompt, or features already inserted); give input_ids, and pictures as "
            "pixels or packages"
        )
    return ids.view(embeddings.shape[:2])


@torch.inference_mode()
def _embedded(model: PreTrainedModel, begin: int, end: int) -> torch.Tensor:
    layer = model.get_input_embeddings()
    numbers = torch.arange(begin, end, device=embedding_of(model).weight.device)
    found: torch.Tensor = layer(numbers[None])[0]
    return found


def _table(model: PreTrainedModel) -> Iterator[tuple[int, torch.Tensor]]:
    """The embeddings of all tokens in parts, computed by the model itself."""
    count = embedding_of(model).num_embeddings
    for begin in range(0, count, _AT_ONCE):
        yield begin, _embedded(model, begin, min(count, begin + _AT_ONCE))
