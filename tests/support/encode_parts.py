"""Pictures, archives, tables and documents for the tests of `encode`, made as other programs do."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from keepsight.demo.scene import COLORS, Scene
from keepsight.encode import Encoded, Item, ReadOptions, find, items

NAMES = list(COLORS)


def picture(number: int, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """One of any number of different pictures."""
    return Scene.of(color=NAMES[number % len(NAMES)], seed=number, size=size).draw()


def png(number: int, size: tuple[int, int] = (64, 64)) -> bytes:
    """The same as the bytes of a file."""
    out = io.BytesIO()
    picture(number, size).save(out, "PNG")
    return out.getvalue()


def tar(
    path: Path, members: Iterable[tuple[str, bytes | tarfile.TarInfo]], mode: str = "w"
) -> Path:
    """A tar archive with members of any names and kinds."""
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def special(name: str, kind: bytes, target: str = "") -> tuple[str, tarfile.TarInfo]:
    """A link or a device."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return name, info


def zipped(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """A zip archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def table(path: Path, columns: dict[str, list[Any]], **options: Any) -> Path:
    """A Parquet file."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def pdf(path: Path, pages: int = 2, size: tuple[float, float] = (72, 96)) -> Path:
    """A PDF with a rectangle on each page, another one each time."""
    return written(
        path, [(size, f"0.{n % 10} 0.5 0.2 rg 5 {5 + n} 30 40 re f") for n in range(pages)]
    )


def written(path: Path, pages: list[tuple[tuple[float, float], str]]) -> Path:
    """A PDF from the sizes of its pages, in points, and what is drawn on them."""
    kids = " ".join(f"{3 + 2 * n} 0 R" for n in range(len(pages)))
    bodies = ["<</Type/Catalog/Pages 2 0 R>>", f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>"]
    for number, ((width, height), drawing) in enumerate(pages):
        box = f"[0 0 {width} {height}]"
        bodies.append(f"<</Type/Page/Parent 2 0 R/MediaBox{box}/Contents {4 + 2 * number} 0 R>>")
        bodies.append(f"<</Length {len(drawing)}>>stream\n{drawing}\nendstream")
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(bodies, 1):
        places.append(len(out))
        out += f"{number} 0 obj{body}endobj\n".encode()
    start = len(out)
    out += f"xref\n0 {len(places) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{place:010} 00000 n \n".encode() for place in places)
    out += f"trailer<</Root 1 0 R/Size {len(places) + 1}>>\nstartxref\n{start}\n%%EOF".encode()
    path.write_bytes(out)
    return path


def film(path: Path, frames: int = 8, rate: int = 4) -> Path:
    """A video of pictures."""
    import av

    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_image(picture(number))))
        container.mux(stream.encode())
    return path


def read(*sources: Any, **reading: Any) -> list[Item]:
    """All items behind some sources."""
    column = reading.get("column", "image")
    return list(items(find(sources, column).pieces, ReadOptions(**reading)))


def opened(item: Item) -> str:
    """What comes of an item: the size of its image, or the error."""
    try:
        decoded = item.open().decode()
    except ValueError as error:
        return str(error)
    return f"{decoded.size[0]}x{decoded.size[1]}" if hasattr(decoded, "size") else "clip"


def statuses(results: Iterable[Encoded]) -> dict[str, str]:
    return {Path(result.image).name: result.status for result in results}


def towers(vlm: Any) -> tuple[int, int]:
    """How many images were encoded, and how many preprocessed."""
    counts = vlm.stats()["features"]
    return counts["encoded"], counts["preprocessed"]


def files(store: Path) -> dict[str, bytes]:
    """Every package file in a store, byte for byte."""
    named = (path for path in store.rglob("*.sight") if not path.name.startswith("."))
    return {path.name: path.read_bytes() for path in named}
