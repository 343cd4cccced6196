"""Writes one part of a model as a graph of ONNX Runtime or OpenVINO, and narrows its weights.

With eight-bit or four-bit weights there are fewer bytes to read per token, and on the disk. Each 32
weights of a row share a scale. ONNX Runtime adds integers and scales back; OpenVINO adds in
float32. Only matrix products of decoder and head are quantised. The tower is unchanged, so its
features equal those of the float model, and packages serve both. Four bits are for the decoder
only; the head, whose rounding goes directly into the logits, then has eight.
"""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from keepsight.export.graphs.parts import Decoder, GraphPart, Sample
from keepsight.runtimes import imports
from keepsight.runtimes.openvino import core

QUANTISED = ("decoder", "head")
_BLOCK = 32  # weights of a row that share a scale
_SUMS_IN_INT8 = 4  # ONNX Runtime's name for this accuracy level


def write_graph(runtime: str, path: Path, part: GraphPart, sample: Sample) -> None:
    """Trace a part and write its graph beside its weights; `path` has no extension."""
    path.parent.mkdir(exist_ok=True)
    if runtime == "openvino":
        _write_openvino(path.with_name(f"{path.name}.xml"), part, sample)
    else:
        _write_onnx(path.with_name(f"{path.name}.onnx"), part, sample, ort_fusions="cpu")


def quantise(runtime: str, path: Path, kind: str) -> None:
    """Narrow the matrix products of a graph to `int8` or `int4`; `path` has no extension."""
    bits = 4 if kind == "int4" and path.name == "decoder" else 8
    if runtime == "openvino":
        _quantise_openvino(path.with_name(f"{path.name}.xml"), bits)
    else:
        _quantise_onnx(path.with_name(f"{path.name}.onnx"), bits)


# -- ONNX ------------------------------------------------------------------------------------------


def _write_onnx(path: Path, part: GraphPart, sample: Sample, **options: Any) -> None:
    from transformers.exporters import OnnxConfig, OnnxExporter  # needs an optional library

    exporter = OnnxExporter()
    config = OnnxConfig(dynamic=True, dynamic_shapes=sample.varies, **options)
    program, _ = exporter.export_program(part, sample.inputs, config)
    exporter.save_program(program, path)


def _quantise_onnx(path: Path, bits: int) -> None:
    import onnx  # an optional library, and below another

    imports.onnxruntime()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    from onnxruntime.quantization import matmul_nbits_quantizer as nbits

    root.handlers[:], root.level = handlers, level  # which its import has changed
    logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)
    how = nbits.DefaultWeightOnlyQuantConfig(
        block_size=_BLOCK, is_symmetric=True, accuracy_level=_SUMS_IN_INT8, bits=bits
    )
    quantizer = nbits.MatMulNBitsQuantizer(onnx.load(path), algo_config=how)
    quantizer.process()
    path.unlink()
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    quantizer.model.save_model_to_file(str(path), use_external_data_format=True)


# -- OpenVINO --------------------------------------------------------------------------------------


def _write_openvino(path: Path, part: GraphPart, sample: Sample) -> None:
    openvino = imports.openvino()
    from transformers.exporters import OpenVINOConfig, OpenVINOExporter  # an optional library

    exporter = OpenVINOExporter()
    if isinstance(part, Decoder) and "linear" in part.kinds:
        # Its PyTorch reader does not know scan, which the delta rule uses; its reader of ONNX with
        # standard operators knows loops and branches.
        with TemporaryDirectory(dir=path.parent) as scratch:
            between = Path(scratch) / "part.onnx"
            _write_onnx(between, part, sample)
            exporter.save_program(openvino.convert_model(between), path)
        return
    config = OpenVINOConfig(dynamic=True, dynamic_shapes=sample.varies, stateful=False)
    program, _ = exporter.export_program(part, sample.inputs, config)
    exporter.save_program(program, path)


def _quantise_openvino(path: Path, bits: int) -> None:
    """Each block of a row has its own scale, or the whole row if no block fits."""
    openvino = imports.openvino()
    ops, most = openvino.opset13, 2 ** (bits - 1) - 1
    # Read into memory: the file is replaced, so it must not be mapped by then.
    graph = core().read_model(path.read_bytes(), path.with_suffix(".bin").read_bytes())
    for product in graph.get_ordered_ops():
        if product.get_type_name() != "MatMul":
            continue
        weights = product.input_value(1).get_node()
        if weights.get_type_name() != "Constant" or weights.data.ndim != 2:
            continue
        attributes = product.get_attributes()
        rows = weights.data if attributes["transpose_b"] else weights.data.T
        size = _BLOCK if rows.shape[1] % _BLOCK == 0 else rows.shape[1]
        cut = rows.reshape(rows.shape[0], -1, size)
        scale = np.abs(cut).max(axis=2, keepdims=True) / most
        whole = np.round(cut / np.where(scale == 0, 1, scale)).astype(np.int8)
        packed = ops.constant(whole, openvino.Type.i4 if bits == 4 else openvino.Type.i8)
        scaled = ops.multiply(ops.convert(packed, "f32"), ops.constant(scale))
        flat = ops.reshape(scaled, np.array(rows.shape), False)
        again = ops.matmul(product.input_value(0), flat, attributes["transpose_a"], True)
        product.output(0).replace(again.output(0))
    openvino.save_model(graph, str(path), compress_to_fp16=False)
