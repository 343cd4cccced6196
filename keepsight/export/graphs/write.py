"""One part of a model to one graph on disk, by Transformers' own exporters.

For ONNX Runtime with its own operators; what OpenVINO reads is made in `openvino`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keepsight.errors import MissingExtra
from keepsight.export.graphs.openvino import write_openvino
from keepsight.export.graphs.parts import GraphPart, Sample


def write_graph(runtime: str, path: Path, part: GraphPart, sample: Sample) -> None:
    """Trace a part and write its graph beside its weights; `path` lacks the ending."""
    path.parent.mkdir(exist_ok=True)
    if runtime == "openvino":
        write_openvino(path.with_name(f"{path.name}.xml"), part, sample, _write_standard_onnx)
    else:
        _write_onnx(path.with_name(f"{path.name}.onnx"), part, sample, ort_fusions="cpu")


def _write_standard_onnx(path: Path, part: GraphPart, sample: Sample) -> None:
    """With operators of the standard alone."""
    _write_onnx(path, part, sample)


def _write_onnx(path: Path, part: GraphPart, sample: Sample, **options: Any) -> None:
    try:
        from transformers.exporters import OnnxConfig, OnnxExporter

        exporter = OnnxExporter()
    except ImportError as error:
        raise MissingExtra.named("onnx and onnxscript", "onnx") from error
    config = OnnxConfig(dynamic=True, dynamic_shapes=sample.varies, **options)
    program, _ = exporter.export_program(part, sample.inputs, config)
    exporter.save_program(program, path)
