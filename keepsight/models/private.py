"""One private API of Transformers or torch, as a row of `upstream`; also the row for TorchScript.

A row says where the API is, what it is for, and what happens without it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from keepsight.errors import UpstreamChanged
from keepsight.models.tested import TESTED


@dataclass(frozen=True)
class PrivateApi:
    """One private API: its owner, its purpose, and the fallback if it is missing."""

    owner: str  # a module, or a class in one
    name: str
    use: str
    without: str = ""  # an error if empty

    def found(self, owner: object = None) -> Any:
        """The private attribute of an object, or of its usual owner; None if it is missing."""
        home = self._home() if owner is None else owner
        return getattr(home, self.name, None)

    def needed(self, owner: object = None) -> Any:
        """The attribute, or an error that names it."""
        found = self.found(owner)
        if found is None:
            library = self.owner.partition(".")[0]
            version = {"torch": torch, "transformers": transformers}[library].__version__
            raise UpstreamChanged.named(
                f"{self.owner}.{self.name}", self.use, f"{library} {version}", TESTED[library]
            )
        return found

    def _home(self) -> object:
        try:
            return importlib.import_module(self.owner)
        except ImportError:
            module, _, name = self.owner.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name, None)
        except ImportError:
            return None
