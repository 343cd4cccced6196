"""Keepsight gives any Hugging Face vision-language model a memory. Look once, remember. May import
every room but server, bench and cli.

Nothing heavy is imported until a name is used: `import keepsight` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_HOMES = {
    "Encoder": "encode.encoder",
    "Package": "formats.package",
    "Prefix": "session.prepared",
    "Reply": "report",
    "Report": "report",
    "Session": "session.session",
    "Ticket": "core.together",
    "Together": "core.together",
    "Usage": "report",
    "VLM": "vlm",
    "errors": "errors",
    "install": "vlm",
    "installed": "vlm",
    "load": "export.runtime_choice",
    "tower_tensors": "models.tower_inputs",
    "uninstall": "vlm",
    "wrap": "vlm",
}

__all__ = [
    "Encoder",
    "Package",
    "Prefix",
    "Reply",
    "Report",
    "Session",
    "Ticket",
    "Together",
    "Usage",
    "VLM",
    "errors",
    "install",
    "installed",
    "load",
    "tower_tensors",
    "uninstall",
    "wrap",
]

if TYPE_CHECKING:
    from keepsight import errors
    from keepsight.core.together import Ticket, Together
    from keepsight.encode.encoder import Encoder
    from keepsight.export.runtime_choice import load
    from keepsight.formats.package import Package
    from keepsight.models.tower_inputs import tower_tensors
    from keepsight.report import Reply, Report, Usage
    from keepsight.session.prepared import Prefix
    from keepsight.session.session import Session
    from keepsight.vlm import VLM, install, installed, uninstall, wrap


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'keepsight' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"keepsight.{home}")
    except Exception as error:
        from keepsight.errors import WrongTorchvision

        if (known := WrongTorchvision.behind(error)) is None:
            raise
        raise known from None
    return module if name == home else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
