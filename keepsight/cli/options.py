"""Options that commands share, and their translation into library calls.

Options are named as in Transformers and the OpenAI API. torch and Transformers are imported only
when a model is loaded.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepsight.cli.loading_line import loading_line
from keepsight.cli.model_names import DEMO_NAMES, check_model, may_be_hub_id
from keepsight.errors import ImageError, InputError, NotKeepsightFile, UnsupportedInput
from keepsight.kinds import Options, Record
from keepsight.system.optional import optional
from keepsight.system.places import check_device, check_store_writable, expanded
from keepsight.system.words import (
    check_dtype,
    check_export_place,
    check_runtime,
    check_together,
    check_weights,
)

if TYPE_CHECKING:
    from keepsight.vlm import VLM

_LARGE = 50_000_000  # parameters from which the speed of a dtype matters


def refused_by(check: Callable[[str], None]) -> Callable[[str | None], str | None]:
    """An option callback that refuses a value while the command line is parsed."""

    def look(value: str | None) -> str | None:
        if value is not None:
            check(value)
        return value

    return look


Named = Annotated[str | None, typer.Argument(metavar="MODEL", help="The model, as with --model.")]
SomeModel = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="demo (the default), demo-hybrid, demo-smol, a folder, or a hub id."
    ),
]
Images = Annotated[
    list[str] | None, typer.Option("--image", "-i", help="File, URL or .sight; repeatable.")
]
Prompt = Annotated[str | None, typer.Option("--prompt", "-p", help="The question.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="The longest answer, in tokens.")]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, help="Sampling temperature; 0 is greedy. Default: the checkpoint's."),
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, help="Sample from the likeliest tokens of this total probability."
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of the sampling.")]
Dtype = Annotated[
    str,
    typer.Option(help="auto, float32, bfloat16 or float16.", callback=refused_by(check_dtype)),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device",
        "--device-map",
        help="Where the model goes: cpu, cuda, auto.",
        callback=refused_by(check_device),
    ),
]
Runtime = Annotated[
    str | None,
    typer.Option(
        help="torch, mlx, auto, or onnx or openvino: exported once, into the store.",
        callback=refused_by(check_runtime),
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="int8, or int4 in an exported runtime. Default: as they are.",
        callback=refused_by(check_weights),
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        envvar="KEEPSIGHT_STORE",
        help="Folder to remember in. Default: memory only.",
        callback=refused_by(check_store_writable),
    ),
]
Remote = Annotated[
    str | None,
    typer.Option(
        envvar="KEEPSIGHT_REMOTE",
        help="Address behind the store, such as s3://bucket/name.",
        callback=refused_by(check_store_writable),
    ),
]
Tenant = Annotated[
    str | None, typer.Option(help="Whose memory to use; tenants of a store share nothing.")
]
MinPixels = Annotated[int | None, typer.Option(min=1, help="Enlarge images with fewer pixels.")]
MaxPixels = Annotated[int | None, typer.Option(min=1, help="Shrink images with more pixels.")]
Json = Annotated[bool, typer.Option("--json", help="JSON for machines instead of text.")]
ShowReport = Annotated[bool, typer.Option("--report", help="Print what was reused, and why.")]


def one_model(named: str | None, option: str | None) -> str:
    """The model, from the first argument or `--model`; the demo if neither is given."""
    if named is not None and option is not None:
        raise InputError(f"{named!r} and --model {option}: name one model")
    name = named or option or "demo"
    check_model(name)
    return name


def model_first(
    words: list[str], alone: bool, option: str | None = None
) -> tuple[str | None, list[str]]:
    """A model that stands before pictures and question, as in other commands, and the rest.

    That is a demo model, a folder that holds a model, or, without `--model`, a possible hub id;
    `alone` means that nothing need follow.
    """
    if len(words) + alone < 2:
        return None, words
    first = expanded(words[0])
    demo = words[0] in DEMO_NAMES and not holds_pictures(first)
    hub = option is None and may_be_hub_id(words[0]) and not _LOOKED_AT.fullmatch(words[0])
    is_model = demo or hub or _holds_model(first)
    return (words[0], words[1:]) if is_model else (None, words)


# What a folder's name says for itself: one without any of these gives nothing to look at.
_LOOKED_AT = re.compile(
    r".*\.(png|jpe?g|gif|webp|bmp|tiff?|ico|hei[cf]|avif|pdf|mp4|m4v|mov|mkv|webm|avi|sight"
    r"|zip|tar|tgz|gz|bz2|xz|parquet|arrow|feather|csv|tsv|jsonl|txt)",
    re.IGNORECASE,
)


def holds_pictures(path: Path) -> bool:
    """Whether a file or folder that is called as a demo model is meant: the clone has a folder
    `demo`, of scripts, beside which the model would never be found."""
    if not path.is_dir():
        return path.exists()
    return any(_LOOKED_AT.fullmatch(file.name) for file in path.rglob("*"))


def _holds_model(folder: Path) -> bool:
    """Whether a folder's config.json is that of a model; pictures may lie beside another one."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "model_type" in found


def check_images(names: Iterable[str]) -> None:
    """Refuse a missing file or one that is no picture, before anything slow is imported."""
    for name in names:
        if re.match("[a-z]{2,}:", name, re.IGNORECASE):
            continue
        path = Path(name)
        if not path.exists():
            raise ImageError(f"{name}: no image can be read there (No such file or directory)")
        if path.suffix.lower() == ".sight":
            check_shown(path)
        elif path.suffix.lower() == ".pdf":
            optional("pypdfium2", "pdf")
        elif path.is_file():
            _check_picture(path, name)


def _check_picture(path: Path, name: str) -> None:
    from keepsight.media import pictures  # start-up time: imports Pillow

    try:
        data = path.read_bytes()
    except OSError as error:
        raise ImageError(f"{name}: no image can be read there ({error.strerror})") from None
    pictures.size_of(data, name)


def read_text(path: str | Path, option: str) -> str:
    """The text of a file that an option names; `-` is standard input."""
    try:
        if str(path) == "-":
            return sys.stdin.read()
        return expanded(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{option} {path}: cannot be read ({why})") from error


def check_how(model: str, runtime: str | None, weights: str | None, store: str | None) -> None:
    """Refuse runtimes and weights that cannot be combined; only exports support both."""
    check_together(runtime, weights)
    if not (expanded(model) / MANIFEST).is_file():
        check_export_place(runtime, weights, store)


def load(
    model: str,
    dtype: str = "auto",
    device_map: str | None = None,
    store: str | None = None,
    pixels: tuple[int | None, int | None] = (None, None),
    remote: str | None = None,
    tenant: str | None = None,
    **options: Any,
) -> VLM:
    """Load the model that the options name, with a progress line on a terminal."""
    check_model(model)
    check_how(model, options.get("runtime"), options.get("weights"), store)
    with loading_line(model):
        from transformers import logging

        import keepsight as ks

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        if any(pixels):
            options["image_options"] = {"size": pixel_limits(model, *pixels)}
        options |= {"store": store or "", "remote": remote or "", "tenant": tenant}
        if options.get("runtime") or options.get("weights"):
            options["tell"] = lambda line: typer.echo(line, err=True)
        vlm = ks.load(model, dtype=dtype, device_map=device_map, **options)
    if dtype == "auto" and sys.stderr.isatty():
        _warn_of_slow_dtype(vlm)
    return vlm


def _warn_of_slow_dtype(vlm: VLM) -> None:
    """Warn if this CPU would run a large model several times slower than necessary."""
    import torch

    from keepsight.core.kernels.linear import has_bfloat16  # start-up time

    model = vlm.model
    if model.dtype != torch.bfloat16 or model.device.type != "cpu" or has_bfloat16():
        return
    if model.num_parameters() >= _LARGE:
        typer.echo(
            "this CPU has no instructions for bfloat16: prompts and pictures are several times "
            "faster with --dtype float32, which takes twice the memory",
            err=True,
        )


def pixel_limits(model: str, least: int | None, most: int | None) -> dict[str, int]:
    """Pixel limits as Qwen's image processors want them; other processors use other options."""
    from keepsight.models import loading

    processor = loading.load_processor(loading.model_path(model), None).image_processor
    size = processor.size
    understood = getattr(getattr(processor, "valid_kwargs", None), "__annotations__", {})
    if not {"min_pixels", "max_pixels"} <= set(understood):
        raise UnsupportedInput(
            f"--min-pixels and --max-pixels: {type(processor).__name__} does not size images by "
            "their number of pixels; use image_options= in Python"
        )
    least = size["shortest_edge"] if least is None else least
    most = size["longest_edge"] if most is None else most
    if least > most:
        raise InputError(f"--min-pixels {least} is more than --max-pixels {most}")
    return {"shortest_edge": least, "longest_edge": most}


def decoding(
    max_tokens: int | None, temperature: float | None, top_p: float | None, seed: int | None
) -> Record:
    """The decoding options as the library takes them."""
    if temperature == 0 and top_p is not None:
        raise InputError("--top-p has no effect at --temperature 0, which is greedy")
    options: Options = {}
    if temperature is not None or top_p is not None:
        options["do_sample"] = temperature != 0
    if temperature:
        options["temperature"] = temperature
    given = {"max_new_tokens": max_tokens, "top_p": top_p, "seed": seed}
    return options | {name: value for name, value in given.items() if value is not None}


_HEADER = 8  # bytes with the record's length, before its first brace
MANIFEST = "keepsight.json"  # name of an export's file
_PARTS = (MANIFEST, "graphs")  # part of any export, whole or damaged


def check_shown(path: Path) -> None:
    """Accept files that may be ours or an export; reading shows whether they are intact."""
    try:
        if path.is_dir():
            _check_folder(path)
            return
        with path.open("rb") as file:
            start = file.read(_HEADER + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(start) <= _HEADER or start[_HEADER:] != b"{":
        raise NotKeepsightFile(f"{path}: not a Keepsight file (no safetensors header)")


def _check_folder(path: Path) -> None:
    if any((path / part).exists() for part in _PARTS):
        return
    what = "neither a store nor an export"
    if (path / "config.json").is_file():
        raise InputError(f"{path} is {what}; what a model takes: keepsight plan {path}")
    found = next((f for end in ("sight", "keep") for f in sorted(path.glob(f"*.{end}"))), None)
    hint = f"one of its files: keepsight show {found}" if found else "name a .sight or .keep file"
    raise InputError(f"{path} is {what}; {hint}")
