"""How models mark their thoughts: Qwen's tags, which many others write too.

A template may open a thought, or close an empty one; else the model may begin one itself.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

THINK, THINK_END = "<think>", "</think>"
_END = 16  # tokens that may hold the mark of a thought


def thinks(template: str) -> bool:
    """Whether a chat template knows thoughts."""
    return THINK in template or THINK_END in template


def opened(tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> bool:
    """Whether a prompt ends within a thought that its template has opened."""
    return _end(tokenizer, prompt).endswith(THINK)


def may_open(tokenizer: PreTrainedTokenizerBase, template: str, prompt: list[int]) -> bool:
    """Whether a model may begin its answer with a thought: it has a token for that, and the
    template has not closed one already."""
    known = any(token.content == THINK for token in tokenizer.added_tokens_decoder.values())
    return known and thinks(template) and not _end(tokenizer, prompt).endswith(THINK_END)


def _end(tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> str:
    return str(tokenizer.decode(prompt[-_END:], skip_special_tokens=False)).rstrip()
