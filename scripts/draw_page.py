"""Takes the README's pictures of the page in a browser: docs/pictures/page-light.png and -dark.png.

python scripts/draw_page.py        needs playwright and Chromium (requirements-dev.txt)

A demo server on this machine, two pictures, two questions: the second answer remembers the first
picture. Run it again when the page has changed.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.page_browser import Page, browser  # noqa: E402
from support.server_harness import served  # noqa: E402

from keepsight.demo.scene import Scene  # noqa: E402

SIZE = {"width": 1120, "height": 720}
COLOURS = 128


def main() -> int:
    """Take both pictures."""
    with tempfile.TemporaryDirectory() as folder, served() as server:
        with browser(Path(folder)) as context:
            for scheme in ("light", "dark"):
                page = Page(context, server.url, size=SIZE, color_scheme=scheme)
                _talk(page)
                shot = page.tab.screenshot(animations="disabled")
                page.close()
                _write(shot, ROOT / "docs" / "pictures" / f"page-{scheme}.png")
    return 0


def _talk(page: Page) -> None:
    """Ask about one picture, then compare it with a second."""
    page.attach(Scene.of(color="red", shape="circle", background="white"), "circle.png")
    page.ask("Describe the picture.")
    page.attach(Scene.of(color="blue", shape="star", background="white"), "star.png")
    page.ask("Compare the two pictures.")
    page.tab.mouse.move(0, 0)


def _write(shot: bytes, path: Path) -> None:
    """As a small PNG: the page has few colours."""
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
