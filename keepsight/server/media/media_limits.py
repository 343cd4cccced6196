"""The decoded size of a video or a sound, determined without decoding it.

A few bytes can hold hours of nothing, so what would not fit is refused before it is decoded.
"""

from __future__ import annotations

import io

from keepsight.errors import ImageError
from keepsight.media.video_files import MAX_FRAMES
from keepsight.server.errors import ApiError
from keepsight.system.optional import optional

_VIDEO_MAGIC = (b"\x1aE\xdf\xa3", b"RIFF")


def is_video(data: bytes) -> bool:
    """Whether bytes are a video, by their start: clients may claim any name and type."""
    if data[4:8] == b"ftyp":
        return data[8:11] not in (b"avi", b"hei", b"mif", b"msf")  # AVIF and HEIF are pictures
    return data[:4] == _VIDEO_MAGIC[0] or (data[:4] == _VIDEO_MAGIC[1] and data[8:11] == b"AVI")


def check_video(data: bytes, most: int) -> None:
    """Refuse a video whose frames would take more than `most` bytes."""
    av = optional("av", "video")
    try:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            frame = 3 * stream.codec_context.width * stream.codec_context.height
            size = frames = 0
            for packet in container.demux(stream):
                frames += bool(packet.size)
                size = frames * frame
                if size > most or frames > MAX_FRAMES:
                    raise _too_large("a video", most)
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise ImageError(f"a video cannot be read: {type(error).__name__}") from None


def check_sound(data: bytes, most: int) -> None:
    """Refuse a sound whose samples would take more than `most` bytes."""
    soundfile = optional("soundfile", "audio")
    try:
        info = soundfile.info(io.BytesIO(data))
    except (RuntimeError, ValueError) as error:
        raise ImageError(f"a sound cannot be read: {type(error).__name__}") from None
    if 4 * info.frames * info.channels > most:
        raise _too_large("a sound", most)


def _too_large(what: str, most: int) -> ApiError:
    return ApiError(
        400,
        f"{what} would take more than {most} bytes when decoded; send a shorter or smaller one",
        param="messages",
        code="media_too_large",
    )
