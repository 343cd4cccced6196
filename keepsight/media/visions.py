"""What is done with several pictures at once, or with the encoders of several tenants.

Pictures that wait are named before the first of them is encoded, so that small ones share a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keepsight.formats.package import Package
from keepsight.kinds import Record
from keepsight.media.features import COUNTS, Vision
from keepsight.media.medium import Medium
from keepsight.media.naming import Inspected
from keepsight.media.shared_passes import MOST
from keepsight.models.tower_pieces import TowerParts


def feature_stats(visions: Iterable[Vision]) -> Record:
    """How often what was done for some tenants, which parts of a tower ran in pieces, and which
    pictures share its calls."""
    counts, parts, shared = dict.fromkeys(COUNTS, 0), TowerParts(), 0
    tried: dict[str, str] = {}
    for vision in visions:
        counts = {name: counts[name] + n for name, n in vision.counts.items()}
        parts.add(vision.parts)
        shared += vision.tower.shared_passes.shared
        tried |= vision.tower.shared_passes.outcomes
    return {
        **counts,
        "together": shared,
        "tower_parts": parts.to_dict(),
        "tried_together": tried,
    }


def expect(vision: Vision, looks: Iterable[Inspected]) -> list[Medium]:
    """Media that come next, whose pixels wait. They are learnt each in its turn."""
    media = []
    for looked in looks:
        if looked.pixels is not None:
            media.append(vision.medium_of(looked))
            vision.tower.expect(media[-1], looked.pixels)
    return media


def encode_all(vision: Vision, images: Sequence[object]) -> list[Package]:
    """The packages of several images: small ones that wait together may share a pass."""
    found = []
    for start in range(0, len(images), MOST):
        media = [vision.name_any(image) for image in images[start : start + MOST]]
        found += [vision.handed_out(one, media[n + 1 :]) for n, one in enumerate(media)]
    return found
