"""ONNX Runtime and OpenVINO, imported without their telemetry.

Both send telemetry unless it is switched off. From its import on, the one keeps an id of the
machine and a list of events (the path of the program among them) in the user's cache folder, and
sends them from a thread of its own; the other forks the process to send an event to a web service.
Users of a model have not asked for that, so both are switched off. What the caller has
decided for himself stays as it is: `ORT_DISABLE_TELEMETRY`, or a runtime that he imported before.
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


class Foreign(Protocol):
    """Something of a library that has no types."""

    def __getattr__(self, name: str, /) -> Any: ...

    def __call__(self, *args: object, **options: object) -> Any: ...


_SENDER = "openvino_telemetry"


def onnxruntime() -> ModuleType:
    """The module, which sends nothing."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise MissingExtra.named("onnxruntime", "onnx") from error


def openvino() -> ModuleType:
    """The module, which sends nothing."""
    try:
        with _without_sender():
            found = importlib.import_module("openvino")
            # What converts models looks for the sender again, when it is first imported.
            with contextlib.suppress(ImportError):
                importlib.import_module("openvino.tools.ovc.convert_impl")
            return found
    except ImportError as error:
        raise MissingExtra.named("openvino", "openvino") from error


@contextlib.contextmanager
def _without_sender() -> Iterator[None]:
    """As if the package that sends were not installed: then OpenVINO has a stand-in of its own."""
    if _SENDER in sys.modules:
        yield
        return
    sys.modules[_SENDER] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[_SENDER]
