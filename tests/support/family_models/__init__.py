"""Builders of tiny models, one module a behaviour. Each gives model class, config, processor."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

Builder = Callable[[], tuple[Any, Any, Any]]
BUILDERS: dict[str, Builder] = {}
for _module in pkgutil.iter_modules(__path__):
    BUILDERS.update(importlib.import_module(f"{__name__}.{_module.name}").BUILDERS)
