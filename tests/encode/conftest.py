"""What the tests of `encode` share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.encode_parts import png


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three pictures, two of them in folders of their own."""
    folder = tmp_path / "photos"
    (folder / "trip" / "day").mkdir(parents=True)
    for number, place in enumerate((folder, folder / "trip", folder / "trip" / "day")):
        (place / f"p{number}.png").write_bytes(png(number))
    return folder
