"""Families that look at an image in parts, or padded to a neighbour: each held to the suite."""

from __future__ import annotations

from typing import Any

from models import build
from support.families import FamilyTests


class TestLlavaNext(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("llava_next")


class TestLlavaOnevision(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("llava_onevision")


class TestMistral3(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("mistral3")


class TestPixtral(FamilyTests):
    """A LLaVA with the tower of Mistral 3."""

    def make_model(self) -> tuple[Any, Any]:
        return build("llava_pixtral")


class TestIdefics3(FamilyTests):
    nests_images = True

    def make_model(self) -> tuple[Any, Any]:
        return build("idefics3")


class TestSmolVLM(FamilyTests):
    nests_images = True

    def make_model(self) -> tuple[Any, Any]:
        return build("smolvlm")


class TestIdefics2(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("idefics2")


class TestAria(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("aria")


class TestLfm2VL(FamilyTests):
    nests_images = True

    def make_model(self) -> tuple[Any, Any]:
        return build("lfm2_vl")


class TestMiniCPM(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("minicpmv4_6")


class TestMiniCPMFine(FamilyTests):
    """Four times the tokens for each patch."""

    def make_model(self) -> tuple[Any, Any]:
        return build("minicpmv4_6_fine")


class TestMiniCpmCanvas(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("minicpmv4_7")


class TestMiniCpmOcr(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("minicpm_ocr")
