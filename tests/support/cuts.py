"""Conversations of random tokens, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import keepsight as ks
from support.answers import Catch
from support.models import build

GREEDY: dict[str, Any] = {"do_sample": False}


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


@contextmanager
def wrapped(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Iterator[ks.VLM]:
    with ks.wrap(*build(kind, dtype), **options) as vlm:
        yield vlm


def ids_of(vlm: ks.VLM, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(10, 400, (1, count), generator=torch.Generator().manual_seed(seed))


def logits_of(vlm: ks.VLM, ids: torch.Tensor) -> torch.Tensor:
    catch = Catch()
    vlm.generate(input_ids=ids, max_new_tokens=1, logits_processor=[catch])
    return catch.rows[0]


def assert_bits(vlm: ks.VLM) -> None:
    engine = vlm.stats()["engine"]
    assert engine["exactness"] == "bits", engine["rounding_because"]


def why_rounding(vlm: ks.VLM) -> str:
    """Why answers are equal to rounding only, as they must be."""
    engine = vlm.stats()["engine"]
    assert engine["exactness"] == "rounding"
    return str(engine["rounding_because"])


def rows(vlm: ks.VLM) -> int:
    return int(vlm.stats()["engine"]["prefill_tokens"])
