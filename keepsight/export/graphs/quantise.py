"""Eight-bit or four-bit weights in a graph: fewer bytes to read per token, and on the disk.

Each 32 weights of a row share a scale. ONNX Runtime adds integers and scales back; OpenVINO adds in
float32. Only matrix products of decoder and head are quantised. The tower is unchanged, so its
features equal those of the float model, and packages serve both. Four bits are for the decoder
only; the head, whose rounding goes directly into the logits, then has eight.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepsight.export.graphs.openvino import BLOCK, quantise_openvino
from keepsight.runtimes import imports
from keepsight.system.words import WEIGHTS

KINDS = WEIGHTS
PARTS = ("decoder", "head")
_SUMS_IN_INT8 = 4  # ONNX Runtime's name for this accuracy level


def quantise(runtime: str, path: Path, kind: str) -> None:
    """Quantise the matrix products of a graph to one of the `KINDS`; `path` has no extension."""
    bits = 4 if kind == "int4" and path.name == "decoder" else 8
    if runtime == "openvino":
        quantise_openvino(path.with_name(f"{path.name}.xml"), bits)
    else:
        _quantise_onnx(path.with_name(f"{path.name}.onnx"), bits)


def _quantise_onnx(path: Path, bits: int) -> None:
    import onnx  # an optional library, and below another

    imports.onnxruntime()
    with _quiet():
        from onnxruntime.quantization import matmul_nbits_quantizer as nbits
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
    """Keep ONNX Runtime's quantiser from changing the process's logging on import."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:], root.level = handlers, level
        logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)
