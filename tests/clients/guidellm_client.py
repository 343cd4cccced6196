"""guidellm: a benchmark from its start to its report, in streams of a set length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import URL, check

with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "report.json"
    target = URL.removesuffix("/v1")
    command = [
        str(Path(sys.executable).parent / "guidellm"),
        "run",
        "--backend",
        f"kind=openai_http,target={target},model=demo",
        "--profile",
        "kind=synchronous",
        "--constraint",
        "kind=max_requests,count=3",
        "--tokenizer",
        f"kind=hf_auto,model={os.environ['KEEPSIGHT_TOKENIZER']}",
        "--data",
        "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--disable-console-interactive",
        "--output",
        f"kind=json,path={out}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    check(done.returncode == 0, f"it ends: {done.stdout[-1500:]}{done.stderr[-1500:]}"[:3000])
    text = out.read_text()
    totals = json.loads(text)["benchmarks"][0]["metrics"]["request_totals"]
    check(totals["successful"] == 3 and totals["errored"] == 0, f"every request: {totals}")
