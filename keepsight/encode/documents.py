"""PDF pages and videos as images.

A page is named by the document's bytes, its number and the resolution, so a known page is not drawn
again. The libraries for both formats are imported only here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import PIL
from PIL import Image

from keepsight import digests
from keepsight.encode.items import Item, broken
from keepsight.errors import Forked, ImageError
from keepsight.media.clips import open_clip
from keepsight.media.pictures import MAX_PIXELS
from keepsight.media.sources import Source, file_label, open_source
from keepsight.system.lock import FairLock
from keepsight.system.optional import optional

MAX_DOCUMENT = 1 << 30
MAX_PAGES = 100_000
_LOCKS: dict[int, FairLock] = {}  # of the PDF library, which is not thread-safe; by process
_POINTS = 72  # PDF points per inch


def pdfium() -> ModuleType:
    return optional("pypdfium2", "pdf")


def pdf_lock() -> FairLock:
    """This process's lock; refused where the library was at work when the process was forked."""
    me = os.getpid()
    if me not in _LOCKS:
        if any(lock.taken for lock in list(_LOCKS.values())):
            raise Forked("the PDF library")
        _LOCKS.setdefault(me, FairLock("the PDF library"))
    return _LOCKS[me]


class _Document:
    """An open PDF. Pages are drawn in any thread, one at a time."""

    def __init__(self, path: str) -> None:
        self._library, self._lock = pdfium(), pdf_lock()
        self.path = path
        try:
            if Path(path).stat().st_size > MAX_DOCUMENT:
                raise ImageError(f"{path} is larger than {MAX_DOCUMENT} bytes")
            data = Path(path).read_bytes()
        except OSError as error:
            raise ImageError(f"{path} cannot be read: {error.strerror}") from None
        self.name = digests.digest("pdf", data, self._version())
        try:
            with self._lock:
                self._open = self._library.PdfDocument(data)
                self.pages = len(self._open)
        except self._library.PdfiumError as error:
            hint = "; it is encrypted, save it without a password first" if _locked(error) else ""
            raise ImageError(f"{path} cannot be opened as a PDF: {error}{hint}") from None
        if not 0 < self.pages <= MAX_PAGES:
            raise ImageError(f"{path} has {self.pages} pages, expected 1 to {MAX_PAGES}")

    def _version(self) -> str:
        return f"{self._library.PDFIUM_INFO} {PIL.__version__}"

    def __del__(self) -> None:
        if hasattr(self, "_open"):  # the garbage collector may call this at any moment: never wait
            self._lock.leave(self._open.close)

    def draw(self, number: int, dpi: int) -> Image.Image:
        """Draw a page, counted from 0, as an RGB image."""
        label = f"{self.path}#page={number + 1}"
        try:
            with self._lock:
                page = self._open[number]
                try:
                    scale = dpi / _POINTS
                    width, height = (side * scale for side in page.get_size())
                    if not (width >= 1 and height >= 1 and width * height <= MAX_PIXELS):
                        raise ImageError(
                            f"{label} is {width:.0f}x{height:.0f} pixels at {dpi} dpi, expected 1 "
                            f"to {MAX_PIXELS} pixels; choose another dpi"
                        )
                    drawn: Image.Image = page.render(scale=scale, rev_byteorder=True).to_pil()
                    return drawn.convert("RGB") if drawn.mode != "RGB" else drawn.copy()
                finally:
                    page.close()
        except self._library.PdfiumError as error:
            raise ImageError(f"{label} cannot be drawn: {error}") from None

    def source(self, number: int, dpi: int) -> Source:
        """The source of a page; it is drawn only if it is not known yet."""
        name = digests.digest("pdf page", self.name, number, dpi)
        label = f"{self.path}#page={number + 1}"
        return Source(name, lambda: self.draw(number, dpi), label, [], file=file_label(label))


def _locked(error: Exception) -> bool:
    code = getattr(error, "err_code", None)
    return code == 4 or "assword" in str(error)  # FPDF_ERR_PASSWORD


def draw_pages(path: str, dpi: int, most: int) -> list[Image.Image]:
    """All pages of a PDF with at most `most` pages."""
    document = _Document(path)
    if document.pages > most:
        raise ImageError(f"{path} has {document.pages} pages, expected at most {most}")
    return [document.draw(number, dpi) for number in range(document.pages)]


def page_count(path: str) -> int | None:
    """The number of pages of a PDF, or None if it cannot be opened."""
    library = pdfium()
    with pdf_lock():
        try:
            document = library.PdfDocument(path)
        except (library.PdfiumError, OSError):
            return None
        try:
            return len(document)
        finally:
            document.close()


def pdf_items(path: str, place: str, dpi: int) -> Iterator[Item]:
    """The pages of a PDF, each as an image."""
    try:
        document = _Document(path)
    except ImageError as error:
        yield broken(path, place, error)
        return
    for number in range(document.pages):
        yield _page(document, number, place, dpi)


def _page(document: _Document, number: int, place: str, dpi: int) -> Item:
    spot = f"#page={number + 1}"
    return Item(document.path + spot, place + spot, lambda: document.source(number, dpi))


# -- videos --------------------------------------------------------------------------------------


def clip_items(path: str, place: str) -> Iterator[Item]:
    """A video as one medium, if the family takes videos."""
    optional("av", "video")
    yield Item(path, place, lambda: open_clip(path, "video"), modality="video")


def frame_items(path: str, place: str, fps: float) -> Iterator[Item]:
    """Frames of a video as images, `fps` per second."""
    optional("av", "video")
    due = 0.0
    try:
        for number, (frame, rate) in enumerate(_frames(path)):
            if number / rate + 1e-9 < due:
                continue
            due += 1 / fps
            yield _frame(frame, f"{path}#frame={number}", f"{place}#frame={number}")
    except ImageError as error:
        yield broken(path, place, error)


def _frame(frame: np.ndarray, name: str, place: str) -> Item:
    def opened() -> Source:
        return open_source(Image.fromarray(frame))

    return Item(name, place, opened, frame.nbytes)


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
