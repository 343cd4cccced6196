"""The tested versions of Transformers and torch, and a check of what newer ones pass to us.

Functions and objects of ours replace some of Transformers'. A newer version may pass arguments they
do not know, and no argument may be silently ignored.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import transformers

from keepsight.errors import UpstreamChanged

# The newest versions that all tests ran with, and the oldest.
TESTED = {"transformers": "5.24.0", "torch": "2.13.0"}
OLDEST_TESTED = {"transformers": "5.23.0", "torch": "2.13.0"}


def refuse_unknown(
    place: str, more: Sequence[object], options: Mapping[str, object], known: Container[str] = ()
) -> None:
    """Refuse arguments that Transformers passes to `place`, which is ours, and that ours does not
    know.

    `known` are names that change nothing there; nor does a value of None or False.
    """
    asked = [name for name, value in options.items() if value is not None and value is not False]
    unknown = [name for name in asked if name not in known]
    if unknown or more:
        what = f"an argument {unknown[0]!r}" if unknown else f"{len(more)} arguments more"
        raise UpstreamChanged(
            f"transformers {transformers.__version__} passes {what} to {place}, which Keepsight "
            "replaces and which does not know it; Keepsight was tested with up to "
            f"{TESTED['transformers']}. Install that version, or a newer Keepsight"
        )
