"""Small pictures of one form share calls of the tower, where a trial showed that no bit changes.

A trial costs some calls, so it waits until so many pictures of a form came that it will pay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from keepsight import digests
from keepsight.errors import TowerRan
from keepsight.media.video_steps import FeatureOrigin, Tensors
from keepsight.models.batch_trial import other_bits, why_not
from keepsight.models.families import Family, Pixels

logger = logging.getLogger(__name__)

SMALL = 1 << 19  # numbers of a picture's pixels, up to which a shared pass pays
MOST = 8  # pictures in a call
WORTH = 128  # of a form, before a trial pays: it takes as long as some 30 of them, for a fifth
_FORMS = 512  # that are remembered
Made = tuple[Tensors, str]


def is_small(pixels: Pixels) -> bool:
    """Whether a picture may gain from a shared pass."""
    tensors = pixels.tensors.values()
    few = all(t.is_floating_point() or t.numel() <= 64 for t in tensors)
    return few and pixels.modality == "image" and sum(t.numel() for t in tensors) <= SMALL


class SharedPasses:
    """How many pictures of which form go through one model's tower at once."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._met: dict[str, int] = {}  # pictures of each form
        self._found: dict[tuple[str, int], str] = {}  # what gives so many other bits, or nothing
        self.shared = 0  # pictures that shared a call
        self.outcomes: dict[str, str] = {}  # for people

    def form(self, pixels: Pixels, origin: FeatureOrigin) -> str:
        """All that a trial depends on; empty where the picture goes alone."""
        tensors = pixels.tensors
        if not is_small(pixels):
            return ""
        parts = [
            [name, str(t.dtype), list(t.shape), [] if t.is_floating_point() else t.tolist()]
            for name, t in sorted(tensors.items())
        ]
        made = (origin.weights, origin.settings, origin.of("image"))
        return digests.digest("form", parts, *made, torch.get_num_threads())

    def run(
        self, form: str, media: Sequence[Pixels], alone: Callable[[Pixels], Made]
    ) -> list[Made]:
        """The features of the first picture, and of those that shared its call or its trial."""
        count = self._count(form, len(media))
        if len(self._met) > _FORMS:
            for known in (self._met, self._found, self.outcomes):
                known.clear()
        if count > 1 and self._found.get((form, count)) == "":
            try:
                with torch.no_grad():
                    made = self._family.encode_together(media[:count])
            except TowerRan:
                raise
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                self._note(form, count, media[0], f"{type(error).__name__}: {error}")
                return [alone(media[0])]
            self.shared += count
            self._met[form] = self._met.get(form, 0) + count
            return made
        made = [alone(pixels) for pixels in media[:count]]
        self._met[form] = self._met.get(form, 0) + count
        while count > 1 and self._found.get((form, count)) is None:
            with torch.no_grad():
                why = other_bits(self._family, media[:count], [one for one, _ in made[:count]])
            self._note(form, count, media[0], why)
            count = 1 if not why else count // 2
        return made

    def _count(self, form: str, waiting: int) -> int:
        """The most that may go together, or whose trial pays."""
        pays = self._met.get(form, 0) + waiting
        count = 1 << min(waiting, MOST).bit_length() - 1
        while count > 1:
            found = self._found.get((form, count))
            if found == "" or (found is None and pays >= max(WORTH, 2 * count)):
                break
            count //= 2
        return 1 if count > 1 and why_not(self._family) else count

    def _note(self, form: str, count: int, pixels: Pixels, why: str) -> None:
        self._found[form, count] = why
        sizes = ", ".join(
            f"{name} {'x'.join(map(str, tensor.shape))}"
            for name, tensor in pixels.tensors.items()
            if tensor.is_floating_point()
        )
        said = f"other bits together: {why}" if why else "equal together"
        self.outcomes[f"{count} pictures of {sizes}"] = said
        logger.info("%d pictures of %s: %s", count, sizes, said)
