"""The tour as a page: the frame of what `rich` recorded, and the check of the file it goes to.

The check comes before the tour, so PyTorch is not imported here.
"""

from __future__ import annotations

from pathlib import Path

from keepsight.errors import InputError
from keepsight.system.places import expanded

_MARK = "<!doctype html>\n<!-- a tour of keepsight demo -->\n"
PAGE = (
    _MARK
    + """<html lang=en>
<head>
<meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'">
<title>Keepsight: look once, remember</title>
<style>
body {{ color: {foreground}; background-color: {background}; }}
pre {{ font: .875rem/1.25 ui-monospace, Menlo, Consolas, monospace; }}
{stylesheet}
</style>
</head>
<body><pre>{code}</pre></body>
</html>
"""
)


def check_page(path: Path) -> None:
    """Before the tour, refuse a page that cannot be written, or an existing foreign file."""
    path = expanded(path)
    if path.is_dir() or not path.parent.is_dir():
        what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise InputError(f"--save {path}: {what}; name a file such as tour.html")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(_MARK)) != _MARK.encode():
                raise InputError(f"--save {path}: a file of that name is there; name a new one")
