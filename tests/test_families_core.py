"""The shipped suite on one family of each kind that the engine was first built for."""

from __future__ import annotations

from typing import Any

from models import build
from support import FamilyTests

from keepsight.prefix.prompt import PASS


class TestQwen2VL(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("qwen2_vl")


class TestQwen25VL(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("qwen2_5_vl")


class TestSliding(FamilyTests):
    long_words, long_run = 4400, PASS  # more than 4,096 tokens

    def make_model(self) -> tuple[Any, Any]:
        return build("sliding")


class TestQwen3VL(FamilyTests):
    long_words, long_run = 4400, PASS  # more than 4,096 tokens

    def make_model(self) -> tuple[Any, Any]:
        return build("qwen3_vl")


class TestQwen3VLMoe(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("qwen3_vl_moe")


class TestQwen35(FamilyTests):
    long_words, long_run = 4400, PASS  # more than 4,096 tokens

    def make_model(self) -> tuple[Any, Any]:
        return build("qwen3_5")


class TestQwen35Moe(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("qwen3_5_moe")


class TestLlava(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("llava")


class TestInternVL(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("internvl")
