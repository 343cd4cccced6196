"""OpenVINO GenAI, a library: it gets a door (`openvino_door.py`) in the virtual environment `ov`;
the checkpoint is exported once in `ovx`, with Transformers of before 5."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from bench.rivals import openvino_door
from bench.servers import Contestant, made_by, version_in

NAME = "OpenVINO GenAI"
NEEDS = ("ov/bin/python", "ovx/bin/optimum-cli")


def contestant(place: Path, dtype: str, threads: int) -> Contestant:
    precision, weights = {"float32": ("f32", "fp32"), "bfloat16": ("bf16", "bf16")}[dtype]

    def folder(model: Path) -> Path:
        return model.parent / f"{model.name}-openvino-{precision}"

    def prepare(model: Path) -> None:
        if (folder(model) / "openvino_detokenizer.xml").exists():
            return
        with tempfile.TemporaryDirectory() as draft:
            copy = Path(draft) / model.name
            _as_on_the_hub(model, copy)
            words = [str(place / NEEDS[1]), "export", "openvino", "-m", str(copy)]
            words += ["--task", "image-text-to-text", "--weight-format", weights]
            made_by("OpenVINO's exporter", [*words, str(folder(model))])

    def command(model: Path, port: int) -> list[str]:
        words = [str(place / NEEDS[0]), "-P", openvino_door.__file__, str(folder(model))]
        return [*words, str(port), str(threads), precision]

    version = version_in(place / "ov", "openvino-genai")
    return Contestant(NAME, command, version, many=False, prepare=prepare)


def _as_on_the_hub(model: Path, copy: Path) -> None:
    """The same checkpoint as hubs still have it, for libraries of before Transformers 5."""
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    rope = dict(config["text_config"]["rope_parameters"])
    config["text_config"] |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    config["vision_config"]["model_type"] = config["model_type"]
    (copy / "config.json").write_text(json.dumps(config))
    told = json.loads((copy / "tokenizer_config.json").read_text())
    told |= {"tokenizer_class": "Qwen2TokenizerFast", "bos_token": None, "unk_token": None}
    told["additional_special_tokens"] = told.pop("extra_special_tokens")
    (copy / "tokenizer_config.json").write_text(json.dumps(told))
    merges = json.loads((copy / "tokenizer.json").read_text())["model"]
    (copy / "vocab.json").write_text(json.dumps(merges["vocab"], ensure_ascii=False))
    lines = [" ".join(pair) for pair in merges["merges"]]
    (copy / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]))
