"""Packages for vLLM and SGLang, by request or through a store.

`to_vllm` and `to_sglang` put features into a request. If vLLM reads a Keepsight store as its
encoder cache (`connector_config`), requests carry only names of features (`named_for_vllm`).
Imports are lazy, because inside vLLM another Transformers is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOMES = {
    "checkpoint_digest": "export.engines.checkpoint",
    "connector_config": "export.engines.binding",
    "identifier": "formats.engine_inputs",
    "named_for_vllm": "formats.engine_inputs",
    "to_sglang": "formats.engine_inputs",
    "to_vllm": "formats.engine_inputs",
}

__all__ = [
    "checkpoint_digest",
    "connector_config",
    "identifier",
    "named_for_vllm",
    "to_sglang",
    "to_vllm",
]

if TYPE_CHECKING:
    from keepsight.export.engines.binding import connector_config
    from keepsight.export.engines.checkpoint import checkpoint_digest
    from keepsight.formats.engine_inputs import identifier, named_for_vllm, to_sglang, to_vllm


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"keepsight.{_HOMES[name]}"), name)
