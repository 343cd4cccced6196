"""The shipped suite on rarer types of Transformers."""

from __future__ import annotations

import pytest
from support.models import suite_of

TestHyperclova = suite_of("hyperclovax_vision_v2")
TestGlmga = suite_of("glmga")
TestDeepseekHybrid = suite_of("deepseek_vl_hybrid")
# Its tower makes 257 tokens of the smallest picture; the wide one has views of its parts.
TestDeepseekOcr = pytest.mark.slow(suite_of("deepseek_ocr2", other_size=(420, 200)))
