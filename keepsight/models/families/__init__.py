"""Family-specific code. `family_of(model)` finds the right class.

A file holds families that are close to each other; many model types need none and use `base.py`. A
type is listed in `SUPPORTED` once tests have shown it exact. Other types are tried on the user's
own model before it answers anything, and refused by name if the trial fails.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from keepsight.errors import UnsupportedModel
from keepsight.models.families.base import Cast, Family
from keepsight.models.families.marked_tiles import Idefics2, Idefics3, Lfm2Vl, MiniCpmV, MiniCpmV47
from keepsight.models.families.mlcd import Mlcd
from keepsight.models.families.mllama import Mllama
from keepsight.models.families.molmo2 import Molmo2
from keepsight.models.families.one_block import Gemma3, Gemma4, Gemma4Unified, PaliGemma
from keepsight.models.families.packed import (
    Ernie45VLMoe,
    Glm4v,
    GlmImage,
    HunyuanVL,
    Lfm3Vl,
    PaddleOcrVL,
    VideoLlama3,
)
from keepsight.models.families.pixels import Pixels
from keepsight.models.families.qwen_omni import QwenOmni
from keepsight.models.families.qwen_vl import QwenVL
from keepsight.models.families.sized import LlavaNext, Mistral3
from keepsight.models.families.tiles import (
    AyaVision,
    Cohere2Vision,
    DeepseekOcr2,
    GotOcr2,
    InternVL,
    Llama4,
    Ovis2,
    Step3p7,
)

__all__ = ["SUPPORTED", "Family", "Pixels", "family_of"]

SUPPORTED: dict[str, type[Family]] = {
    "qwen2_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "qwen3_vl": QwenVL,
    "qwen3_vl_moe": QwenVL,
    "qwen3_5": QwenVL,
    "qwen3_5_moe": QwenVL,
    "qwen2_5_omni_thinker": QwenOmni,
    "qwen3_omni_moe_thinker": QwenOmni,
    "llava": Family,
    "vipllava": Family,
    "internvl": InternVL,
    "aya_vision": AyaVision,
    "cohere2_vision": Cohere2Vision,
    "deepseek_vl": Family,
    "deepseek_vl_hybrid": Cast,
    "deepseek_ocr2": DeepseekOcr2,
    "got_ocr2": GotOcr2,
    "llama4": Llama4,
    "ovis2": Ovis2,
    "step3p7": Step3p7,
    "glm4v": Glm4v,
    "glm4v_moe": Glm4v,
    "glm46v": Glm4v,
    "glmga": Glm4v,
    "glm_ocr": Glm4v,
    "ernie4_5_vl_moe": Ernie45VLMoe,
    "paddleocr_vl": PaddleOcrVL,
    "video_llama_3": VideoLlama3,
    "kimi_k25": PaddleOcrVL,
    "hunyuan_vl": HunyuanVL,
    "exaone4_5": QwenVL,
    "hyperclovax_vision_v2": QwenVL,
    "lfm3_vl": Lfm3Vl,
    "muse_glimmer": Family,
    "cohere_compass": QwenVL,
    "cosmos3_edge": QwenVL,
    "cosmos3_omni": QwenVL,
    "llava_next": LlavaNext,
    "llava_next_video": LlavaNext,
    "llava_onevision": LlavaNext,
    "mistral3": Mistral3,
    "lighton_ocr": Mistral3,
    "aria": Cast,
    "idefics2": Idefics2,
    "idefics3": Idefics3,
    "smolvlm": Idefics3,
    "lfm2_vl": Lfm2Vl,
    "minicpmv4_6": MiniCpmV,
    "minicpmv4_7": MiniCpmV47,
    "minicpm_ocr": MiniCpmV,
    "mlcd_vision_model": Mlcd,
    "glm_image": GlmImage,
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "gemma4_unified": Gemma4Unified,
    "paligemma": PaliGemma,
    "molmo2": Molmo2,
    "mllama": Mllama,
}

# The tower decides how images are prepared: Pixtral 12B is a LLaVA.
_BY_TOWER: dict[tuple[str, str], type[Family]] = {("llava", "pixtral"): Mistral3}


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model. For an unlisted type it is not `proven`: the caller must try it first
    (stock/probe.py)."""
    model_type = getattr(model.config, "model_type", "?")
    if getattr(model, "thinker", None) is not None:
        raise UnsupportedModel(
            f"{model_type} thinks and talks; wrap its thinker: ks.wrap(model.thinker, ...)"
        )
    if model_type not in SUPPORTED:
        family = Cast(model)
        family.proven = False
        return family
    tower = getattr(getattr(model.config, "vision_config", None), "model_type", "")
    return _BY_TOWER.get((model_type, tower), SUPPORTED[model_type])(model)
