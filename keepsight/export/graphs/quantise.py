"""Weights of a graph in eight or four bits: fewer bytes to read for each token, and on the disk.

Each 32 weights of a row share a scale. ONNX Runtime adds up in whole numbers and scales back,
OpenVINO adds up in float32. Only the products of decoder and head are quantised: the tower stays as
it is, so what it sees is what the float model sees, and packages serve both. Four bits are for the
decoder; the head, whose rounding goes straight into the logits, then has eight.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepsight.errors import MissingExtra
from keepsight.export.graphs.openvino import BLOCK, quantise_openvino
from keepsight.runtimes import imports
from keepsight.system.words import WEIGHTS

KINDS = WEIGHTS
PARTS = ("decoder", "head")
_SUMS_IN_INT8 = 4  # what ONNX Runtime calls this level of accuracy


def quantise(runtime: str, path: Path, kind: str) -> None:
    """Give the products of a graph weights of one of the `KINDS`; `path` lacks the ending."""
    bits = 4 if kind == "int4" and path.name == "decoder" else 8
    if runtime == "openvino":
        quantise_openvino(path.with_name(f"{path.name}.xml"), bits)
    else:
        _quantise_onnx(path.with_name(f"{path.name}.onnx"), bits)


def _quantise_onnx(path: Path, bits: int) -> None:
    try:
        import onnx

        imports.onnxruntime()
        with _quiet():
            from onnxruntime.quantization import matmul_nbits_quantizer as nbits
    except ImportError as error:
        raise MissingExtra.named("onnx and onnxruntime", "onnx") from error
    how = nbits.DefaultWeightOnlyQuantConfig(
        block_size=BLOCK, is_symmetric=True, accuracy_level=_SUMS_IN_INT8, bits=bits
    )
    quantizer = nbits.MatMulNBitsQuantizer(onnx.load(path), algo_config=how)
    quantizer.process()
    path.unlink()
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    quantizer.model.save_model_to_file(str(path), use_external_data_format=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """ONNX Runtime's module sets up the logging of the whole process when it is imported."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:], root.level = handlers, level
        logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)
