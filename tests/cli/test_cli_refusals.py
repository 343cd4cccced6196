"""What commands refuse: by name, on one line, with exit code 2, before PyTorch is imported."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from support.commands import run
from support.encode_parts import table

import keepsight as ks
from keepsight.store import open_store

FILES = {
    "notes.txt": "a note",
    "notes.md": "a note",
    "notes.sight": "a note",
    "no.sight": "no package",
    "bad.png": "not an image",
    "model/README": "",
    "text/config.json": '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}',
    "bert/config.json": '{"model_type": "bert", "architectures": ["BertForMaskedLM"], '
    '"is_encoder_decoder": false}',
    "packs/x.sight": "",
    "hub/models--some--reader/refs/main": "0",
    "hub/models--some--reader/snapshots/0/config.json": '{"model_type": "gpt2", '
    '"architectures": ["GPT2LMHeadModel"]}',
    "q.json": '{"red": {"type": "noul", "instructions": "Is it red?"}}',
    "none.json": "[1]",
    "bad.json": "{",
    "deep.json": "[" * 100_000,
    "keys.toml": "model = 'demo'\nkeys = 5",
    "in.jsonl": '{"id": "one", "question": "a"}',
    "empty.jsonl": "",
    "x.jsonl": "x",
    "q.jsonl": '{"q": 1}',
    "images.jsonl": '{"question": "a", "images": [3]}',
    "id.jsonl": '{"question": "a", "id": [1]}',
    "twice.jsonl": '{"question": "a", "id": 1}\n{"question": "b", "id": 1}',
    "form.jsonl": '{"question": "a", "response_format": 3}',
    "another.jsonl": '{"id": "one", "question": "another", "text": "x"}\n',
    "three.jsonl": "3\n",
    "a.toml": "ttl = 'long'",
}
# What is typed, and what is said. Three dots stand for anything.
REFUSED = """
ask                                       | there is no question
ask p.png                                 | p.png is an image
ask none.png Hi                           | none.png: no image can be read there
ask bad.png Hi                            | bad.png is not an image
ask notes.txt Hi                          | notes.txt is not an image in a format that is opened
ask no.sight Hi                           | no.sight: not a Keepsight file
ask x.sight Hi                            | x.sight: no image can be read there
ask LONG Hi                               | LONG: File name too long
ask p.png Hi --temprature 1               | --temprature
ask p.png Hi --temperature 0 --top-p 0.5  | --top-p has no effect
ask Hi --dtype fp16                       | 'fp16' is not a dtype; did you mean 'float16'?
ask Hi --dtype bf16                       | did you mean 'bfloat16'?
ask Hi --dtype flaot32                    | did you mean 'float32'?
ask Hi --dtype int8                       | 'auto', 'float32', 'bfloat16' or 'float16'
ask Hi --device gpu:0                     | no device 'gpu:0'; did you mean 'cuda:0'?
ask Hi --device-map gpu0                  | no device 'gpu0'; did you mean 'cuda:0'?
ask Hi --device CPU                       | did you mean 'cpu'?
ask Hi --runtime onx                      | did you mean 'onnx'?
ask p.png Hi --min-pixels 9 --max-pixels 8 | --min-pixels 9 is more than --max-pixels 8
ask Hi --weights int5                     | int5
ask Hi --weights int8 --runtime onnx      | name one with store=
ask Hi -m demo-hybird                     | did you mean demo-hybrid?
ask Hi -m ./modle                         | did you mean ./model?
ask Hi -m ./none                          | there is no such folder
ask Hi -m none                            | a hub id (owner/name)
ask Hi -m a/b/c                           | a/b/c
ask Hi -m model                           | no config.json
ask Hi -m p.png                           | p.png is a file
ask Hi -m /nowhere/at/all                 | /nowhere/at/all
ask Hi -m bert                            | has no vision encoder: models of type 'bert'
ask Hi -m ~nobody-here/m                  | no home folder that ~ stands for
ask Hi --store notes.txt                  | notes.txt cannot be a store: it is a file
ask Hi --store ~nobody-here/s             | no home folder that ~ stands for
ask --batch in.jsonl                      | go together
ask --out out.jsonl                       | go together
ask p.png Hi --batch in.jsonl --out o     | leave out
ask --batch none.jsonl --out o            | none.jsonl: cannot be read
ask --batch empty.jsonl --out o           | no questions
ask --batch x.jsonl --out o               | line 1: not JSON
ask --batch deep.json --out o             | line 1: not JSON
ask --batch q.jsonl --out o               | line 1: expected
ask --batch in.jsonl --out text           | text: Is a directory
ask --batch images.jsonl --out o          | line 1: images
ask --batch id.jsonl --out o              | line 1: the id
ask --batch twice.jsonl --out o           | line 2: the id 1
ask --batch form.jsonl --out o            | line 1: response_format: got a int
ask --batch in.jsonl --out another.jsonl  | another question
ask --batch in.jsonl --out three.jsonl    | not an answer
ask Hi --json-schema none.json5           | --json-schema none.json5: cannot be read
ask Hi --json-schema p.png                | --json-schema p.png: cannot be read
ask Hi --json-schema {                    | --json-schema: this schema is no JSON
ask Hi --choices ''                       | --choices: every choice
ask Hi --choices a,,b                     | --choices: every choice
ask Hi --choice ''                        | --choices: every choice
ask Hi --regex ''                         | --regex: expected a regular expression
ask Hi --regex a --choice b               | --choices and --regex: an answer has one form
decide p.png                              | --questions FILE
decide -q none.json                       | none.json: expected questions
decide -q bad.json                        | not JSON
decide -q deep.json                       | not JSON
decide -q missing.json                    | error: --questions missing.json: cannot be read
decide -q q.json --decision-config none   | --decision-config none: there is no such file
decide none.png -q q.json                 | none.png
chat --image none.png                     | none.png
chat demo-hybird                          | did you mean demo-hybrid?
chat -m demo-hybird                       | did you mean demo-hybrid?
chat demo --model demo-hybrid             | 'demo' and --model demo-hybrid: name one model
chat text                                 | 'text' has no vision encoder: models of type 'gpt2' only
chat some/reader                          | 'some/reader' has no vision encoder: models of type
chat some/model                           | is not on this machine and the Hub cannot be reached
chat demo --device cuda                   | device 'cuda': PyTorch ... sees none here; leave the
chat demo --device-map mps                | device 'mps': PyTorch ... sees none here
chat demo --store full/new                | nothing can be made in full (No such file
chat demo --store shut/new                | cannot be a store: shut cannot be written
chat demo --store gs://some/where         | gcsfs is not installed
chat --runtime onnx --store memory://x    | which needs a folder to lie in
verify ./none                             | there is no such folder
verify demo --model demo-hybrid           | name one model
verify --image notes.sight                | notes.sight: not a Keepsight file
verify demo --runtime onnx                | which needs a folder to lie in
verify demo --device cuda                 | device 'cuda': PyTorch ... sees none here
verify --store notes.txt/in               | cannot be a store: notes.txt is a file
serve                                     | which model?
serve demo-hybird                         | did you mean demo-hybrid?
serve demo --model demo-hybrid            | name one model
serve demo --dtype fp16                   | 'fp16' is not a dtype
serve demo --device mps                   | device 'mps': PyTorch ... sees none here
serve demo --host 256.1.1.1               | cannot listen on 256.1.1.1
serve demo --port many                    | Invalid value for '--port'
serve demo --port 70000                   | port is 70000: expected less than 65536
serve demo --port TAKEN                   | TAKEN: something else listens there
serve demo --prot 1                       | --port
serve demo --max-body big                 | 'big' is not a size
serve demo --drain soon                   | 'soon' is not a time
serve demo --api-key :                    | NAME:KEY
serve demo --api-key a:k --admin-key b:k  | are the same
serve --config a.toml                     | ttl is "long": 'long' is not a time
serve demo --store notes.txt              | notes.txt cannot be a store: it is a file
serve demo --runtime torch --weights int4 | runs in ONNX Runtime or
serve --config none.toml                  | none.toml
serve --config keys.toml                  | keys: expected a valid tuple
serve demo --decision-config none         | --decision-config none: there is no such file
show nope.sight                           | nope.sight: cannot be read: No such file or directory
show p.png                                | not a Keepsight file
show LONG                                 | LONG: File name too long
show .                                    | neither a store nor an export; name one of its files
show packs                                | one of its files: keepsight show packs/x.sight
show model                                | neither a store nor an export; see what a model takes
show text                                 | what a model takes: keepsight plan text
show ~nobody-here/p.sight                 | no home folder that ~ stands for
demo --out p.png                          | --out p.png cannot be written: it is a file
demo --save notes.txt                     | --save notes.txt cannot be written; name a new file
demo --save none/x.html                   | --save none/x.html cannot be written
encode none --to s                        | none: there is no such file or folder
encode none.png                           | --to
encode p.png --to p.png                   | p.png cannot be a store: it is a file
encode p.png --to shut                    | shut cannot be a store: shut cannot be written
encode p.png --to ~nobody-here            | no home folder that ~ stands for
encode notes.md --to s                    | notes.md: not a picture; expected images, PDFs
encode p.png --to s -m demo-hybird        | did you mean demo-hybrid?
encode demo p.png --to s -m demo-hybrid   | name one model
encode demo --to s                        | write: keepsight encode demo PICTURES --to FOLDER
encode demo-hybird p.png --to s           | did you mean demo-hybrid?
encode owner/model p.png --to s           | 'owner/model' is not
encode p.png --to s --codec int7          | no codec 'int7'
encode p.png --to s --shard 9/8           | expected i/n
encode p.png --to s --dpi 3               | dpi=3
encode p.png --to s --store x             | --store goes with --files
encode p.png --to s --workers 2           | --workers goes with --ray
encode p.png --to s --errors none/of/it   | --errors none/of/it cannot be written: No such file
encode p.png --to s --ray --files         | leave out --files
export demo                               | --to
export --to x                             | which model?
export demo --to .                        | . is there already
export demo --to p.png/below              | p.png/below cannot be written: Not a directory; name
export demo --to new --quant int5         | --quant int5 is not known
export demo --to new --format onx         | did you mean 'onnx'?
export demo --to new --formt onnx         | --format
export demo --to new --max-patches 0      | --max-patches
export demo --to ~nobody-here/x           | no home folder that ~ stands for
export demo-hybird --to x                 | did you mean demo-hybrid?
export demo --model demo-hybrid --to x    | name one model
export some/model --to x                  | the Hub cannot be reached
plan some/model                           | the Hub cannot be reached
plan demo --size big                      | expected width and height
plan demo --size 0x10                     | expected width and height
plan demo --budget many                   | 'many' is not a size
cache stats                               | which store?
cache stats --store nowhere               | no such folder
cache list --store notes.txt              | notes.txt cannot be a store: it is a file
cache list --store ~nobody-here/s         | no home folder that ~ stands for
cache list --store filled --kind cats     | --kind cats: the store has alias
cache gc --store filled --budget many     | 'many' is not a size
cache explain abc --store filled          | abc: the store has no such entry
cache explain '' --store filled           | the store has no such entry
cache delete alias/ --store filled        | the store has no such entry
cache delete package/0 --store filled     | package/0: the store has no such entry
cache delete 1 --store filled             | 1 may be any of 2: alias/1
cache pin package/0x12 --store filled     | package/0x12: the store has no such entry
bench --typo                              | --typo
bench --workload W1,W2                    | --workload W2: choose from W1, W4
bench --model-shape gpt                   | --model-shape gpt: choose from qwen3_vl
bench --dtype float16                     | --dtype float16: choose from
bench --size big                          | --size big: choose from tiny
bench --scale big                         | --scale big: choose from full
bench --out p.png/x                       | p.png: File exists
bench --turns 0                           | --turns
bench --repetitions 0                     | --repetitions
bench --device gpu                        | did you mean 'cuda'?
bench demo-hybird                         | did you mean demo-hybrid?
bench demo --model demo                   | name one model
bench demo --model-shape qwen3_vl         | leave --model-shape out
askk                                      | Did you mean 'ask'?
"""
# Root may write anywhere, so the system's answer about the shut folder is replaced, and so are the
# Hub and PyTorch's name.
_SCRIPT = """
import importlib.metadata as m, importlib.util as u, json, os, sys
access, find, version, make = os.access, u.find_spec, m.version, os.mkdir
def mkdir(path, *more):
    if os.path.dirname(path) == "full":
        raise FileNotFoundError(2, "No such file or directory")
    make(path, *more)
os.mkdir = mkdir
os.access = lambda path, how: str(path) != "shut" and access(path, how)
u.find_spec = lambda name, *a: None if name == "gcsfs" else find(name, *a)
m.version = lambda name: "2.0+cpu" if name == "torch" else version(name)
sys.platform = "linux"
from typer.testing import CliRunner
from keepsight.cli.app import app
for words in json.loads(sys.argv[1]):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, words)
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps([done.exit_code, done.stderr, heavy]))
"""


def test_what_is_wrong_is_said_on_one_line_before_pytorch_is_imported(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "p.png")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("shut", "full"):
        (tmp_path / name).mkdir()
    store = open_store(tmp_path / "filled")
    for start in "10", "11":
        store.put_note("alias", start.ljust(64, "0"), {})
    store.close()
    before = sorted(tmp_path.rglob("*"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = {"TAKEN": str(taken.getsockname()[1]), "LONG": "x" * 300}
        rows = [line.split("|") for line in REFUSED.strip().splitlines()]
        rows = [[re.sub("LONG|TAKEN", lambda m: words[m[0]], part) for part in row] for row in rows]
        environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
        environment.pop("KEEPSIGHT_STORE", None)
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, json.dumps([shlex.split(line) for line, _ in rows])],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    wrong = []
    for (line, said), shown in zip(rows, done.stdout.splitlines(), strict=True):
        code, error, heavy = json.loads(shown)
        named = all(part.strip() in error for part in said.split("..."))
        one = "Usage: " in error or (error.startswith("error: ") and error.count("\n") == 1)
        if not (code == 2 and not heavy and named and one):
            wrong.append((line, code, error, heavy))
    assert not wrong, "\n".join(map(str, wrong))
    assert sorted(tmp_path.rglob("*")) == before, "and nothing is written"


# What only PyTorch, a model or its processor knows.
LATER = """
ask p.png Hi --device nonsense                      | there is no device 'nonsense'; name cpu, cuda
ask p.png Hi --json-schema '{"not": {}}'            | --json-schema: it cannot be enforced
ask p.png Hi --regex (                              | --regex: it cannot be enforced
ask p.png Hi --max-pixels 99                        | --max-pixels 99 is less than the least of this
ask p.png Hi --min-pixels 99999999                  | --min-pixels 99999999 is more than the most of
ask - Hi                                            | standard input is empty
ask --batch not.jsonl --out o --choices a,b         | line 1: response_format: it cannot be enforced
ask x.sight Hi --model demo-hybrid                  | does not fit
decide p.png -q essay.json                          | essay
encode t.parquet --to s                             | no column 'image'
families qwen9_vl                                   | did you mean qwen3_vl or
families zzz                                        | 'zzz' is not listed; keepsight families
"""


def test_what_a_model_or_a_store_refuses_is_said_as_shortly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64)).save("p.png")
    with ks.load("demo") as vlm:
        vlm.encode("p.png").save("x.sight")
    Path("not.jsonl").write_text('{"question": "A?", "response_format": {"not": {}}}')
    Path("essay.json").write_text('{"q": {"type": "essay"}}')
    table(Path("t.parquet"), {"photo": [b""]})
    for line, said in (row.split("|") for row in LATER.strip().splitlines()):
        done = run(*shlex.split(line), code=2)
        assert done.stderr.startswith("error: ") and said.strip() in done.stderr, line
