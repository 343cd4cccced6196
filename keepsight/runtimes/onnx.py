"""One graph in ONNX Runtime, which reads inputs and writes outputs in place.

Outputs named in `into` are written there directly: attention appends to a lane's own buffer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from keepsight.errors import ModelError
from keepsight.runtimes import imports

# ONNX's numbers of element types.
_TYPES = {
    torch.float32: 1,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
}


class OnnxSession:
    """A graph that takes and gives tensors by name."""

    def __init__(self, path: Path, threads: int) -> None:
        onnxruntime = imports.onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # it has a class of error for each missing feature
            raise ModelError(
                f"ONNX Runtime {onnxruntime.__version__} cannot run {path.name}: {error}; export "
                "the model again with this version, or install the one it was exported with"
            ) from error
        self.version: str = onnxruntime.__version__
        self._name = path.name
        self.inputs = frozenset(spec.name for spec in self._session.get_inputs())
        self._outputs = [spec.name for spec in self._session.get_outputs()]

    def run(
        self, feeds: dict[str, Tensor], into: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The outputs by name; those named in `into` are written there."""
        binding = self._session.io_binding()
        held = []  # keep alive during the run
        for name in self.inputs:
            tensor = feeds[name].contiguous()
            # It refuses the null pointer of an empty tensor.
            buffer = tensor if tensor.numel() else tensor.new_empty(1)
            held.append(buffer)
            binding.bind_input(
                name, "cpu", 0, _TYPES[tensor.dtype], list(tensor.shape), buffer.data_ptr()
            )
        into = into or {}
        for name in self._outputs:
            if name in into:
                out = into[name]
                binding.bind_output(
                    name, "cpu", 0, _TYPES[out.dtype], list(out.shape), out.data_ptr()
                )
            else:
                binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # any of the same classes
            raise ModelError(
                f"ONNX Runtime {self.version} failed in {self._name}: {error}"
            ) from error
        values = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        return {
            name: into[name] if name in into else torch.from_numpy(value.numpy())
            for name, value in values.items()
        }
