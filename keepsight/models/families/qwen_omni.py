"""Families that also hear (the thinkers of Qwen's Omni models).

Transformers accepts features of images and videos, but not of sound. Sound features are inserted
here in place of embeddings, before the language model runs. Positions come from ids and lengths;
Transformers would silently use one dimension for any call without an attention mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from keepsight.errors import InputError, UnsupportedInput
from keepsight.formats.package import Package
from keepsight.kinds import Clip, Grid, Options, Record
from keepsight.models import upstream
from keepsight.models.families.pixels import Part, Pixels, Tensors, joined, rows_of
from keepsight.models.families.qwen_vl import VIDEO, QwenVL

if TYPE_CHECKING:
    from transformers import ProcessorMixin
    from transformers.modeling_outputs import BaseModelOutputWithPooling

AUDIO = ("input_features", "feature_attention_mask")
_SECONDS = "video_second_per_grid"


class QwenOmni(QwenVL):
    """Images, videos and sound; each clip is cut to its own length."""

    times_name = _SECONDS
    also_takes = (*VIDEO, _SECONDS, *AUDIO, "use_audio_in_video")

    @property
    def placeholders(self) -> dict[str, int]:
        return {**super().placeholders, "audio": int(self.model.config.audio_token_id)}

    # -- sound in --------------------------------------------------------------------------------

    def preprocess_other(
        self, processor: ProcessorMixin, medium: Clip, options: Options, modality: str
    ) -> Pixels:
        if modality != "audio":
            return super().preprocess_other(processor, medium, options, modality)
        samples, about = medium
        extractor = processor.feature_extractor
        rate = about.get("sampling_rate") or extractor.sampling_rate
        if rate != extractor.sampling_rate:
            raise InputError(
                f"the sound has a sampling rate of {rate} Hz, this model takes "
                f"{extractor.sampling_rate}; resample it first"
            )
        given = {**getattr(processor, "audio_kwargs", {}), "return_tensors": "pt"}
        processed, texts = upstream.processed(processor, "audio", [samples], **given)
        mask = torch.as_tensor(processed[AUDIO[1]])
        clip = self._clip(torch.as_tensor(processed[AUDIO[0]])[0], int(mask[0].sum()))
        layout = self.layout_of(processor, texts[0], "audio")
        return Pixels(clip.tensors, clip.grid, layout, "audio")

    def _process_video(
        self, processor: ProcessorMixin, frames: np.ndarray, about: Record, options: Options
    ) -> tuple[Record, str]:
        given = {
            "videos_kwargs": {
                **getattr(processor, "videos_kwargs", {}),
                **options,
                "return_tensors": "pt",
                "return_metadata": True,
                "video_metadata": [about],
            },
            "load_audio_from_video": False,
        }
        processed, texts = upstream.processed(processor, "videos", [frames], **given)
        return dict(processed), texts[0]

    def _clip(self, features: torch.Tensor, length: int) -> Pixels:
        """One clip without the padding to its neighbours' length."""
        tensors = {
            AUDIO[0]: features[None, :, :length].contiguous(),
            AUDIO[1]: torch.ones(1, length, dtype=torch.long),
        }
        tokens = upstream.sound_tokens(self.core.audio_tower, length)
        return Pixels(tensors, {"audio_seqlens": [length]}, (tokens,), "audio")

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        if "use_audio_in_video" in tensors:
            raise UnsupportedInput(
                "use_audio_in_video interleaves two media, which is not supported"
            )
        if VIDEO[0] in tensors and _SECONDS not in tensors:
            raise InputError(f"{VIDEO[0]} came without {_SECONDS}, which positions depend on")
        media = super().split_tensors(tensors, rows)
        features, mask = (tensors.get(name) for name in AUDIO)
        if features is None:
            return media
        if mask is None or mask.shape != (features.shape[0], features.shape[-1]):
            raise InputError(
                f"{AUDIO[1]} must have the shape (clips, frames) that {AUDIO[0]} of shape "
                f"{tuple(features.shape)} has"
            )
        if (mask[:, 1:] > mask[:, :-1]).any() or not mask[:, 0].all():
            raise InputError(f"{AUDIO[1]} has ones behind zeros; a clip is padded at its end")
        lengths = mask.sum(-1).tolist()
        return [
            *media,
            *(self._clip(clip, int(n)) for clip, n in zip(features, lengths, strict=True)),
        ]

    def join_pixels(self, media: Sequence[Pixels]) -> Tensors:
        """Pack each kind as the processor does; clips are padded to the longest."""
        clips = joined([medium for medium in media if medium.modality == "audio"])
        return {**super().join_pixels([m for m in media if m.modality != "audio"]), **clips}

    def features_of(self, inputs: Tensors) -> BaseModelOutputWithPooling:
        if AUDIO[0] not in inputs:
            return super().features_of(inputs)
        sound = {AUDIO[0]: inputs[AUDIO[0]].to(self.model.dtype)}
        output = self.core.get_audio_features(**{**inputs, **sound}, return_dict=True)
        output.pooler_output = [output.last_hidden_state]
        return output

    def check_package(self, package: Package) -> None:
        if package.modality != "audio":
            super().check_package(package)
        else:
            self.check_width(package, self.feature_width())

    # -- sound in a prompt -----------------------------------------------------------------------

    def feature_inputs(self, parts: Sequence[Part], ids: torch.Tensor) -> Record:
        seen = [part for part in parts if part[0].modality != "audio"]
        heard = [part for part in parts if part[0].modality == "audio"]
        inputs = super().feature_inputs(seen, ids)
        if heard:
            embedded = self.model.get_input_embeddings()(ids)
            rows = torch.cat([rows_of(p.tensors["features"], a, b) for p, a, b in heard])
            spots = (ids == self.placeholders["audio"])[..., None]
            inputs["inputs_embeds"] = embedded.masked_scatter(
                spots, rows.to(embedded.device, embedded.dtype)
            )
        return inputs

    def prompt_inputs(self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> Tensors:
        """Also gives positions: stock `generate` cannot know the lengths of clips it is not
        given."""
        grid = self.rope_grid(grids)
        inputs = {name: torch.tensor(v) for name, v in grid.items() if name.endswith("_thw")}
        return {**inputs, "position_ids": self.positions(ids, types, grids)}

    def rope(
        self, ids: torch.Tensor, types: np.ndarray, given: Tensors, grids: Sequence[Grid]
    ) -> torch.Tensor:
        lengths = [length for one in grids for length in one.get("audio_seqlens", [])]
        found: torch.Tensor = self.core.get_rope_index(
            ids,
            image_grid_thw=given.get("image_grid_thw"),
            video_grid_thw=given.get(VIDEO[1]),
            attention_mask=torch.ones_like(ids),
            audio_seqlens=torch.tensor(lengths) if lengths else None,
            second_per_grids=given.get(_SECONDS),
        )[0]
        return found
