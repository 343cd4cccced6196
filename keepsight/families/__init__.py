"""What only a family knows. `family_of(model)` finds the right one.

A family's file is named for the behaviour it adds; most model types need none and are served by
`base.py`. A type is listed in `SUPPORTED` once tests have shown it exact; others are tried on the
user's own model before anything is answered, and refused by name where that fails.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from keepsight.errors import UnsupportedModel
from keepsight.families.anyres import AnyRes
from keepsight.families.base import Family
from keepsight.families.blocks import Blocks, PaddedBlocks
from keepsight.families.cast import Cast
from keepsight.families.cross import Cross
from keepsight.families.filmed import Filmed
from keepsight.families.framed import Framed, LineBroken
from keepsight.families.hearing import Hearing
from keepsight.families.indicators import Indicators
from keepsight.families.local_views import LocalViews
from keepsight.families.marked import Idefics, Idefics2, Lfm2Vl, MiniCpm
from keepsight.families.moving import Moving
from keepsight.families.padded import Padded
from keepsight.families.pages import Pages
from keepsight.families.patches import ChosenMerge, Patches
from keepsight.families.pixels import Pixels
from keepsight.families.raw_tiles import RawTiles
from keepsight.families.routed import Routed
from keepsight.families.shared_block import SharedBlock
from keepsight.families.tiled import Tiled
from keepsight.families.tower import Tower
from keepsight.families.whole_prompt import WholePrompt

__all__ = ["REFUSED", "SUPPORTED", "Family", "Pixels", "family_of"]

SUPPORTED: dict[str, type[Family]] = {
    "qwen2_vl": Moving,
    "qwen2_5_vl": Moving,
    "qwen3_vl": Moving,
    "qwen3_vl_moe": Moving,
    "qwen3_5": Moving,
    "qwen3_5_moe": Moving,
    "qwen2_5_omni_thinker": Hearing,
    "qwen3_omni_moe_thinker": Hearing,
    "llava": Family,
    "internvl": Tiled,
    "aya_vision": Framed,
    "cohere2_vision": LineBroken,
    "deepseek_vl": Family,
    "got_ocr2": Pages,
    "llama4": RawTiles,
    "ovis2": Indicators,
    "step3p7": LocalViews,
    "glm4v": Filmed,
    "glm4v_moe": Filmed,
    "glm46v": Filmed,
    "glm_ocr": Filmed,
    "ernie4_5_vl_moe": Routed,
    "paddleocr_vl": Patches,
    "video_llama_3": ChosenMerge,
    "kimi_k25": Patches,
    "llava_next": AnyRes,
    "llava_onevision": AnyRes,
    "mistral3": Padded,
    "aria": Cast,
    "idefics2": Idefics2,
    "idefics3": Idefics,
    "smolvlm": Idefics,
    "lfm2_vl": Lfm2Vl,
    "minicpmv4_6": MiniCpm,
    "mlcd_vision_model": Tower,
    "gemma3": Blocks,
    "gemma4": PaddedBlocks,
    "paligemma": WholePrompt,
    "molmo2": SharedBlock,
    "mllama": Cross,
}

# Known, looked at, and left out.
REFUSED: dict[str, str] = {
    "glm_image": (
        "it draws pictures: the positions of what it draws are kept on the model between calls, so "
        "no remembered prefix can be continued exactly; use it without Keepsight"
    ),
}

# Where the tower decides how images come: Pixtral 12B is a LLaVA.
_BY_TOWER: dict[tuple[str, str], type[Family]] = {("llava", "pixtral"): Padded}


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model. One of a type that nobody has written down is not `proven`: whoever
    takes it has to try it first (trial.py)."""
    model_type = getattr(model.config, "model_type", "?")
    if getattr(model, "thinker", None) is not None:
        raise UnsupportedModel(
            f"{model_type} thinks and talks; wrap the part that thinks: ks.wrap(model.thinker, ...)"
        )
    if model_type in REFUSED:
        raise UnsupportedModel(f"model type {model_type!r}: {REFUSED[model_type]}")
    if model_type not in SUPPORTED:
        family = Cast(model)
        family.proven = False
        return family
    tower = getattr(getattr(model.config, "vision_config", None), "model_type", "")
    return _BY_TOWER.get((model_type, tower), SUPPORTED[model_type])(model)
