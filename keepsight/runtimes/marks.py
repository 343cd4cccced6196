"""What a graph shows of itself, found without the library that writes graphs.

Whoever runs an export has the runtime, and need not have `onnx`. Weights lie in a file of their
own, so a graph is small, and the names of its operators stand in it as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

# Operators of ONNX that compute with weights of few bits, and OpenVINO's types of such weights.
_QUANTISED = (
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "DynamicQuantizeMatMul",
    "GatherBlockQuantized",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "QLinearMatMul",
)
_FEW_BITS = ("i8", "u8", "i4", "u4", "nf4", "f8e4m3", "f8e5m2")
_APPENDS = "GroupQueryAttention"
_OP_TYPE = 0x22  # field 4 of an ONNX node, a text


class Marks(NamedTuple):
    """What can be seen of a graph."""

    quantised: bool
    appends: bool  # it writes keys and values where they lie


def marks(path: Path) -> Marks:
    """The marks of one graph."""
    data = path.read_bytes()
    if path.suffix == ".xml":
        few = any(f'element_type="{kind}"'.encode() in data for kind in _FEW_BITS)
        return Marks(few, False)
    return Marks(any(_has(data, name) for name in _QUANTISED), _has(data, _APPENDS))


def _has(data: bytes, operator: str) -> bool:
    """Whether a node of this kind is there: a tag, a length, and the name."""
    return bytes([_OP_TYPE, len(operator)]) + operator.encode() in data
