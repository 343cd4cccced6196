"""The generic family: right for every model that accepts `mm_encoder_outputs`.

It asks Transformers for everything Transformers knows: `get_image_features` for the tower,
`get_rope_index` for multimodal positions, the processor's `replace_image_token` for the prompt text
of an image. It keeps no state of a conversation, and uses none that the model keeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutputWithPooling

from keepsight.errors import (
    DamagedFile,
    InputError,
    PlaceholderMismatch,
    UnsupportedInput,
    UnsupportedModel,
    WrongIdentity,
)
from keepsight.formats.package import Layout, Package
from keepsight.kinds import Clip, Decoded, Grid, Inputs, Options, Processor, Record
from keepsight.models import upstream
from keepsight.models.families.pixels import (
    SWITCHES,
    Part,
    Pixels,
    Tensors,
    all_tensors,
    embedding_of,
    features_in,
    is_numeric,
    parameters,
    refuse_dropped,
    rows_of,
    settled,
    with_others,
)
from keepsight.models.families.tower_absent import absent_parts
from keepsight.models.families.tower_tensors import TowerTensors
from keepsight.models.renamed import EncoderOutput
from keepsight.system import digests

# Tokens that end a turn.
TURN_ENDS = (
    "<|im_end|>", "<end_of_turn>", "<turn|>", "<|eot_id|>", "<|eot|>", "<|end|>",
    "<|END_OF_TURN_TOKEN|>", "</s>",
)  # fmt: skip


class Family:
    """The family-specific view of one model. Subclasses override only what differs."""

    # Which part of a prompt can serve another prompt (law 4):
    #   "prefix"        everything up to any token;
    #   "same media"    cuts only after the last medium: a later medium changes what is before
    #   "whole prompt"  only the identical prompt: all its tokens attend to each other.
    reuse = "prefix"
    proven = True  # False for a type not yet shown exact: stock/probe.py tries it first
    feeds_stock = True  # whether stock `generate` accepts features, as `vlm.inputs` gives them
    packages_only = ""  # what kind of model makes packages but answers no prompts
    decodes_together = True  # False if padding a batch changes a row's result
    decodes_as_prefilled = True  # False if some decoded tokens take another path through the model
    sees_whole_media = False  # whether tokens of one medium attend to each other both ways
    # Ids that close a medium whose frame tokens attend to it: a cut may follow the first.
    media_ends: frozenset[int] = frozenset()
    beside_the_tower: tuple[str, ...] = ()  # parts of the model that forward runs on given features
    also_takes: tuple[str, ...] = ()  # tensors of a processor beyond those the encoder takes
    counts_by_grid = False  # whether the grid of a package must give its tokens, without mrope too
    casts = False  # whether the tower wants pixels in its dtype and does not cast them itself

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.core: PreTrainedModel = model.base_model
        takes = "mm_encoder_outputs" in parameters(model.forward)
        if not takes or getattr(self, "encoder", None) is None:
            raise UnsupportedModel(
                f"model type {model.config.model_type!r} ({type(model).__name__}) takes no "
                "precomputed features (`mm_encoder_outputs`); "
                "Keepsight needs transformers >= 5.23 and an image-text-to-text model"
            )
        self.image_token_id: int = self._image_token()
        self.video_token_id: int | None = getattr(model.config, "video_token_id", None)
        self.mrope = hasattr(self.core, "get_rope_index")
        self._encoder_inputs = set(parameters(self.encoder)) - SWITCHES
        self.tower_tensors = TowerTensors(self.core)

    @property
    def encoder(self) -> Callable[..., BaseModelOutputWithPooling]:
        """The method that makes features from pixels; it may be replaced at any time."""
        getter: Callable[..., BaseModelOutputWithPooling] = self.core.get_image_features
        return getter

    def _image_token(self) -> int:
        config = self.model.config
        for name in ("image_token_id", "image_token_index"):
            token = getattr(config, name, None)
            if isinstance(token, int):
                return token
        raise UnsupportedModel(f"{type(config).__name__} names no image token")

    @property
    def placeholders(self) -> dict[str, int]:
        """The placeholder id for each modality that the family sees."""
        return {"image": self.image_token_id}

    def spots(self, row: np.ndarray, kind: str) -> np.ndarray:
        """The places of the placeholders of one kind of media in a prompt."""
        return np.flatnonzero(row == self.placeholders[kind])

    @property
    def tensor_inputs(self) -> set[str]:
        """The tensors of a processor's output that describe media."""
        return {*self._encoder_inputs, *self.also_takes}

    # -- identity --------------------------------------------------------------------------------

    def vision_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that make features: all except decoder and output head."""
        skip = {id(t) for module in self.text_modules() for _, t in all_tensors(module)}
        for name, tensor in all_tensors(self.model):
            if id(tensor) not in skip:
                yield name, tensor

    def text_modules(self) -> Iterator[torch.nn.Module]:
        """The modules for text only: the decoder and the output head."""
        for module in (self.model.get_decoder(), self.model.get_output_embeddings()):
            if module is not None:
                yield module

    def vision_settings(self) -> str:
        """A digest of the configuration of the tower and its projector."""
        return digests.digest("vision settings", settled(self.model.config.to_dict()))

    def turn_ends(self, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
        """Ids that end a turn."""
        ids: set[int] = set()
        for config in (self.model.generation_config, self.model.config.get_text_config()):
            eos = getattr(config, "eos_token_id", None)
            ids.update([eos] if isinstance(eos, int) else eos or [])
        if tokenizer is not None:
            vocabulary = tokenizer.get_vocab()
            ids.update(vocabulary[name] for name in TURN_ENDS if name in vocabulary)
        return frozenset(ids)

    def processor(self, given: Processor | None) -> Processor | None:
        """The processor to use for this model, given the user's."""
        return given

    # -- images in -------------------------------------------------------------------------------

    def placed(self, layout: Layout, number: int) -> Layout:
        """Prompt text of an image that is number `number` of its conversation, counted from 0."""
        return layout

    def preprocess_other(
        self, processor: Processor, medium: Clip, options: Options, modality: str
    ) -> Pixels:
        """Preprocess one video or audio clip, if the family takes them."""
        raise UnsupportedInput(f"{self.model.config.model_type} takes no {modality} here")

    def preprocess(self, processor: Processor, image: Decoded, options: Options) -> Pixels:
        """One image through the checkpoint's own processor."""
        return self._pixels(*self.processed(processor, image, options))

    def processed(
        self, processor: Processor, image: Decoded, options: Options
    ) -> tuple[Inputs, Layout]:
        """The tensors of one image, and its prompt text."""
        given = {**self.settings(processor), **options, "return_tensors": "pt"}
        tensors, texts = upstream.processed(processor, "images", [image], **given)
        return dict(tensors), self.layout_of(processor, texts[0])

    def settings(self, processor: Processor) -> Record:
        """Options that the processor itself adds for an image."""
        return dict(getattr(processor, "images_kwargs", None) or {})

    def layout_of(self, processor: Processor, text: str, kind: str = "image") -> Layout:
        """`<img>` + 256 placeholders + `</img>` becomes `("<img>", 256, "</img>")`."""
        placeholder = processor.tokenizer.convert_ids_to_tokens(self.placeholders[kind])
        runs = re.split(f"((?:{re.escape(placeholder)})+)", text)
        return tuple(
            len(run) // len(placeholder) if i % 2 else run for i, run in enumerate(runs) if run
        )

    def prompt_text(self, processor: Processor, text: str, written: re.Pattern[str]) -> str:
        """The rendered text as the processor would pass it to the tokenizer.

        `written` finds the images that the template wrote, not those that a user typed.
        """
        return text

    def _pixels(self, processed: Inputs, layout: Layout) -> Pixels:
        tensors = {
            name: torch.as_tensor(value)
            for name, value in processed.items()
            if name in self._encoder_inputs
        }
        grid: Grid = {
            name: torch.as_tensor(value).tolist()
            for name, value in processed.items()
            if not name.startswith("pixel_") and is_numeric(value)
        }
        return Pixels(tensors, grid, layout)

    def split(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        """Split a processor's packed output into media, in prompt order.

        `rows` are the ids of each prompt of the batch, without padding.
        """
        media = self.split_tensors(tensors, rows)
        refuse_dropped(media, tensors, self._encoder_inputs)
        return media

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        """Split the tensors as the family packs its media."""
        names = ("pixel_values", "image_grid_thw")
        pixels, grids = (tensors.get(name) for name in names)
        if pixels is None:
            return []
        if grids is None:
            media = self._split_rows(pixels, np.concatenate(rows))
        else:
            parts = self._split_patches(pixels, grids, *names)
            media = [self._pixels(dict(zip(names, part, strict=True)), (n,)) for *part, n in parts]
        return with_others(media, tensors, self._encoder_inputs)

    def _split_patches(
        self, pixels: torch.Tensor, grids: torch.Tensor, *names: str
    ) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """The patches of each medium, the row of its grid, and the number of its tokens."""
        patches = grids.prod(-1).tolist()
        if sum(patches) != len(pixels):
            raise PlaceholderMismatch(
                f"{names[1]} describes {sum(patches)} patches, {names[0]} has {len(pixels)}"
            )
        tokens = [self._tokens_of(row) for row in grids.tolist()]
        return list(zip(pixels.split(patches), grids.split(1), tokens, strict=True))

    def _tokens_of(self, row: list[int]) -> int:
        tokens = self._grid_tokens({"image_grid_thw": [row]})
        if tokens is None:
            raise InputError(
                f"image_grid_thw has a row {row}, which does not make a whole number of tokens"
            )
        return tokens

    def _split_rows(self, pixels: torch.Tensor, ids: np.ndarray) -> list[Pixels]:
        """One row of `pixel_values` for one image."""
        tokens = self.tokens_per_row(pixels.shape[0], ids)
        return [self._pixels({"pixel_values": row[None]}, (tokens,)) for row in pixels]

    def tokens_per_row(self, rows: int, ids: np.ndarray) -> int:
        """The number of placeholders per row of `pixel_values`, if it is fixed."""
        total = int((ids == self.image_token_id).sum())
        if not rows or total == 0 or total % rows:
            raise PlaceholderMismatch(
                f"the prompt has {total} image placeholders, which {rows} images cannot share"
            )
        return total // rows

    def join_pixels(self, media: Sequence[Pixels]) -> Tensors:
        """Pack the pixels of several media as a processor would, for stock forward."""
        names = dict.fromkeys(name for m in media for name in m.tensors)
        return {n: torch.cat([m.tensors[n] for m in media if n in m.tensors]) for n in names}

    # -- the tower -------------------------------------------------------------------------------

    @property
    def tower_absent(self) -> bool:
        """Whether the model was loaded without its tower."""
        return bool(absent_parts(self.model))

    def encode(self, pixels: Pixels) -> tuple[Tensors, str]:
        """Run one medium through the tower, alone. Returns its features, and the form in which the
        model takes several.
        """
        return self.encode_together([pixels])[0]

    def encode_together(self, media: Sequence[Pixels]) -> list[tuple[Tensors, str]]:
        """Several pictures in one pass, packed as a processor would."""
        device, dtype = self.model.device, self.model.dtype if self.casts else None
        joined = media[0].tensors if len(media) == 1 else self.join_pixels(media)
        inputs = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else None)
            for name, tensor in joined.items()
        }
        output = self.features_of({**inputs, **self.tower_tensors.of(joined, device)})
        return features_in(output, media)

    def features_of(self, inputs: Tensors) -> BaseModelOutputWithPooling:
        """The output of Transformers' encoder for the tensors of one medium."""
        return self.encoder(**inputs, return_dict=True)

    def check_package(self, package: Package) -> None:
        """Refuse, by name, a package that claims this model but does not fit it."""
        self.check_width(package, self.feature_width())
        levels = self.levels()
        found = sum(name.startswith("deepstack.") for name in package.tensors)
        if found != levels:
            raise WrongIdentity("number of deepstack levels", levels, found)
        by_grid = self.mrope or self.counts_by_grid
        if by_grid and self._grid_tokens(package.grid) != package.tokens:
            raise DamagedFile(
                f"the package's grid {package.grid} does not describe its {package.tokens} tokens"
            )

    def check_width(self, package: Package, width: int) -> None:
        """Refuse features that were made for another model."""
        found = package.tensors["features"].shape[-1]
        if found != width:
            raise WrongIdentity("width of the features", width, found)

    def feature_width(self) -> int:
        """The width of the features: that of the decoder's embeddings, which they replace."""
        return int(embedding_of(self.model).embedding_dim)

    def merge_size(self) -> int:
        """How many patches per side become one token."""
        vision = self.model.config.vision_config
        return int(getattr(vision, "spatial_merge_size", None) or vision.merge_size)

    def levels(self) -> int:
        """The number of feature levels besides the tower's last (deepstack)."""
        vision = getattr(self.model.config, "vision_config", None)
        return len(getattr(vision, "deepstack_visual_indexes", None) or ())

    def _grid_tokens(self, grid: Grid) -> int | None:
        """Number of tokens of one image with this grid, or None if it is no grid of one image."""
        merge = self.merge_size()
        match grid.get("image_grid_thw"):
            case [[int(t), int(h), int(w)]] if min(t, h, w) > 0 and not (h % merge or w % merge):
                return t * (h // merge) * (w // merge)
        return None

    def feature_inputs(self, parts: Sequence[Part], ids: torch.Tensor) -> Record:
        """The inputs that replace pixels in forward. `ids` are those of the chunk, shape (1, n).

        `parts` is empty for a chunk of text.
        """
        return {"mm_encoder_outputs": self.encoder_outputs(parts)} if parts else {}

    def encoder_outputs(self, parts: Sequence[Part]) -> Record:
        """`mm_encoder_outputs` from rows a to b of some packages.

        A new wrapper each time: Transformers' `generate` replaces attributes of its argument.
        """
        device, dtype = self.model.device, self.model.dtype

        def rows(name: str) -> tuple[torch.Tensor, ...]:
            return tuple(rows_of(p.tensors[name], a, b).to(device, dtype) for p, a, b in parts)

        features, packed = rows("features"), parts[0][0].container == "tensor"
        output = EncoderOutput(pooler_output=torch.cat(features)[None] if packed else features)
        levels = sum(name.startswith("deepstack.") for name in parts[0][0].tensors)
        output.deepstack_features = [rows(f"deepstack.{i}") for i in range(levels)]
        return {"image": output}

    # -- further inputs of a prompt --------------------------------------------------------------

    def chunk_inputs(self, ids: np.ndarray, types: np.ndarray, start: int, end: int) -> Tensors:
        """Further inputs of the forward pass over tokens `start` to `end` of a prompt.

        `ids` and `types` (0 text, 1 image, 2 video, 3 audio) cover the whole prompt. If
        Transformers wants type ids from the first token on, pass `types[:end]`.
        """
        return {}

    def media_inputs(self, ids: np.ndarray, grids: Sequence[Grid], start: int, end: int) -> Tensors:
        """The media inputs of tokens `start` to `end`, where the family has separate ones.

        `end` may be after the prompt: decoded tokens see what the last token of the prompt sees.
        """
        return {}

    def step_inputs(self, rows: int, length: int) -> Tensors:
        """Further inputs of a decode step: one text token per row, `length` tokens with it."""
        return {}

    def prompt_inputs(self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> Tensors:
        """What a processor adds to ids and pixels, for the stock path: shapes (1, n), grids."""
        inputs = {name: torch.tensor(value) for name, value in self.rope_grid(grids).items()}
        if self.mrope:
            inputs["mm_token_type_ids"] = torch.from_numpy(types.astype(np.int64))[None]
        return inputs

    # -- positions -------------------------------------------------------------------------------

    def positions(self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> torch.Tensor:
        """Explicit positions of the whole prompt: (1, n), or (4, 1, n) with multimodal rope.

        Computed from ids and grids each time, because Transformers' `rope_deltas` belong to the
        last caller. The first of the four rows is the plain text position, from which masks are
        built.
        """
        plain = torch.arange(len(ids))[None]
        if not self.mrope:
            return plain
        if not np.isin(types, (1, 2)).any():
            return plain[None].expand(4, 1, -1)
        given = {name: torch.tensor(value) for name, value in self.rope_grid(grids).items()}
        rope = self.rope(torch.from_numpy(ids.astype(np.int64))[None], types, given, grids)
        return torch.cat([plain[None].to(rope.dtype), rope])

    def rope(
        self, ids: torch.Tensor, types: np.ndarray, given: Tensors, grids: Sequence[Grid]
    ) -> torch.Tensor:
        """Transformers' positions of a prompt that has media, whose grids are `given`."""
        kinds = torch.from_numpy(types.astype(np.int64))[None]
        found: torch.Tensor = self.core.get_rope_index(ids, mm_token_type_ids=kinds, **given)[0]
        return found

    def rope_grid(self, grids: Sequence[Grid]) -> Grid:
        """The grids of all media in the form `get_rope_index` takes."""
        rows = [row for grid in grids for row in grid.get("image_grid_thw", [])]
        return {"image_grid_thw": rows} if rows else {}


class Cast(Family):
    """Families whose tower takes pixels in the model's own dtype and does not cast them (Aria).

    Users of stock Transformers cast the processor's output. Unlisted types use this family: if a
    tower casts, it changes nothing.

    An image of Aria is one row of pixels, or several crops, each with a padding mask. No tensor
    tells crops from images, so `generate` takes each crop for an image: the answers are equal, less
    is shared.
    """

    casts = True
