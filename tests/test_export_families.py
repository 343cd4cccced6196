"""The shipped suite of families on exported models: as their PyTorch models do.

Whatever is remembered, and compared with the model that was exported, not with its graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
from exported_models import exported, small
from support import FamilyTests
from support.prompts import Messages, once


class ExportedTests(FamilyTests):
    """An exported model in place of a live one; `stock` is the live one."""

    kind = ""
    attentions = ()  # that of the graphs; there is no other

    def make_model(self) -> tuple[Any, Any]:
        return exported(self.kind), small(self.kind)[1]

    def stock(self, messages: Messages, tokens: int = 1) -> Any:
        """Of the model that was exported, from pixels."""
        model, processor = small(self.kind)

        def generated() -> Any:
            return model.generate(
                **self.inputs(processor, messages),
                max_new_tokens=tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )

        return once((type(self), "stock", tokens), messages, generated)


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
