"""Models from a hub id are as well off as those from a folder. There is no network here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


_COMMANDS = """
import contextlib, io, json, sys
from keepsight.cli.app import main

for words in json.loads(sys.argv[1]):
    sys.argv = ["keepsight", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def test_a_hub_id_is_a_model_as_the_first_word(tmp_path: Path) -> None:
    cached(tmp_path, "a" * 40)
    picture, store = str(tmp_path / "picture.png"), str(tmp_path / "store")
    Image.new("RGB", (64, 64), "red").save(picture)
    commands = [
        ["ask", NAME, picture, "What is it?"],
        ["ask", NAME, "-p", "Hello", "--max-tokens", "2"],
        ["encode", NAME, picture, "--to", store],
        ["ask", "no/such.png", "What is it?"],
        ["ask", "-m", NAME, "no/such", "What?"],
        ["ask", "no/such", "What is it?"],
    ]
    lines = run_offline(tmp_path, "-c", _COMMANDS, json.dumps(commands)).splitlines()
    asked, spoken, encoded, *refused = [json.loads(line) for line in lines]
    assert asked[0] == spoken[0] == encoded[0] == 0
    assert asked[1].strip() and spoken[1] and "1" in encoded[1]
    assert [code for code, _, _ in refused] == [2, 2, 2]
    assert all("No such file" in err for _, _, err in refused[:2])
    assert "'no/such' is not in the cache of the Hub" in refused[2][2]
