"""A Keepsight store as the external encoder cache of vLLM: `--ec-transfer-config`, read only.

vLLM asks its scheduler's connector whether it has the encoder output of a name, and its worker's
connector to put it in place of the tower's output. The scheduler's connector reads and checks, and
sends the rows with the step, so the worker has nothing left to look up. The class itself,
`KeepsightConnector`, is created when vLLM asks for it, so this module imports without vLLM.

It does not write: where vLLM offers the tower's output, the image and the processor's output are
missing, so the image key of a package would be unknown.
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
from keepsight.export.engines.serving import Binding, Serving, is_ours
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
_VALUES = ("pixel_values", "image_embeds", "pixel_values_flat")  # fields that can serve a request


@dataclass
class StepFeatures:
    """What the scheduler's connector sends the worker's with one step: rows by name."""

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
        self._next = StepFeatures()
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
        """The open store, in the scheduler's connector only."""
        if self._serving is None:
            raise InputError(
                "a worker's connector was called for something only the scheduler's knows"
            )
        return self._serving

    # -- in the scheduler ------------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Whether features of this name can be given out."""
        return self.serving.find(identifier) is not None

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Fail a request that names unavailable features of ours before it is scheduled.

        Otherwise the engine would search for them in vain, or find them with another length.
        """
        for index, feature in enumerate(request.mm_features):
            if not is_ours(feature.identifier):
                continue
            # Features before the computed tokens are already in the KV cache.
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
        """There is room for these features: send them with the next step."""
        name = request.mm_features[index].identifier
        rows = self.serving.rows(name)
        if rows is not None:
            self._next.rows[name] = rows.to(self._dtype)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepFeatures:
        """What the worker needs for this step."""
        handed, self._next = self._next, StepFeatures()
        return handed

    def shutdown(self) -> None:
        """Close the store."""
        if self._serving is not None:
            self._serving.close()

    # -- in the worker ---------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: object) -> None:
        """Put the rows in place of the tower's output."""
        handed: StepFeatures = self._get_connector_metadata()  # type: ignore[attr-defined]
        device = _device()
        for name, rows in handed.rows.items():
            if name not in encoder_cache:
                encoder_cache[name] = rows.to(device)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: object
    ) -> None:
        """Nothing: this connector does not write (the module says why)."""


def _grid(data: MultiModalKwargsItem | None) -> list[int] | None:
    """The grid that a request gives for one image, or None."""
    found = data["image_grid_thw"].data if data is not None and "image_grid_thw" in data else None
    return found.flatten().tolist() if isinstance(found, torch.Tensor) else None


def _can_be_computed(data: MultiModalKwargsItem | None) -> bool:
    """Whether a request has the inputs of vLLM's own tower, or features of its own."""
    return data is not None and any(name in data for name in _VALUES)


def _device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
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
