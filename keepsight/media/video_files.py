"""Video files: named by their bytes, and decoded only if their frames are needed.

A video of an hour has a hundred thousand frames, and a model sees a few hundred. The checkpoint's
own rule chooses them (`sample_frames` of its video processor), and only these are held.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import TypeAlias

import numpy as np

from keepsight.errors import ImageError
from keepsight.kinds import Clip, Processor, Record
from keepsight.media.pictures import check_size
from keepsight.system import digests
from keepsight.system.optional import optional

MAX_FRAMES = 100_000
MAX_DECODED = 4 << 30  # bytes of one decoded video or sound: a small file may hold hours of nothing
DEFAULT_FPS = 24.0  # frame rate if unknown, as in Transformers
SAMPLED = "sampled"  # in a clip's metadata: its frames were already chosen
Choose: TypeAlias = Callable[[Record], Sequence[int]]  # in a video's metadata: its frames


class VideoFile:
    """The bytes of one video."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.name = digests.digest("video file", data, optional("av", "video").__version__)

    def decode(self, choose: Choose | None = None) -> Clip:
        """The chosen frames, or all, and what a processor needs to know about the video."""
        av = optional("av", "video")
        try:
            about = self._about(av)
            frames, total = self._frames(av, about, choose)
            if total != about["total_num_frames"]:  # the file claims more than it holds
                about |= {"total_num_frames": total, "duration": total / about["fps"]}
                frames, _ = self._frames(av, about, choose)
            return frames, about
        except (av.FFmpegError, IndexError, ValueError) as error:
            if isinstance(error, ImageError):
                raise
            raise ImageError(f"the video cannot be decoded: {error}") from error

    def _about(self, av: ModuleType) -> Record:
        with av.open(io.BytesIO(self._data)) as container:
            stream = container.streams.video[0]
            rate = float(stream.average_rate or DEFAULT_FPS)
            height, width = stream.codec_context.height, stream.codec_context.width
            check_size((width, height), "a frame of the video")
            total = int(stream.frames)
            if not total:  # some containers do not tell
                total = sum(bool(packet.size) for packet in container.demux(stream))
        return {
            "total_num_frames": total,
            "fps": rate,
            "duration": total / rate,
            "height": height,
            "width": width,
            "video_backend": "keepsight",
        }

    def _frames(
        self, av: ModuleType, about: Record, choose: Choose | None
    ) -> tuple[np.ndarray, int]:
        """The chosen frames, and the number of frames in the video as far as known."""
        total = about["total_num_frames"]
        wanted = list(range(total)) if choose is None else [int(one) for one in choose(about)]
        found: dict[int, np.ndarray] = {}
        needed, held, number = set(wanted), 0, -1
        with av.open(io.BytesIO(self._data)) as container:
            for number, frame in enumerate(container.decode(container.streams.video[0])):
                if number in needed:
                    found[number] = frame.to_ndarray(format="rgb24")
                    held += found[number].nbytes
                if held > MAX_DECODED or number >= MAX_FRAMES:
                    raise ImageError(
                        f"the video has more than {MAX_FRAMES} frames, or those that are looked at "
                        f"take more than {MAX_DECODED} bytes; cut it, or make it smaller"
                    )
                if len(found) == len(needed) and choose is not None:
                    break
            else:
                total = number + 1
        if not found:
            raise ImageError("the video holds no frames")
        about["frames_indices"] = wanted
        about[SAMPLED] = choose is not None
        return np.stack([found[one] for one in wanted if one in found]), total


def chooser(processor: Processor) -> Choose | None:
    """A checkpoint's rule for choosing frames of a video; None if it takes all frames."""
    part = getattr(processor, "video_processor", None)
    if part is None or not getattr(part, "do_sample_frames", False):
        return None
    settings = {name: getattr(part, name, None) for name in part.valid_kwargs.__annotations__}

    def choose(about: Record) -> Sequence[int]:
        video = SimpleNamespace(**about)  # in Transformers' form
        chosen: Sequence[int] = part.sample_frames(metadata=video, **settings)
        return chosen

    return choose
