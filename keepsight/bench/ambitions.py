"""What we want to be true, held against what was measured, with no say in either.

An ambition that is missed is reported by how much, with the stages that took the time. The worst
turn of a workload counts, not the average.
"""

from __future__ import annotations

from keepsight.bench.rivals import GOALS
from keepsight.kinds import Record

OVER_LIMIT, FASTER, OVER_COLD, OVER_READ = 1.3, 20.0, 0.9, 1.5
TEXT_TURN_FASTER = 35.0  # a turn of text alone behind two pictures


def judge(run: Record) -> list[Record]:
    """One row for each ambition that this run says something about."""
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
    rows += _peers(run)
    return rows


def _row(what: str, goal: str, measured: float | None, held: bool, note: str) -> Record:
    return {"what": what, "goal": goal, "measured": measured, "held": held, "note": note}


def _most(what: str, steps: list[Record], goal: float) -> list[Record]:
    """The highest ratio to the limit must not pass the goal."""
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
    """No token is to be computed again that a turn before has computed."""
    again = sum(step["rerun_tokens"] for step in steps)
    new = sum(step["new_tokens"] for step in steps)
    note = f"{new} new tokens in {len(steps)} turns"
    return [_row(f"{name}: tokens run again", "0", float(again), again == 0, note)]


def _where(step: Record) -> str:
    """Where the time of a step went, the largest stages first."""
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
