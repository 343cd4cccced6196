"""Binds a store of features to the checkpoint that another engine serves.

That engine keeps the weights in other shapes, so our fingerprint cannot be computed from it. But
both sides can read the checkpoint's files: `connector_config` loads them once with Keepsight and
records which features fit, with a digest of every byte of the files. The connector compares that
digest with the files its engine serves.
"""

from __future__ import annotations

import os

from keepsight import vlm
from keepsight.export.engines.checkpoint import checkpoint_digest
from keepsight.kinds import Record
from keepsight.models import loading
from keepsight.system.places import expanded

CONNECTOR = "KeepsightConnector"
MODULE = "keepsight.export.engines.vllm_connector"


def connector_config(
    name: str | os.PathLike[str],
    store: str | os.PathLike[str],
    *,
    tenant: str | None = None,
    lossy: bool = False,
) -> Record:
    """The `--ec-transfer-config` with which vLLM takes features of this checkpoint from a store.

    Loads the model once. `lossy` also admits packages of a lossy codec.
    """
    address = os.fspath(store)
    if "://" not in address:
        address = str(expanded(address).resolve())
    path = loading.model_path(os.fspath(name))
    with vlm.load(name) as live:
        weights = live.runtime.weights.vision
        settings = live.runtime.weights.settings
    extra = {
        "store": address,
        "tenant": tenant,
        "weights": weights,
        "settings": settings,
        "checkpoint": checkpoint_digest(path),
        "lossy": bool(lossy),
    }
    return {
        "ec_connector": CONNECTOR,
        "ec_connector_module_path": MODULE,
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": extra,
    }
