"""Tower memory is bounded, and features are a pure function of the image."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.changes import kept
from support.models import picture, turn

import keepsight as ks
from keepsight.errors import Closed

MEASURE = """
import re, sys
from pathlib import Path
import keepsight as ks
vlm = ks.load("demo", dtype="float32", cache_budget="1MiB", vision_budget="4MiB",
              image_options={"size": {"shortest_edge": 65536, "longest_edge": 65536}})
def peak():  # ru_maxrss would be that of the parent, where this one is larger
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
def ask(paths):
    parts = [{"type": "image", "image": p} for p in paths]
    vlm.prepare([{"role": "user", "content": [*parts, {"type": "text", "text": "Hm."}]}])
paths = sys.argv[1:]
ask(paths[:1]); ask(paths[1:3])
one = peak()
ask(paths[3:])
print(one, peak(), vlm.stats()["features"]["encoded"])
"""


def test_peak_memory_with_one_and_with_many_images(tmp_path: Path) -> None:
    """The pixel values of these pictures would take 150 MB at once, the budget is 4."""
    paths = []
    for seed in range(103):
        path = tmp_path / f"{seed}.png"
        picture(seed, 256, 256).save(path)
        paths.append(str(path))
    run = [sys.executable, "-c", MEASURE, *paths]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    one, many, encoded = (float(part) for part in done.stdout.split()[-3:])
    assert encoded == 103
    # What may grow: keys and values of 6,500 more tokens, on the lane and remembered, and a pass
    # over 2,048 of them. With all pixel values it was 220.
    lane = 103 * 64 * 5 * 2 * 2 * 48 * 4 / 2**20
    assert many - one < 3 * lane + 90 < 165, (one, many)


def test_packages_from_another_maker(demo_parts: Any, tmp_path: Path) -> None:
    """From a store only our own making is taken, unless the caller says otherwise."""
    model, processor = demo_parts["demo"]
    messages = [turn("Please look at this picture and then describe it to me.", picture(1))]
    with ks.wrap(model, processor) as vlm:
        package = vlm.encode(picture(1))
    foreign = dataclasses.replace(package, provenance=dict(package.provenance, maker="onnx"))
    for accepted, encoded, source in (("same", 1, "tower"), ("any", 0, "disk")):
        how = {"store": tmp_path / accepted, "accept_features": accepted}
        with ks.wrap(model, processor, **how) as vlm:
            store = vlm.runtime.store
            store.put("package", foreign.feature_id, foreign.tensors, foreign.record())
            store.put_note("made", foreign.identity, {"feature_id": foreign.feature_id})
            vlm.flush()
        with ks.wrap(model, processor, **how) as vlm:
            reply = vlm.chat(messages, max_new_tokens=1)
            assert reply.usage.images_encoded == encoded
            image = next(s for s in reply.report.segments if s.kind == "image")
            assert image.features == source


def test_a_rendered_prompt_names_pictures_by_the_present_weights(demo_parts: Any) -> None:
    model, processor = demo_parts["demo"]
    shown = [turn("Look.", picture(1))]
    with ks.wrap(model, processor, tenant="never seen before") as vlm:
        assert vlm.render(shown).media[0].feature_id == vlm.encode(picture(1)).feature_id
        undo = kept(model.model.visual.patch_embed.proj.bias, lambda bias: bias.add_(1))
        try:
            assert vlm.render(shown).media[0].feature_id == vlm.encode(picture(1)).feature_id
        finally:
            undo()
    with pytest.raises(Closed):
        vlm.render(shown)
