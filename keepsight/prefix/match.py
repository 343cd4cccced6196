"""Results of a lookup in the tree: how far a prompt can be used, and how far it is known.

Both are plain facts about one prompt; the tree finds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from keepsight.prefix.node import DEVICE, Node
from keepsight.prefix.prompt import Prompt, Rule


@dataclass(frozen=True)
class Match:
    """The longest remembered prefix of a prompt. It may end inside the edge of its node, until it
    is held."""

    node: Node
    length: int = 0  # tokens that are not computed again
    tier: str = DEVICE  # the farthest tier that holds part of it: memory, host, disk or remote
    since: int = 0  # tick of the lookup: what is forgotten later must not come back
    whole: bool = False  # it is the whole prompt, and is usable only with its logits
    states: bool = False  # the model has states: prompts go on only where they were captured

    @property
    def logits(self) -> torch.Tensor | None:
        """The last logits, if the whole prompt is remembered and loaded."""
        return self.node.logits if self.whole else None

    def but_the_last(self, prompt: Prompt, rule: Rule) -> Match:
        """The match without its end, to compute the logits of a completely remembered prompt:
        without the last token, or back to the last place from which it can be continued."""
        node, first = self.node, prompt.first_cut(rule)
        until = prompt.before_medium(len(prompt) - 1, rule)
        if not self.states and until >= max(1, first):
            while node.parent is not None and node.start >= until:
                node = node.parent
            return replace(self, node=node, length=min(until, node.end), whole=False)
        while node.parent is not None and (
            not first <= node.end < len(prompt) or not (node.ends or node.own_entry)
        ):
            node = node.parent
        return replace(self, node=node, length=node.end, whole=False)


@dataclass(frozen=True)
class Known:
    """How far a prompt agrees with anything ever seen, and why not all of it was usable."""

    until: int  # tokens shared with the closest remembered path
    diverged: bool  # the closest path continues differently (otherwise it ends)
    evicted_from: int | None = None
    elsewhere: bool = False  # only the making of the features differs

    def why_not_usable(self, at: int, prompt: Prompt, rule: Rule) -> str:
        """Why the known part after the match, which ends at `at`, is computed again."""
        if self.evicted_from is not None:
            return "evicted"
        if rule.reuse == "whole prompt":
            return "not possible: every token of this model's prompts sees all others"
        if rule.reuse == "same media" and any(span.start >= at for span in prompt.spans):
            return "not possible: a new medium changes what comes before it"
        return f"no snapshot between {at} and {self.until}"

    def why_unknown(self, behind: int, prompt: Prompt) -> str:
        """Why a stretch that begins at `behind` is unknown."""
        if not self.diverged or behind != self.until:
            return "new"
        if self.elsewhere:
            return "made elsewhere"
        medium = prompt.medium_at(behind)
        return f"diverged at token {behind} ({'text' if medium is None else f'medium {medium}'})"
