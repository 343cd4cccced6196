"""What the container is made of and how it starts, as far as no Docker is needed to see it."""

from __future__ import annotations

import fnmatch
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import settings_table
import typer
from support.server_harness import bearer, served
from typer.testing import CliRunner

from keepsight.cli import serve
from keepsight.cli.app import app
from keepsight.errors import InputError
from keepsight.server.config import ServerConfig

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


def steps(word: str) -> list[str]:
    return [line.strip().removeprefix(word).strip() for line in LINES if word in line.split()[:2]]


def test_what_is_copied_is_there_and_is_sent() -> None:
    text = (ROOT / "deploy/Dockerfile.dockerignore").read_text(encoding="utf-8")
    rules = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    sources = [source for step in steps("COPY") for source in step.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "keepsight"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in rules
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in re.findall(r'(?:readme = |license-files = \[)"([^"]+)"', project):
        assert name in sources, "the build reads it"
    assert not any(fnmatch.fnmatch("keepsight", rule) for rule in rules[1:])


def test_the_container_starts_ends_and_tells_its_health(tmp_path: Path) -> None:
    """A configuration, a request, a line in the log without a word of it, an orderly end."""
    [entry], [health] = steps("ENTRYPOINT"), steps("HEALTHCHECK")
    assert json.loads(entry) == ["keepsight"], "a shell between would keep signals to itself"
    flags = json.loads(next(line for line in LINES if line.startswith("CMD"))[3:])
    assert flags[:2] == ["serve", "demo"]
    code = re.search(r'python -c "(.*)"', health)
    assert code is not None
    check = [sys.executable, "-c"]
    config = tmp_path / "server.toml"
    config.write_text('model_name = "mine"\n[[keys]]\nname = "ann"\nkey = "ann-key"\n')
    with served(*flags[2:], "--config", str(config), log=True) as server:
        there = code[1].replace(":8000/", f":{server.port}/")
        assert subprocess.run([*check, there], timeout=60).returncode == 0
        body: dict[str, Any] = {"model": "mine", "user": "somebody"}
        body["messages"] = [{"role": "user", "content": "Hello!"}]
        status, answer, _ = server.call("/v1/chat/completions", body, headers=bearer("ann"))
        assert status == 200
        server.process.send_signal(signal.SIGTERM)
        _, log = server.process.communicate(timeout=60)
        assert server.process.returncode == 0
        assert subprocess.run([*check, there], timeout=60, stderr=-3).returncode == 1
    lines = [json.loads(text) for text in log.splitlines() if text.startswith("{")]
    [line] = [one for one in lines if one.get("path") != "/health"]
    assert line["path"] == "/v1/chat/completions" and line["status"] == 200
    assert line["key"] == "ann" and line["user"] == "somebody"
    assert line["prompt_tokens"] > 0 and line["first_token_ms"] > 0
    said = answer["choices"][0]["message"]["content"]
    assert "Hello" not in log and said not in log and "ann-key" not in log


def test_a_server_that_loads_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a container gets no signal that it has no handler for."""
    seen: list[Any] = []

    def load(settings: ServerConfig) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        raise InputError("enough")

    monkeypatch.setattr(serve, "_loaded", load)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InputError, match="enough"):
        serve.run({"model": "demo"})
    assert signal.getsignal(signal.SIGTERM) is before
    ended: list[int] = []
    monkeypatch.setattr(serve.os, "_exit", ended.append)
    assert callable(seen[0])
    seen[0](signal.SIGTERM, None)
    assert ended == [143]


def test_the_configuration_beside_it_is_read() -> None:
    config = ServerConfig(config=str(ROOT / "deploy/keepsight.toml"))
    assert config.model == "demo" and [key.admin for key in config.keys] == [False, True]


@pytest.mark.parametrize(("page", "pattern", "table"), settings_table.TABLES)
def test_the_tables_of_the_docs_are_of_this_code(page: str, pattern: str, table: Any) -> None:
    found = re.search(pattern, (settings_table.DOCS / page).read_text("utf-8"))
    assert found is not None
    assert found[0] == table(), "run python scripts/settings_table.py"


def test_each_setting_is_a_flag_and_the_usual_come_first() -> None:
    command = serve.ServeCommand("serve")
    flags = [one.name for one in command.get_params(typer.Context(command))]
    assert {*ServerConfig.model_fields, "named", "as_json"} - {"keys"} == {*flags} - {"help"}
    usual = {name for name, one in ServerConfig.model_fields.items() if one.title == "Usual"}
    assert usual == {*flags[1:11]} and len(usual) == 10


def test_a_flag_wins_over_the_environment_the_file_and_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ServerConfig] = []

    def load(config: ServerConfig) -> None:
        seen.append(config)
        raise InputError("enough")

    monkeypatch.setattr(serve, "_loaded", load)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEEPSIGHT_STORE", "here")
    monkeypatch.setenv("KEEPSIGHT_MAX_BODY", "1KiB")
    monkeypatch.setenv("KEEPSIGHT_PORT", "3")
    monkeypatch.setenv("KEEPSIGHT_ALLOW_PATH", "/a,/b")
    Path("a.toml").write_text(
        "port = 1\nlog = false\ndrain = 5\nmodel = 'other'\nmax_body = 5\n"
        "[[keys]]\nname = 'bob'\nkey = 'b'\nanswers = 2"
    )
    flags = ["--config", "a.toml", "--port", "0", "--allow-origin", "http://a"]
    CliRunner().invoke(app, ["serve", "demo", *flags, "--api-key", "ann:k"])
    [config] = seen
    assert (config.port, config.log, config.drain, config.max_images) == (0, False, 5, 64)
    assert (config.max_body, config.allow_path) == (1024, ("/a", "/b"))
    assert config.allow_origin == ("http://a",)
    assert [(key.name, key.answers) for key in config.keys] == [("bob", 2), ("ann", None)]
    assert (config.model, config.store, config.dtype) == ("demo", "here", "auto")
