"""Options that commands share, in groups, and what is refused before PyTorch is imported.

Options are named as in Transformers and the OpenAI API. A group is a dataclass: `grouped` gives a
command an option for each of its fields, and its methods do what the options ask for.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from keepsight.cli.terminal import hush, loading_line, tell
from keepsight.core.structured import formats
from keepsight.errors import ImageError, InputError, NotKeepsightFile, UnsupportedInput
from keepsight.kinds import Options
from keepsight.system.optional import optional
from keepsight.system.places import check_device, check_store_writable, expanded
from keepsight.system.suffixes import can_be_looked_at, is_package, kind_of
from keepsight.system.words import (
    check_dtype,
    check_export_place,
    check_runtime,
    check_together,
    check_weights,
)

if TYPE_CHECKING:
    from keepsight.vlm import VLM

DEMO_NAMES = ("demo", "demo-hybrid", "demo-smol")
MANIFEST = "keepsight.json"  # name of an export's file
_LARGE = 50_000_000  # parameters from which the speed of a dtype matters
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def option(
    help: str,
    *names: str,
    default: Any = None,
    check: Callable[[str], None] | None = None,
    **more: Any,
) -> Any:
    """An option; `check` refuses a value while the command line is parsed."""

    def look(value: str | None) -> str | None:
        if value is not None and check is not None:
            check(value)
        return value

    more |= {"callback": look} if check else {}
    return typer.Option(default, *names, help=help, **more)


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """The function with an option for each field of those parameters that are groups."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {
        n: kind for n, kind in hints.items() if dataclasses.is_dataclass(kind)
    }
    own = inspect.signature(function).parameters.values()
    spread = [one.replace(annotation=hints[one.name]) for one in own if one.name not in groups]
    for kind in groups.values():
        kinds = get_type_hints(kind, include_extras=True)
        for one in dataclasses.fields(kind):
            one.default.rich_help_panel = kind.panel  # type: ignore[union-attr]
            how = inspect.Parameter.KEYWORD_ONLY
            spread.append(
                inspect.Parameter(one.name, how, default=one.default, annotation=kinds[one.name])
            )

    @functools.wraps(function)
    def call(**given: Any) -> None:
        for name, kind in groups.items():
            fields = [one.name for one in dataclasses.fields(kind)]
            given[name] = kind(**{field: given.pop(field) for field in fields})
        function(**given)

    spread = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in spread]
    call.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in spread}
    return call


Named = Annotated[str | None, typer.Argument(metavar="MODEL", help="The model, as with --model.")]
MODEL = option(
    "demo (the default), demo-hybrid, demo-smol, a folder, or a hub id.", "--model", "-m"
)
IMAGES = option(
    "File, folder, PDF, URL or .sight; - is standard input; repeatable.", "--image", "-i"
)
REVISION = option("Branch, tag or commit of a hub id.")
JSON = option("JSON for machines instead of text.", "--json", default=False)
REPORT = option("Print what was reused, and why.", "--report", default=False)


@dataclass
class Model:
    """Which model answers, and how it is loaded."""

    panel: ClassVar[str] = "Model and memory"
    model: str | None = MODEL
    dtype: str = option("auto, float32, bfloat16 or float16.", check=check_dtype, default="auto")
    device_map: str | None = option(
        "Where it goes: cpu, cuda, auto.", "--device", "--device-map", check=check_device
    )
    min_pixels: int | None = option("Enlarge images with fewer pixels.", min=1)
    max_pixels: int | None = option("Shrink images with more pixels.", min=1)

    def choose(self, named: str | None) -> str:
        """Take the model that is named first, or by `--model`."""
        self.model = one_model(named, self.model)
        return self.model

    def first_of(self, words: list[str], alone: bool) -> list[str]:
        """Take the model that may be the first of some words; the others."""
        named, others = model_first(words, alone, self.model)
        self.choose(named)
        return others

    def load(self, **more: Any) -> VLM:
        """Load it, with a progress line on a terminal."""
        return load(**vars(self), **more)


@dataclass
class Stored(Model):
    """And what it runs in, and remembers in."""

    runtime: str | None = option(
        "torch, mlx, auto, or onnx or openvino: exported once, into the store.", check=check_runtime
    )
    weights: str | None = option(
        "int8, or int4 in an exported runtime. Default: as they are.", check=check_weights
    )
    store: str | None = option(
        "Folder to remember in. Default: memory only.",
        envvar="KEEPSIGHT_STORE",
        check=check_store_writable,
    )


@dataclass
class Remembering(Stored):
    """And whose memory, and what is behind it."""

    remote: str | None = option(
        "Address behind the store, such as s3://bucket/name.",
        envvar="KEEPSIGHT_REMOTE",
        check=check_store_writable,
    )
    tenant: str | None = option("Whose memory to use; tenants of a store share nothing.")


@dataclass
class Decoding:
    """How tokens are chosen."""

    panel: ClassVar[str] = "Decoding"
    max_tokens: int | None = option("The longest answer, in tokens.", min=1)
    temperature: float | None = option("0 is greedy. Default: the checkpoint's.", min=0.0)
    top_p: float | None = option(
        "Sample from the likeliest tokens of this total probability.", min=0.0, max=1.0
    )
    seed: int | None = option("Seed of the sampling.", min=0)

    def options(self) -> Options:
        """As the library takes them."""
        if self.temperature == 0 and self.top_p is not None:
            raise InputError("--top-p has no effect at --temperature 0, which is greedy")
        sampled = self.temperature is not None or self.top_p is not None
        given = {
            "do_sample": self.temperature != 0 if sampled else None,
            "temperature": self.temperature or None,
            "max_new_tokens": self.max_tokens,
            "top_p": self.top_p,
            "seed": self.seed,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass
class Form:
    """What the answer looks like."""

    panel: ClassVar[str] = "Form of the answer"
    json_schema: str | None = option("JSON that fits this schema: a file, -, or the schema itself.")
    json_object: bool = option("Any JSON object.", "--json-object", default=False)
    choices: str | None = option("One of these texts: yes,no,unclear.")
    choice: list[str] | None = option("One of these texts, also with commas; repeatable.")
    regex: str | None = option("A text that matches this to its end.")

    def asked(self) -> formats.Format | None:
        """The one form that is named, checked; None without any."""
        forms = list[formats.Format]()
        if (schema := self.json_schema) is not None:
            inline = schema.lstrip().startswith("{")
            text = schema if inline else read_text(schema, "--json-schema")
            forms.append(formats.of_schema(text, "--json-schema"))
        if self.json_object:
            forms.append(formats.of_schema({"type": "object"}, "--json-object"))
        if self.choices is not None or self.choice:
            split = [] if self.choices is None else [s.strip() for s in self.choices.split(",")]
            forms.append(formats.of_choices([*split, *(self.choice or [])], "--choices"))
        if self.regex is not None:
            forms.append(formats.of_regex(self.regex, "--regex"))
        if len(forms) > 1:
            named = " and ".join(form.place for form in forms)
            raise InputError(f"{named}: an answer has one form; name one of them")
        if forms:
            optional("llguidance", "structured")
        return forms[0] if forms else None


# -- models ------------------------------------------------------------------------------------


def one_model(named: str | None, option: str | None) -> str:
    """The model, from the first argument or `--model`; the demo if neither is given."""
    if named is not None and option is not None:
        raise InputError(f"{named!r} and --model {option}: name one model")
    name = named or option or "demo"
    check_model(name)
    return name


def check_model(name: str) -> None:
    """Accept demo models, folders with a configuration, and possible hub ids."""
    if name in DEMO_NAMES:
        return
    folder = expanded(name)
    if folder.is_file():
        raise InputError(f"{name} is a file; a model is a folder, a hub id, or demo")
    if folder.is_dir() and not any(folder.glob("*.json")):
        raise InputError(f"{name}: the folder holds no model: it has no config.json")
    if folder.is_dir() or _may_be_hub_id(name):
        from keepsight.models import reachable  # start-up time: imports the Hub's client

        reachable.check_folder_sees(name)
        reachable.check_hub(name, None)
        return
    beside = [entry.name for entry in os.scandir(folder.parent)] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(name, DEMO_NAMES, n=1, cutoff=0.7)
    close = difflib.get_close_matches(folder.name, beside, n=1, cutoff=0.7)
    near += [os.path.join(os.path.dirname(name), one) for one in close]
    hint = f"did you mean {near[0]}?" if near else "give demo, a folder, or a hub id (owner/name)"
    raise InputError(f"no model {name!r}: there is no such folder; {hint}")


def _may_be_hub_id(name: str) -> bool:
    """Whether a name has the form owner/name, and nothing on the disk has that name."""
    path = name.startswith(("./", "../", "~")) or os.path.lexists(name)
    return not path and _HUB_ID.fullmatch(name) is not None


def model_first(
    words: list[str], alone: bool, option: str | None = None
) -> tuple[str | None, list[str]]:
    """A model that stands before pictures and question, as in other commands, and the rest.

    That is a demo model, a folder that holds a model, or a possible hub id; with `--model` only
    what cannot be looked at. `alone` means that nothing need follow.
    """
    if len(words) + alone < 2 or (option is not None and is_there(words[0])):
        return None, words
    first = words[0]
    demo = first in DEMO_NAMES and not is_there(first)
    hub = option is None and _may_be_hub_id(first) and not can_be_looked_at(first)
    is_model = demo or hub or _holds_model(expanded(first))
    return (first, words[1:]) if is_model else (None, words)


def is_there(name: str) -> bool:
    """Whether something of that name can be looked at. If it is called as a demo model, it must
    hold pictures: the clone has a folder `demo`, of scripts and texts."""
    path = expanded(name)
    if name not in DEMO_NAMES or not path.is_dir():
        return os.path.lexists(path)
    names = [file.name for file in path.rglob("*")]
    return any(can_be_looked_at(name) and kind_of(name) != "list" for name in names)


def _holds_model(folder: Path) -> bool:
    """Whether a folder's config.json is that of a model; pictures may lie beside another one."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "model_type" in found


def check_how(model: str, runtime: str | None, weights: str | None, store: str | None) -> None:
    """Refuse runtimes and weights that cannot be combined; only exports support both."""
    check_together(runtime, weights)
    if not (expanded(model) / MANIFEST).is_file():
        check_export_place(runtime, weights, store)


def load(
    model: str,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    store: str | None = None,
    remote: str | None = None,
    **options: Any,
) -> VLM:
    """Load the model that the options name, with a progress line on a terminal."""
    check_model(model)
    check_how(model, options.get("runtime"), options.get("weights"), store)
    check_limits(min_pixels, max_pixels)
    with loading_line(model):
        import keepsight as ks

        hush()
        options["image_options"] = pixel_limits(model, min_pixels, max_pixels)
        if options.get("runtime") or options.get("weights"):
            options["tell"] = tell
        vlm = ks.load(model, store=store or "", remote=remote or "", **options)
    if options.get("dtype") == "auto" and sys.stderr.isatty():
        from keepsight.core.kernels.linear import has_bfloat16  # start-up time

        it = vlm.model
        halves = str(it.dtype) == "torch.bfloat16" and it.device.type == "cpu"
        if halves and not has_bfloat16() and it.num_parameters() >= _LARGE:
            tell(
                "this CPU has no instructions for bfloat16: prompts and pictures are several times "
                "faster with --dtype float32, which takes twice the memory"
            )
    return vlm


def check_limits(least: int | None, most: int | None) -> None:
    """Refuse a least number of pixels above the most."""
    if least is not None and most is not None and least > most:
        raise InputError(f"--min-pixels {least} is more than --max-pixels {most}")


def pixel_limits(model: str, least: int | None, most: int | None) -> Options | None:
    """Pixel limits as Qwen's image processors want them; other processors use other options."""
    if least is None and most is None:
        return None
    from keepsight.models import loading

    processor = loading.load_processor(loading.model_path(model), None).image_processor
    understood = getattr(getattr(processor, "valid_kwargs", None), "__annotations__", {})
    if not {"min_pixels", "max_pixels"} <= set(understood):
        raise UnsupportedInput(
            f"--min-pixels and --max-pixels: {type(processor).__name__} does not size images by "
            "their number of pixels; use image_options= in Python"
        )
    own_least, own_most = processor.size["shortest_edge"], processor.size["longest_edge"]
    if least is None and most is not None and most < own_least:
        why = f"is less than the least of this model, {own_least}; name --min-pixels too"
        raise InputError(f"--max-pixels {most} {why}")
    if most is None and least is not None and least > own_most:
        why = f"is more than the most of this model, {own_most}; name --max-pixels too"
        raise InputError(f"--min-pixels {least} {why}")
    least = own_least if least is None else least
    return {"size": {"shortest_edge": least, "longest_edge": own_most if most is None else most}}


# -- files -------------------------------------------------------------------------------------


def read_text(path: str | Path, option: str) -> str:
    """The text of a file that an option names; `-` is standard input."""
    try:
        if str(path) == "-":
            return sys.stdin.read()
        return expanded(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{option} {path}: cannot be read ({why})") from error


def beside(path: object, folder: Path) -> Any:
    """What a file names: a path begins where that file lies; all else stays as it is."""
    is_path = isinstance(path, str) and "://" not in path and not path.startswith("data:")
    return os.fspath(folder / os.path.expanduser(str(path))) if is_path else path


def check_images(names: Iterable[str]) -> None:
    """Refuse a missing file or one that is no picture, before anything slow is imported."""
    for name in names:
        if name == "-" or re.match("[a-z]{2,}:", name, re.IGNORECASE):
            continue
        path = Path(name)
        if not path.exists():
            raise ImageError(f"{name}: no image can be read there (No such file or directory)")
        if is_package(name):
            check_shown(path)
        elif path.suffix.lower() == ".pdf":
            optional("pypdfium2", "pdf")
        elif path.is_file():
            from keepsight.media import pictures  # start-up time: imports Pillow

            try:
                data = path.read_bytes()
            except OSError as error:
                raise ImageError(f"{name}: no image can be read there ({error.strerror})") from None
            pictures.size_of(data, name)


def check_decision_config(name: str | None) -> None:
    """Accept files and folders that are there, and possible hub ids."""
    if name is not None and not expanded(name).exists() and not _may_be_hub_id(name):
        raise InputError(f"--decision-config {name}: there is no such file or folder")


def check_shown(path: Path) -> None:
    """Accept files that may be ours or an export; reading shows whether they are intact."""
    try:
        if not path.is_dir():
            with path.open("rb") as file:
                if file.read(9)[8:] != b"{":  # behind the record's length
                    raise NotKeepsightFile(f"{path}: not a Keepsight file (no safetensors header)")
        elif not any((path / part).exists() for part in (MANIFEST, "graphs")):
            ours = min([*path.glob("*.sight"), *path.glob("*.keep")], default=None)
            hint = f"see what a model takes: keepsight plan {path}"
            hint = hint if ours is None else f"name one of its files: keepsight show {ours}"
            raise InputError(f"{path} is neither a store nor an export; {hint}")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
