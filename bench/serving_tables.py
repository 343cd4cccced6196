"""A comparison of servers for people: how many times faster Keepsight's was, and who agreed.

Every number but Keepsight's own times is a ratio, taken within one repetition; above 1 Keepsight's
server was the faster one.
"""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.serving_sums import COUNTS, KEEPSIGHT
from keepsight.bench.tables import machine


def show(result: dict[str, Any], console: Console) -> None:
    """All tables of one result."""
    console.print(machine(result))
    rivals = [name for name in result["servers"] if name != KEEPSIGHT]
    console.print(", ".join(f"{name}: {version}" for name, version in result["servers"].items()))
    for workload in result["workloads"]:
        console.print(_workload(workload, rivals))
    console.print(_clients(result["clients"], rivals))
    console.print(_overhead(result["overhead"]))
    console.print(_identity(result["identity"]))
    for name, reason in result["left_out"].items():
        console.print(f"left out: {name}: {reason}")


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _workload(workload: dict[str, Any], rivals: list[str]) -> Table:
    """Keepsight's time to the first token beside how many times slower each rival was."""
    table = _table(
        f"{workload['name']}: {workload['about']} (rivals: how many times slower)",
        ["prompt", "reused", "first token ms", *rivals],
    )
    for step in workload["steps"]:
        mine = step["servers"][KEEPSIGHT]
        row = [f"first token, {step['name']}", str(mine["prompt_tokens"])]
        row += [str(mine["cached_tokens"]), f"{mine['first_token_ms']:.0f}"]
        ratios = [f"{step['servers'][name]['first_token_ratio']:.2f}" for name in rivals]
        table.add_row(*row, *ratios)
    for name, ratio in _LATER.items():
        ratios = [f"{workload['later'][rival][ratio]:.2f}" for rival in rivals]
        table.add_row(f"{name}, median after the first", "", "", "", *ratios)
    return table


_LATER = {
    "first token": "first_token_ratio",
    "whole answer": "total_ratio",
    "decoding": "rate_ratio",
}


def _clients(clients: dict[str, Any], rivals: list[str]) -> Table:
    columns = ["tokens/s of all", "first token ms", *rivals]
    title = "clients at once (rivals: how many times slower all answers / the mean first token)"
    table = _table(title, columns)
    for name, told in clients.items():
        mine = told[KEEPSIGHT]
        row = [name, f"{mine['tokens_per_second']:.1f}", f"{mine['first_token_ms']:.0f}"]
        for rival in rivals:
            met = told.get(rival)
            cell = f"{met['rate_ratio']:.2f} / {met['first_token_ratio']:.2f}" if met else "-"
            row.append(cell)
        table.add_row(*row)
    return table


def _overhead(overhead: dict[str, Any]) -> Table:
    columns = ["server ms", "engine ms", "added ms", "x first token", "x whole answer"]
    title = (
        f"the server over the bare engine, {overhead['about']} (cold {overhead['cold']:.3f}, "
        f"warm {overhead['warm']:.3f}, aim {overhead['goal']:.2f})"
    )
    table = _table(title, columns)
    for step in overhead["steps"]:
        row = [f"{step[field]:.1f}" for field in ("server_ms", "engine_ms", "added_ms")]
        ratios = [f"{step[field]:.3f}" for field in ("first_token_ratio", "total_ratio")]
        table.add_row(step["name"], *row, *ratios)
    if not overhead["equal"]:
        table.add_row("OTHER ANSWERS THAN THE ENGINE", style="bold red")
    return table


def _identity(identity: dict[str, Any]) -> Table:
    columns = ["answers", "same prompt", "equal", "tokens", "that agree", "first difference"]
    table = _table("answers beside Keepsight's of the first repetition", columns)
    for name, told in identity.items():
        row = [str(told[field]) for field in COUNTS]
        other = told.get("first_difference")
        where = f"DIFFERENT in {other['where']}" if other else ""
        table.add_row(name, *row, where, style="red" if other else None)
    return table
