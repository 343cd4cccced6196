"""Ctrl-C at any moment of any call leaves no lock taken, no count wrong and torch as it was."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.models import picture, turn

import keepsight as ks

# Runs public calls, while another process sends SIGINT at random moments of them.
WORK = """
import gc, json, random, subprocess, sys, threading, time, warnings
import torch
import keepsight as ks
from support import tree_invariants
from PIL import Image
warnings.simplefilter("ignore")
rounds, seed = int(sys.argv[1]), int(sys.argv[2])
draw = random.Random(seed)
sender = subprocess.Popen(
    [sys.executable, "-c", '''
import os, signal, sys, time
for line in sys.stdin:
    time.sleep(float(line))
    os.kill(os.getppid(), signal.SIGINT)
'''], stdin=subprocess.PIPE, text=True, start_new_session=True)
unraised = []
sys.unraisablehook = lambda told: unraised.append(repr(told.exc_value))
pictures = [Image.effect_noise((64, 64), 9 + n).convert("RGB") for n in range(4)]
vlm = ks.load("demo", cache_budget="1500000", vision_budget="1500000")

def shown(n):
    parts = [{"type": "image", "image": pictures[n % 4]}, {"type": "text", "text": f"What? {n}"}]
    return [{"role": "user", "content": parts}]

def stream(n):
    for piece in vlm.stream(shown(n), max_new_tokens=4):
        if n % 3 == 0:
            break

def session(n):
    chat = vlm.session()
    chat.ask(f"What is {n}?", pictures[n % 4], max_new_tokens=2)
    chat.ask("And?", max_new_tokens=2)

def prefix(n):
    with vlm.prefix(shown(n)) as one:
        one.ask("Why?", max_new_tokens=2)

ids = torch.from_numpy(vlm.render([{"role": "user", "content": "a b"}]).ids)[None].repeat(2, 1)
calls = [
    stream, session, prefix,
    lambda n: vlm.chat(shown(n), max_new_tokens=4),
    lambda n: vlm.generate(ids, max_new_tokens=2 + n % 3, do_sample=False),
    lambda n: vlm.encode(pictures[n % 4]),
    lambda n: vlm.prepare(shown(n)),
    lambda n: vlm.explain(shown(n)),
    lambda n: vlm.render(shown(n)),
    lambda n: vlm.inputs(shown(n)),
    lambda n: (vlm.pin(pictures[n % 4]), vlm.pin(pictures[n % 4], pinned=False)),
    lambda n: vlm.delete(pictures[n % 4]),
    lambda n: (vlm.clear(), vlm.stats(), vlm.flush()),
]
took = {}
for call in calls:
    call(1)
    begun = time.perf_counter(); call(2); took[call] = time.perf_counter() - begun
interrupted = 0
for n in range(rounds):
    call = calls[n % len(calls)]
    try:
        sender.stdin.write(f"{draw.random() * took[call] * 1.2}\\n"); sender.stdin.flush()
        call(draw.randrange(99))
        time.sleep(10)
    except KeyboardInterrupt:
        interrupted += 1
gc.collect()
answered = []
def ask():
    answered.append(vlm.ask(pictures[0], "What?", max_new_tokens=2).text)
threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join(60) for thread in threads]
ok = len(answered) == 2
if ok:
    vlm.runtime.check()
    vlm.clear()
    vlm.runtime.check()
told = vlm.stats() if ok else None
print(json.dumps({
    "answered": len(answered), "interrupted": interrupted, "unraised": unraised,
    "torch": [torch.ones(1).item(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
    "bytes": ok and [told["prefix"][k] for k in ("bytes", "held_bytes", "lane_bytes")]
        + [told["features"][k] for k in ("bytes", "pixel_bytes", "name_bytes")],
}))
sys.stdout.flush()
import os; os._exit(0)
"""
ROUNDS = 60


def interrupt(rounds: int, seed: int) -> None:
    run = [sys.executable, "-c", WORK, str(rounds), str(seed)]
    done = subprocess.run(
        run, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["answered"] == 2 and not any(told["bytes"]), told
    assert told["torch"] == [1.0, True, False], told
    # Python itself swallows what is raised while an object is dropped.
    assert told["interrupted"] + len(told["unraised"]) == rounds, told
    assert set(told["unraised"]) <= {"KeyboardInterrupt()"}, told


def test_interrupts_at_random_moments() -> None:
    interrupt(ROUNDS, seed=0)


def test_an_interrupt_while_a_prefix_is_prepared_leaves_nothing_held(
    demo_parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with ks.wrap(*demo_parts["demo"]) as vlm:
        vlm.prepare([turn("What is it?", picture(1))])
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(vlm.model.base_model.visual, "forward", interrupted)
            vlm.prefix([turn("What is it?", picture(1), picture(2))])
        vlm.prepare([turn("And this?")])
        vlm.clear()
        told = vlm.stats()["prefix"]
        assert [told[name] for name in ("bytes", "held_bytes", "lane_bytes")] == [0, 0, 0]
        vlm.runtime.check()


# Python swallows what is raised while an object is dropped.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("file", ["lock.py", "engine.py"])
def test_an_interrupt_at_each_call_and_return(demo_parts: Any, file: str) -> None:
    with ks.wrap(*demo_parts["demo"], cache_budget="3MB") as vlm:
        words = "Tell me of it. "
        vlm.ask(words, max_new_tokens=2)
        reached = at = 0

        def hook(frame: Any, event: str, _: object) -> None:
            nonlocal reached
            if event in ("call", "return") and frame.f_code.co_filename.endswith(f"/{file}"):
                reached += 1
                if reached == at:
                    sys.setprofile(None)
                    signal.raise_signal(signal.SIGINT)

        while reached == at:
            reached, at = 0, at + 1
            try:
                sys.setprofile(hook)
                with contextlib.closing(vlm.stream([turn(words)], max_new_tokens=2)) as pieces:
                    list(pieces)
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            assert not vlm.runtime.lock.held, at
        assert at > 20 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        answered: list[str] = []
        thread = threading.Thread(
            target=lambda: answered.append(vlm.ask(words, max_new_tokens=2).text), daemon=True
        )
        thread.start()
        thread.join(60)
        assert answered
        vlm.clear()
        told = vlm.stats()["prefix"]
        assert [told[name] for name in ("bytes", "held_bytes", "lane_bytes")] == [0, 0, 0]
        vlm.runtime.check()


if __name__ == "__main__":
    interrupt(int(sys.argv[1]), int(sys.argv[2]))


# Presses Ctrl-C while the command is imported, or when all is done.
PRESSED = """
import atexit, os, runpy, signal, sys

def press():
    os.kill(os.getpid(), signal.SIGINT)

class Watched:
    def find_spec(self, name, *more):
        if name == "keepsight.cli.app":
            press()

sys.meta_path.insert(0, Watched()) if sys.argv.pop() == "start" else atexit.register(press)
runpy.run_module("keepsight", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("moment", ["start", "end"])
def test_the_command_line_is_interrupted_without_a_traceback(moment: str) -> None:
    words = [sys.executable, "-c", PRESSED, "--version", moment]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert done.stdout.startswith("keepsight") == (moment == "end")
