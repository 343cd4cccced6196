"""Imports ONNX Runtime and OpenVINO without their telemetry.

Both send telemetry by default. On import, ONNX Runtime writes an id of the machine and a list of
events (including the program's path) to the user's cache folder, and sends them from a thread.
OpenVINO forks the process to send an event to a web service. Users of a model did not ask for that,
so both are switched off. The caller's own choice is kept: `ORT_DISABLE_TELEMETRY`, or a runtime
that was imported earlier.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Protocol

from keepsight.errors import MissingExtra


class Untyped(Protocol):
    """An attribute of a library without types."""

    def __getattr__(self, name: str, /) -> Any: ...

    def __call__(self, *args: object, **options: object) -> Any: ...


_SENDER = "openvino_telemetry"


def onnxruntime() -> ModuleType:
    """The module, with telemetry off."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise MissingExtra.named("onnxruntime", "onnx") from error


def openvino() -> ModuleType:
    """The module, with telemetry off."""
    try:
        with _without_sender():
            found = importlib.import_module("openvino")
            # The model converter looks for the sender again when it is first imported.
            with contextlib.suppress(ImportError):
                importlib.import_module("openvino.tools.ovc.convert_impl")
            return found
    except ImportError as error:
        raise MissingExtra.named("openvino", "openvino") from error


@contextlib.contextmanager
def _without_sender() -> Iterator[None]:
    """Hide the package that sends; then OpenVINO uses its own dummy."""
    if _SENDER in sys.modules:
        yield
        return
    sys.modules[_SENDER] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[_SENDER]
