"""Libraries that only some need: imported where they are used, and named with the extra to install.

A function and no table, so that each room says itself what it needs.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from keepsight.errors import MissingExtra


def optional(module: str, extra: str, library: str | None = None) -> ModuleType:
    """A module of an optional library; where it is missing, the error says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra.named(library or module, extra) from None
