"""What one turn needs of a prefix cache, as a protocol; and a cache that remembers nothing.

With the second one every answer stays the same, but nothing is reused.
"""

from __future__ import annotations

from typing import Protocol

import torch

from keepsight.prefix.match import Known, Match
from keepsight.prefix.node import Node, Tensors
from keepsight.prefix.prompt import Prompt, Rule


class PrefixCache(Protocol):
    """Finds the longest remembered prefix of a prompt, and remembers new ones."""

    def match(self, namespace: str, prompt: Prompt, rule: Rule) -> Match:
        """Return the longest remembered prefix of a prompt, to its last token."""

    def known(self, namespace: str, prompt: Prompt) -> Known:
        """Return how far the prompt agrees with anything seen before."""

    def hold(self, match: Match) -> Node:
        """Keep a match in memory while a turn uses it; the node ends where it ends."""

    def release(self, node: Node) -> None:
        """End one hold of a path."""

    def load(self, node: Node, prompt: Prompt) -> bool:
        """Bring a held path to the model's device; False if an entry is damaged."""

    def insert(
        self,
        parent: Node,
        prompt: Prompt,
        end: int,
        kv: Tensors,
        fixed: Tensors | None,
        logits: torch.Tensor | None = None,
        cost: float = 0.0,
        since: int | None = None,
    ) -> Node:
        """Remember what follows `parent`, up to `end`; the node comes back held."""

    def is_forgotten(self, node: Node, prompt: Prompt, since: int) -> bool:
        """Return whether anything on a turn's path was deleted after the turn began."""

    def is_barred(self, node: Node, image_key: str, since: int) -> bool:
        """Return whether an image was deleted after a turn began."""

    def settle(self) -> None:
        """Do the work that waited for the end of a turn."""


class NothingRemembered(PrefixCache):
    """A prefix cache that matches nothing and keeps nothing."""

    def match(self, namespace: str, prompt: Prompt, rule: Rule) -> Match:
        """Return an empty path."""
        return Match(Node(None))

    def known(self, namespace: str, prompt: Prompt) -> Known:
        """Nothing was seen before."""
        return Known(0, False)

    def hold(self, match: Match) -> Node:
        """Return the empty path."""
        return match.node

    def load(self, node: Node, prompt: Prompt) -> bool:
        """An empty path is loaded."""
        return True

    def insert(
        self,
        parent: Node,
        prompt: Prompt,
        end: int,
        kv: Tensors,
        fixed: Tensors | None,
        logits: torch.Tensor | None = None,
        cost: float = 0.0,
        since: int | None = None,
    ) -> Node:
        """Return an unreachable node without content."""
        node = Node(parent, parent.end, prompt.ids[parent.end : end])
        node.gone = True
        return node

    def is_forgotten(self, node: Node, prompt: Prompt, since: int) -> bool:
        """Nothing was remembered."""
        return False

    def is_barred(self, node: Node, image_key: str, since: int) -> bool:
        """Nothing was deleted."""
        return False
