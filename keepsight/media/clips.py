"""Videos and sound: frames and samples, and what a processor needs to know about them.

A video is a list of frames with their rate, or a file (video_files.py); sound is one row of numbers
with its sampling rate. They are named by their frames and their times, by their samples, or by the
bytes of the file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from difflib import get_close_matches
from numbers import Real

import numpy as np
import torch
from PIL import Image

from keepsight.errors import ImageError
from keepsight.kinds import Clip, Record
from keepsight.media.sources import Fetch, Source, as_array, fetched, file_label, read_bytes
from keepsight.media.video_files import DEFAULT_FPS, MAX_DECODED, MAX_FRAMES, SAMPLED, VideoFile
from keepsight.system import digests
from keepsight.system.optional import optional

FILES = (str, os.PathLike, bytes, bytearray, memoryview)


def open_clip(clip: object, modality: str, fetch: Fetch = fetched) -> Source:
    """A source of a video or of sound, from any form of it."""
    if isinstance(clip, Source):
        return clip
    where = os.fspath(clip) if isinstance(clip, str | os.PathLike) else ""
    where = "" if where.startswith("data:") else where
    if modality == "video" and isinstance(clip, FILES):
        data = read_bytes(clip, fetch)
        video = VideoFile(data)
        return Source(
            video.name,
            video.decode,
            "a video file",
            [],
            modality,
            file=file_label(where),
            video=video,
            where=where,
            data=data,
        )
    decoded = _video(clip) if modality == "video" else _sound(clip, fetch)
    rows, about = decoded
    name = digests.digest(modality, *([rows] if modality == "audio" else list(rows)), about)
    label = f"a clip of {len(rows)} {'samples' if modality == 'audio' else 'frames'}"
    return Source(name, lambda: decoded, label, [], modality, where=where, data=decoded)


def _video(clip: object) -> Clip:
    """Frames of shape (frames, height, width, 3), and what a processor needs to know about them."""
    fps: object = None
    sampled = False
    if isinstance(clip, dict):
        _check_fields(clip, ("frames", "fps", SAMPLED), "a video")
        fps, sampled = clip.get("fps"), bool(clip.get(SAMPLED))
        clip = clip.get("frames")
    frames = _frames(clip)
    rate = DEFAULT_FPS if fps is None else _rate(fps, "a video at {} frames per second", 10_000)
    count = len(frames)
    about = {
        "total_num_frames": count,
        "fps": rate,
        "duration": count / rate,
        "height": int(frames.shape[1]),
        "width": int(frames.shape[2]),
        "frames_indices": list(range(count)),
        "video_backend": "keepsight",
    }
    return frames, {**about, SAMPLED: True} if sampled else about


def is_rate(given: object, limit: float) -> bool:
    """Whether something is a positive number below a limit."""
    return isinstance(given, Real) and not isinstance(given, bool) and 0 < float(given) < limit


def _rate(given: object, what: str, limit: float) -> float:
    if not is_rate(given, limit):
        raise ImageError(f"{what.format(repr(given))}; expected a positive rate")
    return float(given)  # type: ignore[arg-type]


def _check_fields(clip: Record, known: Sequence[str], what: str) -> None:
    """Refuse a dict with a field that would be ignored."""
    for name in clip:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ImageError(f"{what} has no field {name!r}; {hint}")


def _frames(clip: object) -> np.ndarray:
    if isinstance(clip, list | tuple) and clip:
        clip = [np.asarray(f.convert("RGB")) if isinstance(f, Image.Image) else f for f in clip]
        if len({np.shape(frame) for frame in clip}) > 1:
            raise ImageError("the frames of a video must all have one size")
        clip = np.stack([np.asarray(frame) for frame in clip])
    if isinstance(clip, torch.Tensor):
        clip = as_array(clip)
    if not isinstance(clip, np.ndarray) or clip.ndim != 4 or not clip.size:
        raise ImageError(
            f"a {type(clip).__name__} is not a video; expected a file, a list of frames, or an "
            "array of shape (frames, height, width, 3); {'frames': ..., 'fps': ...} gives the rate"
        )
    if clip.shape[-1] != 3 and clip.shape[1] == 3:
        clip = clip.transpose(0, 2, 3, 1)
    if clip.shape[-1] != 3 or clip.dtype != np.uint8 or len(clip) > MAX_FRAMES:
        raise ImageError(
            f"the video is {clip.dtype} of shape {clip.shape}; expected uint8 of shape (frames, "
            f"height, width, 3), with at most {MAX_FRAMES} frames"
        )
    return np.ascontiguousarray(clip)


def _sound(clip: object, fetch: Fetch) -> Clip:
    """One channel of float32, and its sampling rate (None: the model's)."""
    rate: int | None = None
    if isinstance(clip, dict):
        _check_fields(clip, ("array", "data", "sampling_rate", "path"), "sound")
        if (rate := clip.get("sampling_rate")) is not None:
            rate = int(_rate(rate, "sound at {} samples per second", 10_000_000))
        clip = clip.get("array", clip.get("data"))
    if isinstance(clip, FILES):
        clip, rate = _decode_sound(read_bytes(clip, fetch))
    if isinstance(clip, torch.Tensor):
        clip = as_array(clip)
    array = np.asarray(clip) if isinstance(clip, list | tuple | np.ndarray) else None
    if array is None or array.ndim != 1 or not array.size or array.dtype.kind not in "fiu":
        raise ImageError(
            f"a {type(clip).__name__} is not sound; expected a file, or one row of samples from -1 "
            "to 1; {'array': ..., 'sampling_rate': ...} gives the rate"
        )
    if array.dtype.kind in "iu":
        array = array / float(np.iinfo(array.dtype).max)
    if not np.isfinite(array).all():
        raise ImageError("the sound holds values that are not numbers")
    return np.ascontiguousarray(array, dtype=np.float32), {"sampling_rate": rate}


def _decode_sound(data: bytes) -> tuple[np.ndarray, int]:
    soundfile = optional("soundfile", "audio")
    try:
        info = soundfile.info(io.BytesIO(data))
        if 4 * info.frames * info.channels > MAX_DECODED:
            raise ValueError(f"more than {MAX_DECODED} bytes of samples")
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (RuntimeError, ValueError) as error:
        raise ImageError(f"the sound cannot be decoded: {error}") from error
    return samples.mean(axis=1), int(rate)
