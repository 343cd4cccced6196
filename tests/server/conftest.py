"""The demo model of a file of tests, and a server over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.server_harness import TEMPLATE, Live, live

import keepsight as ks


@pytest.fixture(scope="module")
def vlm(demo_parts: dict[str, Any]) -> Iterator[ks.VLM]:
    with ks.wrap(*demo_parts["demo"]) as it:
        yield it


@pytest.fixture(scope="module")
def server(vlm: ks.VLM) -> Iterator[Live]:
    with live(vlm) as it:
        yield it


@pytest.fixture(scope="module")
def thinker(demo_parts: dict[str, Any]) -> Iterator[ks.VLM]:
    """A model whose template has places for tools, calls and thoughts."""
    with ks.wrap(*demo_parts["demo"], chat_template=TEMPLATE) as it:
        yield it


@pytest.fixture(scope="module")
def tooled(thinker: ks.VLM) -> Iterator[Live]:
    with live(thinker) as it:
        yield it
