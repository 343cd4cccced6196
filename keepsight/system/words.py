"""The values of options that are words; others are refused before anything slow is imported.

The rooms that use an option take its list from here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from keepsight.errors import InputError, UnknownOption, UnsupportedInput

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
RUNTIMES = ("torch", "onnx", "openvino", "mlx", "auto")
EXPORTS = ("onnx", "openvino")
WEIGHTS = ("int8", "int4")
TORCH_WEIGHTS = ("int8",)
CODECS = ("exact", "bf16", "int8")

_OF_TORCH = ("float", "half", "double")  # other names of the same
_SHORT = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp64": "float64"}
_SHORT |= dict.fromkeys(("fp16", "f16"), "float16")


def check_text(text: str, what: str) -> None:
    """Refuse a text with half of a surrogate pair in it, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!r} at character {error.start}"
        raise InputError(f"{what} is no Unicode: {half} is half of a surrogate pair") from None


def check_dtype(name: str) -> None:
    """Refuse an unknown dtype."""
    if name in DTYPES or name in _OF_TORCH:
        return
    near = _SHORT.get(name.lower()) or next(iter(difflib.get_close_matches(name, DTYPES, 1)), None)
    hint = f"did you mean {near!r}?" if near else f"use {_listed(DTYPES[:-1])}"
    raise InputError(f"{name!r} is not a dtype; {hint}")


def check_runtime(name: str) -> None:
    """Refuse an unknown runtime."""
    UnknownOption.refuse([name], RUNTIMES, "runtime")


def check_weights(name: str) -> None:
    """Refuse an unknown form of weights."""
    if name not in WEIGHTS:
        known = ", ".join(map(repr, WEIGHTS))
        raise InputError(f"weights={name!r} is not known; known: {known}")


def check_together(runtime: str | None, weights: str | None) -> None:
    """Refuse an unknown runtime or form of weights, and narrow weights in a runtime without
    them."""
    if runtime is not None:
        check_runtime(runtime)
    if weights is not None:
        check_weights(weights)
    if weights not in (None, *TORCH_WEIGHTS) and runtime in (None, "torch"):
        raise UnsupportedInput(
            f"weights={weights!r} runs in ONNX Runtime or OpenVINO: name runtime='onnx', "
            "'openvino' or 'auto', or load a checkpoint that is quantised already"
        )


def check_export_place(runtime: str | None, weights: str | None, store: str | None) -> None:
    """Refuse an export without a folder for it."""
    wanted = runtime in EXPORTS or (weights not in (None, *TORCH_WEIGHTS) and runtime == "auto")
    if wanted and (not store or "://" in store):
        raise InputError(
            "a runtime other than torch runs an export, which needs a folder to lie in: name one "
            "with store= (--store on the command line), or make the export with `keepsight export` "
            "and load its folder"
        )


def check_export_words(runtime: str, quantised: str | None) -> None:
    """Refuse what `keepsight export` cannot write."""
    UnknownOption.refuse([runtime], EXPORTS, "--format")
    if quantised is not None and quantised not in WEIGHTS:
        raise InputError(f"--quant {quantised} is not known; known: {', '.join(WEIGHTS)}")


def check_codec(name: str) -> None:
    """Refuse an unknown codec of packages."""
    if name not in CODECS:
        raise InputError(f"there is no codec {name!r}; choose one of {', '.join(CODECS)}")


def check_count(count: int | None, name: str, of: str) -> None:
    """Refuse a count below 1, and what is no count."""
    if count is not None and (not isinstance(count, int) or count < 1):
        raise InputError(f"{name}={count!r}; expected a number of {of}: 1 or more")


def check_dpi(dpi: int) -> None:
    """Refuse a resolution of PDF pages that is too small to read, or takes too much memory."""
    if not isinstance(dpi, int) or not 18 <= dpi <= 1200:
        raise InputError(f"dpi={dpi!r}; expected 18 to 1200 dots an inch")


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """`"2/8"`: the second of eight machines that share the work."""
    if text is None:
        return None
    number, slash, count_ = str(text).partition("/")
    if slash and number.isdecimal() and count_.isdecimal() and 1 <= int(number) <= int(count_):
        return int(number), int(count_)
    raise InputError(f"shard {text!r}; expected i/n with i from 1 to n, such as 2/8")


def _listed(names: Iterable[str]) -> str:
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}"
