"""`transformers serve`, from the virtual environment `hf`."""

from __future__ import annotations

from pathlib import Path

from bench.servers import Contestant, threads_of, version_in

NAME = "transformers serve"
NEEDS = ("hf/bin/transformers",)


def contestant(place: Path, dtype: str, threads: int) -> Contestant:
    def command(model: Path, port: int) -> list[str]:
        words = [str(place / NEEDS[0]), "serve", str(model), "--device", "cpu"]
        return [*words, "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)]

    version = version_in(place / "hf", "transformers")
    # It refuses `stream_options`, and tells the usage without being asked.
    return Contestant(NAME, command, version, threads_of(threads), usage=False)
