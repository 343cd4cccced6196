"""A result for people: tables on the terminal, made from the record that machines get.

Every time stands beside what it has to be compared with; a time alone says nothing about a memory.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from keepsight.kinds import Record

Row = list[str]
WIDE = 118  # width of all tables
# Columns that are left out on a narrow terminal.
_WIDE_ONLY = {"new", "again", "limit ms", "x limit", "ms/tok"} | {
    *("bare read ms", "x read", "restore ms"),
}


def show(result: Record, console: Console) -> None:
    """All tables of one result."""
    console.print(machine(result))
    for run in result["runs"]:
        console.rule(title(run))
        for heading, columns, rows in tables(run):
            console.print(_table(heading, columns, rows, console.width < WIDE))
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


def machine(result: Record) -> str:
    """The machine of a result, in one line."""
    m = result["machine"]
    amx = ", AMX" if m["amx"] else ""
    on = m["accelerator"] or f"{m['processor']} ({m['instructions']}{amx})"
    return (
        f"{m['date']}; {on}, {m['cores']} cores, {m['threads']} threads, load {m['load']} at the "
        f"start; Python {m['python']}, torch {m['torch']}, transformers {m['transformers']}, "
        f"keepsight {m['keepsight']}"
    )


def title(run: Record) -> str:
    """The model of a run."""
    size = f"{run['parameters'] / 1e6:.0f} M parameters" if run["parameters"] else "an export"
    return f"{run['shape']}, {size}, {run['dtype']}"


def tables(run: Record) -> list[tuple[str, Row, list[Row]]]:
    """(heading, columns, rows) of everything that a run measured."""
    found = [_workload(workload) for workload in run["workloads"]]
    if found:
        found.append(_stages(run["workloads"]))
    if "cold" in run:
        found += [_cold(run["cold"]), _anatomy(run["cold"])]
    if "restart" in run:
        found.append(_restart(run["restart"]))
    if "roofline" in run:
        found.append(_roofline(run["roofline"]))
    return found


def warnings(run: Record) -> list[str]:
    """Failed checks: times of wrong answers are worth nothing."""
    wrong = []
    for workload in run["workloads"]:
        if not workload["warm_equals_cold"]:
            wrong.append(f"{workload['name']}: WARM DIFFERS FROM COLD")
        wrong += _guards(workload["name"], workload["steps"], run["dtype"])
    return wrong + _guards("cold", run.get("cold", {}).get("cases", []), run["dtype"])


def _guards(name: str, steps: list[Record], dtype: str) -> list[str]:
    """Whether tokens must equal stock's: promised in float32 only. Repeating the same answer is
    always promised."""
    return [
        f"{name}, {step['name']}: TOKENS {step['guard']}"
        for step in steps
        if step["guard"].startswith("DIFFERENT")
        and (dtype == "float32" or "repetition" in step["guard"])
    ]


def _workload(workload: Record) -> tuple[str, Row, list[Row]]:
    columns = ["", "prompt", "reused", "new", "again", "images", "ms", "limit ms", "stock ms"]
    columns += ["x limit", "x faster", "ms/tok", "tokens"]
    fields = ["name", "prompt_tokens", "cached_tokens", "new_tokens", "rerun_tokens", "new_images"]
    fields += ["keepsight_ms:.1f", "limit_ms:.1f", "stock_ms:.1f", "keepsight_over_limit:.2f"]
    fields += ["stock_over_keepsight:.2f", "decode_ms:.1f", "guard"]
    rows = [_cells(step, *fields) for step in workload["steps"]]
    size = workload["bytes"]
    held = ", ".join(f"{name} {count / 1e6:.1f} MB" for name, count in size.items())
    exact = "yes" if workload["warm_equals_cold"] else "NO"
    heading = f"{workload['name']}: {workload['about']} (held: {held}; warm = cold bit for bit: "
    return f"{heading}{exact})", columns, rows


_STAGES = ("check", "render", "match", "load", "restore", "encode", "prefill", "first_token")


def _stages(workloads: list[Record]) -> tuple[str, Row, list[Row]]:
    """The stages that took the time of the last step of each workload."""
    rows = []
    for workload in workloads:
        step = workload["steps"][-1]
        row = [f"{workload['name']}, {step['name']}"]
        rows.append([*row, *(f"{step['stages'].get(name, 0.0):.1f}" for name in _STAGES)])
    names = [name.replace("_", " ") for name in _STAGES]
    return "stages of the last step, ms (match holds load; render holds naming)", ["", *names], rows


def _cells(found: Record, *fields: str) -> Row:
    """Fields of a record as text, such as `stock_ms:.1f`; a dash where there is nothing."""
    parts = (field.partition(":") for field in fields)
    return [
        "-" if found[name] is None else format(found[name], digits) for name, _, digits in parts
    ]


def _cold(cold: Record) -> tuple[str, Row, list[Row]]:
    columns = ["", "prompt", "keepsight ms", "stock ms", "x stock", "tokens"]
    fields = ["name", "prompt_tokens", "keepsight_ms:.1f", "stock_ms:.1f"]
    fields += ["keepsight_over_stock:.2f", "guard"]
    rows = [_cells(case, *fields) for case in cold["cases"]]
    return "cold: the first request on an empty memory", columns, rows


def _anatomy(cold: Record) -> tuple[str, Row, list[Row]]:
    found = {k.removesuffix("_ms"): v for k, v in cold["anatomy"].items()}
    columns = [f"{name} ms" for name in found if name != "encode_over_tower"] + ["encode x tower"]
    row = _cells(found, *(f"{name}:.2f" for name in found))  # the ratio is the last
    return "one new picture, stage by stage", columns, [row]


def _restart(restart: Record) -> tuple[str, Row, list[Row]]:
    columns = ["files in the", "prompt", "reused", "MB read", "load ms", "bare read ms", "x read"]
    columns += ["restore ms", "first token ms"]
    fields = ["prompt_tokens:.0f", "cached_tokens:.0f", "megabytes:.1f", "load_ms:.1f"]
    fields += ["read_ms:.1f", "load_over_read:.2f", "restore_ms:.1f", "first_token_ms:.1f"]
    places = {place: found for place, found in restart.items() if place != "repetitions"}
    rows = [[place, *_cells(found, *fields)] for place, found in places.items()]
    return "restart: a new engine answers the next turn from files", columns, rows


def _roofline(found: Record) -> tuple[str, Row, list[Row]]:
    decode, tower = found["decode"], found["tower"]
    columns = ["", "work", "machine gives", "floor ms", "keepsight ms", "x floor", "stock ms"]
    tower = {**tower, "over_floor": tower["ms"] / tower["floor_ms"]}
    token = ["read_gb_s:.1f", "floor_ms:.1f", "keepsight_ms:.1f", "keepsight_over_floor:.2f"]
    read, floor, *rest = _cells(decode, *token, "stock_ms:.1f")
    product, tower_floor, *took = _cells(
        tower, "product_gflop_s:.0f", "floor_ms:.1f", "ms:.1f", "over_floor:.2f"
    )
    work = f"{tower['gflop']:.0f} GFLOP"
    rows = [
        ["a decoded token", f"{decode['megabytes']:.0f} MB read", f"{read} GB/s", floor, *rest],
        ["the tower, one picture", work, f"{product} GFLOP/s", tower_floor, *took, "the same"],
    ]
    return "roofline: what the machine gives at most", columns, rows


def _table(heading: str, columns: Row, rows: list[Row], narrow: bool = False) -> Table:
    """A table; a narrow terminal gets the important columns, a file given to --out has all."""
    if narrow:
        chosen = [i for i, column in enumerate(columns) if column not in _WIDE_ONLY]
        columns, rows = [columns[i] for i in chosen], [[row[i] for i in chosen] for row in rows]
    table = Table(title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        words = i == 0 or column == "tokens"
        table.add_column(
            column,
            justify="left" if words else "right",
            overflow="fold",
            no_wrap=i == 0 and not narrow,
        )
    for row in rows:
        style = "red" if "NO" in row or any(c.startswith("DIFFERENT") for c in row) else None
        table.add_row(*row, style=style)
    return table
