"""The versions of Transformers and torch that were tested, and what newer ones hand over.

Functions and objects of ours stand in the places of some of upstream's. A newer version may call
them with more than they know, and nothing that is asked for may be passed over in silence.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import transformers
from packaging.version import InvalidVersion, Version

from keepsight.errors import UpstreamChanged

# The newest versions that all tests were run with, and the oldest.
TESTED = {"transformers": "5.23.0", "torch": "2.13.0"}
OLDEST_TESTED = {"transformers": "5.23.0", "torch": "2.13.0"}


def is_newer_than_tested(version: str) -> bool:
    """Whether a Transformers of this version is newer than any that the tests were run with, or of
    a version that cannot be compared."""
    try:
        return Version(Version(version).base_version) > Version(TESTED["transformers"])
    except InvalidVersion:
        return True


def newer_than_tested() -> bool:
    """Whether this Transformers is newer than any that the tests were run with."""
    return is_newer_than_tested(transformers.__version__)


def refuse_unknown(
    place: str, more: Sequence[object], options: Mapping[str, object], known: Container[str] = ()
) -> None:
    """Refuse what upstream hands to `place`, which is ours, and ours does not know.

    `known` are names that change nothing there; nor does a value of None or False.
    """
    asked = [name for name, value in options.items() if value is not None and value is not False]
    unknown = [name for name in asked if name not in known]
    if unknown or more:
        what = f"an argument {unknown[0]!r}" if unknown else f"{len(more)} arguments more"
        raise UpstreamChanged(
            f"transformers {transformers.__version__} hands {what} to {place}, which Keepsight "
            f"puts in the place of its own and which does not know it; Keepsight was tested with "
            f"up to {TESTED['transformers']}. Install that version, or a newer Keepsight"
        )
