"""Families that look at an image in parts, or padded to a neighbour: each held to the suite."""

from __future__ import annotations

from support.models import suite_of

TestLlavaNext = suite_of("llava_next")
TestLlavaOnevision = suite_of("llava_onevision")
TestMistral3 = suite_of("mistral3")
TestPixtral = suite_of("llava_pixtral")  # A LLaVA with the tower of Mistral 3.
TestIdefics3 = suite_of("idefics3", nests_images=True)
TestSmolVLM = suite_of("smolvlm", nests_images=True)
TestIdefics2 = suite_of("idefics2")
TestAria = suite_of("aria")
TestLfm2VL = suite_of("lfm2_vl", nests_images=True)
TestMiniCPM = suite_of("minicpmv4_6")
TestMiniCPMFine = suite_of("minicpmv4_6_fine")  # Four times the tokens for each patch.
TestMiniCpmCanvas = suite_of("minicpmv4_7")
TestMiniCpmOcr = suite_of("minicpm_ocr")
