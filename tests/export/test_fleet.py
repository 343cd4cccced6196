"""Packages for other engines: the shapes they take, refusals by name, and a store as vLLM's cache.

Shapes are compared with stock features here; whether the engines answer the same from them is shown
by running vLLM, where `KEEPSIGHT_VLLM_PYTHON` names a Python that has it (support/fleet_job.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fleet_job
from support.hostile import ROOT, tiny_package
from support.models import build, picture

import keepsight as ks
from keepsight.errors import (
    InputError,
    MissingExtra,
    UnknownOption,
    UnsupportedInput,
    WrongIdentity,
)
from keepsight.export import engines
from keepsight.export.engines import vllm_connector
from keepsight.export.engines.checkpoint import checkpoint_digest
from keepsight.export.engines.serving import Binding, Serving, is_ours
from keepsight.formats import engine_inputs
from keepsight.formats.package import Package
from keepsight.models import loading
from keepsight.models.families import SUPPORTED
from keepsight.store import open_store

VLLM = os.environ.get("KEEPSIGHT_VLLM_PYTHON")


def package_of(model_type: str, tokens: int = 4, seed: int = 0, **changes: Any) -> Package:
    made = torch.Generator().manual_seed(seed)
    return tiny_package(
        **{
            "tensors": {
                "features": torch.randn(tokens, 8, generator=made),
                "deepstack.0": torch.randn(tokens, 8, generator=made),
                "deepstack.1": torch.randn(tokens, 8, generator=made),
            },
            "layout": ("<", tokens, ">"),
            "grid": {"image_grid_thw": [[1, 4, tokens]]},
            "about": {"model_type": model_type},
            "key": f"{seed:064x}",
            **changes,
        }
    )


# -- shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_grid_families_get_all_rows_and_all_grids(kind: str) -> None:
    """Two images of different sizes, against what stock Transformers computes for both at once."""
    model, processor = build(kind)
    vlm = ks.wrap(model, processor)
    images = [picture(1), picture(2, 128, 64)]
    packs = [vlm.encode(image) for image in images]
    given = engines.to_vllm(packs)["image"]
    processed = processor.image_processor(images, return_tensors="pt")
    with torch.no_grad():
        out = model.base_model.get_image_features(**processed)
    expected = [torch.cat(out.pooler_output)]
    for level in getattr(out, "deepstack_features", None) or []:
        expected.append(torch.cat(level) if isinstance(level, list | tuple) else level)
    torch.testing.assert_close(given["image_embeds"], torch.cat(expected, -1), atol=1e-5, rtol=1e-4)
    assert torch.equal(given["image_grid_thw"], processed["image_grid_thw"])
    assert given["image_grid_thw"].dtype == torch.int64
    (item,) = engines.to_sglang(packs)["image_data"]
    assert torch.equal(item["precomputed_embeddings"], given["image_embeds"])
    assert torch.equal(item["image_grid_thw"], given["image_grid_thw"])
    assert (item["format"], item["modality"]) == ("processor_output", "image")


@pytest.mark.parametrize("kind", ["llava", "llava_next", "llava_onevision", "internvl"])
def test_row_families_get_a_list_with_one_row_a_token(kind: str) -> None:
    model, processor = build(kind)
    vlm = ks.wrap(model, processor)
    packs = [vlm.encode(picture(1)), vlm.encode(picture(2, 128, 64))]
    rows = engines.to_vllm(packs)["image"]
    assert [row.shape for row in rows] == [
        (p.tokens, model.config.text_config.hidden_size) for p in packs
    ]
    for row, pack in zip(rows, packs, strict=True):
        assert torch.equal(row, pack.tensors["features"].reshape(row.shape))
    with pytest.raises(UnsupportedInput, match=f"SGLang .* {model.config.model_type}"):
        engines.to_sglang(packs)
    with pytest.raises(UnsupportedInput, match="multi_modal_uuids"):
        engines.named_for_vllm(packs)


def test_deepstack_levels_stand_behind_the_features() -> None:
    pack = package_of("qwen3_vl")
    rows = pack.to_vllm()["image"]["image_embeds"]
    assert rows.shape == (4, 24)
    for spot, name in enumerate(("features", "deepstack.0", "deepstack.1")):
        assert torch.equal(rows[:, 8 * spot : 8 * spot + 8], pack.tensors[name])
    assert torch.equal(pack.to_sglang()["image_data"][0]["precomputed_embeddings"], rows)


def test_images_stay_in_the_order_of_the_prompt() -> None:
    packs = [package_of("qwen2_vl", tokens, seed) for seed, tokens in enumerate((4, 2, 3))]
    given = engines.to_vllm(packs)["image"]
    assert given["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 2], [1, 4, 3]]
    assert torch.equal(given["image_embeds"][4:6], engine_inputs.rows(packs[1]))
    named = engines.named_for_vllm(packs)
    assert named["multi_modal_uuids"]["image"] == [f"keepsight-{p.feature_id}" for p in packs]
    assert named["multi_modal_data"]["image"].keys() == {"image_grid_thw"}


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(SUPPORTED))
def test_every_family_is_taken_or_refused_by_name(model_type: str) -> None:
    pack = package_of(model_type)
    hands = (engines.to_vllm, engines.to_sglang)
    for engine, hand in zip((engine_inputs.VLLM, engine_inputs.SGLANG), hands, strict=True):
        if model_type in engine_inputs.TAKES[engine]:
            assert hand([pack])
            continue
        with pytest.raises(UnsupportedInput, match=f"{engine} takes no features of {model_type}"):
            hand([pack])


NO: dict[str, tuple[list[Package], str]] = {
    "nothing": ([], "no packages"),
    "a video": ([package_of("qwen2_vl", modality="video")], "'video'"),
    "no model type": ([package_of("qwen2_vl", about={})], "model type"),
    "a model type that nobody knows": ([package_of("novel_vl")], "novel_vl"),
    "no grid": ([package_of("qwen2_vl", grid={})], "0 grids"),
    "two grids": (
        [package_of("qwen2_vl", grid={"image_grid_thw": [[1, 2, 2], [1, 2, 2]]})],
        "2 grids",
    ),
    "other weights": ([package_of("qwen2_vl"), package_of("qwen2_vl", weights="0")], "weights"),
    "other settings": ([package_of("qwen2_vl"), package_of("qwen2_vl", settings="0")], "settings"),
}


@pytest.mark.parametrize("what", NO)
def test_what_is_not_handed_over(what: str) -> None:
    packages, named = NO[what]
    for hand in (engines.to_vllm, engines.to_sglang, engines.named_for_vllm):
        with pytest.raises(InputError, match=named):
            hand(packages)


def test_indicators_are_refused() -> None:
    tensors = {"features": torch.zeros(4, 8), "indicator": torch.zeros(2, 8)}
    with pytest.raises(UnsupportedInput, match="indicator"):
        package_of("llava", tensors=tensors).to_vllm()


# -- a store as a cache ------------------------------------------------------------------------


def binding_of(store: Path, pack: Package, **changes: Any) -> Binding:
    given = {"weights": pack.weights, "settings": pack.settings, "checkpoint": "c", **changes}
    return Binding(store=str(store), **given)


def filled(folder: Path, *packs: Package) -> Path:
    store = open_store(folder)
    for pack in packs:
        store.put("package", pack.feature_id, pack.stored, pack.record())
    store.flush()
    store.close()
    return folder


def serving(folder: Path, pack: Package, **changes: Any) -> Serving:
    return Serving(open_store(folder), binding_of(folder, pack, **changes))


def test_features_are_given_out_under_their_name(tmp_path: Path) -> None:
    packs = [package_of("qwen3_vl", seed=seed) for seed in (1, 2)]
    served = serving(filled(tmp_path, *packs), packs[0])
    for pack in packs:
        rows = served.rows(engines.identifier(pack))
        assert rows is not None and torch.equal(rows, engine_inputs.rows(pack))
        assert served.misfit(engines.identifier(pack), 4, [1, 4, 4]) == ""
    served.close()


def test_names_that_are_not_ours(tmp_path: Path) -> None:
    pack = package_of("qwen3_vl")
    served = serving(filled(tmp_path, pack), pack)
    for name in (
        "",
        pack.feature_id,
        f"keepsight-{pack.feature_id}x",
        f"lora-{engines.identifier(pack)}",
        "keepsight-../../etc/passwd",
        f"keepsight-{'g' * 64}",
        f"keepsight-{pack.feature_id}\n",
    ):
        assert not is_ours(name) and served.find(name) is None, name
    absent = f"keepsight-{'0' * 64}"
    assert is_ours(absent) and served.rows(absent) is None
    assert "no features of that name" in served.misfit(absent, 4, None)
    served.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weights": "0" * 64}, "other vision weights"),
        ({"settings": "0" * 64}, "other vision settings"),
    ],
)
def test_features_of_another_model_are_not_given_out(
    tmp_path: Path, changes: dict[str, str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    pack = package_of("qwen3_vl")
    served = serving(filled(tmp_path, pack), pack, **changes)
    for _ in range(3):
        assert served.rows(engines.identifier(pack)) is None
    assert caplog.text.count(named) == 1
    served.close()


def test_lossy_features_are_given_out_only_where_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lossy = package_of("qwen3_vl").pack("int8")
    name = engines.identifier(lossy)
    strict = serving(filled(tmp_path, lossy), lossy)
    assert strict.rows(name) is None and "int8: off by" in caplog.text
    strict.close()
    served = serving(tmp_path, lossy, lossy=True)
    rows = served.rows(name)
    assert rows is not None and torch.equal(rows, engine_inputs.rows(lossy))
    served.close()


def test_a_package_under_another_name_is_not_given_out(tmp_path: Path) -> None:
    one, two = package_of("qwen3_vl", seed=1), package_of("qwen3_vl", seed=2)
    store = open_store(tmp_path)
    store.put("package", one.feature_id, two.stored, two.record())
    store.flush()
    served = Serving(store, binding_of(tmp_path, one))
    assert served.rows(engines.identifier(one)) is None
    served.close()


def test_features_that_do_not_fit_the_prompt(tmp_path: Path) -> None:
    pack = package_of("qwen3_vl")
    served = serving(filled(tmp_path, pack), pack)
    name = engines.identifier(pack)
    assert "room for 5 tokens" in served.misfit(name, 5, [1, 4, 4])
    assert "grid [1, 8, 2]" in served.misfit(name, 4, [1, 8, 2])
    assert served.misfit(name, 4, None) == ""
    served.close()


def test_what_the_connector_is_told(tmp_path: Path) -> None:
    extra = engines.connector_config("demo", tmp_path)["ec_connector_extra_config"]
    bound = Binding.of(extra)
    with ks.load("demo", store=tmp_path) as vlm:
        pack = vlm.encode(picture(1))
        assert isinstance(pack, Package)
        vlm.flush()
        served = Serving(open_store(bound.store), bound)
        assert served.rows(engines.identifier(pack)) is not None
        served.close()
    for wrong, error in (
        ({}, InputError),
        ({**extra, "weights": None}, InputError),
        ({**extra, "wieghts": "x"}, UnknownOption),
    ):
        with pytest.raises(error):
            Binding.of(wrong)


def test_a_checkpoint_is_named_by_every_byte(tmp_path: Path) -> None:
    first = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="no weight files"):
        checkpoint_digest(str(tmp_path))
    first.write_bytes(bytes(1000))
    names = {checkpoint_digest(str(tmp_path))}
    (tmp_path / "README.md").write_text("not part of it")
    names.add(checkpoint_digest(str(tmp_path)))
    assert len(names) == 1
    first.write_bytes(bytes(999) + b"x")
    names.add(checkpoint_digest(str(tmp_path)))
    first.rename(tmp_path / "other.safetensors")
    names.add(checkpoint_digest(str(tmp_path)))
    (tmp_path / "config.json").write_text("{ }")
    names.add(checkpoint_digest(str(tmp_path)))
    assert len(names) == 4
    with pytest.raises(InputError, match="neither a folder"):
        checkpoint_digest("nobody/nothing")


# -- the connector, with vLLM's side played here -----------------------------------------------


class PlayedBase:
    """What Connector needs of vLLM's ECConnectorBase."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        self._metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A vLLM that consists of that one class."""
    parts = vllm_connector._BASE.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[vllm_connector._BASE].ECConnectorBase = PlayedBase  # type: ignore[attr-defined]
    vllm_connector._connector.cache_clear()
    yield
    vllm_connector._connector.cache_clear()


def configured(path: str, extra: dict[str, Any], role: str = "ec_consumer") -> Any:
    model = types.SimpleNamespace(model=path, revision=None, dtype=torch.float32)
    transfer = types.SimpleNamespace(ec_role=role, ec_connector_extra_config=extra)
    return types.SimpleNamespace(ec_transfer_config=transfer, model_config=model)


SCHEDULER, WORKER = types.SimpleNamespace(name="SCHEDULER"), types.SimpleNamespace(name="WORKER")


def request(name: str, tokens: int, **data: torch.Tensor) -> Any:
    held = {key: types.SimpleNamespace(data=value) for key, value in data.items()}
    place = types.SimpleNamespace(offset=5, length=tokens)
    feature = types.SimpleNamespace(identifier=name, data=held, mm_position=place)
    return types.SimpleNamespace(
        request_id=f"r-{name[-4:]}", mm_features=[feature], get_num_encoder_embeds=lambda i: tokens
    )


@pytest.fixture
def connected(played: None, tmp_path: Path) -> Iterator[tuple[Any, Any, Package]]:
    """Both sides of the connector on a store with one picture of the demo model."""
    config = engines.connector_config("demo", tmp_path)
    with ks.load("demo", store=tmp_path) as vlm:
        pack = vlm.encode(picture(1))
        vlm.flush()
    told = configured(loading.model_path("demo"), config["ec_connector_extra_config"])
    made = getattr(
        importlib.import_module(config["ec_connector_module_path"]), config["ec_connector"]
    )
    scheduler, worker = made(told, SCHEDULER), made(told, WORKER)
    yield scheduler, worker, pack
    scheduler.shutdown()
    worker.shutdown()


def test_rows_travel_from_the_scheduler_to_the_worker(connected: Any) -> None:
    scheduler, worker, pack = connected
    name = engines.identifier(pack)
    asked = request(name, pack.tokens, image_grid_thw=torch.tensor(pack.grid["image_grid_thw"]))
    assert scheduler.has_cache_item(name) and scheduler.ensure_cache_available(asked, 0)
    scheduler.update_state_after_alloc(asked, 0)
    cache: dict[str, torch.Tensor] = {}
    for handed, expected in (
        (scheduler.build_connector_meta(None), [name]),
        (scheduler.build_connector_meta(None), []),
    ):
        assert list(handed.rows) == expected, "handed over once"
        worker.bind_connector_metadata(handed)
        worker.start_load_caches(cache)
    assert torch.equal(cache[name].cpu(), engine_inputs.rows(pack).to(torch.float32))
    assert scheduler.take_unavailable_requests() == set()


def test_requests_that_cannot_be_served_fail_alone(connected: Any) -> None:
    scheduler, _, pack = connected
    name, grid = engines.identifier(pack), torch.tensor(pack.grid["image_grid_thw"])
    absent = f"keepsight-{'0' * 64}"
    for wrong in (
        request(absent, pack.tokens, image_grid_thw=grid),
        request(name, pack.tokens + 1, image_grid_thw=grid),
        request(name, pack.tokens, image_grid_thw=grid * torch.tensor([1, 2, 1])),
        request(name, pack.tokens + 1, pixel_values=torch.zeros(1)),
    ):
        assert not scheduler.ensure_cache_available(wrong, 0)
        assert scheduler.take_unavailable_requests() == {wrong.request_id}
        assert scheduler.take_unavailable_requests() == set()
    # Pixels under a name that the store lacks are vLLM's to encode, and so are names of others.
    for fine in (
        request(absent, 9, pixel_values=torch.zeros(1)),
        request("somebody's name", 9, image_grid_thw=grid),
        request("somebody's name", 9),
    ):
        assert scheduler.ensure_cache_available(fine, 0)
        assert not scheduler.has_cache_item(fine.mm_features[0].identifier)
    # What was computed before is not looked for again.
    assert scheduler.ensure_cache_available(request(absent, 9, image_grid_thw=grid), 14)
    assert not scheduler.ensure_cache_available(request(absent, 9, image_grid_thw=grid), 13)


def test_another_checkpoint_is_refused_at_the_start(connected: Any, played: None) -> None:
    scheduler, _, _ = connected
    extra = dataclasses.asdict(scheduler.serving._binding)
    made = type(scheduler)
    with pytest.raises(WrongIdentity, match="checkpoint"):
        made(configured(loading.model_path("demo-hybrid"), extra), SCHEDULER)
    with pytest.raises(InputError, match="ec_consumer"):
        made(configured(loading.model_path("demo"), extra, "ec_both"), SCHEDULER)


def test_without_vllm_the_extra_is_named() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vllm is installed here")
    vllm_connector._connector.cache_clear()
    with pytest.raises(MissingExtra, match="pip install vllm"):
        _ = vllm_connector.KeepsightConnector
    with pytest.raises(AttributeError, match="Nothing"):
        _ = vllm_connector.Nothing


def test_the_connector_needs_no_transformers_of_ours() -> None:
    """vLLM brings a Transformers of its own, older than the one that Keepsight needs."""
    script = (
        "import keepsight.export.engines.vllm_connector, sys; print('transformers' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"


# -- vLLM itself -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes() -> list[Any]:
    return [scene.draw() for scene in fleet_job.scenes()]


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="KEEPSIGHT_VLLM_PYTHON names no Python with vLLM")
def test_vllm_answers_the_same_from_features(tmp_path: Path, scenes: list[Any]) -> None:
    path = loading.model_path("demo")
    with ks.load("demo", dtype="float32") as vlm:
        told = fleet_job.prepare(vlm, path, scenes, tmp_path, "float32")
        mine = [vlm.ask(scenes[:n], fleet_job.QUESTIONS[n], max_new_tokens=16) for n in (1, 2)]
    result = fleet_job.run(str(VLLM), told, tmp_path)
    assert "failed" not in result, result
    for count, said in enumerate(fleet_job.verdicts(result["answers"]).values(), 1):
        assert said["features equal pixels, token by token"]
        assert said["largest difference of log probabilities"] < 1e-4
        assert said["other features, another answer"]
        assert said["other features equal other pixels"]
        assert said["text"].strip() == mine[count - 1].text.strip() == said["truth"]


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="KEEPSIGHT_VLLM_PYTHON names no Python with vLLM")
def test_vllm_reads_features_from_a_store(tmp_path: Path, scenes: list[Any]) -> None:
    path, store = loading.model_path("demo"), tmp_path / "store"
    config = engines.connector_config("demo", store)
    with ks.load("demo", dtype="float32", store=store) as vlm:
        told = fleet_job.prepare_connector(vlm, path, scenes, tmp_path, config, "float32")
    result = fleet_job.run(str(VLLM), told, tmp_path)
    assert "failed" not in result, result
    answers = result["answers"]
    for count in (1, 2):
        pixels, named = answers[f"{count} pixels"], answers[f"{count} named"]
        assert named["tokens"] == pixels["tokens"]
        # Pixels of another picture under this name: the features come from the store.
        assert answers[f"{count} disguised"]["tokens"] == pixels["tokens"]
        assert answers[f"{count} swapped"]["tokens"] != pixels["tokens"]
    assert answers["first of all"]["tokens"] == answers["1 swapped"]["tokens"]
    for how in ("unknown name", "another grid", "turned grid"):
        assert answers[how]["finish"] == "error" and not answers[how]["tokens"]
        assert answers[f"after {how}"]["tokens"] == answers["1 pixels"]["tokens"]
    assert answers["at last"]["tokens"] == answers["last"]["tokens"]


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="KEEPSIGHT_VLLM_PYTHON names no Python with vLLM")
def test_vllm_does_not_start_with_features_of_another_checkpoint(tmp_path: Path) -> None:
    config = engines.connector_config("demo", tmp_path / "store")
    config["ec_connector_extra_config"]["checkpoint"] = "0" * 64
    told = fleet_job.job(loading.model_path("demo"), "float32", [], connector=config)
    result = fleet_job.run(str(VLLM), told, tmp_path)
    assert "this encoder cache does not fit: checkpoint" in result["failed"]
