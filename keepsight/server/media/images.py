"""Pictures for the model: shrunk to a size limit if given; and the pages of a PDF.

Both are named by the bytes sent and by what is done to them. So a known picture or page is neither
decoded nor drawn again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import PIL
from PIL import Image

from keepsight import digests
from keepsight.errors import ImageError
from keepsight.kinds import Options
from keepsight.media.pictures import MAX_PIXELS, size_of
from keepsight.media.sources import Source, decode_bytes
from keepsight.server.api.unused import Unused
from keepsight.server.errors import ApiError, invalid, refused

LOW = 512 * 512  # the limit for `detail: "low"`


@dataclass(frozen=True)
class SentImage:
    """The size of a picture for the model: a limit in pixels, or options of the processor."""

    most: int | None = None
    options: tuple[tuple[str, object], ...] = ()


class ImageSizes:
    """How the model's processor sizes pictures, and which limits requests may set."""

    def __init__(self, image_processor: object, given: Options) -> None:
        """`given`: the processor options that the server was started with."""
        known = getattr(getattr(image_processor, "valid_kwargs", None), "__annotations__", {})
        size = dict(given.get("size") or getattr(image_processor, "size", None) or {})
        self._least = given.get("min_pixels") or size.get("shortest_edge") or 0
        self._most = given.get("max_pixels") or size.get("longest_edge") or 0
        self._older = [(name, None) for name in ("min_pixels", "max_pixels") if name in given]
        self.by_pixels = {"min_pixels", "max_pixels"} <= set(known) and self._most > 0

    def shown(self, least: int | None, most: int | None, place: str, unused: Unused) -> SentImage:
        """The size for a request's limits: the processor's own rule with these limits."""
        if least is not None and most is not None and least > most:
            raise invalid(place, f"{place}: min_pixels {least} is more than max_pixels {most}")
        if not self.by_pixels:
            if least is not None:
                unused.add(f"{place}.min_pixels", "this model's processor has its own sizes")
            return SentImage(most)
        if least is None and most is None:
            return SentImage()
        if least is not None and least > self._most:
            why = f"{least} pixels; this server shows at most {self._most} of a picture"
            raise refused(f"{place}.min_pixels", why)
        most = self._most if most is None else min(most, self._most)
        least = min(self._least, most) if least is None else least
        size = {"shortest_edge": least, "longest_edge": most}
        return SentImage(most, (("size", size), *self._older))


def is_pdf(data: bytes) -> bool:
    """Whether bytes are a PDF, by their start: clients may claim any name and type."""
    return data[:1024].lstrip()[:5] == b"%PDF-"


def picture(data: bytes, shown: SentImage, largest: int) -> bytes | Source:
    """A picture for the library, in the size to be shown; only its header is read here."""
    width, height = size_of(data, "it")
    if width * height > largest:
        raise _too_large(f"an image is {width}x{height}", largest, "make it smaller first")
    if shown.options:
        name = digests.digest("image with options", data, dict(shown.options), PIL.__version__)
        decode = functools.partial(decode_bytes, data, "an image")
        return Source(name, decode, "an image", [], options=shown.options)
    cap = shown.most
    if cap is None or width * height <= cap:
        return data
    name = digests.digest("shrunk image", data, cap, PIL.__version__)
    return Source(name, lambda: _shrunk(data, cap), "an image", [])


def _shrunk(data: bytes, cap: int) -> Image.Image:
    image = decode_bytes(data, "an image")
    scale = (cap / (image.width * image.height)) ** 0.5
    size = max(1, int(image.width * scale)), max(1, int(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS)


def _too_large(what: str, largest: int, hint: str) -> ApiError:
    return ApiError(
        400,
        f"{what}, this server takes at most {largest} pixels; {hint}",
        param="messages",
        code="image_too_large",
    )


def pages(data: bytes, shown: SentImage, dpi: int, most: int, largest: int) -> Iterator[Source]:
    """The pages of a PDF, each at most `largest` pixels, drawn only if not yet known."""
    from keepsight.encode import documents  # the library is not thread-safe: one lock for all

    library, cap = documents.pdfium(), shown.most
    with documents.pdf_lock():
        try:
            document = library.PdfDocument(data)
        except library.PdfiumError:
            raise ImageError("a PDF cannot be opened: it is damaged, or needs a password") from None
        try:
            count = len(document)
            if not 0 < count <= most:
                what = f"a PDF has {count} pages; expected 1 to {most} in one request"
                raise invalid("messages", what)
            for number in range(count):
                _check_page(document.get_page_size(number), number, cap, dpi, largest)
        finally:
            document.close()
    name = digests.digest("pdf bytes", data, str(library.PDFIUM_INFO), PIL.__version__)
    for number in range(count):
        yield dataclasses.replace(_page(data, name, number, cap, dpi), options=shown.options)


def _scale(size: tuple[float, float], cap: int | None, dpi: int) -> float:
    """Pixels per point of a page, so that the picture stays below the limit."""
    scale = dpi / 72
    return scale if cap is None else min(scale, (cap / max(size[0] * size[1], 1)) ** 0.5)


def _check_page(
    size: tuple[float, float], number: int, cap: int | None, dpi: int, largest: int
) -> None:
    scale = _scale(size, cap, dpi)
    width, height = (max(1, round(side * scale)) for side in size)
    if width * height > largest:
        what = f"page {number + 1} of a PDF is {width}x{height} at {dpi} dpi"
        raise _too_large(what, largest, "with max_pixels it is drawn smaller")


def _page(data: bytes, name: str, number: int, cap: int | None, dpi: int) -> Source:
    label = f"page {number + 1} of a PDF"
    page = digests.digest("sent pdf page", name, number, dpi, cap)
    return Source(page, lambda: _drawn(data, number, cap, dpi, label), label, [])


def _drawn(data: bytes, number: int, cap: int | None, dpi: int, label: str) -> Image.Image:
    from keepsight.encode import documents

    library = documents.pdfium()
    with documents.pdf_lock():
        document = library.PdfDocument(data)
        try:
            page = document[number]
            width, height = page.get_size()
            scale = _scale((width, height), cap, dpi)
            area = width * height * scale * scale
            if not 1 <= area <= MAX_PIXELS:
                raise ImageError(f"{label} is {area:.0f} pixels large at {dpi} dpi")
            # In the library's own memory, because Python-made buffers block other threads.
            maker = library.PdfBitmap.new_foreign
            bitmap = page.render(scale=scale, rev_byteorder=True, bitmap_maker=maker)
            image: Image.Image = bitmap.to_pil()  # it copies RGB, and shares other formats
            return image if image.mode == "RGB" else image.convert("RGB")
        except library.PdfiumError:
            raise ImageError(f"{label} cannot be drawn") from None
        finally:
            document.close()
