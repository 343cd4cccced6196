"""The shipped suite of families on exported models: as their PyTorch models do.

Whatever is remembered, and compared with the model that was exported, not with its graphs.
"""

from __future__ import annotations

import pytest
from support.exported_tests import ExportedTests


class TestQwen3VL(ExportedTests):
    kind = "qwen3_vl"


class TestQwen3VLMoe(ExportedTests):
    """Each token goes to experts of its own, within the graph."""

    kind = "qwen3_vl_moe"


class TestQwen35(ExportedTests):
    kind = "qwen3_5"
    decodes_together = False  # graphs of layers with states take one sequence


class TestQwen2VL(ExportedTests):
    kind = "qwen2_vl"


@pytest.mark.slow  # the next has its tower and its layers
class TestQwen25VL(ExportedTests):
    """Its tower looks through windows."""

    kind = "qwen2_5_vl"


class TestSliding(ExportedTests):
    """Half of the layers see 24 tokens back, and no mask of upstream's says so."""

    kind = "sliding"


class TestGemma3(ExportedTests):
    """The tokens of one image see each other; half of the layers see 24 tokens back."""

    kind = "gemma3_sliding"
    decodes_together = False  # its graphs give other bits beside other sequences
    nests_images = True


class TestLlava(ExportedTests):
    kind = "llava"


class TestInternVL(ExportedTests):
    kind = "internvl"
