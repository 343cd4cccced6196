"""The shipped suite on one family of each kind that the engine was first built for."""

from __future__ import annotations

from support.models import suite_of

from keepsight.prefix.prompt import PASS

TestQwen2VL = suite_of("qwen2_vl")
TestQwen25VL = suite_of("qwen2_5_vl")
TestSliding = suite_of("sliding", long_words=4400, long_run=PASS)
TestQwen3VL = suite_of("qwen3_vl", long_words=4400, long_run=PASS)
TestQwen3VLMoe = suite_of("qwen3_vl_moe")
TestQwen35 = suite_of("qwen3_5", long_words=4400, long_run=PASS)
TestQwen35Moe = suite_of("qwen3_5_moe")
TestLlava = suite_of("llava")
TestInternVL = suite_of("internvl")
