"""Finds pictures in typed text: dropped, quoted or escaped paths, `~`, `file://`, URLs.

A folder stands for the pictures in it, a PDF for its pages. Other words stay text.
"""

from __future__ import annotations

import os
import re
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from keepsight.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {
    ".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif",
    ".heic", ".heif", ".pdf", ".sight",
}  # fmt: skip
MOST = 64  # most pictures of one folder or PDF
_DPI = 150
_WORD = re.compile(r"'[^']*'|\"[^\"]*\"|(?:\\.|\S)+")
_AFTER = "?.,;:!)"  # punctuation after a path in a sentence


def split_pictures(line: str) -> tuple[list[str], str]:
    """The pictures that a line names, and the remaining question.

    Paths before the question, and after a finished sentence, are cut out; inside a sentence the
    file name stays.
    """
    if _is_picture(_path_of(line), alone=True):  # a dropped path with spaces
        return [_path_of(line)], ""
    _check_not_a_file(_path_of(line))
    found: list[str] = []
    text = ""
    end = 0
    for word in _WORD.finditer(line):
        before = text + line[end : word.start()]
        leading = not before.strip()
        path, after = _split_word(word[0], leading)
        if path is None:
            text = before + word[0]
        else:
            found.append(path)
            alone = not after and (leading or before.rstrip()[-1] in ".?!:")
            text = before if alone else before + Path(path).name + after
        end = word.end()
    return found, (text + line[end:]).strip()


def _split_word(word: str, leading: bool) -> tuple[str | None, str]:
    """The picture in one word, and the punctuation after it."""
    bare = word.rstrip(_AFTER)
    for part in (word, bare):
        path = _path_of(part)
        if part and _is_picture(path, leading):
            return path, word[len(part) :]
    path = _path_of(bare)
    if (leading or os.sep in path) and Path(path).suffix.lower() in SUFFIXES:
        raise InputError(f"{path}: there is no such picture; nothing was sent")
    return None, ""


def _check_not_a_file(path: str) -> None:
    """Refuse a dropped file that is no picture: otherwise the model would be asked about its
    name."""
    if "\0" not in path and os.path.isfile(path):
        raise InputError(f"{path} is not a picture that is opened here; nothing was sent")


def _is_picture(path: str, alone: bool) -> bool:
    """Whether a word names pictures; a folder only if it cannot be part of a sentence."""
    suffix = Path(urllib.parse.urlsplit(path).path if "://" in path else path).suffix.lower()
    if path.startswith(("http://", "https://")):
        return suffix in SUFFIXES and not re.search(r"\s", path)
    try:
        if os.path.isdir(path):
            return alone and os.sep in path
        return suffix in SUFFIXES and os.path.isfile(path)
    except ValueError:  # a null character
        return False


def _path_of(word: str) -> str:
    """A path as on disk: without quotes, escapes, `~` and `file://`."""
    word = word.strip()
    quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "'\""
    if quoted:
        word = word[1:-1]
    if word.startswith("file://"):
        return urllib.request.url2pathname(urllib.parse.urlsplit(word).path)
    if not quoted and os.sep == "/" and "://" not in word:
        word = re.sub(r"\\(.)", r"\1", word)
    return os.path.expanduser(word)


def open_pictures(name: str) -> list[tuple[str, str | Image]]:
    """The pictures behind a typed name, in a form for the library, each with a name to show."""
    return pictures_at(_path_of(name))


def pictures_at(path: str) -> list[tuple[str, str | Image]]:
    """The same for a path on disk."""
    if os.path.isdir(path):
        files = sorted(p for p in Path(path).iterdir() if p.suffix.lower() in SUFFIXES - {".pdf"})
        _bound(path, len(files))
        return [(str(file), str(file)) for file in files]
    if path.lower().endswith(".pdf") and os.path.isfile(path):
        from keepsight.encode.documents import draw_pages

        pages = draw_pages(path, _DPI, MOST)
        return [(f"{path}#page={n}", page) for n, page in enumerate(pages, 1)]
    return [(path, path)]


def _bound(path: str, count: int) -> None:
    if not count:
        raise InputError(f"{path}: the folder holds no picture")
    if count > MOST:
        raise InputError(f"{path} holds {count} pictures, at most {MOST} go into one question")
