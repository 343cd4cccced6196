"""A layer of a lane with a state of fixed size: a convolution or a gated delta rule.

In passes without our kernels it behaves as in Transformers. In others it holds the last inputs of
its convolution, the state at the last chunk start, and the rows after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keepsight.core.kernels.delta import DeltaHeads, GridState, OpenSequence
from keepsight.models.upstream import LinearAttentionLayer

Tensors = dict[str, torch.Tensor]


class MixerLayer(LinearAttentionLayer):
    """The state of one sequence in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: Sequence[int] = ()
        self.found: dict[int, tuple[torch.Tensor, GridState | None]] = {}
        self._open: OpenSequence | None = None
        self._restored: Tensors = {}

    def parts(self, count: int) -> list[tuple[MixerLayer, int, int]]:
        """The state, and the rows of its tokens in a pass over so many."""
        return [(self, 0, count)]

    def opened(self, heads: DeltaHeads) -> OpenSequence:
        """The sequence of a gated delta rule at its current end."""
        if self._open is None:
            grid_state = None
            if self._restored:
                grid_state = GridState(self._restored["grid"], self._restored["tail"])
            self._open, self._restored = OpenSequence(heads, grid_state), {}
        return self._open

    def inputs(self) -> torch.Tensor | None:
        """The last inputs of the convolution, channels x inputs; None before the first."""
        held = self.conv_states[0] if self.has_previous_state[0] else None
        return None if held is None else held[0]

    def take(self, inputs: torch.Tensor) -> None:
        self.conv_states[0] = inputs[None]
        self.conv_kernel_size[0] = inputs.shape[-1]
        self.dtype, self.device = inputs.dtype, inputs.device
        self.is_conv_states_initialized[0] = self.has_previous_state[0] = True

    def held(self, end: int | None = None) -> Tensors:
        """What a snapshot holds here, at the end or after some tokens of the last pass; not
        copied."""
        if end is not None:
            inputs, grid_state = self.found[end]
            own = {} if grid_state is None else {"grid": grid_state.state, "tail": grid_state.rows}
            return {"conv": inputs[None], **own}
        states = {"conv": self.conv_states[0], "recurrent": self.recurrent_states[0]}
        if self._open is not None:
            states |= {"grid": self._open.state, "tail": self._open.rows}
        return {
            name: state for name, state in (states | self._restored).items() if state is not None
        }

    def restore(self, what: str, state: torch.Tensor) -> None:
        self._open = None
        self._restored[what] = state.clone()


class JoinedMixer(LinearAttentionLayer):
    """One layer of several lanes, whose tokens lie end to end."""

    def __init__(self, layers: Sequence[MixerLayer], edges: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._layers, self._edges = layers, edges

    def parts(self, count: int) -> list[tuple[MixerLayer, int, int]]:
        pairs = zip(self._layers, self._edges, strict=True)
        return [(layer, start, stop) for layer, (start, stop) in pairs]
