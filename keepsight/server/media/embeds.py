"""Features in place of pictures: the bytes of `.sight` files, uploaded or in the body itself.

A bare tensor does not say which model, settings or grid it belongs to, so it is refused. A package
says all of it, and the library compares it with the served model.
"""

from __future__ import annotations

from keepsight.errors import FileError
from keepsight.formats import package, tensorfile
from keepsight.formats.package import Package
from keepsight.kinds import Record
from keepsight.server.api.unused import Unused
from keepsight.server.errors import ApiError, refused
from keepsight.server.media import parts

_ALONE = (
    "a tensor alone has no identity; send the bytes of a .sight file as base64 or a data URI, or "
    "the id of an uploaded one: it holds features, grid and identity"
)
_SIZES = ("detail", "min_pixels", "max_pixels", "mm_processor_kwargs")


def is_package(data: bytes) -> bool:
    """Whether bytes are a package, by their start: a header length and its beginning."""
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= tensorfile.MAX_HEADER


def package_in(data: bytes, place: str, part: parts.PicturePart | None, unused: Unused) -> Package:
    """The package of an image, with every byte checked."""
    try:
        found = Package.from_record(
            *tensorfile.parse(data, "the file", package.KIND, package.FORMAT), where="the file"
        )
    except FileError as error:
        what = f"{place}: {error}"
        raise ApiError(400, what, param=place, code="invalid_package") from error
    if found.modality != "image":
        raise refused(place, f"a package of {found.modality!r}; expected an image package")
    for name in _SIZES:
        if getattr(part, name, None) is not None:
            unused.add(f"{place}.{name}", "features are as they were made")
    return found


def text_of(part: parts.EmbedsPart, place: str) -> str:
    """The file in a part of type image_embeds, as text."""
    if not isinstance(part.image_embeds, str) or not part.image_embeds:
        raise refused(f"{place}.image_embeds", _ALONE)
    return part.image_embeds


def features_only(found: list[Record], place: str) -> list[Record]:
    """Refuse a file that should be a package and is not."""
    if not all(isinstance(one.get("image"), Package) for one in found):
        raise refused(f"{place}.image_embeds", _ALONE)
    return found
