"""Installs our kernels in place of torch's functions, in our passes only.

A model calls `torch.nn.functional.linear`, `scaled_dot_product_attention`, `silu` and `sigmoid` by
name, `sigmoid` also as a method, and `grouped_mm` for experts. These names are replaced once per
process. The replacement checks whether the thread is in one of our passes; otherwise it calls
torch's function with the same arguments. For scripts it is torch's own.

With a mask, Transformers copies all keys and values once per query of a group, in every layer and
pass: most of the cost of a short chunk on a long prefix. One function of theirs decides this, and
only listens to a variable of the process; it is wrapped too, and answers per thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from keepsight.core.kernels import attention
from keepsight.core.kernels.delta import DeltaHeads
from keepsight.core.kernels.elementwise import in_whole_vectors
from keepsight.core.kernels.linear import Linears
from keepsight.models import upstream

_stock_linear = functional.linear
_stock_attention = functional.scaled_dot_product_attention
if hasattr(functional, "grouped_mm"):  # not in torch 2.9
    _stock_grouped: Callable[..., torch.Tensor] = functional.grouped_mm
_stock_sigmoid, _stock_silu = torch.sigmoid, functional.silu
_stock_sigmoid_of = torch.Tensor.sigmoid


@dataclass(eq=False)
class Kernels:
    """The kernels of one model."""

    linears: Linears = field(default_factory=Linears)
    query_rows: attention.QueryRows = field(default_factory=attention.QueryRows)
    doubts: list[str] = field(default_factory=list)  # what was met without a trial
    mixers: list[DeltaHeads | None] = field(default_factory=list)  # of the last pass, in order
    whole_steps: bool = False  # a few tokens run without modules: shown to give equal bits
    in_graphs: bool = False  # of another runtime: torch functions stay
    ready: Callable[[], object] = bool  # called before each pass


@contextmanager
def running(kernels: Kernels | None) -> Iterator[None]:
    """Use these kernels for everything this thread computes meanwhile; None for torch's own."""
    if kernels is None or kernels.in_graphs:
        yield
        return
    kernels.ready()
    kernels.mixers.clear()
    with _pass(_Pass(attention.Attention(kernels.query_rows, kernels.doubts), kernels)):
        yield


@contextmanager
def side_by_side(function: Any = None) -> Iterator[None]:
    """Let sequences laid end to end attend to their own lanes, with torch's kernels, or as a
    function says."""
    with _pass(_Pass(function or attention.LaneAttention(), None)):
        yield


@contextmanager
def grouped_queries(device: torch.device, on_lanes: bool = False) -> Iterator[None]:
    """Let attention in this thread read grouped keys and values in place: on a CPU, and where our
    own attention reads them on their lanes. Else an accelerator needs the copy: its fast kernels
    take no groups with masks."""
    if device.type != "cpu" and not on_lanes:
        yield
        return
    begin()
    before, _here.grouped = _in_place(), True
    try:
        yield
    finally:
        _here.grouped = before


def _in_place() -> bool:
    return bool(vars(_here).get("grouped"))


@contextmanager
def _pass(call: _Pass) -> Iterator[None]:
    before, _here.call = vars(_here).get("call"), call
    try:
        yield
    finally:
        _here.call = before


@dataclass
class _Pass:
    """One pass: what its attention layers share, and its kernels; None for torch's own."""

    attention: Any  # an `OverLanes`, or as one
    kernels: Kernels | None
    inside: bool = False  # one of our kernels is running


_here = threading.local()


def _call() -> _Pass | None:
    found: _Pass | None = vars(_here).get("call")
    return found


def is_inside() -> bool:
    """Whether one of our kernels is running in this thread."""
    call = _call()
    return call is not None and call.inside


def _with_kernels() -> Kernels | None:
    """The kernels of this thread's pass; None outside, and in one with torch's own."""
    call = None if torch.compiler.is_compiling() else _call()
    return None if call is None else call.kernels


def is_running() -> bool:
    """Whether this thread computes with our kernels."""
    return _with_kernels() is not None


@contextmanager
def inside() -> Iterator[None]:
    """While one of our kernels runs, let its calls reach torch directly."""
    call = _call()
    if call is None:
        yield
        return
    before, call.inside = call.inside, True
    try:
        yield
    finally:
        call.inside = before


def note_mixer(heads: DeltaHeads | None) -> None:
    """Note that a layer of fixed-size state was computed: a delta rule, or only a convolution."""
    kernels = _with_kernels()
    if kernels is not None:
        kernels.mixers.append(heads)


def attention_here() -> Any:
    """The attention of the running pass, in which a layer notes its buffers; None outside."""
    call = _call()
    return None if call is None else call.attention


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    kernels = _with_kernels()
    if kernels is None:
        return _stock_linear(input, weight, bias)
    call = _here.call
    before, call.inside = call.inside, True
    try:
        return kernels.linears(input, weight, bias)
    finally:
        call.inside = before


def _sigmoid(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is not None or not is_running():
        return _stock_sigmoid(input, out=out)
    return _elementwise(_stock_sigmoid, input)


def _sigmoid_by_name(input: torch.Tensor) -> torch.Tensor:
    return _sigmoid(input)  # torch needs a separate function at each place


def _sigmoid_of(self: torch.Tensor) -> torch.Tensor:
    """The method that routers call: `logits.sigmoid()`."""
    return _elementwise(_stock_sigmoid_of, self) if is_running() else _stock_sigmoid_of(self)


def _silu(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return _stock_silu(input, inplace)
    else:  # noqa: RET505 (a script is compiled up to here and no further)
        return _ours_or_stock_silu(input, inplace)


def _ours_or_stock_silu(input: torch.Tensor, inplace: bool) -> torch.Tensor:
    if inplace or not is_running():
        return _stock_silu(input, inplace)
    return _elementwise(_stock_silu, input)


def _elementwise(
    function: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor
) -> torch.Tensor:
    with inside():
        return in_whole_vectors(function, input.reshape(-1, 1)).view(input.shape)


def _grouped(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    kernels = _with_kernels()
    plain = bias is None and out_dtype is None and mat_a.dim() == 2 and mat_b.dim() == 3
    if kernels is None or offs is None or not plain:
        return _stock_grouped(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
    with inside():
        return kernels.linears.grouped(mat_a, mat_b, offs.tolist())


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    call = None if torch.compiler.is_compiling() or dropout_p else _call()
    if call is None:
        return _stock_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    with inside():
        found: torch.Tensor = call.attention(query, key, value, attn_mask, is_causal, scale)
        return found


@functools.cache
def begin() -> None:
    """Install them: once per process, before a model's code is first inspected."""
    functional.linear = _linear
    if hasattr(functional, "grouped_mm"):
        functional.grouped_mm = _grouped
    torch.sigmoid, functional.sigmoid = _sigmoid, _sigmoid_by_name
    torch.Tensor.sigmoid = _sigmoid_of  # type: ignore[assignment, method-assign]
    functional.silu = _silu
    functional.scaled_dot_product_attention = _attention
    upstream.for_scripts(
        linear=_linear,
        sigmoid=_sigmoid,
        scaled_dot_product_attention=_attention,
    )
    # A tracer cannot see thread state, so compiled code keeps the behaviour of Transformers.
    upstream.ask_first(lambda: not torch.compiler.is_compiling() and _in_place())
