"""Optional libraries: imported where they are used; errors name the extra to install.

A function instead of a table, so that each room names its own needs.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from keepsight.errors import MissingExtra


def optional(module: str, extra: str, library: str | None = None) -> ModuleType:
    """Import an optional library; if it is missing, the error says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra.named(library or module, extra) from None
