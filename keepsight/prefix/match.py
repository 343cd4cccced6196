"""What a tree finds of a prompt: the deepest snapshot of use, and how far anything is known.

Both are plain facts about one prompt; finding them is the tree's business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from keepsight.prefix.node import DEVICE, Node
from keepsight.prefix.prompt import Prompt, Rule


@dataclass(frozen=True)
class Match:
    """The deepest usable snapshot for a prompt."""

    node: Node
    tier: str = DEVICE  # the farthest that something of it lies: memory, host, disk or remote
    since: int = 0  # when the tree was asked: what is forgotten later must not come back
    until: int | None = None  # the end of what is used of the node, where that is not all of it
    whole: bool = False  # it ends where the prompt does, and is of use with its logits only
    states: bool = False  # a prompt goes on from states of fixed size: where a node ends

    @property
    def length(self) -> int:
        """Tokens that need not be computed."""
        return self.node.end if self.until is None else self.until

    @property
    def base(self) -> Node:
        """The deepest node that is used whole."""
        if self.until is None or self.until == self.node.end or self.node.parent is None:
            return self.node
        return self.node.parent

    @property
    def logits(self) -> torch.Tensor | None:
        """Set when the whole prompt is remembered, and loaded."""
        return self.node.logits if self.node.terminal or self.whole else None

    def but_the_last(self, prompt: Prompt) -> Match:
        """The match without its end, to compute the logits of a prompt that is remembered whole:
        all but the last token, or all up to the last state before it."""
        if not self.states:
            return replace(self, until=len(prompt) - 1, whole=False)
        node = self.node
        while node.parent is not None and (
            node.end >= len(prompt) or not (node.state.tier or node.on_disk)
        ):
            node = node.parent
        return replace(self, node=node, whole=False)


@dataclass(frozen=True)
class Known:
    """How far a prompt agrees with anything ever seen, and why that was not all usable."""

    until: int  # tokens shared with the closest remembered path
    diverged: bool  # the closest path goes on differently (else it just ends)
    evicted_from: int | None = None
    elsewhere: bool = False  # it differs only in who made the features

    def why_not_usable(self, at: int, prompt: Prompt, rule: Rule) -> str:
        """Why the known part behind the match, which ends at `at`, has to be computed again."""
        if self.evicted_from is not None:
            return "evicted"
        if rule.reuse == "whole prompt":
            return "not possible: every token of this model's prompts sees all others"
        if rule.reuse == "same media" and any(span.start >= at for span in prompt.spans):
            return "not possible: a new medium changes what comes before it"
        if self.until - at < rule.grain:
            return "no boundary yet (below the grain)"
        return f"no snapshot between {at} and {self.until}"

    def why_unknown(self, behind: int, prompt: Prompt) -> str:
        """Why a stretch that begins at `behind` is not known."""
        if not self.diverged or behind != self.until:
            return "new"
        if self.elsewhere:
            return "made elsewhere"
        medium = prompt.medium_at(behind)
        return f"diverged at token {behind} ({'text' if medium is None else f'medium {medium}'})"
