"""The parts of docs/benchmarks.md about servers, chats at once and exported models.

Each takes committed results as they are in the folder of its benchmark, and gives a heading, the
command, and tables as rows; `page` writes them down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench import drafting, mlx, structured

Told = tuple[str, list[str], list[list[str]]]  # heading, columns, rows

_KEEPSIGHT = "keepsight serve"
_LATER = {
    "first token": "first_token_ratio",
    "whole answer": "total_ratio",
    "decoding": "rate_ratio",
}
_EXPORTED = {
    "tower_patches_per_second": "tower, patches/s",
    "prefill_tokens_per_second": "prefill, tokens/s",
    "decode_tokens_per_second": "decode, tokens/s",
    "first_token_cold_ms": "first token, cold, ms",
    "first_token_warm_ms": "first token, warm, ms",
    "memory_mib": "memory, MiB",
}


def sections(folder: str, result: dict[str, Any]) -> list[Told]:
    """The tables of one result; none for a benchmark that has no part on the page."""
    makers = {
        "serving": _serving,
        "together": _together,
        "exporting": _exporting,
        "drafting": _drafting,
        "structured": _structured,
        "mlx": _mlx,
    }
    return list(makers[folder](result)) if folder in makers else []


def title(folder: str, result: dict[str, Any]) -> str:
    """What a part is about."""
    names = {
        "serving": "Servers",
        "together": "Chats at once",
        "exporting": "Exported models",
        "drafting": "Tokens guessed from memory",
        "structured": "Answers of a given form",
        "mlx": "Beside mlx-vlm",
    }
    shape = f"{result['shape']} {result.get('size', '')}".strip()
    return f"{names[folder]}: {shape} {result.get('dtype', '')}".strip()


def _serving(result: dict[str, Any]) -> Iterator[Told]:
    rivals = [name for name in result["servers"] if name != _KEEPSIGHT]
    for workload in result["workloads"]:
        rows = []
        for step in workload["steps"]:
            mine = step["servers"][_KEEPSIGHT]
            ratios = [f"{step['servers'][name]['first_token_ratio']:.2f}" for name in rivals]
            told = [str(mine["prompt_tokens"]), str(mine["cached_tokens"])]
            rows.append([step["name"], *told, f"{mine['first_token_ms']:.0f}", *ratios])
        for name, field in _LATER.items():
            ratios = [f"{workload['later'][rival][field]:.2f}" for rival in rivals]
            rows.append([f"{name}, median after the first", "", "", "", *ratios])
        columns = ["request", "prompt", "reused", "first token, ms", *rivals]
        about = f"{workload['name']}, {workload['about']}"
        yield f"{about} (rivals: how many times slower)", columns, rows
    yield _clients(result["clients"], rivals)
    overhead = result["overhead"]
    rows = []
    for step in overhead["steps"]:
        times = [f"{step[field]:.1f}" for field in ("server_ms", "engine_ms")]
        rows.append([step["name"], *times, f"{step['first_token_ratio']:.3f}"])
    rows += [
        ["cold", "", "", f"{overhead['cold']:.3f}"],
        ["warm", "", "", f"{overhead['warm']:.3f}"],
    ]
    heading = f"the server over the bare engine, first token (aim {overhead['goal']:.2f})"
    yield heading, ["request", "server, ms", "engine, ms", "ratio"], rows
    rows = [
        [
            name,
            *(
                f"{told[a]} of {told[b]}"
                for a, b in (("equal", "answers"), ("tokens_agree", "tokens"))
            ),
        ]
        for name, told in result["identity"].items()
    ]
    yield "answers equal to Keepsight's", ["server", "answers", "tokens"], rows


def _clients(clients: dict[str, Any], rivals: list[str]) -> Told:
    rows = []
    for name, told in clients.items():
        mine, cells = told[_KEEPSIGHT], []
        for rival in rivals:
            met = told.get(rival)
            cells.append(f"{met['rate_ratio']:.2f}" if met else "-")
        rows.append([name, f"{mine['tokens_per_second']:.1f}", *cells])
    columns = ["clients", "tokens/s of all", *rivals]
    return "clients at once (rivals: how many times slower all answers)", columns, rows


def _together(result: dict[str, Any]) -> Iterator[Told]:
    columns = ["", "in turn, tokens/s", "together, tokens/s", "times", "equal tokens"]
    rows = [
        [name]
        + [f"{run[way]['tokens_per_second']:.1f}" for way in ("in turn", "together")]
        + [f"{run['speedup']:.2f}", "yes" if run["equal"] else "NO"]
        for name, run in result["runs"].items()
    ]
    yield f"{result['chats']} chats, a picture of {result['picture']} each", columns, rows


def _drafting(result: dict[str, Any]) -> Iterator[Told]:
    heading = f"answers of {result['tokens']} tokens, {result['repetitions']} repetitions"
    yield heading, drafting.COLUMNS, drafting.rows(result)


def _structured(result: dict[str, Any]) -> Iterator[Told]:
    heading = f"answers of up to {result['tokens']} tokens, {result['repetitions']} repetitions"
    yield heading, structured.COLUMNS, structured.rows(result)


def _mlx(result: dict[str, Any]) -> Iterator[Told]:
    heading = (
        f"pictures of {result['picture']}, answers of {result['tokens']} tokens, "
        f"{result['repetitions']} repetitions, {result['runtime']}"
    )
    yield heading, mlx.COLUMNS, mlx.rows(result)


def _exporting(result: dict[str, Any]) -> Iterator[Told]:
    rows = []
    for name, told in result["ways"].items():
        cells = []
        for field in _EXPORTED:
            ratio = told.get(f"{field}_times_as_good")
            cells.append(f"{told[field]:.0f}" + ("" if ratio is None else f" ({ratio:.2f})"))
        rows.append([name, *cells, str(told["tokens_as_first"])])
    columns = ["", *_EXPORTED.values(), "same tokens"]
    heading = (
        f"a picture of {result['picture']}, answers of {result['tokens']} tokens (in brackets: "
        "times as good as pytorch float32 in the same repetition)"
    )
    yield heading, columns, rows
    rows = []
    for name, told in result["deviation"].items():
        if told:
            same = f"{told['same_tokens']} of {told['tokens']}"
            rows.append([name, f"{told['features']:.1e}", f"{told['logits']:.1e}", same])
    yield "off the model, as parts of the scale", ["", "features", "logits", "same tokens"], rows
