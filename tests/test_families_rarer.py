"""The shipped suite on rarer types of Transformers, and refusals of what it cannot serve."""

from __future__ import annotations

from typing import Any

import pytest
from family_models.rarer import REFUSED
from models import build, built, suite_of
from support import FamilyTests

import keepsight as ks
from keepsight.errors import UnsupportedModel


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_in_words(kind: str) -> None:
    """None of these sentences shows what broke inside; the log has it."""
    model, processor = built(REFUSED[kind])
    with pytest.raises(UnsupportedModel, match="are not supported|could not be shown") as refused:
        ks.wrap(model, processor)
    assert "object" not in str(refused.value)


TestHyperclova = suite_of("hyperclovax_vision_v2")
TestGlmga = suite_of("glmga")
TestDeepseekHybrid = suite_of("deepseek_vl_hybrid")


@pytest.mark.slow  # its tower makes 257 tokens of the smallest picture
class TestDeepseekOcr(FamilyTests):
    other_size = (420, 200)  # large enough for views of its parts

    def make_model(self) -> tuple[Any, Any]:
        return build("deepseek_ocr2")
