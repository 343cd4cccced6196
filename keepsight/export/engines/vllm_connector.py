"""A Keepsight store as the external encoder cache of vLLM: `--ec-transfer-config`, read only.

vLLM asks its scheduler's connector whether it has the encoder output of a name, and its worker's
connector to put it where the tower's output would be. The scheduler's one reads and checks, and
hands the rows over with the step, so nothing is left that a worker could fail to find. The class
itself, `KeepsightConnector`, is made when vLLM asks for it: importing this needs no vLLM.

It does not write. At the place where vLLM offers what its tower computed there is neither the image
nor what the processor made of it, so a package with an image key could not be made honestly.
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from keepsight.errors import InputError, MissingExtra, WrongIdentity
from keepsight.export.engines.checkpoint import checkpoint_digest
from keepsight.export.engines.serving import Binding, Serving
from keepsight.store import open_store

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
CONNECTOR = "KeepsightConnector"
_BASE = "vllm.distributed.ec_transfer.ec_connector.base"
_VALUES = ("pixel_values", "image_embeds", "pixel_values_flat")  # what a request may be served from


@dataclass
class Handed:
    """What the scheduler's connector gives the worker's with one step: rows under their names."""

    rows: dict[str, torch.Tensor] = field(default_factory=dict)


class Connector:
    """The methods that vLLM 0.32 calls; its own base class is mixed in below."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)  # type: ignore[call-arg]
        transfer, model = vllm_config.ec_transfer_config, vllm_config.model_config
        if transfer.ec_role != "ec_consumer":
            raise InputError(
                f"ec_role is {transfer.ec_role!r}; this connector only reads: use 'ec_consumer'"
            )
        self._serving: Serving | None = None
        self._dtype = model.dtype
        self._next = Handed()
        self._unavailable: set[str] = set()
        if role.name != "SCHEDULER":
            return
        binding = Binding.of(dict(transfer.ec_connector_extra_config))
        served = checkpoint_digest(model.model, model.revision)
        if served != binding.checkpoint:
            raise WrongIdentity("checkpoint", served, binding.checkpoint, "encoder cache")
        self._serving = Serving(open_store(binding.store).tenant(binding.tenant), binding)

    @property
    def serving(self) -> Serving:
        """The store's side, which the scheduler's connector has."""
        if self._serving is None:
            raise InputError("a worker's connector was asked for what only the scheduler's knows")
        return self._serving

    # -- in the scheduler ------------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Whether features of this name can be given out."""
        return self.serving.find(identifier) is not None

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Fail a request that names features of ours which it cannot have, before it is scheduled.

        Without this the engine would look for them in vain, or find them of another length.
        """
        for index, feature in enumerate(request.mm_features):
            if not self.serving.ours(feature.identifier):
                continue
            # Features that lie behind what is computed already are in the key/value cache.
            place = feature.mm_position
            if place.offset + place.length <= num_computed_tokens:
                continue
            tokens = request.get_num_encoder_embeds(index)
            why = self.serving.misfit(feature.identifier, tokens, _grid(feature.data))
            found = self.serving.find(feature.identifier) is not None
            if why and (found or not _can_be_computed(feature.data)):
                logger.warning("request %s fails: %s: %s", request.request_id, place, why)
                self._unavailable.add(request.request_id)
                return False
        return True

    def take_unavailable_requests(self) -> set[str]:
        """The requests that vLLM must fail now."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """There is room for these features now: hand them over with the next step."""
        name = request.mm_features[index].identifier
        rows = self.serving.rows(name)
        if rows is not None:
            self._next.rows[name] = rows.to(self._dtype)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Handed:
        """What the worker needs for this step."""
        handed, self._next = self._next, Handed()
        return handed

    def shutdown(self) -> None:
        """Close the store."""
        if self._serving is not None:
            self._serving.close()

    # -- in the worker ---------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: object) -> None:
        """Put the rows where the tower's output would be."""
        handed: Handed = self._get_connector_metadata()  # type: ignore[attr-defined]
        device = _device()
        for name, rows in handed.rows.items():
            if name not in encoder_cache:
                encoder_cache[name] = rows.to(device)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: object
    ) -> None:
        """Nothing: this connector does not write (the module says why)."""


def _grid(data: MultiModalKwargsItem | None) -> list[int] | None:
    """The grid that a request gives for one image, where it gives one."""
    found = data["image_grid_thw"].data if data is not None and "image_grid_thw" in data else None
    return found.flatten().tolist() if isinstance(found, torch.Tensor) else None


def _can_be_computed(data: MultiModalKwargsItem | None) -> bool:
    """Whether a request holds what vLLM's own tower needs, or features of its own."""
    return data is not None and any(name in data for name in _VALUES)


def _device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@functools.cache
def _connector() -> type:
    try:
        base = importlib.import_module(_BASE).ECConnectorBase
    except ImportError as error:
        raise MissingExtra.named("vllm") from error
    made: type = type(CONNECTOR, (Connector, base), {"__module__": __name__, "__doc__": __doc__})
    return made


def __getattr__(name: str) -> type:
    if name == CONNECTOR:
        return _connector()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
