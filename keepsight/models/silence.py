"""Keeps what Transformers says to its own users away where Keepsight is the one who runs it.

A bar for weights that load in an instant only flashes, and a note about slower code is no news to
somebody whose layers run by ours. Settings of the user are as before afterwards.
"""

from __future__ import annotations

import functools
import logging as stdlib_logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from transformers import logging

from keepsight.system.exchanged import exchanged

_SMALL = 1 << 30  # bytes of weights that are read within a second or two


@contextmanager
def without_notes() -> Iterator[None]:
    """Let Transformers log errors only."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def without_exporters_notes() -> Iterator[None]:
    """Let exporters log errors only. Settings of the whole process change; the exporter sees to it
    that only one thread is here."""
    # Transformers does not pass `verbose`, without which every step is printed.
    export = functools.partial(torch.onnx.export, verbose=False)
    disabled = stdlib_logging.root.manager.disable
    with warnings.catch_warnings(), exchanged((torch.onnx, "export", export)):
        warnings.simplefilter("ignore")
        stdlib_logging.disable(max(disabled, stdlib_logging.WARNING))
        try:
            yield
        finally:
            stdlib_logging.disable(disabled)


@contextmanager
def without_short_bars(path: str) -> Iterator[None]:
    """Show no bar while a folder with few bytes of weights is loaded."""
    files = [*Path(path).glob("*.safetensors"), *Path(path).glob("*.bin")]
    small = bool(files) and sum(file.stat().st_size for file in files) < _SMALL
    of_hub = not are_progress_bars_disabled()
    if not small or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
        if not of_hub:
            disable_progress_bars()
