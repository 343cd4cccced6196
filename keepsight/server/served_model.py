"""The model as its server knows it: its name, and what its chat template has a place for.

The template's own text tells, so that a field which it would silently drop is refused.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from keepsight.core.structured import thoughts
from keepsight.kinds import Record
from keepsight.prompt.lengths import context_length
from keepsight.server.errors import ApiError, invalid, refused
from keepsight.server.forms import CallSyntax
from keepsight.server.media import ImageSizes
from keepsight.server.parser import CALL, CALL_END
from keepsight.server.schema import Reasoning, Rendering, Unused, is_empty, kind_of

if TYPE_CHECKING:
    from keepsight.vlm import VLM

# What `apply_chat_template` and the renderer decide themselves.
_RESERVED = {
    "messages", "conversation", "tools", "documents", "chat_template", "tokenize", "generate",
    "add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "name",
    "processor_kwargs",
}  # fmt: skip


class ServedModel:
    def __init__(self, vlm: VLM, name: str) -> None:
        self.name, self._created = name, int(time.time())
        self.tokenizer = copy.deepcopy(vlm.runtime.tokenizer())  # only used by this object
        renderer = vlm.runtime.renderer
        self.template = renderer.template if renderer is not None else ""
        self.vocabulary = int(vlm.model.config.get_text_config().vocab_size)
        self._longest = context_length(vlm.model)
        self.thinks = thoughts.thinks(self.template)
        added = self.tokenizer.added_tokens_decoder.values()
        own = {CALL, CALL_END} & {token.content for token in added}
        self.calls = CallSyntax("<function=" in self.template, frozenset(own))
        ends = vlm.model.generation_config.eos_token_id
        self.ends = (ends,) if isinstance(ends, int) else tuple(ends or ())
        self.sizes = ImageSizes(
            getattr(vlm.runtime.processor, "image_processor", None), vlm.runtime.image_options
        )

    def check_name(self, name: str | None) -> None:
        """Refuse a request that names another model."""
        if name not in (None, self.name):
            what = f"no such model: {str(name)[:100]!r}; this server has {self.name!r}"
            raise ApiError(404, what, param="model", code="model_not_found")

    def check_tools(self) -> None:
        """Refuse tools if the template cannot show them, or calls could not be parsed."""
        if not self._has("tools"):
            raise refused("tools", "the chat template of this model has no place for tools")
        if CALL not in self.template:
            raise refused("tools", "this model writes calls in a form that cannot be parsed here")

    def _has(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self.template) is not None

    def template_options(self, body: Rendering, unused: Unused) -> Record:
        """Template variables besides the messages; those the template does not use are reported."""
        options: Record = {}
        for name, value in (body.chat_template_kwargs or {}).items():
            if name in _RESERVED or not name.isidentifier():
                raise refused("chat_template_kwargs", f"{name[:100]!r} cannot be set by the client")
            if self._has(name):
                options[name] = value
            elif not is_empty(value):
                why = "the chat template of this model has no such setting"
                unused.add(f"chat_template_kwargs.{name}", why)
        return {**self._thoughts(body, unused), **options, **_beginning(body)}

    def _thoughts(self, body: Rendering, unused: Unused) -> Record:
        """The template's variables for the amount of thinking; a request that no variable expresses
        is reported."""
        switch = next((name for name in ("enable_thinking", "thinking") if self._has(name)), None)
        options: Record = {}
        for place, level, thinks in _wishes(body, unused):
            if level is not None and self._has("reasoning_effort"):
                options["reasoning_effort"] = level
            elif level not in (None, "none"):
                unused.add(place, "the chat template of this model knows no levels of thinking")
            if switch is not None:
                options[switch] = thinks
            elif "reasoning_effort" not in options:
                unused.add(place, "the chat template of this model has no switch for thinking")
        return options

    def opened_thought(self, prompt: list[int]) -> bool:
        """Whether a prompt ends within a thought that the template has opened."""
        return self.thinks and thoughts.opened(self.tokenizer, prompt)

    def token_text(self, token: int) -> tuple[str, list[int] | None]:
        """A token alone as text, and its bytes; None if it is part of a character."""
        text: str = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text, None if "\ufffd" in text else list(text.encode())

    def as_json(self) -> Record:
        made = {"id": self.name, "object": "model", "created": self._created}
        return {**made, "owned_by": "keepsight", "max_model_len": self._longest}


def _beginning(body: Rendering) -> dict[str, bool]:
    """How an answer begins, if not by the template's own words."""
    if not body.continues:
        return {"add_generation_prompt": False} if body.add_generation_prompt is False else {}
    last = body.messages[-1]
    why = ""
    if body.add_generation_prompt:
        why = "an answer begins anew, or goes on; add_generation_prompt must be false"
    elif last.role != "assistant" or last.tool_calls or not last.content:
        why = "the last message is not a text of the assistant"
    if why:
        raise invalid("continue_final_message", why)
    return {"continue_final_message": True}


def _wishes(body: Rendering, unused: Unused) -> Iterator[tuple[str, str | None, bool]]:
    """What a client requests about thinking: the field, a level, and whether to think at all. The
    last one counts."""
    given = body.reasoning or Reasoning()
    for name in ("summary", "generate_summary"):
        if not is_empty(getattr(given, name)):
            unused.add(f"reasoning.{name}", "thoughts are sent whole, without a summary")
    if level := body.reasoning_effort or given.effort:
        place = "reasoning_effort" if body.reasoning_effort else "reasoning.effort"
        yield place, level, level != "none"
    if given.enabled is not None:
        yield "reasoning.enabled", None, given.enabled
    kind = kind_of(body.thinking, body.thinking)
    if kind in ("enabled", "disabled", True):
        yield "thinking", None, kind != "disabled"
    elif not is_empty(body.thinking):
        unused.add("thinking", "expected {'type': 'enabled'} or 'disabled'")
    if body.enable_thinking is not None:
        yield "enable_thinking", None, body.enable_thinking
