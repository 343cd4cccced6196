"""Yields frames as they come: from a video file, a camera, or a program.

They are read one by one, so an endless source takes no more memory than a short one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
from PIL import Image

from keepsight.errors import ImageError, InputError
from keepsight.media.pictures import check_size
from keepsight.media.video_files import DEFAULT_FPS
from keepsight.system.optional import optional

Frames: TypeAlias = "str | os.PathLike[str] | int | Iterable[object]"
_CAMERAS = {  # FFmpeg's input format and device name for a camera number
    "linux": ("/dev/video{}", "v4l2"),
    "darwin": ("{}", "avfoundation"),
    "win32": ("video={}", "dshow"),
}


def frames_of(source: Frames, fps: float) -> Iterator[np.ndarray]:
    """Frames of shape (height, width, 3), `fps` per second of a file or a camera. A program's
    frames are all taken."""
    if isinstance(source, bool | bytes):
        raise _not_watched(source)
    if isinstance(source, int):
        place, kind = _CAMERAS.get(sys.platform, _CAMERAS["linux"])
        frames = _decoded(place.format(source), kind, fps)
    elif isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        frames = _decoded(name, "v4l2" if name.startswith("/dev/video") else None, fps)
    else:
        try:
            frames = map(_frame, iter(source))
        except TypeError:
            raise _not_watched(source) from None
    return _of_one_size(frames)


def _not_watched(source: object) -> InputError:
    hint = "; of a function that returns the next frame make iter(function, None)"
    return InputError(
        f"cannot watch a {type(source).__name__}; expected a file, the number of a camera, or an "
        f"iterable of frames{hint if callable(source) else ''}"
    )


def _decoded(name: str, kind: str | None, fps: float) -> Iterator[np.ndarray]:
    av = optional("av", "video")
    try:
        with av.open(name, format=kind) as container:
            stream = container.streams.video[0]
            rate, due = float(stream.average_rate or DEFAULT_FPS), 0.0
            for number, frame in enumerate(container.decode(stream)):
                time = number / rate if frame.time is None or kind is None else frame.time
                if time + 1e-9 >= due:
                    check_size((frame.width, frame.height), "a frame of the video")
                    yield frame.to_ndarray(format="rgb24")
                    due = max(due + 1 / fps, time - 1 / fps)  # a camera may have paused
    except (av.FFmpegError, IndexError, ValueError, OSError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"{name} cannot be watched: {error}") from error


def _frame(given: object) -> np.ndarray:
    if isinstance(given, Image.Image):
        given = np.asarray(given.convert("RGB"))
    if not isinstance(given, np.ndarray) or given.ndim != 3 or given.shape[-1] != 3:
        shape = f" of shape {given.shape}" if isinstance(given, np.ndarray) else ""
        raise ImageError(
            f"a {type(given).__name__}{shape} is no frame; expected an image, or an array of shape "
            "(height, width, 3)"
        )
    if given.dtype != np.uint8:
        raise ImageError(f"a frame is {given.dtype}; expected uint8")
    return np.ascontiguousarray(given)


def _of_one_size(frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    first: tuple[int, ...] | None = None
    for number, frame in enumerate(frames):
        first = first or frame.shape
        if frame.shape != first:
            raise ImageError(
                f"frame {number} is {frame.shape[1]}x{frame.shape[0]}, those before it are "
                f"{first[1]}x{first[0]}; the frames of a video have one size"
            )
        yield frame
