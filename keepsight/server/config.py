"""How a server is run: limits, keys and addresses, from flags and from a file with the same names.

A file is TOML or YAML. A name that nobody listens to is refused with the nearest one that somebody
does; a value of the wrong kind is refused with its name.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepsight.core.settings import parse_seconds
from keepsight.errors import InputError, MissingExtra, UnknownOption
from keepsight.kinds import Record
from keepsight.store import parse_bytes

_MAX_CONFIG = 1 << 20
_LEAST = {
    "max_images": 1,
    "max_image_pixels": 1,
    "max_messages": 1,
    "max_choices": 1,
    "max_tokens": 1,
    "max_running": 1,
    "max_waiting": 0,
    "max_connections": 1,
    "pdf_dpi": 1,
}


@dataclass(frozen=True)
class ApiKey:
    """A key, whose memory it opens, and how much it may do."""

    name: str
    key: str = field(repr=False)
    tenant: str = ""  # empty: the name
    admin: bool = False  # sees and resets what is everybody's
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    files_bytes: int | str | None = None  # of uploaded files; None: the server's own limit

    def __post_init__(self) -> None:
        if not self.name or not self.key:
            raise InputError("a key needs a name and a key; write --api-key NAME:KEY")
        if not (self.key.isascii() and self.key.isprintable() and " " not in self.key):
            raise InputError(
                f"key {self.name!r}: a key goes in a header, so it is made of ASCII letters, "
                "digits and signs, without spaces"
            )
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"key {self.name!r}: {name} is {value}, expected at least 1")
        if self.files_bytes is not None:
            parse_bytes(self.files_bytes)

    @property
    def whose(self) -> str:
        """The tenant."""
        return self.tenant or self.name

    @classmethod
    def parse(cls, text: str, admin: bool = False) -> ApiKey:
        """`name:key`; a key alone is its own name's tenant and called `default`."""
        name, colon, key = text.partition(":")
        return cls(name, key, admin=admin) if colon else cls("default", text, admin=admin)


@dataclass(frozen=True)
class ServerConfig:
    """All that a server is told beside its model. Times are seconds, sizes bytes (or "20MiB")."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None  # what clients call the model; None: what it was loaded by
    keys: tuple[ApiKey, ...] = ()
    allow_origin: tuple[str, ...] = ()
    allow_path: tuple[str, ...] = ()
    allow_private_urls: bool = False
    max_body: int | str = "64MiB"
    max_images: int = 64
    max_image_pixels: int = 40_000_000
    max_messages: int = 20_000
    max_choices: int = 8
    max_running: int = 16
    max_waiting: int = 64
    max_connections: int = 4096
    max_tokens: int | None = None  # the longest answer that anybody gets
    request_timeout: float | str = "10m"
    body_timeout: float | str = "60s"
    idle_timeout: float | str = "75s"
    url_timeout: float | str = "20s"
    url_bytes: int | str = "64MiB"
    files_budget: int | str = "512MiB"
    file_ttl: float | str = "1d"
    responses_budget: int | str = "64MiB"  # of responses that are kept; 0 keeps none
    clip_bytes: int | str = "1GiB"  # of a video or a sound when it is decoded
    pdf_dpi: int = 144
    unknown_fields: str = "name"  # what requests have and nobody listens to; or "refuse"
    prefill_ahead: float | str = 0.25  # of quiet, before answers are prefilled; or "never"
    drain: float | str = "30s"
    warm_up: bool = True
    log: bool = True

    def __post_init__(self) -> None:
        for name in ("request_timeout", "body_timeout", "idle_timeout", "url_timeout"):
            parse_seconds(getattr(self, name))
        parse_seconds(self.drain), parse_seconds(self.file_ttl)
        if self.prefill_ahead != "never":
            parse_seconds(self.prefill_ahead)
        if self.unknown_fields not in ("name", "refuse"):
            raise InputError(
                f"unknown_fields is {self.unknown_fields!r}, expected 'name' or 'refuse'"
            )
        for name in ("max_body", "url_bytes", "files_budget", "responses_budget", "clip_bytes"):
            parse_bytes(getattr(self, name))
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise InputError(f"{name} is {value}, expected at least {least}")
        if self.bytes("max_body") < 1:
            raise InputError("max_body is 0, expected at least 1 byte")
        for origin in self.allow_origin:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s?#]+", origin):
                raise InputError(
                    f"allow_origin is {origin!r}, expected one like https://app.example.com, "
                    "without a path, or *"
                )
        if not 0 <= self.port < 65536:
            raise InputError(f"port is {self.port}, expected 0 to 65535 (0: any free one)")
        secrets = [key.key for key in self.keys]
        if len(set(secrets)) < len(secrets):
            raise InputError("two API keys are the same; each needs a value of its own")

    @property
    def quiet(self) -> float | None:
        """Seconds without a request before answers are prefilled for their next turns."""
        if self.prefill_ahead == "never":
            return None
        return parse_seconds(self.prefill_ahead)

    def seconds(self, name: str) -> float:
        """A time by its name."""
        return parse_seconds(getattr(self, name))

    def bytes(self, name: str) -> int:
        """A size by its name."""
        return parse_bytes(getattr(self, name))


FLAGS = tuple(f.name for f in dataclasses.fields(ServerConfig))


def read_config(path: str, others: tuple[str, ...] = ()) -> Record:
    """The settings in a file. `others` are names that somebody else listens to (of the model)."""
    given = _parsed(Path(path))
    settings = {str(name).replace("-", "_"): value for name, value in given.items()}
    known = {*FLAGS, *others}
    if set(settings) - known:
        raise UnknownOption.among(settings, known, path)
    if "keys" in settings:
        settings["keys"] = tuple(_key(row, path) for row in _rows(settings["keys"], path))
    return {name: _checked(name, value, path) for name, value in settings.items()}


def _parsed(path: Path) -> Record:
    try:
        data = path.read_bytes()[: _MAX_CONFIG + 1]
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text") from None
    if len(data) > _MAX_CONFIG:
        raise InputError(f"{path} is larger than {_MAX_CONFIG} bytes")
    try:
        given = _yaml(text) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as a configuration: {error}") from None
    if not isinstance(given, dict):
        raise InputError(f"{path} is a {type(given).__name__}, expected names and values")
    return given


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtra.named("pyyaml", "server") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _rows(keys: Any, path: str) -> list[Record]:
    if not isinstance(keys, list) or not all(isinstance(row, dict) for row in keys):
        raise InputError(f"{path}: keys must be a list of tables with at least name and key")
    return keys


def _key(row: Record, path: str) -> ApiKey:
    known = [f.name for f in dataclasses.fields(ApiKey)]
    row = {str(name).replace("-", "_"): value for name, value in row.items()}
    if set(row) - set(known):
        raise UnknownOption.among(row, known, f"{path}: a key")
    for name in ("name", "key"):
        if not isinstance(row.get(name), str):
            raise InputError(f"{path}: a key has no {name}")
    for name, value in row.items():
        wanted = _KEY_KINDS[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted != (bool,)):
            shown = json.dumps(value, default=str)
            told = " or ".join(_KIND_NAMES[kind] for kind in wanted)
            raise InputError(f"{path}: {name} of key {row['name']!r} is {shown}, expected {told}")
    return ApiKey(**row)


_KEY_KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "key": (str,),
    "tenant": (str,),
    "admin": (bool,),
    "requests_per_minute": (int,),
    "tokens_per_minute": (int,),
    "files_bytes": (int, str),
}
_KIND_NAMES = {str: "a text", bool: "true or false", int: "a whole number"}


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float | str": (int, float, str),
    "int | str": (int, str),
    "int | None": (int,),
    "str | None": (str,),
    "tuple[str, ...]": (list, tuple, str),
}


def _checked(name: str, value: Any, path: str) -> Any:
    """A value of the kind that its name wants; names of others are left to them."""
    kinds = {f.name: str(f.type) for f in dataclasses.fields(ServerConfig)}
    wanted = kinds.get(name, "")
    if wanted not in _KINDS:
        return value
    right = isinstance(value, _KINDS[wanted])
    if not right or (isinstance(value, bool) and wanted != "bool"):
        raise InputError(f"{path}: {name} is {json.dumps(value, default=str)}, expected {wanted}")
    if wanted.startswith("tuple"):
        values = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(item, str) for item in values):
            raise InputError(f"{path}: {name} must be a list of texts")
        return values
    return value
