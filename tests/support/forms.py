"""Models that write what a form asks for, and one that hurries."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor


class Hurry(LogitsProcessor):
    """Makes a random model end its texts, lists and numbers some time."""

    def __init__(self, tokenizer: Any) -> None:
        texts = [tokenizer.decode([n]) for n in range(len(tokenizer))]
        self._liked = [
            [n for n, text in enumerate(texts) if text and set(text) <= set(liked)]
            for liked in ('"', '"]}', '"]},Z')
        ]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores, room = scores.clone(), scores.max() - scores.min()
        for liked in self._liked:
            scores[:, liked] += room
        return scores


def made(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of any kind, nested at most three deep."""
    leaves: list[Callable[[random.Random], dict[str, Any]]] = [
        lambda r: {"enum": r.sample(["red", "green", 1, 2.5, True, None, "a \"b\"", "é"], 3)},
        lambda r: {"const": r.choice(["x", 7, None, {"a": [1]}])},
        lambda r: {"type": "string", "minLength": r.randint(0, 2), "maxLength": r.randint(2, 6)},
        lambda r: {"type": "string", "pattern": r.choice(["^[A-Z]{2}[0-9]{3}$", "^a+b?$", "[0-9]"]),
                   "maxLength": 12},
        lambda r: {"type": "string", "format": r.choice(["date", "time", "ipv4", "uuid"])},
        lambda r: {"type": "integer", "minimum": r.randint(-50, 0), "maximum": r.randint(1, 999)},
        lambda r: {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": r.randint(2, 50)},
        lambda r: {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": r.randint(2, 9)},
        lambda r: {"type": "number", "minimum": -1, "maximum": r.choice([1, 2.5, 1000])},
        lambda r: {"type": r.choice(["boolean", "null"])},
        lambda r: {"type": ["boolean", "null"]},
    ]  # fmt: skip
    inner = depth + 1

    def array(r: random.Random) -> dict[str, Any]:
        least = r.randint(0, 2)
        return {"type": "array", "items": made(r, inner), "minItems": least, "maxItems": least + 1}

    def pair(r: random.Random) -> dict[str, Any]:
        both = [made(r, inner), made(r, inner)]
        return {"type": "array", "prefixItems": both, "items": False, "minItems": 2}

    def record(r: random.Random) -> dict[str, Any]:
        names = r.sample(["id", "colour", "size", "a b", "ünï", "last"], r.randint(1, 3))
        needed = [name for name in names if r.random() < 0.7]
        closed = {"additionalProperties": False} if r.random() < 0.5 else {}
        properties = {name: made(r, inner) for name in names}
        return {"type": "object", "properties": properties, "required": needed, **closed}

    def table(r: random.Random) -> dict[str, Any]:
        values = {"type": "integer", "minimum": 0, "maximum": 9}
        return {"type": "object", "patternProperties": {"^[xy]{1,3}$": values},
                "additionalProperties": False}  # fmt: skip

    def union(r: random.Random) -> dict[str, Any]:
        return {"anyOf": [made(r, inner), made(r, inner)]}

    def one_of(r: random.Random) -> dict[str, Any]:
        return {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]}

    def shared(r: random.Random) -> dict[str, Any]:
        one = {"type": "object", "properties": {"v": made(r, 3), "next": {"$ref": "#/$defs/end"}},
               "required": ["v"]}  # fmt: skip
        return {"$ref": "#/$defs/one", "$defs": {"one": one, "end": made(r, 3)}}

    nests = [array, pair, record, record, table, union, one_of]
    tops = [*nests, shared]
    kinds = leaves if depth >= 3 else [*leaves, *nests] if depth else [*leaves[:3], *tops, *tops]
    return rng.choice(kinds)(rng)
