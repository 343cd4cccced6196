"""Page retrieval and restarts run, guard their answers, and count what they say they count.

Times are not looked at; a machine that runs tests is no place to measure.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from bench import page_sections, pages, restart, structured

SMALL = ["--size", "tiny", "--shape", "qwen3_vl"]


def test_pages_come_from_packages_and_answers_are_those_of_stock(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    argv = [*SMALL, "--shelf", "5", "--pages", "2", "--turns", "3", "--page", "64x64"]
    argv += ["--folder", str(tmp_path), "--out", str(out)]
    assert pages.main(argv) == 0
    result = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    (run,) = result["runs"]
    assert run["encoded"] == 0 and run["indexing"]["pages"] == 5
    assert run["turns"] == 3 and not run["wrong"]
    assert {guard.partition(":")[0] for guard in run["guards"]} == {"disk", "memory", "limit"}
    assert all(cached < run["prompt_tokens"] for cached in run["cached_tokens"])
    for who in pages.WHO:
        assert len(run[f"{who}_first_samples"]) == 3


def test_forms_are_timed_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    argv = [*SMALL, "--tokens", "24", "--repetitions", "1", "--folder", str(tmp_path)]
    assert structured.main([*argv, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    by_name = {row["name"]: row for row in result["answers"]}
    assert result["equal"] and str(tmp_path) not in out.read_text()
    assert by_name["record"]["certain"] > by_name["text"]["certain"] >= 0
    assert by_name["free"]["over_free"] == 1 and by_name["one by one"]["certain"] == 0
    [(_, columns, cells)] = page_sections.sections("structured", result)
    assert len(cells) == 4 and all(len(row) == len(columns) for row in cells)


def _child(folder: Path, way: str, question: int = 0) -> dict[str, Any]:
    argv = [*SMALL, "--picture", "128x128", "--turns", "2", "--folder", str(folder)]
    argv += ["--store", str(folder / "store"), "--child", way, "--question", str(question)]
    argv += ["--born", repr(time.time())]
    return restart.child(restart._parser().parse_args(argv))


def test_a_restart_reads_what_was_stored_and_answers_the_same(tmp_path: Path) -> None:
    assert _child(tmp_path, "fill")["stored"] > 0
    rows = [
        {"repetition": 0, **_child(tmp_path, way, restart._asked(way, 0))} for way in restart.WAYS
    ]
    read, dropped, computed = rows
    assert read["cached_tokens"] > 0 and dropped["cached_tokens"] > 0
    assert computed["cached_tokens"] == 0 and computed["megabytes"] == 0
    assert read["megabytes"] > 0 and read["bare_read_ms"] > 0
    assert restart.equal(rows)
    assert not restart.equal([*rows, {**read, "tokens": [0]}])
    assert restart.ratio(rows, "nothing", "page cache") == pytest.approx(
        computed["first_token_ms"] / read["first_token_ms"], abs=1e-3
    )
    summed = {
        way: restart.sum_up([row for row in rows if row["way"] == way]) for way in restart.WAYS
    }
    told = {"shape": "qwen3_vl", "size": "tiny", "dtype": "float32", "runs": summed}
    table = restart.table({**told, "nothing_over_page_cache": 2.0})
    assert table.row_count > len(restart.START) + len(restart.TURN)


def test_nothing_is_asked_twice_over_one_store() -> None:
    asked = [restart._asked(way, r) for r in range(4) for way in ("page cache", "disk")]
    assert len(set(asked)) == len(asked)
    assert {restart._asked("nothing", r) for r in range(4)} <= set(asked)
