"""`keepsight chat` on a real terminal: lines, pastes and completion, with and without an editor."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from rich.console import Console
from support.commands import run
from support.hostile import hear_interrupts

from keepsight.cli.chat import Shell
from keepsight.cli.line_editor import completions, history_at
from keepsight.cli.terminal import WrittenWords, loading_line

_SCRIPT = """
import sys
if sys.argv[1] == "plain":
    sys.modules["prompt_toolkit"] = None
from rich.console import Console
from keepsight.cli.chat import Shell
class Vlm:
    def session(self): return None
class Told(Shell):
    def ask(self, question): print("ASKED", repr(question), flush=True)
Told(Vlm(), Console(), {}).run()
print("ENDED", flush=True)
"""


class Terminal:
    """A child on a terminal of 80 columns."""

    def __init__(self, *words: str) -> None:
        self.end, inner = pty.openpty()
        environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
        self.child = subprocess.Popen(
            [sys.executable, *words],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**environment, "PROMPT_TOOLKIT_NO_CPR": "1"},
            preexec_fn=hear_interrupts,
        )
        os.close(inner)
        self.text = ""

    def takes(self, typed: str, words: str) -> None:
        """Type at the next prompt, when the keys are the editor's, and read until the words."""
        self.until(">")
        os.write(self.end, typed.encode())
        self.until(words)

    def interrupt(self, words: str) -> None:
        """As Ctrl-C, until the words come: one that falls between a prompt and its reading is heard
        with the next key only."""
        for _ in range(30):
            self.child.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                self.until(words, 2)
                break

    def until(self, words: str, seconds: float = 60) -> None:
        """Read until the words have come."""
        end = time.monotonic() + seconds
        while words not in self.text:
            ready = select.select([self.end], [], [], max(0, end - time.monotonic()))[0]
            assert ready, f"{words!r} did not come in {self.text!r}"
            try:
                self.text += os.read(self.end, 65536).decode(errors="replace")
            except OSError:  # how a terminal ends
                break
        assert words in self.text, self.text
        self.text = self.text.partition(words)[2]

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self.end)


@pytest.mark.parametrize("how", ["plain", "edited"])
def test_a_terminal_takes_lines_pastes_commands_and_the_end(how: str) -> None:
    if how == "edited":
        pytest.importorskip("prompt_toolkit")
    terminal = Terminal("-c", _SCRIPT, how)
    try:
        terminal.until("/help lists the commands")
        terminal.takes("What is it?\r", "ASKED 'What is it?'")
        terminal.takes("/imags\r", "did you mean /images?")
        if how == "edited":
            terminal.takes("\x1b[200~one\ntwo\x1b[201~\r", r"ASKED 'one\ntwo'")
            terminal.takes("three\x1b\rfour\r", r"ASKED 'three\nfour'")
            terminal.takes("half a line\x03", "/exit or Ctrl-D ends the chat")
            terminal.takes("\x04", "ENDED")
        else:  # the child has no terminal of its own that would make a signal of it
            terminal.until(">")
            terminal.interrupt("/exit or Ctrl-D ends the chat")
            terminal.takes("/exit\r", "ENDED")
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("pieces", "seen"),
    [
        (["Picture 1 sh", "ows a red cir", "cle."], "Picture 1 shows a\nred circle."),
        (["one\n\n  two ", "three four five"], "one\n\n  two three four\nfive"),
        (["exactly twenty chars then"], "exactly twenty chars\nthen"),
        (["a" * 25 + " b"], "a" * 25 + "\nb"),
    ],
)
def test_an_answer_is_broken_between_words(pieces: list[str], seen: str) -> None:
    """And a pipe gets it as it is."""
    for terminal in (True, False):
        out = io.StringIO()
        words = WrittenWords(Console(file=out, force_terminal=terminal, width=20))
        for piece in pieces:
            words.write(piece)
        words.end()
        lines = [line.rstrip(" ") for line in out.getvalue().splitlines()]
        assert "\n".join(lines) == (seen if terminal else "".join(pieces))


def test_a_script_without_spaces_is_written_as_it_comes() -> None:
    out = io.StringIO()
    words = WrittenWords(Console(file=out, force_terminal=True, width=20))
    words.write("红色的圆")
    assert out.getvalue() == "红色的圆"


def test_commands_and_pictures_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("pictures").mkdir()
    for name in ("cat.png", "notes.txt", "pictures/car.JPG", ".hidden.png"):
        Path(name).touch()
    commands = ["image", "images", "edit"]
    assert completions("/im", commands) == (-3, ["/image", "/images"])
    assert completions("/image c", commands) == (-1, ["cat.png"])
    assert completions("look at ", commands) == (0, ["cat.png", f"pictures{os.sep}"])
    assert completions("~/pictures/c", commands) == (-1, ["car.JPG"])
    assert completions("nowhere/c", commands) == (0, [])


class _Terminal(io.StringIO):
    """A stream that says of itself that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_line_moves_on_a_terminal_while_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And counts what comes from the Hub meanwhile."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    blobs = tmp_path / "models--some--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "old").write_bytes(bytes(9))
    for stream, told in ((_Terminal(), ", 2.0 KiB from the Hub"), (io.StringIO(), "")):
        monkeypatch.setattr(sys, "stderr", stream)
        with loading_line("some/model"):
            (blobs / "new.incomplete").write_bytes(bytes(2048))
        (blobs / "new.incomplete").unlink()
        assert ("loading some/model ... 0 s" in stream.getvalue()) == bool(told)
        assert told in stream.getvalue()


def test_what_is_typed_is_kept_in_a_store_that_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept: list[Path | None] = []
    monkeypatch.setattr(Shell, "run", lambda shell: kept.append(shell.history))
    for words in ((), ("--store", "memory://bucket/name"), ("--store", "here")):
        run("chat", *words)
    assert kept == [None, None, Path("here/chat-lines")]
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    history_at(kept[-1]).append_string("typed")
    assert "typed" in Path("here/chat-lines").read_text()


class _CtrlC:
    """A processor of logits during whose third token somebody presses Ctrl-C."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, ids: object, scores: object) -> object:
        self.seen += 1
        if self.seen == 3:
            signal.raise_signal(signal.SIGINT)
        return scores


def test_ctrl_c_keeps_the_answer_so_far(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = io.StringIO()
    shell = Shell(dense, Console(file=lines), {"logits_processor": [_CtrlC()]})
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n/retry\n"))
    shell.run()
    assert "the answer so far is in the history" in lines.getvalue()
    question, answer = shell.session.messages
    assert question["content"][-1]["text"] == "Hello!"
    assert answer["role"] == "assistant" and answer["content"][0]["text"]
    assert dense.ask("Hello!", max_new_tokens=2).tokens  # nothing is left taken


def test_ctrl_c_in_a_retry_leaves_the_conversation(
    dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.StringIO()
    shell = Shell(dense, Console(file=lines), {})
    shell.ask("Hello!")
    before = shell.session.messages
    shell.options["logits_processor"] = [_CtrlC()]
    monkeypatch.setattr("sys.stdin", io.StringIO("/retry\n"))
    shell.run()
    assert "nothing of it is in the history" in lines.getvalue()
    assert shell.session.messages is before
