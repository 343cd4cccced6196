"""A few tokens of each sequence through all layers of a decoder of the Llama kind, as one script.

A decoded token reads all weights; what Python does between two products comes on top, with cold
caches. Here all layers are one call, which leaves the lock of the interpreter to other threads.
The operations are those of the modules and of our attention, in the same order, over the buffers of
the lanes. A check at load shows that bits are equal; otherwise the modules run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, List, Tuple  # noqa: UP035 (scripts know these names)

import torch
from torch.jit import optimized_execution  # type: ignore[attr-defined]
from torch.nn import functional
from transformers import PreTrainedModel

from keepsight.core.decoding.lane_layer import LaneLayer
from keepsight.core.kernels.attention import attend_plainly, read_at_once
from keepsight.core.kernels.elementwise import fills_vectors
from keepsight.core.kernels.layers import (
    Parts,
    add_and_norm,
    is_llamas,
    is_quiet,
    norm,
    size_of,
    turn_heads,
)
from keepsight.core.kernels.linear import Read, mkl_product, onednn_product, plain_product
from keepsight.core.kernels.passes import Kernels

if TYPE_CHECKING:
    from keepsight.core.decoding.forward import Stretch

_MOST = 32  # tokens of a pass; with more of them, other things cost more than Python
_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")

# The norm before attention, queries with keys and values, the norms of heads, the output of
# attention, the norm behind it, both halves of the gated layer, and its output.
Layer = Tuple[torch.Tensor, Read, List[torch.Tensor], Read, torch.Tensor, Read, Read]  # noqa: UP006
# Of one sequence: its first row and the one behind its last, the place of the first in the lane,
# and how many keys are read.
Rows = Tuple[int, int, int, int]  # noqa: UP006


class Steps:
    """The decoder of one model without its modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        self._layers = [Parts(layer) for layer in self._decoder.layers]
        self._around = [
            *(one for one in model.modules() if any(x is self._decoder for x in one.modules())),
            *(self._decoder._modules[name] for name in _PARTS),
            self._head,
        ]
        self._held: list[object] = []  # weights, packed or plain, that `_known` was made of
        self._known: dict[int, list[Layer]] = {}  # by rows
        self.passes = 0

    @classmethod
    def of(cls, model: PreTrainedModel) -> Steps | None:
        """Those of a model whose layers are all of the Llama kind and of one size."""
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        layers = list(getattr(decoder, "layers", ()))
        if (
            not layers
            or decoder._modules.keys() != set(_PARTS)
            or type(head) is not torch.nn.Linear
        ):
            return None
        if not all(map(is_llamas, layers)) or not hasattr(decoder.norm, "variance_epsilon"):
            return None
        if any(layer.self_attn.layer_idx != place for place, layer in enumerate(layers)):
            return None
        found = cls(model)
        return found if len({parts.sizes for parts in found._layers}) == 1 else None

    def run(
        self, segments: Sequence[Stretch], kernels: Kernels
    ) -> list[torch.Tensor | None] | None:
        """The logits that each segment asked for; None where the modules have to run."""
        first, count = self._layers[0], sum(len(one.ids) for one in segments)
        queries, keys, width, inner = (int(one) for one in first.sizes[:4])
        if count > _MOST or not fills_vectors(count * inner) or not self.stand():
            return None
        heads = queries, keys, width, first.dtype
        rows, masks, start = list[Rows](), list[torch.Tensor](), 0
        for one in segments:
            seen = read_at_once(kernels.query_rows, heads, len(one.ids), one.end)
            if seen is None:
                return None
            rows.append((start, start + len(one.ids), one.start, seen[0]))
            masks.append(seen[1])
            start += len(one.ids)
        layers, rooms = self._weights(kernels, count), [_rooms(one) for one in segments]
        keys_of = [room[0] for room in rooms if room is not None]
        values_of = [room[1] for room in rooms if room is not None]
        if layers is None or len(keys_of) < len(segments):
            return None
        hidden = self._decoder.embed_tokens(torch.cat([torch.from_numpy(x.ids) for x in segments]))
        positions = torch.cat([one.positions for one in segments], -1)
        positions = positions[1:] if len(positions) == 4 else positions  # the first is of the text
        cos, sin = self._decoder.rotary_emb(hidden[None], positions)
        if hidden.dtype != keys_of[0][0].dtype or cos.dim() != 3 or cos.shape[-1] != width:
            return None
        with optimized_execution(False):  # fuse nothing
            hidden = _script()(
                hidden,
                cos,
                sin,
                layers=layers,
                keys=keys_of,
                values=values_of,
                rows=rows,
                masks=masks,
                scale=first.attention.scaling,
                sizes=[queries, keys, width],
                of_rows=size_of(hidden.shape[1], first.sizes[5]),
                of_heads=size_of(width, first.sizes[-1]),
            )
        for one in segments:
            for layer in one.lane.cache.layers:
                layer.advance(len(one.ids))
        self.passes += 1
        return self._logits(hidden, segments, kernels)

    def _logits(
        self, hidden: torch.Tensor, segments: Sequence[Stretch], kernels: Kernels
    ) -> list[torch.Tensor | None]:
        pieces, last = hidden.split([len(one.ids) for one in segments]), self._decoder.norm
        wanted = [len(piece) - one.logits for piece, one in zip(pieces, segments, strict=True)]
        kept = torch.cat([piece[at:] for piece, at in zip(pieces, wanted, strict=True)])
        normed = norm(kept, last.weight, size_of(kept.shape[1], last.variance_epsilon))
        logits = kernels.linears(normed, self._head.weight, self._head.bias)
        found = logits.split([one.logits for one in segments])
        return [rows if len(rows) else None for rows in found]

    def _weights(self, kernels: Kernels, count: int) -> list[Layer] | None:
        """All weights as the script takes them, looked at again only if one was exchanged."""
        packed = kernels.linears.packed()
        weights = [one for parts in self._layers for one in parts.weights()]
        if any(one is not None and one.dtype != self._layers[0].dtype for one in weights):
            return None  # it was cast: the modules say what follows from that
        now: list[object] = [packed.get(id(one), one) for one in weights]
        if len(now) != len(self._held) or not all(map(is_, now, self._held)):
            self._held, self._known = now, {}
        if count in self._known:
            return self._known[count]
        layers = [_layer(parts, kernels, count) for parts in self._layers]
        found = [one for one in layers if one is not None]
        if len(found) < len(layers):
            return None
        if not any(parts.qkv[0].bias is not None for parts in self._layers):  # these are joined
            self._known[count] = found
        return found

    def stand(self) -> bool:
        """Whether all parts are those that were looked at, and nobody listens at them."""
        now = self._decoder.layers._modules.values()
        return (
            len(now) == len(self._layers)
            and all(one is parts.layer for one, parts in zip(now, self._layers, strict=True))
            and is_quiet(self._around)
            and all(parts.stand() for parts in self._layers)
        )


def _layer(parts: Parts, kernels: Kernels, count: int) -> Layer | None:
    qkv, out, both, down = (kernels.linears.read(group, count) for group in parts.products)
    if qkv is None or out is None or both is None or down is None:
        return None
    of_heads = [one.weight for one in parts.norms]
    return parts.first.weight, qkv, of_heads, out, parts.second.weight, both, down


def _rooms(one: Stretch) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """The buffers of all layers of a lane, with room for what they get."""
    found = [x.room(len(one.ids)) if type(x) is LaneLayer else None for x in one.lane.cache.layers]
    rooms = [room for room in found if room is not None]
    if len(rooms) < len(found):
        return None
    return [keys for keys, _ in rooms], [values for _, values in rooms]


# -- the script ------------------------------------------------------------------------------------


def _product(rows: torch.Tensor, read: Read) -> torch.Tensor:
    """Linear layers that read the same rows, side by side."""
    weights, sized, biases, filled, kernel = read
    found: List[torch.Tensor] = []  # noqa: UP006
    for i in range(len(weights)):
        count, wanted, given = rows.shape[0], filled[i], rows.contiguous()
        if count == 1 and wanted > 1:  # to repeat it takes less time than to pad it
            given = rows.expand(wanted, -1).contiguous()
        elif count < wanted:
            given = functional.pad(rows, [0, 0, 0, wanted - count])
        if kernel == 0:
            result = plain_product(given, weights[i], sized[i], biases[i])
        elif kernel == 1:
            result = mkl_product(given, weights[i], sized[i], biases[i])
        else:
            result = onednn_product(given, weights[i], sized[i], biases[i])
        found.append(result if count == wanted else result.narrow(0, 0, count))
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _layers(
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layers: List[Layer],  # noqa: UP006
    keys: List[List[torch.Tensor]],  # noqa: UP006
    values: List[List[torch.Tensor]],  # noqa: UP006
    rows: List[Rows],  # noqa: UP006
    masks: List[torch.Tensor],  # noqa: UP006
    scale: float,
    sizes: List[int],  # noqa: UP006
    of_rows: List[torch.Tensor],  # noqa: UP006
    of_heads: List[torch.Tensor],  # noqa: UP006
) -> torch.Tensor:
    for i in range(len(layers)):
        first, qkv, each, out, second, both, down = layers[i]
        joined = _product(norm(hidden, first, of_rows), qkv)
        query, key, value = turn_heads(joined, sizes, each, of_heads, cos, sin)
        seen: List[torch.Tensor] = []  # noqa: UP006
        for s in range(len(rows)):
            start, stop, at, behind = rows[s]
            count, own_keys, own_values = stop - start, keys[s][i], values[s][i]
            own_keys.narrow(2, at, count).copy_(key.narrow(2, start, count))
            own_values.narrow(2, at, count).copy_(value.narrow(2, start, count))
            asked = query.narrow(2, start, count).reshape(1, sizes[1], -1, sizes[2])
            wanted, filled = asked.shape[2], masks[s].shape[2]
            if filled > wanted:
                asked = functional.pad(asked, [0, 0, 0, filled - wanted])
            read = own_keys.narrow(2, 0, behind), own_values.narrow(2, 0, behind)
            found = attend_plainly(asked.contiguous(), read[0], read[1], masks[s], scale)
            found = found if filled == wanted else found.narrow(2, 0, wanted)
            seen.append(found.reshape(1, sizes[0], count, -1))
        attended = seen[0] if len(seen) == 1 else torch.cat(seen, dim=2)
        attended = attended[0].transpose(0, 1).reshape(hidden.shape[0], -1)
        hidden, normed = add_and_norm(hidden, _product(attended, out), second, of_rows)
        gate, up = _product(normed, both).chunk(2, dim=-1)
        hidden = hidden + _product(functional.silu(gate.contiguous()) * up, down)
    return hidden


@functools.cache
def _script() -> Callable[..., torch.Tensor]:
    """Torch would rather have it compiled, which fuses, and changes bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Callable[..., torch.Tensor] = torch.jit.script(_layers)
    return found
