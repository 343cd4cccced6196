"""Models from a hub id are as well off as those from a folder. There is no network here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hub_cache import NAME, cached, run_offline
from PIL import Image
from safetensors.torch import load_file, save_file

_LOOK = """
import json, sys
import keepsight as ks
from keepsight import digests

name, store, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
hashed, digest = [], digests.weight_digest
digests.weight_digest = lambda weight: hashed.append(weight) or digest(weight)
with ks.load(name, store=store, dtype="float32", **options) as vlm:
    engine, weights = vlm.stats()["engine"], vlm.runtime.weights.all
    print(json.dumps([weights, engine["packed_bytes"], len(hashed)]))
"""
_NOTED = """
import sys
import keepsight as ks
from keepsight.models.loading import files_digest
from PIL import Image

with ks.load(sys.argv[1]) as vlm:
    print(vlm.encode(Image.new("RGB", (64, 64))).about["commit"])
print(len(files_digest(sys.argv[1], "float32", None, every=True)))
"""


def test_weights_are_packed_and_hashed_once_per_commit(tmp_path: Path) -> None:
    def load(name: str = NAME, store: str = "store", **options: Any) -> tuple[str, int, int]:
        words = ("-c", _LOOK, name, str(tmp_path / store), json.dumps(options))
        weights, packed, hashed = json.loads(run_offline(tmp_path, *words))
        return weights, packed, hashed

    cached(tmp_path, "a" * 40)
    assert run_offline(tmp_path, "-c", _NOTED, NAME).split() == ["a" * 40, "64"]
    first = load()
    assert first == load("demo", "another store") and first[1]
    again = load()
    assert again[:2] == first[:2] and again[2] < first[2] / 10
    file = cached(tmp_path, "b" * 40) / "model.safetensors"
    save_file({name: w + 1 for name, w in load_file(file).items()}, file, {"format": "pt"})
    later = load()
    assert later[0] != first[0] and later[2] == first[2]
    assert load()[0] == later[0]
    assert load(revision="a" * 40) == again
    save_file({name: w + 2 for name, w in load_file(file).items()}, file, {"format": "pt"})
    assert load()[0] != later[0]  # edited in the cache


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
