"""PDF pages and videos as images.

A page is named by the document's bytes, its number and the resolution, so a known page is not drawn
again. The libraries for both formats are imported only here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import PIL
from PIL import Image

from keepsight.encode.items import At, Item, broken
from keepsight.errors import ImageError
from keepsight.media.clips import open_clip
from keepsight.media.pictures import MAX_PIXELS
from keepsight.media.sources import Source, file_label, open_source
from keepsight.system import digests
from keepsight.system.lock import FairLock
from keepsight.system.optional import optional

MAX_DOCUMENT = 1 << 30
MAX_PAGES = 100_000
POINTS = 72  # PDF points per inch


def pdfium() -> ModuleType:
    return optional("pypdfium2", "pdf")


def pdf_lock() -> FairLock:
    """This process's lock of the PDF library, which is not thread-safe."""
    return _lock_of(os.getpid())


@functools.cache
def _lock_of(process: int) -> FairLock:
    return FairLock("the PDF library")


class Document:
    """An open PDF. Pages are drawn in any thread, one at a time."""

    def __init__(self, path: str, data: bytes | None = None) -> None:
        """A file; or bytes that errors call `path`, whose giver limits their size and pages."""
        self._library, self._lock, self.path = pdfium(), pdf_lock(), path
        from_file = data is None
        try:
            if data is None:
                if Path(path).stat().st_size > MAX_DOCUMENT:
                    raise ImageError(f"{path} is larger than {MAX_DOCUMENT} bytes")
                data = Path(path).read_bytes()
            with self._lock:
                self._open = self._library.PdfDocument(data)
                self.pages = len(self._open)
        except OSError as error:
            raise ImageError(f"{path} cannot be read: {error.strerror}") from None
        except self._library.PdfiumError as error:
            hint = (
                "; it is encrypted, save it without a password" if "assword" in str(error) else ""
            )
            raise ImageError(f"{path} cannot be opened as a PDF: {error}{hint}") from None
        if from_file and not 0 < self.pages <= MAX_PAGES:
            raise ImageError(f"{path} has {self.pages} pages, expected 1 to {MAX_PAGES}")
        self._data = data

    def __del__(self) -> None:
        if hasattr(self, "_open"):  # the garbage collector may call this at any moment: never wait
            self._lock.leave(self._open.close)

    @functools.cached_property
    def name(self) -> str:
        made_by = f"{self._library.PDFIUM_INFO} {PIL.__version__}"
        return digests.digest("pdf", self._data, made_by)

    def size(self, number: int) -> tuple[float, float]:
        """Width and height of a page in points."""
        try:
            with self._lock:
                width, height = self._open.get_page_size(number)
        except self._library.PdfiumError as error:
            raise ImageError(f"page {number + 1} of {self.path} is damaged: {error}") from None
        return width, height

    def draw(self, number: int, dpi: float) -> Image.Image:
        """Draw a page, counted from 0, as an RGB image."""
        label, scale = f"{self.path}#page={number + 1}", dpi / POINTS
        try:
            with self._lock:
                page = self._open[number]
                try:
                    width, height = (side * scale for side in page.get_size())
                    if min(width, height) < 1 or width * height > MAX_PIXELS:
                        raise ImageError(
                            f"{label} is {width:.0f}x{height:.0f} pixels at {dpi:.0f} dpi, "
                            f"expected 1 to {MAX_PIXELS} pixels; choose another dpi"
                        )
                    # In the library's own memory: buffers that Python makes block other threads.
                    maker = self._library.PdfBitmap.new_foreign
                    drawn = page.render(scale=scale, rev_byteorder=True, bitmap_maker=maker)
                    image: Image.Image = drawn.to_pil()  # it copies RGB, and shares other formats
                    return image if image.mode == "RGB" else image.convert("RGB")
                finally:
                    page.close()
        except self._library.PdfiumError as error:
            raise ImageError(f"{label} cannot be drawn: {error}") from None

    def source(self, number: int, dpi: int) -> Source:
        """The source of a page; it is drawn only if it is not known yet."""
        name = digests.digest("pdf page", self.name, number, dpi)
        label = f"{self.path}#page={number + 1}"
        return Source(name, lambda: self.draw(number, dpi), label, [], file=file_label(label))


def draw_pages(path: str, dpi: int, most: int) -> list[Image.Image]:
    """All pages of a PDF with at most `most` pages."""
    document = Document(path)
    if document.pages > most:
        raise ImageError(f"{path} has {document.pages} pages, expected at most {most}")
    return [document.draw(number, dpi) for number in range(document.pages)]


def page_count(path: str) -> int | None:
    """The number of pages of a PDF, or None if it cannot be opened."""
    library = pdfium()
    try:
        with pdf_lock(), library.PdfDocument(path) as document:
            return len(document)
    except (library.PdfiumError, OSError):
        return None


def pdf_items(at: At, dpi: int) -> Iterator[Item]:
    """The pages of a PDF, each as an image."""
    try:
        document = Document(at.name)
    except ImageError as error:
        yield broken(at, error)
        return
    for number in range(document.pages):
        opened = functools.partial(document.source, number, dpi)
        yield Item(*at.spot(f"page={number + 1}"), opened)


def video_items(at: At, fps: float | None) -> Iterator[Item]:
    """A video as one medium, if the family takes videos; or `fps` frames a second as images."""
    optional("av", "video")
    if fps is None:
        yield Item(*at, lambda: open_clip(at.name, "video"), modality="video")
        return
    due = 0.0
    try:
        for number, (frame, rate) in enumerate(_frames(at.name)):
            if number / rate + 1e-9 >= due:
                due += 1 / fps
                opened = functools.partial(_source, frame)
                yield Item(*at.spot(f"frame={number}"), opened, frame.nbytes)
    except ImageError as error:
        yield broken(at, error)


def _source(frame: np.ndarray) -> Source:
    return open_source(Image.fromarray(frame))


def _frames(path: str) -> Iterator[tuple[np.ndarray, float]]:
    av = optional("av", "video")
    try:
        with av.open(path) as container:
            stream = container.streams.video[0]
            rate = float(stream.average_rate or 24.0)
            for frame in container.decode(stream):
                if frame.width * frame.height > MAX_PIXELS:
                    raise ImageError(f"{path}: a frame of more than {MAX_PIXELS} pixels")
                yield frame.to_ndarray(format="rgb24"), rate
    except (av.FFmpegError, IndexError, ValueError, OSError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"{path} cannot be decoded as a video: {error}") from error
