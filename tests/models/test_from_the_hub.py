"""Models from a hub id are as well off as those from a folder. There is no network here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from support.hub_cache import NAME, cached, run_offline

_LOOK = """
import json, sys
import keepsight as ks
from keepsight.system import digests
from keepsight.models.loading import files_digest
from PIL import Image

hashed, digest = [], digests.weight_digest
digests.weight_digest = lambda weight: hashed.append(weight) or digest(weight)
for name, store, options in json.loads(sys.argv[1]):
    hashed.clear()
    with ks.load(name, store=store, dtype="float32", **options) as vlm:
        about = vlm.encode(Image.new("RGB", (64, 64))).about
        found = [vlm.runtime.weights.all, vlm.stats()["engine"]["packed_bytes"], len(hashed)]
    print(json.dumps([*found, about.get("commit"), files_digest(name, "float32", every=True)]))
"""


def test_weights_are_packed_and_hashed_once_per_commit(tmp_path: Path) -> None:
    def load(*asked: tuple[str, str, dict[str, str]]) -> list[tuple[Any, ...]]:
        words = [[name, str(tmp_path / store), options] for name, store, options in asked]
        lines = run_offline(tmp_path, "-c", _LOOK, json.dumps(words)).splitlines()
        return [tuple(json.loads(line)) for line in lines]

    hub: tuple[str, str, dict[str, str]] = (NAME, "store", {})
    cached(tmp_path, "a" * 40)
    first, folder = load(hub, ("demo", "another store", {}))
    assert first[:3] == folder[:3] and first[1]
    assert first[3] == "a" * 40 and len(first[4]) == 64
    [again] = load(hub)
    assert again[:2] == first[:2] and again[2] < first[2] / 10
    file = cached(tmp_path, "b" * 40) / "model.safetensors"
    save_file({name: w + 1 for name, w in load_file(file).items()}, file, {"format": "pt"})
    later, earlier = load(hub, (NAME, "store", {"revision": "a" * 40}))
    assert later[0] != first[0] and later[2] == first[2]
    assert earlier[:3] == again[:3]
    save_file({name: w + 2 for name, w in load_file(file).items()}, file, {"format": "pt"})
    [edited] = load(hub)  # in the cache
    assert edited[0] not in (first[0], later[0])


def test_a_hub_id_is_a_model_as_the_first_word(tmp_path: Path) -> None:
    cached(tmp_path, "a" * 40)
    picture, store = str(tmp_path / "picture.png"), str(tmp_path / "store")
    Image.new("RGB", (64, 64), "red").save(picture)
    command = ("-m", "keepsight")
    assert run_offline(tmp_path, *command, "ask", NAME, picture, "What is it?").strip()
    assert run_offline(tmp_path, *command, "ask", NAME, "-p", "Hello", "--max-tokens", "2")
    assert "1" in run_offline(tmp_path, *command, "encode", NAME, picture, "--to", store)
    for words in (["ask", "no/such.png", "What is it?"], ["ask", "-m", NAME, "no/such", "What?"]):
        with pytest.raises(AssertionError, match="No such file"):
            run_offline(tmp_path, *command, *words)
    with pytest.raises(AssertionError, match="'no/such' is not in the cache of the Hub"):
        run_offline(tmp_path, *command, "ask", "no/such", "What is it?")
