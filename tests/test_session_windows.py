"""Sessions of models whose layers keep rows of several shapes, some behind a window."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import build, picture

import keepsight as ks


@pytest.mark.parametrize("kind", ["gemma4", "gemma3_sliding", "sliding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_saved_session_goes_on_elsewhere(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    with ks.wrap(*build(kind, dtype)) as vlm:
        session = vlm.session()
        session.ask("Look at it.", picture(1), max_new_tokens=4)
        session.save(tmp_path / "a.keep")
        wanted = session.ask("And now?", max_new_tokens=4)
    with ks.wrap(*build(kind, dtype)) as vlm:
        session = vlm.resume(tmp_path / "a.keep")
        found = session.ask("And now?", max_new_tokens=4)
        assert found.tokens == wanted.tokens and not session.notes
        assert found.usage.cached_tokens > 9 and not found.usage.images_encoded
