"""Every private thing of Transformers and torch that Keepsight uses, and what happens without it.

What upstream promises to nobody may be gone in its next version. So each such name is looked up
here, when it is needed and not when Keepsight is imported. Where there is another way it is taken;
where there is none an error says what is missing, from which version, and what it is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from keepsight.errors import UpstreamChanged

# The newest versions that all tests were run with.
TESTED = {"transformers": "5.23.0", "torch": "2.13.0"}


def needed(owner: object, name: str, use: str) -> Any:
    """What `owner` calls `name`, or an error that says what it is missed for."""
    found = getattr(owner, name, None)
    if found is None:
        where = getattr(owner, "__name__", None) or type(owner).__name__
        here = f"Transformers {transformers.__version__}"
        raise UpstreamChanged.named(f"{where}.{name}", use, here, TESTED["transformers"])
    return found


# -- text ------------------------------------------------------------------------------------------


def encode_as_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text in which no added token is found; spelled out where upstream cannot say."""
    encode = getattr(tokenizer, "_encode_without_added_tokens", None)
    if encode is not None:
        return list(encode(text))
    return [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]


def plain_data(value: Any) -> Any:
    """Data as a chat template gets to see it: numbers, strings, lists and records."""
    module = transformers.utils.chat_template_utils
    convert = getattr(module, "_plain_template_data", None)
    if convert is None and not _is_plain(value):
        convert = needed(module, "_plain_template_data", "to render messages with objects in them")
    return value if convert is None else convert(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def tool_schema(tool: Any) -> Any:
    """A tool as a record, from a record or a function with type hints and a docstring."""
    return tool if isinstance(tool, dict) else transformers.utils.get_json_schema(tool)


# -- files -----------------------------------------------------------------------------------------


def checkpoint_file(path: str, file: str, options: dict[str, Any]) -> str | None:
    """Where a file of a checkpoint lies, fetched if need be; None where the checkpoint has none."""
    given = {**options, "_raise_exceptions_for_missing_entries": False}
    found: str | None = transformers.utils.cached_file(path, file, **given)
    return found
