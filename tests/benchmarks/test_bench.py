"""The benchmark runs, guards its answers, and its page says only what results say.

Times are not looked at here; a machine that runs tests is no place to measure.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.commands import run as command
from torch.utils.flop_counter import FlopCounterMode

import keepsight
from bench import page
from keepsight.bench import checkpoints, frame, options, tables
from keepsight.bench.checkpoints import checkpoint
from keepsight.bench.contestants import Answer, agreement
from keepsight.bench.hardware import ATTENTION
from keepsight.bench.measure import Round, guard
from keepsight.bench.options import SCALES, WORKLOADS, Asked
from keepsight.bench.workloads import Pictures, workloads

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A smoke run of everything on a tiny checkpoint."""
    folder = tmp_path_factory.mktemp("bench")
    out = folder / "result.json"
    argv = ["--model-shape", "qwen3_vl", "--size", "tiny", "--scale", "smoke"]
    command("bench", *argv, "--folder", str(folder), "--out", str(out))
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_run_measures_every_workload_and_finds_no_wrong_answer(result: dict[str, Any]) -> None:
    run = result["runs"][0]
    assert [w["name"] for w in run["workloads"]] == ["W1", "W4", "W5", "W7", "peers"]
    assert all(w["warm_equals_cold"] for w in run["workloads"])
    for workload in run["workloads"]:
        for step in workload["steps"]:
            assert not step["guard"].startswith("DIFFERENT"), (workload["name"], step)
            parts = step["cached_tokens"] + step["rerun_tokens"] + step["new_tokens"]
            assert parts == step["prompt_tokens"], (workload["name"], step)
            assert step["encoded"] == step["new_images"], (workload["name"], step)
    cases = ["one small image", "one image", "two images"]
    assert [case["name"] for case in run["cold"]["cases"]] == cases
    for place in set(run["restart"]) - {"repetitions"}:
        assert run["restart"][place]["cached_tokens"] > 0 < run["restart"][place]["megabytes"]


def test_the_roofs_are_those_of_this_model(result: dict[str, Any], tmp_path: Path) -> None:
    """Counted by hand: weights that a step reads, and operations of the tower's blocks at least."""
    found = result["runs"][0]["roofline"]
    path = checkpoint("qwen3_vl", "tiny", tmp_path)
    with keepsight.load(path, dtype="float32") as vlm:
        text, vision = vlm.model.config.text_config, vlm.model.config.vision_config
        hidden, inner, head = text.hidden_size, text.intermediate_size, text.head_dim
        q, kv = text.num_attention_heads * head, text.num_key_value_heads * head
        layer = hidden * (2 * q + 2 * kv + 3 * inner) + 2 * hidden + 2 * head
        numbers = text.num_hidden_layers * layer + hidden + hidden * text.vocab_size
    assert found["decode"]["megabytes"] == round(4 * numbers / 1e6, 1)
    patches, width = 16, vision.hidden_size  # of a picture of 64x64
    block = 2 * patches * 12 * width * width + 4 * patches * patches * width
    assert found["tower"]["gflop"] >= round(vision.depth * block / 1e9, 4) > 0
    rows = torch.randn(1, 2, 256, 64)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
    assert counter.get_total_flops() == 4 * 2 * 256 * 256 * 64


def test_a_result_tells_its_commit_and_names_no_place_of_this_machine(
    result: dict[str, Any],
) -> None:
    text = json.dumps(result)
    for place in (str(ROOT), str(Path.home()), "/tmp"):
        assert place not in text
    machine = result["machine"]
    assert machine["cores"] and machine["torch"] and machine["transformers"]
    assert machine["commit"] or not (ROOT / ".git").exists()


def test_the_page_holds_every_table_of_every_result(result: dict[str, Any], tmp_path: Path) -> None:
    folder, readme, beside = tmp_path / "results", tmp_path / "README.md", tmp_path / "docs/mlx.md"
    (folder / "mlx").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for file in (readme, beside):
        file.write_text("before\n<!-- measured -->\n<!-- /measured -->\nbehind\n")
    argv = ["--results", str(folder), "--page", str(tmp_path / "page.md"), "--readme", str(readme)]
    (folder / "a.json").write_text(json.dumps(result))
    assert page.main([*argv, "--check"]) == 1
    assert page.main(argv) == 0 and page.main([*argv, "--check"]) == 0
    text = (tmp_path / "page.md").read_text()
    assert result["command"] in text
    for heading, _, _ in tables.tables(result["runs"][0]):
        assert heading[1:] in text
    assert "times sooner" in readme.read_text() and "Nothing was measured" in beside.read_text()
    pictures = sorted(file.name for file in (tmp_path / "docs/pictures").iterdir())
    assert pictures == ["memory-dark.svg", "memory-light.svg"]
    committed = json.loads((ROOT / "bench/results/mlx/qwen3_vl-small.json").read_text())
    (folder / "mlx/one.json").write_text(json.dumps(committed))
    assert page.main([*argv, "--check"]) == 1
    assert page.main(argv) == 0 and page.main([*argv, "--check"]) == 0
    for file in (beside, tmp_path / "page.md"):
        text = file.read_text()
        assert "# Beside mlx-vlm: qwen3_vl small float32" in text and committed["command"] in text
    assert beside.read_text().startswith("before\n") and beside.read_text().endswith("behind\n")
    beside.write_text(beside.read_text().replace("T1r", "T9"))
    assert page.main([*argv, "--check"]) == 1


def test_the_committed_page_is_the_one_that_the_committed_results_give() -> None:
    argv = ["--results", str(ROOT / "bench/results"), "--page", str(ROOT / "docs/benchmarks.md")]
    argv += ["--readme", str(ROOT / "README.md")]
    assert page.main([*argv, "--check"]) == 0


def test_tables_fit_a_narrow_terminal(result: dict[str, Any]) -> None:
    console = Console(width=80, file=io.StringIO(), highlight=False)
    tables.show_all(result, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "In short: later turns of a chat about one image start" in text


def test_ways_take_turns_and_ratios_are_of_one_turn() -> None:
    met: list[str] = []
    ways = {name: lambda number, name=name: met.append(name) or number for name in "abc"}
    rounds = frame.interleaved(3, ways)
    assert "".join(met) == "abcbcacab" and rounds[2] == {"a": 2, "b": 2, "c": 2}
    assert frame.ratio([(2, 1), (30, 10), (4, 1)]) == 3
    assert frame.ratio([(2, 0)]) is None
    argv = ["W1", "--out", "here", "--folder=there", "a b"]
    assert frame.command("keepsight bench", argv) == 'keepsight bench W1 "a b"'


def test_tokens_that_differ_are_a_tie_only_between_equal_logits() -> None:
    stock = Answer(1.0, 1.0, [0], logits=[torch.tensor([[1.0, 0.99995, 0.5]])])
    assert agreement([0], stock) == "equal"
    assert agreement([1], stock) == "tie at token 0"
    assert agreement([2], stock).startswith("DIFFERENT at token 0")
    assert agreement([], stock).startswith("DIFFERENT")


def test_the_guard_reports_the_worst_of_all_repetitions() -> None:
    stock = Answer(1.0, 1.0, [0], logits=[torch.tensor([[1.0, 0.5]])])
    right, wrong = (Round({"keepsight": Answer(1.0, 1.0, [t]), "stock": stock}) for t in (0, 1))
    assert guard([right, right]) == "equal"
    assert guard([wrong, wrong]).startswith("DIFFERENT at token 0")
    assert guard([right, wrong]) == "DIFFERENT from one repetition to the next"


def test_wrong_answers_are_told_loudly_and_fail_the_run(result: dict[str, Any]) -> None:
    run = json.loads(json.dumps(result["runs"][0]))
    assert tables.warnings(run) == []
    run["workloads"][0]["steps"][0]["guard"] = "DIFFERENT at token 3"
    run["workloads"][1]["warm_equals_cold"] = False
    assert len(tables.warnings(run)) == 2
    assert len(tables.warnings(dict(run, dtype="bfloat16"))) == 1  # promised in float32 only


def test_workloads_are_the_same_prompts_each_time(tmp_path: Path) -> None:
    names = list(WORKLOADS)
    first, second = (list(workloads(names, Pictures(tmp_path), SCALES["smoke"])) for _ in range(2))
    assert first == second
    assert first[0].steps[1].messages[0] == first[0].steps[0].messages[0]  # a history grows


def test_options_are_known_names_and_a_quick_run_is_short() -> None:
    assert tuple(checkpoints.SHAPES) == options.SHAPES and tuple(checkpoints.SIZES) == options.SIZES
    assert Asked(scale="quick").plan() == {"qwen3_vl": ["W1", "W5"]}
    assert Asked(scale="quick", workloads=["W4"]).plan() == {"qwen3_vl": ["W4"]}
    full = Asked().plan()
    assert full == {"qwen3_vl": [*WORKLOADS], "qwen3_5": [*WORKLOADS], "qwen2_5_vl": ["peers"]}


def test_a_model_of_ones_own_is_measured_and_its_folder_not_told(tmp_path: Path) -> None:
    path, told = str(checkpoint("qwen3_vl", "tiny", tmp_path)), tmp_path / "told.json"
    argv = [f"--model={path}", "--scale", "smoke", "--workload", "W1"]
    argv += ["--turns", "2", "--repetitions", "1"]
    command("bench", *argv, "--out", str(told))
    assert str(tmp_path) not in told.read_text()
    assert json.loads(told.read_text())["runs"][0]["shape"] == Path(path).name
    assert "--turns 2" in json.loads(told.read_text())["command"]
