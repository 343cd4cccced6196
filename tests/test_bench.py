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
from torch.utils.flop_counter import FlopCounterMode

import keepsight
from bench import page
from keepsight import bench
from keepsight.bench import checkpoints, machine, options, suite, tables
from keepsight.bench.checkpoints import checkpoint
from keepsight.bench.contestants import Answer, agreement
from keepsight.bench.measure import Round, guard
from keepsight.bench.options import SCALES
from keepsight.bench.roofline import ATTENTION
from keepsight.bench.workloads import Pictures, workloads

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A smoke run of everything on a tiny checkpoint."""
    folder = tmp_path_factory.mktemp("bench")
    out = folder / "result.json"
    argv = ["--model-shape", "qwen3_vl", "--size", "tiny", "--scale", "smoke"]
    assert bench.main([*argv, "--folder", str(folder), "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_run_measures_every_workload_and_finds_no_wrong_answer(result: dict[str, Any]) -> None:
    run = result["runs"][0]
    assert [w["name"] for w in run["workloads"]] == ["W1", "W4", "W5", "W7", "peers"]
    assert all(w["warm_equals_cold"] for w in run["workloads"])
    guards = [step["guard"] for w in run["workloads"] for step in w["steps"]]
    assert not [words for words in guards if words.startswith("DIFFERENT")]
    assert {case["name"] for case in run["cold"]["cases"]} == {
        "one small image",
        "one image",
        "two images",
    }
    assert run["restart"]["page cache"]["cached_tokens"] > 0
    assert run["restart"]["page cache"]["megabytes"] > 0


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
        patches = 16  # of a picture of 64x64
    assert found["decode"]["megabytes"] == round(4 * numbers / 1e6, 1)
    width = vision.hidden_size
    block = 2 * patches * 12 * width * width + 4 * patches * patches * width
    assert found["tower"]["gflop"] >= round(vision.depth * block / 1e9, 4) > 0
    assert found["decode"]["keepsight_over_floor"] > 0 and found["tower"]["floor_ms"] > 0


def test_attention_is_counted() -> None:
    rows = torch.randn(1, 2, 256, 64)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
    assert counter.get_total_flops() == 4 * 2 * 256 * 256 * 64


def test_new_reused_and_repeated_tokens_make_the_prompt(result: dict[str, Any]) -> None:
    for workload in result["runs"][0]["workloads"]:
        for step in workload["steps"]:
            parts = step["cached_tokens"] + step["rerun_tokens"] + step["new_tokens"]
            assert parts == step["prompt_tokens"], (workload["name"], step)


def test_each_new_picture_is_encoded_once(result: dict[str, Any]) -> None:
    for workload in result["runs"][0]["workloads"]:
        for step in workload["steps"]:
            assert step["encoded"] == step["new_images"], (workload["name"], step)


def test_a_result_names_no_place_of_this_machine(result: dict[str, Any]) -> None:
    text = json.dumps(result)
    assert str(ROOT) not in text
    assert str(Path.home()) not in text
    assert "/tmp" not in text


def test_the_page_holds_every_table_of_every_result(result: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(result))
    argv = ["--results", str(tmp_path), "--page", str(tmp_path / "page.md")]
    assert page.main([*argv, "--check"]) == 1
    assert page.main(argv) == 0
    assert page.main([*argv, "--check"]) == 0
    text = (tmp_path / "page.md").read_text()
    assert result["command"] in text
    for heading, _, _ in tables.tables(result["runs"][0]):
        assert heading[1:] in text


def test_results_beside_mlx_vlm_are_shown_on_the_page_for_macs(
    result: dict[str, Any], tmp_path: Path
) -> None:
    folder, readme = tmp_path / "results", tmp_path / "README.md"
    (folder / "mlx").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    beside = tmp_path / "docs/mlx.md"
    for file in (readme, beside):
        file.write_text("before\n<!-- measured -->\n<!-- /measured -->\nbehind\n")
    argv = ["--results", str(folder), "--page", str(tmp_path / "page.md"), "--readme", str(readme)]
    (folder / "a.json").write_text(json.dumps(result))
    assert page.main(argv) == 0
    assert "Nothing was measured" in beside.read_text()
    told = {"prompt_tokens": 9, "cached_tokens": 8, "encoded": 1, "first_ms": 7.0, "decode_ms": 2.0}
    both = {"keepsight": told, "mlx-vlm": {**told, "first_ms": 4321.0}}
    step = {"name": "T1r", **both, "first_ratio": 5.5, "decode_ratio": 1.0, "equal": True}
    about = {"shape": "qwen3_vl", "size": "small", "dtype": "float32", "picture": "384x384"}
    measured = {**about, "tokens": 16, "repetitions": 3, "runtime": "mlx 1.2, mlx-vlm 3.4"}
    measured |= {"command": "python -m bench.mlx --shape qwen3_vl", "machine": result["machine"]}
    (folder / "mlx/one.json").write_text(json.dumps({**measured, "steps": [step], "equal": True}))
    assert page.main([*argv, "--check"]) == 1
    assert page.main(argv) == 0
    assert page.main([*argv, "--check"]) == 0
    for file in (beside, tmp_path / "page.md"):
        text = file.read_text()
        assert "# Beside mlx-vlm: qwen3_vl small float32" in text and measured["command"] in text
        assert "| T1r" in text and "4321" in text and "3 repetitions, mlx 1.2, mlx-vlm 3.4" in text
    assert beside.read_text().startswith("before\n") and beside.read_text().endswith("behind\n")
    beside.write_text(beside.read_text().replace("4321", "1"))
    assert page.main([*argv, "--check"]) == 1


def test_the_committed_page_is_the_one_that_the_committed_results_give() -> None:
    argv = ["--results", str(ROOT / "bench/results"), "--page", str(ROOT / "docs/benchmarks.md")]
    argv += ["--readme", str(ROOT / "README.md")]
    assert page.main([*argv, "--check"]) == 0


def test_tables_fit_a_narrow_terminal(result: dict[str, Any]) -> None:
    console = Console(width=80, file=io.StringIO(), highlight=False)
    tables.show(result, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "In short: later turns of a chat about one image start" in text


def test_a_quick_run_is_two_workloads_on_one_shape() -> None:
    assert suite._plan(options.parse(["--quick"])) == {"qwen3_vl": ["W1", "W5"]}
    assert suite._plan(options.parse(["--quick", "--workload", "W4"])) == {"qwen3_vl": ["W4"]}


def test_tokens_that_differ_are_a_tie_only_between_equal_logits() -> None:
    logits = torch.tensor([[1.0, 0.99995, 0.5]])
    stock = Answer(1.0, 1.0, [0], logits=[logits])
    assert agreement([0], stock) == "equal"
    assert agreement([1], stock) == "tie at token 0"
    assert agreement([2], stock).startswith("DIFFERENT at token 0")
    assert agreement([], stock).startswith("DIFFERENT")


def test_the_guard_reports_the_worst_of_all_repetitions() -> None:
    stock = Answer(1.0, 1.0, [0], logits=[torch.tensor([[1.0, 0.5]])])
    right = Round({"keepsight": Answer(1.0, 1.0, [0]), "stock": stock}, 1, 0, 0)
    wrong = Round({"keepsight": Answer(1.0, 1.0, [1]), "stock": stock}, 1, 0, 0)
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
    names = list(bench.WORKLOADS)
    first = list(workloads(names, Pictures(tmp_path), SCALES["smoke"]))
    second = list(workloads(names, Pictures(tmp_path), SCALES["smoke"]))
    assert first == second
    assert first[0].steps[1].messages[0] == first[0].steps[0].messages[0]  # a history grows


def test_every_shape_and_size_can_be_chosen() -> None:
    assert tuple(checkpoints.SHAPES) == options.SHAPES and tuple(checkpoints.SIZES) == options.SIZES


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--workload", "W2"], ["--model-shape", "gpt"], ["--turns", "0"], ["--typo"]):
        with pytest.raises(SystemExit):
            bench.main(argv)
    assert "choose from W1" in capsys.readouterr().err


def test_a_model_of_ones_own_is_measured_and_its_folder_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(checkpoint("qwen3_vl", "tiny", tmp_path))
    told = tmp_path / "told.json"
    words = [
        path,
        "--scale",
        "smoke",
        "--workload",
        "W1",
        "--turns",
        "2",
        "--repetitions",
        "1",
    ]
    assert bench.main([*words, "--out", str(told)]) == 0
    result = json.loads(told.read_text())
    assert str(tmp_path) not in told.read_text()
    assert result["runs"][0]["shape"] == Path(path).name
    with pytest.raises(SystemExit):
        bench.main([path, "--model-shape", "qwen3_vl"])
    assert "leave --model-shape out" in capsys.readouterr().err


def test_the_machine_is_described_without_naming_it() -> None:
    described = machine.describe()
    assert described["cores"] and described["torch"] and described["transformers"]
