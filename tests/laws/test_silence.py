"""Loading and trials are quiet where Keepsight runs Transformers, and users' settings stay."""

from __future__ import annotations

import logging as stdlib_logging
import subprocess
import sys

import pytest
import torch
from huggingface_hub import utils as hub
from transformers.utils import logging

from keepsight.models import silence
from keepsight.models.loading import model_path

_LOAD = """
import keepsight as ks
from transformers.utils import logging
before = logging.get_verbosity(), logging.is_progress_bar_enabled()
with ks.load("demo-hybrid") as vlm:
    vlm.chat([{"role": "user", "content": "hi"}], max_new_tokens=2)
assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())
"""


def test_the_demo_loads_and_answers_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", _LOAD], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("enabled", [True, False])
def test_bars_are_as_before(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = logging.is_progress_bar_enabled(), hub.are_progress_bars_disabled()
    try:
        logging.enable_progress_bar() if enabled else logging.disable_progress_bar()
        with pytest.raises(KeyError), silence.without_short_bars(model_path("demo")):
            assert not logging.is_progress_bar_enabled()
            raise KeyError
        assert logging.is_progress_bar_enabled() is enabled
        monkeypatch.setattr(silence, "_SMALL", 10)
        with silence.without_short_bars(model_path("demo")):
            assert logging.is_progress_bar_enabled() is enabled
    finally:
        logging.enable_progress_bar() if before[0] else logging.disable_progress_bar()
        hub.disable_progress_bars() if before[1] else hub.enable_progress_bars()


def test_exporters_say_errors_only_and_settings_are_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = torch.onnx.export
    with pytest.raises(KeyError), silence.without_exporters_notes():
        caplog.clear()
        stdlib_logging.getLogger("torch.onnx").warning("a note")
        stdlib_logging.getLogger("torch.onnx").error("an error")
        raise KeyError
    assert caplog.messages == ["an error"]
    assert torch.onnx.export is before and stdlib_logging.root.manager.disable == 0
