"""Finds pictures in typed text: dropped, quoted or escaped paths, `~`, `file://`, URLs.

A folder stands for the pictures in it, a PDF for its pages, `-` for standard input. Other words
stay text.
"""

from __future__ import annotations

import os
import re
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from keepsight.errors import InputError
from keepsight.system.suffixes import is_picture, kind_of

if TYPE_CHECKING:
    from PIL.Image import Image

Opened: TypeAlias = "tuple[str, str | bytes | Image]"  # a name to show, and a form to ask with
_MOST = 64  # pictures of one folder or PDF
_DPI = 150
_WORD = re.compile(r"'[^']*'|\"[^\"]*\"|(?:\\.|\S)+")
_AFTER = "?.,;:!)"  # punctuation after a path in a sentence


def split_pictures(line: str) -> tuple[list[str], str]:
    """The pictures that a line names, and the remaining question.

    Paths before the question, and after a finished sentence, are cut out; inside a sentence the
    file name stays.
    """
    whole = _path_of(line)
    if _is_picture(whole, alone=True):  # a dropped path with spaces
        return [whole], ""
    if "\0" not in whole and os.path.isfile(whole):  # else the model would be asked about its name
        raise InputError(f"{whole} is not a picture that is opened here; nothing was sent")
    found, text, end = list[str](), "", 0
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
    if (leading or os.sep in path) and is_picture(path):
        raise InputError(f"{path}: there is no such picture; nothing was sent")
    return None, ""


def _is_picture(path: str, alone: bool) -> bool:
    """Whether a word names pictures; a folder only if it cannot be part of a sentence."""
    if path.startswith(("http://", "https://")):
        return is_picture(urllib.parse.urlsplit(path).path) and not re.search(r"\s", path)
    if "\0" in path:
        return False
    if os.path.isdir(path):
        return alone and os.sep in path
    return is_picture(path) and os.path.isfile(path)


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


def open_pictures(typed: str) -> list[Opened]:
    """The pictures behind a typed name."""
    return pictures_at(_path_of(typed))


def pictures_at(path: str) -> list[Opened]:
    """The pictures behind a path on disk or an address."""
    if path == "-":
        from keepsight.media.pictures import size_of  # start-up time: imports Pillow

        data = sys.stdin.buffer.read()
        size_of(data, "standard input")
        return [("standard input", data)]
    if os.path.isdir(path):
        files = sorted(
            p for p in Path(path).iterdir() if is_picture(p.name) and kind_of(p.name) != "pdf"
        )
        if not files:
            raise InputError(f"{path}: the folder holds no picture")
        if len(files) > _MOST:
            raise InputError(
                f"{path} holds {len(files)} pictures, at most {_MOST} go into one question"
            )
        return [(str(file), str(file)) for file in files]
    if path.lower().endswith(".pdf") and os.path.isfile(path):
        from keepsight.encode.documents import draw_pages

        pages = draw_pages(path, _DPI, _MOST)
        return [(f"{path}#page={n}", page) for n, page in enumerate(pages, 1)]
    return [(path, path)]
