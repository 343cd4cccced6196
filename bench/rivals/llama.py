"""llama-server, built in `lcpp-build`; the converter of its sources under `dl` runs in `hf`."""

from __future__ import annotations

from pathlib import Path

from bench.servers import Contestant, made_by

NAME = "llama-server"
_SOURCE = "dl/*/vendor/llama.cpp/convert_hf_to_gguf.py"
NEEDS = ("lcpp-build/bin/llama-server", "hf/bin/python", _SOURCE)
# The converter knows published tokenizers only; ours splits words as Qwen's does.
_CONVERT = """
import runpy, sys
source = sys.argv.pop(1)
sys.path[:0] = [source, source + "/gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
sys.argv[0] = source + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def contestant(place: Path, dtype: str, threads: int) -> Contestant:
    kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    source = next(place.glob(_SOURCE)).parent

    def files(model: Path) -> list[Path]:
        return [model.parent / f"{model.name}-{kind}{part}.gguf" for part in ("", "-eyes")]

    def prepare(model: Path) -> None:
        for file, more in zip(files(model), ([], ["--mmproj"]), strict=True):
            if not file.exists():
                words = [str(place / "hf/bin/python"), "-c", _CONVERT, str(source), str(model)]
                words += ["--outtype", kind, *more, "--outfile", str(file)]
                made_by("llama.cpp's converter", words)

    def command(model: Path, port: int) -> list[str]:
        text, eyes = map(str, files(model))
        words = [str(place / NEEDS[0]), "-m", text, "--mmproj", eyes, "--host", "127.0.0.1"]
        words += ["--port", str(port), "-t", str(threads), "-c", "8192", "-np", "1"]
        return [*words, "--jinja", "--cache-type-k", kind, "--cache-type-v", kind]

    version = source.parent.parent.name.replace("_", "-")
    return Contestant(NAME, command, version, many=False, prepare=prepare)
