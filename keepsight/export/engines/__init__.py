"""Packages for vLLM and SGLang, by request or through a store.

`to_vllm` and `to_sglang` put features into a request. If vLLM reads a Keepsight store as its
encoder cache (`connector_config`), requests carry only names of features (`named_for_vllm`).
"""

from keepsight.export.engines.checkpoint import checkpoint_digest, connector_config
from keepsight.formats.engine_inputs import identifier, named_for_vllm, to_sglang, to_vllm

__all__ = [
    "checkpoint_digest",
    "connector_config",
    "identifier",
    "named_for_vllm",
    "to_sglang",
    "to_vllm",
]
