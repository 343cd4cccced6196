"""One part of a model as a graph of OpenVINO, made with Transformers' exporters.

OpenVINO's PyTorch reader does not know scan, which the delta rule of linear layers uses. A decoder
with such layers goes through ONNX with standard operators only, whose reader knows loops and
branches; all other parts are converted directly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np

from keepsight.export.graphs.parts import Decoder, GraphPart, Sample
from keepsight.runtimes import imports
from keepsight.runtimes.openvino import core

BLOCK = 32  # weights of a row that share a scale, as in ONNX

WriteOnnx = Callable[[Path, GraphPart, Sample], None]


def write_openvino(path: Path, part: GraphPart, sample: Sample, write_onnx: WriteOnnx) -> None:
    """Trace a part and write its graph; `write_onnx` writes one for ONNX."""
    openvino = imports.openvino()
    from transformers.exporters import OpenVINOConfig, OpenVINOExporter  # an optional library

    exporter = OpenVINOExporter()
    if isinstance(part, Decoder) and "linear" in part.kinds:
        with TemporaryDirectory(dir=path.parent) as scratch:
            between = Path(scratch) / "part.onnx"
            write_onnx(between, part, sample)
            exporter.save_program(openvino.convert_model(between), path)
        return
    config = OpenVINOConfig(dynamic=True, dynamic_shapes=sample.varies, stateful=False)
    program, _ = exporter.export_program(part, sample.inputs, config)
    exporter.save_program(program, path)


def quantise_openvino(path: Path, bits: int = 8) -> None:
    """Give the matrix products of a graph eight-bit or four-bit weights; sums are in float32."""
    openvino = imports.openvino()
    # Read into memory: the file is replaced, so it must not be mapped by then.
    graph = core().read_model(path.read_bytes(), path.with_suffix(".bin").read_bytes())
    for product in graph.get_ordered_ops():
        if product.get_type_name() == "MatMul":
            _quantise(product, openvino, bits)
    openvino.save_model(graph, str(path), compress_to_fp16=False)


def _quantise(product: Any, openvino: ModuleType, bits: int) -> None:
    """Quantise weights to integers: each `BLOCK` of a row has its own scale, or the whole row if
    its length is no multiple of `BLOCK`."""
    ops, most = openvino.opset13, 2 ** (bits - 1) - 1
    weights = product.input_value(1).get_node()
    if weights.get_type_name() != "Constant" or weights.data.ndim != 2:
        return
    attributes = product.get_attributes()
    rows = weights.data if attributes["transpose_b"] else weights.data.T
    size = BLOCK if rows.shape[1] % BLOCK == 0 else rows.shape[1]
    cut = rows.reshape(rows.shape[0], -1, size)
    scale = np.abs(cut).max(axis=2, keepdims=True) / most
    whole = np.round(cut / np.where(scale == 0, 1, scale)).astype(np.int8)
    packed = ops.constant(whole, openvino.Type.i4 if bits == 4 else openvino.Type.i8)
    scaled = ops.multiply(ops.convert(packed, "f32"), ops.constant(scale))
    flat = ops.reshape(scaled, np.array(rows.shape), False)
    again = ops.matmul(product.input_value(0), flat, attributes["transpose_a"], True)
    product.output(0).replace(again.output(0))
