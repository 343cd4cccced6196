"""Features of packages against pixels in vLLM, on one checkpoint: what is asked, and what came.

`python tests/support/fleet_job.py VLLM_PYTHON OUT.json` records the comparison, and docs/fleets.md
quotes it; test_fleet.py runs a part of it where `KEEPSIGHT_VLLM_PYTHON` names a Python.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import keepsight as ks
from keepsight.bench import checkpoints
from keepsight.demo.scene import Scene
from keepsight.export import engines
from keepsight.formats.package import Package
from keepsight.models import loading

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
QUESTIONS = {1: "Describe the picture.", 2: "List the pictures."}
Answers = dict[str, dict[str, Any]]


def prepare(
    vlm: Any, checkpoint: str, images: list[Any], folder: Path, dtype: str
) -> dict[str, Any]:
    """The requests of one engine without a connector."""
    paths, packages = save(vlm, images, folder)
    lossy = [Package.load(path).pack("int8").save(f"{path}.int8.sight") for path in packages]
    cases = []
    for count in (1, 2):
        prompt = text_of(vlm, count)
        one = {"prompt": prompt, "images": paths[:count], "packages": packages[:count]}
        other = dict(one, packages=packages[::-1][:count])
        cases += [
            dict(one, name=f"{count} pixels", how="pixels"),
            dict(one, name=f"{count} features", how="features"),
            dict(other, name=f"{count} swapped", how="features"),
            dict(other, name=f"{count} swapped pixels", how="pixels", images=paths[::-1][:count]),
            dict(one, name=f"{count} int8", how="features", packages=[*map(str, lossy[:count])]),
        ]
    return job(checkpoint, dtype, cases)


def job(checkpoint: str, dtype: str, cases: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What an engine is told."""
    common = {"checkpoint": checkpoint, "dtype": dtype, "connector": None, "max_tokens": 16}
    return {**common, "cases": cases, **more}


def prepare_connector(
    vlm: Any, checkpoint: str, images: list[Any], folder: Path, config: dict[str, Any], dtype: str
) -> dict[str, Any]:
    """The requests of one engine that reads a store in which these images are."""
    paths, packages = save(vlm, images, folder)
    # Pixels of the first picture under the name of the second, when vLLM knows neither.
    cases = [
        {
            "name": "first of all",
            "how": "disguised",
            "prompt": text_of(vlm, 1),
            "images": paths[:1],
            "packages": packages[1:2],
        }
    ]
    for count in (1, 2):
        one = {"prompt": text_of(vlm, count), "images": paths[:count]}
        one["packages"] = packages[:count]
        cases += [
            dict(one, name=f"{count} pixels", how="pixels"),
            dict(one, name=f"{count} named", how="named"),
            dict(one, name=f"{count} disguised", how="disguised", images=paths[::-1][:count]),
            dict(one, name=f"{count} swapped", how="named", packages=packages[::-1][:count]),
        ]
    # Requests that must fail, about a picture that the engine has not seen before: one that is not
    # square, so that its grid can be turned around without another count of tokens.
    paths, packages = save(vlm, [Scene(random.Random(9), (128, 96)).draw()], folder / "last")
    last = {"prompt": text_of(vlm, 1), "images": paths, "packages": packages}
    for how in ("unknown name", "another grid", "turned grid"):
        cases += [dict(last, name=how, how=how), dict(cases[2], name=f"after {how}")]
    cases += [dict(last, name="at last", how="named"), dict(last, name="last", how="pixels")]
    return job(checkpoint, dtype, cases, connector=config)


def save(vlm: Any, images: list[Any], folder: Path) -> tuple[list[str], list[str]]:
    """Images and packages as files."""
    folder.mkdir(exist_ok=True)
    paths, packages = [], []
    for number, image in enumerate(images):
        path = folder / f"{number}.png"
        image.save(path)
        paths.append(str(path))
        packages.append(str(vlm.encode(str(path)).save(folder / f"{number}.sight")))
    vlm.flush()
    return paths, packages


def text_of(vlm: Any, count: int) -> str:
    """The prompt with one placeholder for each picture, as vLLM takes it."""
    content = [{"type": "image"}] * count + [{"type": "text", "text": QUESTIONS[count]}]
    messages = [{"role": "user", "content": content}]
    template = vlm.processor.chat_template or vlm.processor.tokenizer.chat_template
    rendered: str = vlm.processor.tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    return rendered


def run(python: str, told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The answers of a vLLM engine; its last lines where it did not start."""
    (folder / "job.json").write_text(json.dumps(told))
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [python, str(HERE / "fleet_engine.py"), str(folder / "job.json"), str(result)]
    try:
        process = subprocess.run(
            command,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": "it took longer than 580 seconds"}
    if not result.exists():
        return {"failed": (process.stdout + process.stderr)[-6000:]}
    answered: dict[str, Any] = json.loads(result.read_text())
    return answered | {"log": process.stdout + process.stderr}


def furthest(one: dict[str, Any], two: dict[str, Any]) -> float:
    """The largest difference of log probabilities between two answers of the same tokens."""
    return max(
        (abs(a - b) for a, b in zip(one["logprobs"], two["logprobs"], strict=True)), default=0
    )


def verdicts(answers: Answers) -> dict[str, Any]:
    """What the comparison says, count by count."""
    said: dict[str, Any] = {}
    for count in (1, 2):
        pixels, features = answers[f"{count} pixels"], answers[f"{count} features"]
        swapped, lossy = answers[f"{count} swapped"], answers[f"{count} int8"]
        same = pixels["tokens"] == features["tokens"]
        said[f"{count} image{'s' * (count > 1)}"] = {
            "features equal pixels, token by token": same,
            "largest difference of log probabilities": furthest(pixels, features) if same else None,
            "other features, another answer": swapped["tokens"] != features["tokens"],
            "other features equal other pixels": swapped["tokens"]
            == answers[f"{count} swapped pixels"]["tokens"],
            "int8 gives the same tokens": lossy["tokens"] == features["tokens"],
            "tokens": pixels["tokens"],
            "text": pixels["text"],
            "truth": truths()[count - 1],
            "text with other features": swapped["text"],
        }
    return said


def scenes() -> list[Scene]:
    """Two pictures that the demo models can talk about."""
    return [Scene(random.Random(seed), (96, 96)) for seed in (1, 2)]


def truths() -> list[str]:
    """What the right answers about those two are."""
    one, two = scenes()
    return [one.describe(), f"1: {one.name}. 2: {two.name}."]


def noise(seed: int, side: int) -> Image.Image:
    """A picture of coarse noise, of a size that no processor resizes."""
    made = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 256, (4, 4, 3), generator=made, dtype=torch.uint8)
    return Image.fromarray(small.numpy()).resize((side, side), Image.Resampling.NEAREST)


def record(python: str, out: Path, *only: str) -> None:
    """All comparisons that this machine allows, or those named, each written as it is done."""
    done: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"checkpoints": {}}
    done["made_by"] = "python tests/support/fleet_job.py VLLM_PYTHON OUT.json [NAME ...]"
    done["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, no accelerator"
    done["greedy"] = "16 tokens, eager mode, no prefix cache"
    out.parent.mkdir(parents=True, exist_ok=True)
    for title in only or TITLES:
        with tempfile.TemporaryDirectory() as folder:
            if title == "connector":
                done[title] = record_connector(python, Path(folder))
            else:
                done["checkpoints"][title] = record_checkpoint(python, title, Path(folder), done)
        out.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")


TITLES = {
    "demo (qwen3_vl, trained)": "float32",
    "connector": "float32",
    "qwen3_vl, random weights": "float32",
    "qwen2_5_vl, random weights": "float32",
    # The linear attention of vLLM on a CPU takes bfloat16 alone, and heads of 128, which the hybrid
    # demo model has not.
    "qwen3_5, random weights": "bfloat16",
    "llava, random weights": "float32",
    "llava_next, random weights": "float32",
    "llava_onevision, random weights": "float32",
    "internvl, random weights": "float32",
    "paligemma, random weights": "float32",
}


def record_checkpoint(
    python: str, title: str, folder: Path, done: dict[str, Any]
) -> dict[str, Any]:
    """Features against pixels on one checkpoint."""
    dtype, shape = TITLES[title], title.partition(",")[0]
    if "trained" in title:
        path, images = loading.model_path("demo"), [scene.draw() for scene in scenes()]
        vlm = ks.load(path, dtype=dtype)
    elif shape in checkpoints.SHAPES:
        path = str(checkpoints.checkpoint(shape, "small", ROOT / "bench" / "checkpoints"))
        side = 16 * checkpoints.patch_of(shape)
        images = [noise(1, side), noise(2, side)]
        vlm = ks.load(path, dtype=dtype)
    else:
        path, vlm = tiny(shape, folder / "checkpoint")
        side = SIDES[shape]
        images = [noise(1, side), noise(2, side)]
    with vlm:
        told = prepare(vlm, path, images, folder / "job", dtype)
    result = run(python, told, folder / "job")
    if "failed" in result:
        return {"failed": result["failed"].strip().splitlines()[-1]}
    done["vllm"] = result["vllm"]
    said = verdicts(result["answers"])
    if "trained" not in title:  # what random weights say is not worth a line
        said = {name: dict(list(facts.items())[:5]) for name, facts in said.items()}
    return {"dtype": dtype, **said}


SIDES = {"llava": 48, "llava_next": 32, "llava_onevision": 32, "internvl": 32, "paligemma": 32}


def tiny(kind: str, folder: Path) -> tuple[str, Any]:
    """A tiny checkpoint of a family, as vLLM reads those of the hub, and Keepsight on it."""
    from support import model_parts

    # Heads of 64: the least that vLLM's attention on a CPU takes.
    model_parts.TEXT.update(hidden_size=256, intermediate_size=512)
    from safetensors.torch import load_file, save_file

    from support import models

    models.folder_of(kind, folder)
    model, processor = models.build(kind)
    own = {k: v for k, v in vars(processor).items() if isinstance(v, int | float | str)}
    own.pop("chat_template", None)
    own["processor_class"] = type(processor).__name__
    (folder / "processor_config.json").write_text(json.dumps(own))
    images = folder / "preprocessor_config.json"
    images.write_text(images.read_text().replace("ProcessorPil", "Processor"))
    if kind.startswith("llava"):  # the hub's files call the tower by its longer name
        weights = load_file(folder / "model.safetensors")
        named = {
            k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in weights.items()
        }
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder), ks.wrap(model, processor)


def record_connector(python: str, root: Path) -> dict[str, Any]:
    """A store as the encoder cache of vLLM, on the trained demo model."""
    store, images = root / "store", [scene.draw() for scene in scenes()]
    config = engines.connector_config("demo", store)
    with ks.load("demo", dtype="float32", store=store) as vlm:
        path = loading.model_path("demo")
        told = prepare_connector(vlm, path, images, root / "job", config, "float32")
    result = run(python, told, root / "job")
    if "failed" in result:
        return {"failed": result["failed"].strip().splitlines()[-1]}
    return {name: a.get("text") or a["finish"] for name, a in result["answers"].items()}


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
