"""A result for people: tables made from the record that machines get.

Every time stands beside what it has to be compared with; a time alone says nothing about a memory.
"""

from __future__ import annotations

from rich.console import Console

from keepsight.bench.frame import Told, cells, machine, show
from keepsight.kinds import Record

_STAGES = ("check", "render", "match", "load", "restore", "encode", "prefill", "first_token")


def show_all(result: Record, console: Console) -> None:
    """All tables of one result."""
    console.print(machine(result["machine"]))
    for run in result["runs"]:
        console.rule(title(run))
        show(tables(run), console)
        for line in in_short(run):
            console.print(line)
        for warning in warnings(run):
            console.print(f"[bold red]{warning}[/]")


def in_short(run: Record) -> list[str]:
    """The main result: how much sooner than stock an answer starts."""
    names = {"W1": "later turns of a chat about one image", "W5": "an agent's later steps"}
    found = []
    for workload in run["workloads"]:
        times = [step["stock_over_keepsight"] for step in workload["steps"][1:]]
        if workload["name"] in names and times and None not in times:
            about = names[workload["name"]]
            found.append(f"In short: {about} start {min(times):.1f} times sooner than stock.")
    return found


def title(run: Record) -> str:
    """The model of a run."""
    size = f"{run['parameters'] / 1e6:.0f} M parameters" if run["parameters"] else "an export"
    return f"{run['shape']}, {size}, {run['dtype']}"


def warnings(run: Record) -> list[str]:
    """Failed checks: times of wrong answers are worth nothing. That tokens equal stock's is
    promised in float32 only, that an answer repeats itself always."""
    wrong = [
        f"{workload['name']}: WARM DIFFERS FROM COLD"
        for workload in run["workloads"]
        if not workload["warm_equals_cold"]
    ]
    steps = [(load["name"], step) for load in run["workloads"] for step in load["steps"]]
    steps += [("cold", case) for case in run.get("cold", {}).get("cases", [])]
    for name, step in steps:
        promised = run["dtype"] == "float32" or "repetition" in step["guard"]
        if step["guard"].startswith("DIFFERENT") and promised:
            wrong.append(f"{name}, {step['name']}: TOKENS {step['guard']}")
    return wrong


def tables(run: Record) -> list[Told]:
    """Heading, columns and rows of everything that a run measured."""
    found = [_workload(workload) for workload in run["workloads"]]
    if found:
        found.append(_stages(run["workloads"]))
    if "cold" in run:
        found += _cold(run["cold"])
    if "restart" in run:
        found.append(_restart(run["restart"]))
    if "roofline" in run:
        found.append(_roofline(run["roofline"]))
    return found


def _workload(workload: Record) -> Told:
    columns = ["", "prompt", "reused", "new", "again", "images", "ms", "limit ms", "stock ms"]
    columns += ["x limit", "x faster", "ms/tok", "tokens"]
    fields = ["name", "prompt_tokens", "cached_tokens", "new_tokens", "rerun_tokens", "new_images"]
    fields += ["keepsight_ms:.1f", "limit_ms:.1f", "stock_ms:.1f", "keepsight_over_limit:.2f"]
    fields += ["stock_over_keepsight:.2f", "decode_ms:.1f", "guard"]
    held = ", ".join(f"{name} {count / 1e6:.1f} MB" for name, count in workload["bytes"].items())
    exact = "yes" if workload["warm_equals_cold"] else "NO"
    heading = f"{workload['name']}: {workload['about']} (held: {held}; warm = cold bit for bit: "
    return f"{heading}{exact})", columns, [cells(step, *fields) for step in workload["steps"]]


def _stages(workloads: list[Record]) -> Told:
    rows = []
    for workload in workloads:
        step = workload["steps"][-1]
        spent = [f"{step['stages'].get(name, 0.0):.1f}" for name in _STAGES]
        rows.append([f"{workload['name']}, {step['name']}", *spent])
    names = [name.replace("_", " ") for name in _STAGES]
    return "stages of the last step, ms (match holds load; render holds naming)", ["", *names], rows


def _cold(cold: Record) -> list[Told]:
    columns = ["", "prompt", "keepsight ms", "stock ms", "x stock", "tokens"]
    fields = ["name", "prompt_tokens", "keepsight_ms:.1f", "stock_ms:.1f"]
    fields += ["keepsight_over_stock:.2f", "guard"]
    rows = [cells(case, *fields) for case in cold["cases"]]
    found = {name.removesuffix("_ms"): value for name, value in cold["anatomy"].items()}
    stages = [f"{name} ms" for name in found if name != "encode_over_tower"] + ["encode x tower"]
    one = cells(found, *(f"{name}:.2f" for name in found))  # the ratio is the last
    return [
        ("cold: the first request on an empty memory", columns, rows),
        ("one new picture, stage by stage", stages, [one]),
    ]


def _restart(restart: Record) -> Told:
    columns = ["files in the", "prompt", "reused", "MB read", "load ms", "bare read ms", "x read"]
    columns += ["restore ms", "first token ms"]
    fields = ["prompt_tokens:.0f", "cached_tokens:.0f", "megabytes:.1f", "load_ms:.1f"]
    fields += ["read_ms:.1f", "load_over_read:.2f", "restore_ms:.1f", "first_token_ms:.1f"]
    places = [place for place in restart if place != "repetitions"]
    rows = [[place, *cells(restart[place], *fields)] for place in places]
    return "restart: a new engine answers the next turn from files", columns, rows


def _roofline(found: Record) -> Told:
    columns = ["", "work", "machine gives", "floor ms", "keepsight ms", "x floor", "stock ms"]
    decode, tower = found["decode"], found["tower"]
    token = cells(decode, *("floor_ms:.1f", "keepsight_ms:.1f", "keepsight_over_floor:.2f"))
    token += cells(decode, "stock_ms:.1f")
    over = f"{tower['ms'] / tower['floor_ms']:.2f}"
    picture = [*cells(tower, "floor_ms:.1f", "ms:.1f"), over, "the same"]
    read, work = f"{decode['megabytes']:.0f} MB read", f"{tower['gflop']:.0f} GFLOP"
    gives = [f"{decode['read_gb_s']:.1f} GB/s", f"{tower['product_gflop_s']:.0f} GFLOP/s"]
    rows = [
        ["a decoded token", read, gives[0], *token],
        ["the tower, one picture", work, gives[1], *picture],
    ]
    return "roofline: what the machine gives at most", columns, rows
