"""The suite that every exported family passes."""

from __future__ import annotations

from typing import Any

from support import FamilyTests
from support.exported_models import exported, small
from support.prompts import Messages, once


class ExportedTests(FamilyTests):
    """An exported model in place of a live one; `stock` is the live one."""

    kind, runtime = "", "onnx"
    attentions = ()  # that of the graphs; there is no other

    def make_model(self) -> tuple[Any, Any]:
        return exported(self.kind, self.runtime), small(self.kind)[1]

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


def exported_suite(kind: str, **own: Any) -> type[ExportedTests]:
    """The suite for one kind of model in one runtime."""
    return type(kind, (ExportedTests,), {"kind": kind, **own})
