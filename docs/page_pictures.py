"""Draws docs/images/page-light.png and page-dark.png: the page of `keepsight serve demo`, asked.

python docs/page_pictures.py            needs Chromium and what tests/page_browser.py needs

The pictures are made in a real browser on the demo model: nothing in them is drawn by hand.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

import keepsight as ks
from keepsight.demo.scene import Scene

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
SIZE = {"width": 860, "height": 940}
STAR = Scene.of(color="red", shape="star", scale="large", background="white", row="middle", seed=1)
RING = Scene.of(color="blue", shape="ring", scale="large", background="black", row="middle", seed=2)


def main() -> None:
    """Ask the demo model two questions on the page, and draw it in both looks."""
    sys.path.insert(0, str(ROOT / "tests"))
    from page_browser import Page, browser
    from server_harness import live

    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as profile,
        ks.load("demo") as vlm,
        live(vlm) as server,
        browser(Path(profile)) as context,
    ):
        page = Page(context, server.url, size=SIZE, reduced_motion="reduce")
        page.attach(STAR, "star.png")
        page.ask("What is in the picture?")
        page.attach(RING, "ring.png")
        page.ask("Compare the two pictures.")
        for look in ("light", "dark"):
            page.tab.emulate_media(color_scheme=look)
            write(page.tab, FOLDER / f"page-{look}.png")


def write(tab: Any, path: Path) -> None:
    """A picture of the window with at most 256 colours, so that it stays small."""
    with Image.open(io.BytesIO(tab.screenshot())) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
