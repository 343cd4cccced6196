"""A layer of a lane with a state of fixed size: a convolution or a gated delta rule.

If passes are cut at boundaries it behaves as in Transformers. If any cut is exact it holds the last
inputs of its convolution, the state at the last chunk start, and the rows after it.
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
        self.states: list[MixerLayer] = [self]
        self.ends: Sequence[int] = ()
        self.found: dict[int, tuple[torch.Tensor, GridState | None]] = {}
        self._open: OpenSequence | None = None
        self._restored: Tensors = {}

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
        """Replace these inputs."""
        self.conv_states[0] = inputs[None]
        self.conv_kernel_size[0] = inputs.shape[-1]
        self.dtype, self.device = inputs.dtype, inputs.device
        self.is_conv_states_initialized[0] = self.has_previous_state[0] = True

    def block(self, tokens: int) -> int | None:
        """The first row of the rule's open block (0 without a rule) if this many more tokens fit
        into it and no state of theirs is captured; otherwise None."""
        if self.ends or self._restored or self.inputs() is None:
            return None
        if self._open is None:
            return 0
        return self._open.block if self._open.stays_open(tokens) else None

    @property
    def sequence(self) -> OpenSequence | None:
        """The sequence of the rule, if there is one."""
        return self._open

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
        """Restore the state of a gated delta rule."""
        self._open = None
        self._restored[what] = state.clone()


class MixerRows(LinearAttentionLayer):
    """One layer of several lanes."""

    def __init__(self, layers: list[MixerLayer]) -> None:
        super().__init__()
        self.states = layers
