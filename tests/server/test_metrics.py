"""`/metrics` of a server with each kind of store, against the list in docs/server.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.server_harness import asked, live, scene

import keepsight as ks

DOCS = Path(__file__).parents[2] / "docs" / "server.md"


def documented() -> set[str]:
    """The names in the table of metrics."""
    table = re.search(r"\| metric \|.*", DOCS.read_text(), re.DOTALL)
    assert table
    return set(re.findall(r"`(keepsight_\w+)", table[0]))


def scraped(parts: Any, **options: Any) -> dict[str, Any]:
    """The metrics of a server that has answered, by name."""
    with ks.wrap(*parts, **options) as vlm, live(vlm) as server:
        assert server.chat({"messages": asked(scene(1)), "max_tokens": 1})[0] == 200
        status, text, _ = server.call("/metrics")
        assert status == 200, text
    families = text_string_to_metric_families(text)
    return {
        family.name + "_total" * (family.type == "counter"): family
        for family in families
        if not family.name.endswith("_created")
    }


@pytest.mark.parametrize("kind", ["none", "folder", "address", "folder before an address"])
def test_every_metric_is_documented_and_the_reverse(
    kind: str, demo_parts: dict[str, Any], tmp_path: Path
) -> None:
    address = f"file://{tmp_path}/remote"
    options = {
        "none": {},
        "folder": {"store": tmp_path / "near"},
        "address": {"store": address},
        "folder before an address": {"store": tmp_path / "near", "remote": address},
    }[kind]
    found = scraped(demo_parts["demo"], **options)
    of_store = {name for name in documented() if name.startswith("keepsight_store_")}
    assert set(found) == documented() - (of_store if kind == "none" else set())
    if kind != "none":
        [state] = found["keepsight_store_state"].samples
        assert state.labels == {"state": "ok"} and state.value == 1
        caches = {sample.labels["cache"] for sample in found["keepsight_cache_bytes"].samples}
        assert caches == {"features", "prefix", "store"}
