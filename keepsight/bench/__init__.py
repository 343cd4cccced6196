"""`keepsight bench`: against stock Transformers and the limit. May import keepsight and below.

It builds a random-weight checkpoint, or takes a named model (an exported one too), runs the
workloads in one process, prints tables for people and one line of JSON for machines.
`bench/README.md` explains what is measured and how to read it.
"""

from __future__ import annotations

import importlib

from keepsight.bench import options
from keepsight.bench.options import WORKLOADS, CheckModel

__all__ = ["WORKLOADS", "main"]


def main(argv: list[str], check_model: CheckModel | None = None) -> int:
    """Run the benchmark; 1 if an answer was wrong."""
    chosen = options.parse(argv, check_model)
    # Wrong options are refused above, before PyTorch is imported.
    suite = importlib.import_module("keepsight.bench.suite")
    code: int = suite.run(argv, chosen)
    return code
