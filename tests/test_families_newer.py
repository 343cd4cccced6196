"""The shipped suite on types that nobody named before they were tried."""

from __future__ import annotations

from typing import Any

import pytest
from family_models.newer import REFUSED
from models import build, built
from support import FamilyTests

import keepsight as ks
from keepsight.errors import UnsupportedModel


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_in_words(kind: str) -> None:
    model, processor = built(REFUSED[kind])
    with pytest.raises(UnsupportedModel, match="are not supported|could not be shown exact"):
        ks.wrap(model, processor)


class TestVipLlava(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("vipllava")


class TestLlavaNextVideo(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("llava_next_video")


class TestHunyuan(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("hunyuan_vl")


class TestLightOn(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("lighton_ocr")


class TestExaone(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("exaone4_5")


class TestLfm3(FamilyTests):
    decodes_together = False

    def make_model(self) -> tuple[Any, Any]:
        return build("lfm3_vl")


class TestCompass(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("cohere_compass")


class TestCosmos(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("cosmos3_edge")


class TestCosmosOmni(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("cosmos3_omni")


class TestMuse(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("muse_glimmer")
