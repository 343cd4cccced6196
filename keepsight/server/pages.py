"""Pictures as the model gets them: shrunk where a cap says so, and the pages of a PDF.

Both are named by the bytes that were sent and by what is done to them, so that a picture or a page
that was seen before is neither decoded nor drawn again.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import Any

import PIL
from PIL import Image

from keepsight import keys
from keepsight.errors import ImageError
from keepsight.media import MAX_PIXELS, Source, decode_bytes
from keepsight.server.problems import ApiError, invalid

LOW = 512 * 512  # what `detail: "low"` comes to


def is_pdf(data: bytes) -> bool:
    """By its first bytes: names and types are what a client says."""
    return data[:1024].lstrip()[:5] == b"%PDF-"


def picture(data: bytes, cap: int | None, largest: int) -> bytes | Source:
    """A picture for the library, at most `cap` pixels large; only its header is read here."""
    width, height = _size(data)
    if width * height > largest:
        raise ApiError(
            400,
            f"an image is {width}x{height}, this server takes at most {largest} pixels; make it "
            "smaller first",
            param="messages",
            code="image_too_large",
        )
    if cap is None or width * height <= cap:
        return data
    name = keys.digest("shrunk image", data, cap, PIL.__version__)
    return Source(name, lambda: _shrunk(data, cap), "an image", [])


def _size(data: bytes) -> tuple[int, int]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                return image.size
    except Image.DecompressionBombError as error:
        raise ImageError(f"an image is refused as a possible decompression bomb: {error}") from None
    except Exception as error:  # PIL's readers raise almost anything on a damaged file
        raise ImageError(
            "an image cannot be read: it is not in a format that PIL knows, or damaged"
        ) from error


def _shrunk(data: bytes, cap: int) -> Image.Image:
    image = decode_bytes(data, "an image")
    scale = (cap / (image.width * image.height)) ** 0.5
    size = max(1, int(image.width * scale)), max(1, int(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS)


def pages(data: bytes, cap: int | None, dpi: int, most: int) -> Iterator[Source]:
    """The pages of a PDF, each drawn only if nobody knows it."""
    from keepsight.encode import documents  # the library is not thread-safe: one lock for all

    library = documents.pdfium()
    with documents.PDFIUM:
        try:
            document = library.PdfDocument(data)
        except library.PdfiumError:
            raise ImageError("a PDF cannot be opened: it is damaged, or needs a password") from None
        try:
            count = len(document)
        finally:
            document.close()
    if not 0 < count <= most:
        raise invalid("messages", f"a PDF has {count} pages; expected 1 to {most} in one request")
    name = keys.digest("pdf bytes", data, str(library.PDFIUM_INFO), PIL.__version__)
    for number in range(count):
        yield _page(data, name, number, cap, dpi)


def _page(data: bytes, name: str, number: int, cap: int | None, dpi: int) -> Source:
    label = f"page {number + 1} of a PDF"
    page = keys.digest("sent pdf page", name, number, dpi, cap)
    return Source(page, lambda: _drawn(data, number, cap, dpi, label), label, [])


def _drawn(data: bytes, number: int, cap: int | None, dpi: int, label: str) -> Image.Image:
    from keepsight.encode import documents

    library: Any = documents.pdfium()
    with documents.PDFIUM:
        document = library.PdfDocument(data)
        try:
            page = document[number]
            width, height = page.get_size()
            scale = dpi / 72
            if cap is not None:
                scale = min(scale, (cap / max(width * height, 1)) ** 0.5)
            area = width * height * scale * scale
            if not 1 <= area <= MAX_PIXELS:
                raise ImageError(f"{label} is {area:.0f} pixels large at {dpi} dpi")
            image: Image.Image = page.render(scale=scale, rev_byteorder=True).to_pil()
            return image.convert("RGB") if image.mode != "RGB" else image.copy()
        except library.PdfiumError:
            raise ImageError(f"{label} cannot be drawn") from None
        finally:
            document.close()
