"""Other people's clients, in their current releases, against a live demo server.

`make test-clients` installs each into an environment of its own below `build/clients` (or
`KEEPSIGHT_CLIENTS`) and runs its script of `tests/clients/`; one that does not install is skipped
by name. Nothing here is part of `make test` or `make test-slow`: it needs a package registry.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server_harness import TEMPLATE, Live, live

import keepsight as ks

ROOT = Path(ks.__file__).parent.parent
SCRIPTS = ROOT / "tests" / "clients"
TOKENIZER = ROOT / "keepsight" / "demo" / "models" / "qwen3_vl"
FOLDER = os.environ.get("KEEPSIGHT_CLIENTS", "")
PYTHON = {
    "openai_client": ["openai"],
    "openai_agents_client": ["openai-agents"],
    "langchain_client": ["langchain", "langchain-openai"],
    "litellm_client": ["litellm", "mcp"],
    "pydantic_ai_client": ["pydantic-ai-slim[openai]"],
    "browser_use_client": ["browser-use"],
    "instructor_client": ["instructor"],
    "outlines_client": ["outlines[openai]", "pillow"],
    "smolagents_client": ["smolagents[openai]", "pillow"],
    "llama_index_client": ["llama-index-llms-openai", "llama-index-llms-openai-like"],
    "guidellm_client": ["guidellm[vision]"],
    "aiperf_client": ["aiperf"],
}
NODE = {
    "openai_client.mjs": ["openai"],
    "vercel_ai.mjs": ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="make test-clients installs and runs them"),
]


@pytest.fixture(scope="module")
def server(demo_parts: dict[str, Any]) -> Iterator[Live]:
    """The demo model with a template that has a place for tools, calls and their results."""
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor, chat_template=TEMPLATE) as vlm, live(vlm) as it:
        yield it


def installed(name: str, packages: list[str], command: list[str]) -> Path:
    """The folder of an environment, made now if it is not there."""
    folder = Path(FOLDER).resolve() / name
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
        if done.returncode != 0:
            pytest.skip(f"{' '.join(packages)} does not install here: {done.stderr[-300:]}")
        (folder / "ready").touch()
    return folder


def run(server: Live, command: list[str], folder: Path) -> str:
    environment = {
        **os.environ,
        "KEEPSIGHT_URL": f"{server.url}/v1",
        "KEEPSIGHT_PICTURE": str(ROOT / "examples" / "picture.png"),
        "KEEPSIGHT_TOKENIZER": str(TOKENIZER),
        "OPENAI_API_KEY": "none",
        "HF_HUB_OFFLINE": "1",  # no client fetches anything from a hub
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("name", PYTHON)
def test_a_client_for_python(server: Live, name: str) -> None:
    make = f'"{sys.executable}" -m venv . && bin/python -m pip install --quiet "$@"'
    folder = installed(name, PYTHON[name], ["sh", "-c", make, "sh", *PYTHON[name]])
    out = run(server, [str(folder / "bin" / "python"), str(SCRIPTS / f"{name}.py")], folder)
    assert "ok:" in out


def in_node(server: Live, environment: str, script: Path, *words: str) -> str:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node, or no npm")
    make = ["npm", "install", "--no-audit", "--no-fund", "--prefix", ".", *NODE[environment]]
    folder = installed(environment.partition(".")[0] + "_node", NODE[environment], make)
    shutil.copy(script, folder)
    return run(server, ["node", script.name, *words], folder)


@pytest.mark.parametrize("name", NODE)
def test_a_client_for_node(server: Live, name: str) -> None:
    assert "ok:" in in_node(server, name, SCRIPTS / name)


def test_the_example_for_node(server: Live) -> None:
    examples = ROOT / "examples"
    picture = str(examples / "picture.png")
    said = in_node(server, "openai_client.mjs", examples / "chat.mjs", picture)
    assert said.count("A small green triangle in the center on a black background.") == 2
