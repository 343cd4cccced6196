"""Every error Keepsight raises on purpose. May import nothing.

Each one says what was wrong, what was expected and what to do. They also inherit the matching
builtin, so `except ValueError` keeps working for people who never heard of this module.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import traceback
from collections.abc import Iterable


class KeepsightError(Exception):
    """Base of everything Keepsight raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the sentence, after the caller's own functions, but without the
        cell itself and without frames of this library."""
        calls = traceback.extract_tb(self.__traceback__)
        here = os.path.dirname(__file__)
        theirs = itertools.takewhile(lambda call: not call.filename.startswith(here), calls)
        own = [call for call in theirs if "IPython" not in call.filename][1:]
        return [*traceback.format_list(own), f"{type(self).__name__}: {self}"]


class InputError(KeepsightError, ValueError):
    """An argument of a call cannot be used."""


class ImageError(InputError):
    """One image cannot be used: not an image, truncated, an absurd size, a wrong dtype or shape."""


class MediaChanged(ImageError):
    """A file's content changed between the moment it was named and the moment it was encoded."""


class MessagesError(InputError):
    """The conversation has the wrong shape."""


class GrammarError(InputError):
    """A form of answers cannot be enforced. `place` is the caller's name for it."""

    def __init__(self, place: str, why: str) -> None:
        self.place = place
        super().__init__(f"{place}: {why}")


class PlaceholderMismatch(InputError):
    """The number of images does not match the number of placeholders."""


class PinsFull(InputError):
    """There is no room for this pin: pinned entries count against quota and budget."""

    @classmethod
    def over(cls, what: str, nbytes: int, limit: int, name: str) -> PinsFull:
        """The error for one tenant's own limit."""
        return cls(
            f"the {what} that are pinned would come to {nbytes} bytes, {name} is {limit}; unpin "
            "something, or allow more"
        )

    @classmethod
    def no_room(cls, what: str, name: str, limit: int) -> PinsFull:
        """The error for a limit that tenants share; it does not tell what others have."""
        return cls(
            f"there is no room to pin these {what}: {name} is {limit} bytes for all that is "
            "pinned; unpin something, or allow more"
        )


class PromptTooLong(InputError):
    """The prompt does not fit the model's context."""


class UnsupportedInput(InputError):
    """The input is understood, but cannot be served here."""


class UnfinishedAnswer(KeepsightError, ValueError):
    """An answer was cut before its form was complete."""


class UnknownOption(KeepsightError, TypeError):
    """An option is unknown."""

    @classmethod
    def refuse(
        cls, given: Iterable[str], known: Iterable[str], where: str, own: Iterable[str] = ()
    ) -> None:
        """Raise the error for the first of `given` that is not `known`, if there is one. `own` are
        those to list, if not all."""
        given, known = set(given), set(known)
        if not given <= known:
            raise cls.among(given, known, where, own)

    @classmethod
    def among(
        cls, given: Iterable[str], known: Iterable[str], where: str, own: Iterable[str] = ()
    ) -> UnknownOption:
        """The error for the first of `given` that is not `known`, with the nearest known name."""
        known = sorted(known)
        name = sorted(set(given) - set(known))[0]
        near = difflib.get_close_matches(name, [*known, *own], n=1)
        listed = ", ".join(own or known)
        hint = f"did you mean {near[0]!r}?" if near else f"known options: {listed}"
        return cls(f"{where} has no option {name!r}; {hint}")


class FileError(KeepsightError, ValueError):
    """A `.sight` or `.keep` file cannot be used."""


class NotKeepsightFile(FileError):
    """The file is not one of ours, or ends within its first eight bytes."""


class WrongFormatVersion(FileError):
    """Another version of the format wrote the file."""


class DamagedFile(FileError):
    """The file is cut off, was changed, or its header and content disagree."""


class WrongIdentity(FileError):
    """The file is intact but belongs to other weights, settings or another model."""

    def __init__(self, field: str, expected: object, found: object, what: str = "package") -> None:
        self.field, self.expected, self.found = field, expected, found
        super().__init__(
            f"this {what} does not fit: {field} is {found!r}, but this model has {expected!r}. "
            "Encode the image again with this model, or load the model it was made with."
        )


class MadeElsewhere(FileError):
    """Features were made on another device, in another dtype or by other versions, and the caller
    allows only ours."""


class StoreError(KeepsightError, OSError):
    """A store cannot be used."""


class NotStored(StoreError):
    """Some entries that were handed over are not in the store.

    `reasons` gives the reason by kind and key, for the first thousand of `count`; `broken` names a
    problem of the store itself, or is None.
    """

    reasons: dict[tuple[str, str], str] = {}  # noqa: RUF012
    count: int = 0
    broken: str | None = None

    @classmethod
    def of(
        cls, where: str, reasons: dict[tuple[str, str], str], count: int, broken: str | None = None
    ) -> NotStored:
        """The error for a store at an address."""
        first = next((f"{kind}/{key}: {why}" for (kind, key), why in reasons.items()), "an entry")
        error = cls(f"{where}: {count} not written, the first: {first}")
        error.reasons, error.count, error.broken = reasons, count, broken
        return error


class ModelError(KeepsightError, RuntimeError):
    """The model cannot be used in its present state."""


class ModelKeepsChanging(ModelError):
    """The model changes in each pass, so no result can be used."""


class TowerRan(ModelError):
    """A vision or audio encoder was about to run where only features were expected."""

    def __init__(self, tower: str, what: str = "") -> None:
        self.tower = tower
        super().__init__(
            f"the encoder {tower!r} was about to run inside blindfold(){what}: features were "
            "expected, from memory, the store or a package. Call encode() or prepare() before, or "
            "hand in a package"
        )


class UnsupportedModel(ModelError):
    """The model's family, or a kind of cache layer in it, has not been shown to be exact."""


class UnreadableWeights(ModelError):
    """A weight cannot be read, so the model has no fingerprint."""


class UpstreamChanged(ModelError):
    """Transformers or torch does something that Keepsight does not know."""


class Busy(KeepsightError, RuntimeError):
    """Too many requests are in flight. `retry_after` is an estimate in seconds."""

    def __init__(self, in_flight: int, retry_after: float) -> None:
        self.in_flight, self.retry_after = in_flight, retry_after
        super().__init__(
            f"{in_flight} requests are in flight, and no more are taken; try again in about "
            f"{retry_after:.0f} s"
        )


class Closed(KeepsightError, RuntimeError):
    """The object was used after `close()`."""


class Forked(Closed):
    """Used in a process that was forked from the one that made the object."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"this process was forked from the one that has {what}: what it has in memory may be "
            "half written here; load it again in this process, or start processes with the "
            "'spawn' method"
        )


class MissingExtra(KeepsightError, ImportError):
    """An optional library is missing."""

    @classmethod
    def named(cls, library: str, extra: str | None = None) -> MissingExtra:
        """The error that says what to install: everything in the extra, however keepsight itself
        was installed."""
        listed = _listed(extra) if extra else []
        target = " ".join(f'"{one}"' for one in listed) or library
        of_extra = f" (keepsight's extra {extra!r})" if extra else ""
        return cls(f"{library} is not installed{of_extra}; run: pip install {target}")


class WrongTorchvision(KeepsightError, ImportError):
    """The installed torchvision was built for another PyTorch; Transformers fails to import it."""

    @classmethod
    def behind(cls, error: BaseException | None) -> WrongTorchvision | None:
        """The error to raise in place of one that torchvision caused; None for any other."""
        while error is not None:
            if "torchvision::" in str(error):
                return cls(
                    f"the installed torchvision is for another build of PyTorch ({error}): remove "
                    "it with `pip uninstall torchvision`, since only videos need it, or install "
                    "both from one place, as in `pip install --force-reinstall torch torchvision "
                    "--index-url https://download.pytorch.org/whl/cpu`"
                )
            error = error.__cause__ or error.__context__
        return None


def _listed(extra: str) -> list[str]:
    """The libraries of an extra of this package; none if the package was not installed."""
    import importlib.metadata  # here: every start-up imports this file

    try:
        lines = importlib.metadata.requires("keepsight") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    wanted = re.compile(f"""extra == ['"]{re.escape(extra)}['"]""")
    return [line.partition(";")[0].strip() for line in lines if wanted.search(line)]
