"""Runtimes tell nobody that they are used: no file, no fork, no connection."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for runtime in ("onnxruntime", "openvino"):  # not imported here: they would begin to tell
    if importlib.util.find_spec(runtime) is None:
        pytest.skip(f"needs {runtime}", allow_module_level=True)

# Both keep quiet on machines that say they are for tests, so those names are taken away.
_SAID = ("CI", "TF_BUILD", "GITHUB_ACTIONS", "JENKINS_URL", "ORT_DISABLE_TELEMETRY")
_WATCHED = """
import json, os, sys, time
import torch  # one for CUDA looks for its libraries with processes
seen = []
def watch(event, arguments):
    if event in ("os.fork", "socket.connect", "socket.getaddrinfo", "subprocess.Popen"):
        seen.append(event)
        raise PermissionError(event)
sys.addaudithook(watch)
"""


def watched(home: Path, code: str, **more: str) -> Any:
    """What some code tells, run in a process of its own whose home is an empty folder."""
    environment = {name: value for name, value in os.environ.items() if name not in _SAID}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), **more}
    command = [sys.executable, "-c", _WATCHED + code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().split("\n")[-1])


def files(home: Path) -> list[str]:
    return sorted(path.name for path in home.rglob("*") if path.is_file())


def test_runtimes_tell_nobody(tmp_path: Path) -> None:
    code = """
from keepsight.runtimes import imports
ort, ov = imports.onnxruntime(), imports.openvino()
import torch
ov.convert_model(torch.nn.Linear(2, 2), example_input=torch.zeros(1, 2))
time.sleep(0.5)
sender = sys.modules["openvino.tools.ovc.telemetry_utils"].tm.__name__
told = [seen, sender, "openvino_telemetry" in sys.modules, ort.__name__, ov.__name__]
print(json.dumps(told))
"""
    seen, sender, there, *names = watched(tmp_path, code)
    assert seen == [] and files(tmp_path) == []
    assert sender.endswith("telemetry_stub") and not there
    assert names == ["onnxruntime", "openvino"]


def test_what_the_caller_decided_stays(tmp_path: Path) -> None:
    code = """
from keepsight.runtimes import imports
import types
own = sys.modules["openvino_telemetry"] = types.ModuleType("openvino_telemetry")
with imports._without_sender():
    inside = sys.modules["openvino_telemetry"] is own
imports.onnxruntime()
after = sys.modules["openvino_telemetry"] is own
print(json.dumps([inside, after, os.environ["ORT_DISABLE_TELEMETRY"]]))
"""
    assert watched(tmp_path, code, ORT_DISABLE_TELEMETRY="true") == [True, True, "true"]


def test_the_trap_is_still_there(tmp_path: Path) -> None:
    """When this fails, ONNX Runtime asks before it writes; keepsight/runtimes/imports.py knows."""
    watched(tmp_path, "import onnxruntime\nprint(json.dumps(seen))")
    assert "deviceid" in files(tmp_path)


def test_the_other_trap_is_still_there(tmp_path: Path) -> None:
    """When this fails, OpenVINO asks before it sends; keepsight/runtimes/imports.py knows."""
    seen = watched(tmp_path, "import openvino\ntime.sleep(0.5)\nprint(json.dumps(seen))")
    assert "os.fork" in seen and "openvino_ga_cid" in files(tmp_path)


def test_runtimes_are_imported_in_one_place() -> None:
    home = Path(__file__).parents[2] / "keepsight"
    past = ("import onnxruntime", "import openvino", "from openvino")
    for path in home.rglob("*.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            assert not line.strip().startswith(past), f"{path.name}:{number}"
