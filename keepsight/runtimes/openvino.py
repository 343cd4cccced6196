"""One graph in OpenVINO, which reads inputs in place.

The settings give float32, and equal bits for equal inputs whatever ran before.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from keepsight.errors import ModelError
from keepsight.runtimes import imports

# float32 throughout: where supported, the runtime would use bfloat16, keep keys and values in 8
# bits and quantise activations.
_SETTINGS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "PERFORMANCE_HINT": "LATENCY",
    "NUM_STREAMS": "1",
    # Threads bound to cores would block PyTorch's and those of other graphs.
    "ENABLE_CPU_PINNING": "NO",
}


@functools.cache
def core() -> imports.Untyped:
    """One per process, never released: with the last one the runtime unloads code that its threads
    may still run, and the process crashes some time later."""
    return cast(imports.Untyped, imports.openvino().Core())


class OpenVinoSession:
    """A graph that takes and gives tensors by name."""

    def __init__(self, path: Path, threads: int) -> None:
        openvino = imports.openvino()
        self.version: str = openvino.__version__
        settings = {**_SETTINGS, "INFERENCE_NUM_THREADS": str(threads)}
        try:
            shared = core()
            graph = shared.read_model(str(path))
            compiled = shared.compile_model(graph, "CPU", settings)
        except RuntimeError as error:
            raise ModelError(
                f"OpenVINO {self.version} cannot run {path.name}: {error}; export the model again "
                "with this version, or install the one it was exported with"
            ) from error
        self._name = path.name
        self._tensor = openvino.Tensor
        self._request = compiled.create_infer_request()
        self._rooms: dict[str, np.ndarray] = {}  # where inputs are copied together
        self._alone = threading.Lock()  # a request serves one caller at a time
        # Named as in the file: the compiled model also has names of fused operators.
        self.inputs = frozenset(port.get_any_name() for port in graph.inputs)
        self._outputs = [port.get_any_name() for port in graph.outputs]

    def run(
        self, feeds: dict[str, Tensor], into: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The outputs by name; those named in `into` are written there."""
        into = into or {}
        with self._alone:
            held = {name: self._in_one_piece(name, feeds[name]) for name in self.inputs}
            try:
                for name, array in held.items():
                    self._request.set_tensor(name, self._tensor(array, shared_memory=True))
                self._request.infer()
            except RuntimeError as error:
                raise ModelError(
                    f"OpenVINO {self.version} failed in {self._name}: {error}"
                ) from error
            return {name: self._given(name, into.get(name)) for name in self._outputs}

    def _in_one_piece(self, name: str, tensor: Tensor) -> np.ndarray:
        """The memory of an input; a lane's keys and values are separate, so they are copied into
        one buffer.

        NumPy copies them into reused memory: PyTorch would wake its threads for each copy, which
        compete with the runtime's.
        """
        array = tensor.numpy()
        if array.flags.c_contiguous:
            return array
        room = self._rooms.get(name)
        if room is None or room.dtype != array.dtype or room.size < array.size:
            room = self._rooms[name] = np.empty(array.size + array.size // 4, array.dtype)
        piece = room[: array.size].reshape(array.shape)
        np.copyto(piece, array)
        return piece

    def _given(self, name: str, place: Tensor | None) -> Tensor:
        """A copy of an output, because the next run overwrites the runtime's memory.

        Letting it write elsewhere would save nothing: outputs are only new rows, and later runs
        would overwrite that place.
        """
        found = self._request.get_tensor(name).data
        if place is None:
            return torch.from_numpy(np.array(found))
        np.copyto(place.numpy(), found)
        return place
