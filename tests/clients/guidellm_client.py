"""guidellm: a benchmark with pictures from its start to its report, in streams of a set length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from common import PICTURE, QUESTION, URL, check


def pictures_seen() -> float:
    """Pictures that the server has had in prompts so far."""
    with urllib.request.urlopen(f"{URL.removesuffix('/v1')}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    name = "keepsight_mm_cache_queries_total"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


before = pictures_seen()
with tempfile.TemporaryDirectory() as folder:
    out, data = Path(folder) / "report.json", Path(folder) / "data.jsonl"
    row = {"text": QUESTION, "image": PICTURE, "output_tokens_count": 8}
    data.write_text("\n".join([json.dumps(row)] * 4))
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
        f"kind=json_file,path={data}",
        "--disable-console-interactive",
        "--output",
        f"kind=json,path={out}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    check(done.returncode == 0, f"it ends: {done.stdout[-1500:]}{done.stderr[-1500:]}"[:3000])
    text = out.read_text()
    totals = json.loads(text)["benchmarks"][0]["metrics"]["request_totals"]
    check(totals["successful"] == 3 and totals["errored"] == 0, f"every request: {totals}")
check(pictures_seen() - before >= 3, "every picture")
