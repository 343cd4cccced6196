"""The shipped suite on rarer types of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
from support import FamilyTests
from support.models import build, suite_of

TestHyperclova = suite_of("hyperclovax_vision_v2")
TestGlmga = suite_of("glmga")
TestDeepseekHybrid = suite_of("deepseek_vl_hybrid")


@pytest.mark.slow  # its tower makes 257 tokens of the smallest picture
class TestDeepseekOcr(FamilyTests):
    other_size = (420, 200)  # large enough for views of its parts

    def make_model(self) -> tuple[Any, Any]:
        return build("deepseek_ocr2")
