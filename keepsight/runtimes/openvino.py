"""One graph in OpenVINO, its inputs read where they lie.

Settings are those that give float32, and the same bits for the same input whatever ran before.
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

# float32 throughout: on processors that have it the runtime would take bfloat16, would keep keys
# and values in 8 bits and quantise activations.
_SETTINGS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "PERFORMANCE_HINT": "LATENCY",
    "NUM_STREAMS": "1",
    # Threads bound to cores would stand in the way of PyTorch's and of other graphs'.
    "ENABLE_CPU_PINNING": "NO",
}


@functools.cache
def core() -> imports.Foreign:
    """One for the process, never released: with the last of them the runtime unloads code that its
    own threads may still be in, and the process dies some time later."""
    return cast(imports.Foreign, imports.openvino().Core())


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
        self._rooms: dict[str, np.ndarray] = {}  # where inputs are put together
        self._alone = threading.Lock()  # a request serves one caller at a time
        # Named as in the file: what is compiled has names of fused operators besides.
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
        """The memory of an input; a lane's keys and values lie apart, and are copied together.

        NumPy copies them, into memory that stays: PyTorch would wake its threads for each, which
        wait for those of the runtime.
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
        """An output, copied: it lies in memory of the runtime's, which the next run writes over.

        To have it written elsewhere would be no cheaper: outputs are new rows, and the runtime
        would go on writing there without being asked to.
        """
        found = self._request.get_tensor(name).data
        if place is None:
            return torch.from_numpy(np.array(found))
        np.copyto(place.numpy(), found)
        return place
