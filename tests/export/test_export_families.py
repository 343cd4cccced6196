"""The shipped suite of families on exported models: as their PyTorch models do.

Whatever is remembered, and compared with the model that was exported, not with its graphs.
"""

from __future__ import annotations

import pytest
from support.exported_tests import exported_suite

TestQwen3VL = exported_suite("qwen3_vl")
TestQwen3VLMoe = exported_suite("qwen3_vl_moe")  # each token goes to experts of its own
# Graphs of layers with states take one sequence.
TestQwen35 = exported_suite("qwen3_5", decodes_together=False)
TestQwen2VL = exported_suite("qwen2_vl")
# Its tower looks through windows; the next has its tower and its layers.
TestQwen25VL = pytest.mark.slow(exported_suite("qwen2_5_vl"))
# Half of the layers see 24 tokens back, and no mask of upstream's says so.
TestSliding = exported_suite("sliding")
# The tokens of one image see each other; its graphs give other bits beside other sequences.
TestGemma3 = exported_suite("gemma3_sliding", decodes_together=False, nests_images=True)
TestLlava = exported_suite("llava")
TestInternVL = exported_suite("internvl")
