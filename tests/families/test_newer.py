"""The shipped suite on types that nobody named before they were tried."""

from __future__ import annotations

import pytest
from support.models import built, suite_of
from support.tiny_models import REFUSED

import keepsight as ks
from keepsight.errors import UnsupportedModel


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_in_words(kind: str) -> None:
    """None of these sentences shows what broke inside; the log has it."""
    model, processor = built(REFUSED[kind])
    with pytest.raises(UnsupportedModel, match="are not supported|could not be shown") as refused:
        ks.wrap(model, processor)
    assert "object" not in str(refused.value)


TestVipLlava = suite_of("vipllava")
TestLlavaNextVideo = suite_of("llava_next_video")
TestHunyuan = suite_of("hunyuan_vl")
TestLightOn = suite_of("lighton_ocr")
TestExaone = suite_of("exaone4_5")
TestLfm3 = suite_of("lfm3_vl", decodes_together=False)
TestCompass = suite_of("cohere_compass")
TestCosmos = suite_of("cosmos3_edge")
TestCosmosOmni = suite_of("cosmos3_omni")
TestMuse = suite_of("muse_glimmer")
