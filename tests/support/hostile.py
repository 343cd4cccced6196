"""Files that lie, break off or are flipped, and processes that are killed: what tests attack with.

A file with a wrong byte is easy to refuse. The worse liar has a header and a record whose digests
all hold, so `sealed` writes those too: what it says must then be checked for sense.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings

from keepsight.formats import tensorfile
from keepsight.formats.package import Package
from keepsight.system import digests

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"


def bounded(examples: int, **more: Any) -> settings:
    """Hypothesis with a bound, the same examples each time, and no clock."""
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=quiet,
        **more,
    )


# -- files -------------------------------------------------------------------------------------


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file in the shape of safetensors with any header at all, and any claim of its length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + text + data)
    return path


def metadata(record: Any) -> dict[str, str]:
    """The metadata of a record (or of a text in its place) with a digest that holds."""
    text = record if isinstance(record, str) else digests.canonical_json(record)
    return {"keepsight": text, "digest": digests.digest("record", text)}


def sealed(
    path: Path,
    entries: dict[str, Any],
    data: bytes = b"",
    tensors: dict[str, torch.Tensor] | None = None,
    **record: Any,
) -> Path:
    """A file whose seals all hold, whatever its header says of the tensors in it."""
    truth = tensors or dict.fromkeys(entries, torch.zeros(0))
    named = {name: digests.digest("tensor", tensor) for name, tensor in truth.items()}
    body = {"kind": "test", "format": 1, "tensors": named, **record}
    return raw(path, {"__metadata__": metadata(body), **entries}, data)


def entry(dtype: Any, shape: Any, start: Any, end: Any) -> dict[str, Any]:
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def opened_up(path: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What `tensorfile.save` was given for a file: to be saved again with something else in it."""
    tensors, record = tensorfile.read(path, kind, 1)
    for own in ("kind", "format", "tensors"):
        record.pop(own)
    return tensors, record


def flipped(path: Path) -> Iterator[int]:
    """The file with each of its bits flipped in turn; the byte that the flipped bit is in."""
    data = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for spot, byte in enumerate(data):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), spot)
                yield spot
            os.pwrite(file.fileno(), bytes([byte]), spot)


def truncated(path: Path) -> Iterator[int]:
    """The file cut off at each of its bytes, from the end: what a copy holds that broke off."""
    for length in range(path.stat().st_size - 1, -1, -1):
        os.truncate(path, length)
        yield length


def tiny_package(**changes: Any) -> Package:
    """A package small enough to flip each of its bits. The golden file holds this one."""
    values: dict[str, Any] = {
        "tensors": {
            "features": torch.tensor([[0.5, -1.25, 3.0], [1e-30, -0.0, 65504.0]]),
            "deepstack.0": torch.tensor([[1.0, 2.0, 3.0], [-4.0, 0.0, 0.25]], dtype=torch.bfloat16),
        },
        "key": "k" * 64,
        "weights": "w" * 64,
        "settings": "s" * 64,
        "provenance": {"dtype": "torch.float32", "codec": "exact", "threads": 2},
        "grid": {"image_grid_thw": [[1, 2, 4]]},
        "layout": ("<look>", 2, "</look>"),
        "source": "d" * 64,
        "about": {"model_type": "golden", "name": "Zürich 👁", "commit": None},
    }
    return Package(**{**values, **changes})


# -- pictures ----------------------------------------------------------------------------------


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims any size: a decompression bomb."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    start = b"\x89PNG\r\n\x1a\n"
    return start + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """An image as the bytes of a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


# -- processes ---------------------------------------------------------------------------------


def hear_interrupts() -> None:
    """A shell makes what it starts in the background deaf to Ctrl-C, and all that these start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(script: str, *arguments: Any) -> subprocess.Popen[str]:
    """Python on its own, with this Keepsight; its output is read line by line."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )


def in_child(work: Callable[[], object]) -> int:
    """A fork of this process that only does this; its id, for `ended_well`."""
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            code = work() is False
        os._exit(code)
    return child


def ended_well(child: int) -> bool:
    """Whether such a fork raised nothing and found nothing wrong, once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def lines_until_killed(process: subprocess.Popen[str], count: int) -> list[str]:
    """Read some lines, kill -9 in the middle of whatever goes on, and all lines that came."""
    if process.stdout is None:
        raise ValueError("started without a pipe")
    lines = [process.stdout.readline().strip() for _ in range(count)]
    process.send_signal(signal.SIGKILL)
    rest, errors = process.communicate(timeout=60)
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the process ended by itself: {errors}")
    whole = rest.rsplit("\n", 1)[0]
    return [line for line in [*lines, *whole.split("\n")] if line]


def finished(process: subprocess.Popen[str]) -> str:
    """What a process printed, once it has ended well."""
    output, errors = process.communicate(timeout=120)
    if process.returncode:
        raise RuntimeError(errors)
    return output
