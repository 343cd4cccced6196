"""Every setting of `keepsight serve`, in one place: its type, default, bounds and help text.

The command's flags (`cli/serve.py`), the settings file with its checks, and the table in
`docs/server.md` are generated from these models. A wrong value is refused with its name, the value
and what was expected; an unknown name with the nearest known one.
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from keepsight.errors import InputError, KeepsightError, UnknownOption
from keepsight.kinds import Options
from keepsight.system.optional import optional
from keepsight.system.units import parse_bytes, parse_seconds

_MAX_CONFIG = 1 << 20


def _size(value: int | str) -> int | str:
    parse_bytes(value)
    return value


def _body_size(value: int | str) -> int | str:
    if parse_bytes(value) < 1:
        raise PydanticCustomError("bounds", "at least 1 byte")
    return value


def _time(value: float | str) -> float | str:
    parse_seconds(value)
    return value


def _time_or_never(value: float | str) -> float | str:
    return value if value == "never" else _time(value)


def _origin(value: str) -> str:
    if value != "*" and not re.fullmatch(r"https?://[^/\s?#]+", value):
        raise PydanticCustomError(
            "origin", "one like https://app.example.com, without a path, or *"
        )
    return value


def _proxy(value: str) -> str:
    try:
        return str(ipaddress.ip_network(value))
    except ValueError:
        raise PydanticCustomError(
            "proxy", "an address or a network, such as 10.0.0.2 or 10.0.0.0/24"
        ) from None


def _port(value: int) -> int:
    if not 0 <= value < 65536:
        raise PydanticCustomError("bounds", "0 to 65535 (0: any free one)")
    return value


def _as_tuple(value: object) -> object:
    """A tuple from a list in a file, or from a single text."""
    return (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )


Size = Annotated[int | str, AfterValidator(_size)]
BodySize = Annotated[int | str, AfterValidator(_body_size)]
Time = Annotated[float | str, AfterValidator(_time)]
TimeOrNever = Annotated[float | str, AfterValidator(_time_or_never)]
Port = Annotated[int, AfterValidator(_port)]
Count = Annotated[int, Field(ge=1)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Proxies = Annotated[tuple[Annotated[str, AfterValidator(_proxy)], ...], BeforeValidator(_as_tuple)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], BeforeValidator(_as_tuple)]


@dataclass(frozen=True)
class ApiKey:
    """A key, the tenant whose memory it opens, and its limits."""

    name: StrictStr
    key: StrictStr = field(repr=False)
    tenant: StrictStr = ""  # empty: the key's name
    admin: StrictBool = False  # may see and reset entries of all tenants
    requests_per_minute: StrictInt | None = None
    tokens_per_minute: StrictInt | None = None
    files_bytes: StrictInt | StrictStr | None = None  # of uploads; None: an equal share

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
        """Read `name:key`; a key alone is called `default`."""
        name, colon, key = text.partition(":")
        return cls(name, key, admin=admin) if colon else cls("default", text, admin=admin)


class StrictSettings(BaseModel):
    """Settings with strict types and Keepsight's errors."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", protected_namespaces=(), validate_default=False
    )

    def __init__(self, **settings: object) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _refusal(error) from None


class ModelSettings(StrictSettings):
    """The options of the model, as `load` takes them; null leaves the choice to `load`."""

    model: str | None = Field(
        None, description="demo, demo-hybrid, demo-smol, a folder, or a hub id."
    )
    dtype: str = Field("auto", description="auto, float32, bfloat16 or float16.")
    device_map: str | None = Field(None, description="Where the model goes: cpu, cuda, auto.")
    runtime: str | None = Field(
        None, description="torch, mlx, auto, or onnx or openvino: exported once, into the store."
    )
    weights: str | None = Field(None, description="int8; int4 in an exported runtime.")
    store: str | None = Field(
        None,
        description="Folder to remember in; without one, memory only.",
        json_schema_extra={"env": "KEEPSIGHT_STORE"},
    )
    store_budget: Size | None = Field(None, description="Bytes of the store.")
    remote: str | None = Field(
        None,
        description="Address behind the store, such as s3://bucket/name.",
        json_schema_extra={"env": "KEEPSIGHT_REMOTE"},
    )
    tenant: str | None = Field(
        None, description="Whose memory this is; tenants of a store share nothing."
    )
    tenant_quota: Size | None = Field(None, description="Bytes that one tenant may hold.")
    ttl: Time | None = Field(None, description="How long an unused entry is remembered.")
    cache_budget: Size | None = Field(
        None, description="Prefixes on the device; if not set, 2GiB or a third of an accelerator."
    )
    host_budget: Size | None = Field(None, description="Prefixes in host memory.")
    vision_budget: Size | None = Field(None, description="Features in memory; 2GiB if not set.")
    min_pixels: Count | None = Field(None, description="Enlarge smaller images to this.")
    max_pixels: Count | None = Field(None, description="Shrink larger images to this.")


class ServerConfig(StrictSettings):
    """The settings of the server itself: times in seconds or "10m", sizes in bytes or "20MiB"."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(8000, description="Port; 0 takes any free one.")
    model_name: str | None = Field(None, description="What clients call the model.")
    keys: tuple[ApiKey, ...] = Field((), description="API keys; see below.")
    allow_origin: Origins = Field((), description="Web origin for CORS; repeatable.")
    allow_path: Texts = Field((), description="Folder of readable pictures; repeatable.")
    trusted_proxy: Proxies = Field(
        (), description="Proxy whose X-Forwarded-For is believed; repeatable."
    )
    allow_private_urls: bool = Field(False, description="Fetch from private networks too.")
    max_body: BodySize = Field("64MiB", description="Largest request.")
    max_images: Count = Field(64, description="Most images in a request.")
    max_image_pixels: Count = Field(40_000_000, description="Most pixels of an image.")
    max_messages: Count = Field(20_000, description="Most messages in a request.")
    max_choices: Count = Field(8, description="Answers to one request (n).")
    max_tokens: Count | None = Field(None, description="The longest answer that anybody gets.")
    decision_config: str | None = Field(
        None, description="decision.json of /v1/systemone; the model's own if not set."
    )
    max_running: Count = Field(16, description="Most answers decoded together.")
    max_waiting: Annotated[int, Field(ge=0)] = Field(64, description="Most requests that wait.")
    max_connections: Count = Field(4096, description="Most open connections.")
    request_timeout: Time = Field("10m", description="Longest time for an answer.")
    body_timeout: Time = Field("60s", description="Longest time for a body to arrive.")
    idle_timeout: Time = Field("75s", description="Close a connection idle for this long.")
    url_timeout: Time = Field("20s", description="Longest time for fetching pictures.")
    url_bytes: Size = Field("64MiB", description="Bytes fetched for one request.")
    files_budget: Size = Field("512MiB", description="Bytes of all uploads.")
    file_ttl: Time = Field("1d", description="How long uploads last.")
    responses_budget: Size = Field("64MiB", description="Bytes of stored responses; 0: none.")
    clip_bytes: Size = Field("1GiB", description="Bytes of a video or sound when decoded.")
    pdf_dpi: Count = Field(144, description="Resolution of PDF pages.")
    unknown_fields: Literal["name", "refuse"] = Field(
        "name", description="Name or refuse unknown fields of a request."
    )
    prefill_piece: Count = Field(
        512, description="Tokens of a prompt between two steps of running answers."
    )
    drain: Time = Field("30s", description="Longest time that running answers get after SIGTERM.")
    warm_up: bool = Field(True, description="At start, make one small answer.")
    log: bool = Field(True, description="Log a line for each request.")

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        secrets = [key.key for key in self.keys]
        if len(set(secrets)) < len(secrets):
            raise InputError("two API keys are the same; each needs a value of its own")

    def seconds(self, name: str) -> float:
        """Return a time by its name."""
        return parse_seconds(getattr(self, name))

    def bytes(self, name: str) -> int:
        """Return a size by its name."""
        return parse_bytes(getattr(self, name))


def read_config(path: str) -> dict[str, object]:
    """Return the checked settings in a TOML or YAML file, those of the model and of the server."""
    settings = {name.replace("-", "_"): value for name, value in _parsed(Path(path)).items()}
    known = {**ModelSettings.model_fields, **ServerConfig.model_fields}
    UnknownOption.refuse(settings, known, path)
    if "keys" in settings:
        settings["keys"] = _keys(settings["keys"], path)
    checked: dict[str, object] = {}
    for kind in (ModelSettings, ServerConfig):
        own: Options = {name: settings[name] for name in kind.model_fields if name in settings}
        try:
            made = kind(**own)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        checked |= {name: getattr(made, name) for name in own}
    return checked


def _parsed(path: Path) -> dict[str, object]:
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
    return {str(name): value for name, value in given.items()}


def _yaml(text: str) -> object:
    yaml = optional("yaml", "server", "pyyaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


_KEY = TypeAdapter(ApiKey)


def _keys(rows: object, path: str) -> tuple[ApiKey, ...]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: keys must be a list of tables with at least name and key")
    return tuple(_key(row, path) for row in rows)


def _key(given: Mapping[object, object], path: str) -> ApiKey:
    row = {str(name).replace("-", "_"): value for name, value in given.items()}
    known = [one.name for one in fields(ApiKey)]
    UnknownOption.refuse(row, known, f"{path}: a key")
    for name in ("name", "key"):
        if not isinstance(row.get(name), str):
            raise InputError(f"{path}: a key has no {name}")
    try:
        return _KEY.validate_python(row)
    except ValidationError as error:
        of_key = f" of key {row['name']!r}"
        raise InputError(f"{path}: {_refusal(error, of_key)}") from None


_EXPECTED = {
    "string_type": "a text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "tuple_type": "a list of texts",
}


def _refusal(error: ValidationError, of: str = "") -> KeepsightError:
    """The first error in Keepsight's form: the name, the value and what was expected."""
    found = error.errors()
    first = found[0]
    cause = first.get("ctx", {}).get("error")
    if not first["loc"]:
        return cause if isinstance(cause, KeepsightError) else InputError(first["msg"])
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return UnknownOption.among([name], ServerConfig.model_fields, "the server")
    if isinstance(cause, KeepsightError):
        return InputError(f"{name}{of}: {cause}")
    alike = dict.fromkeys(_expected(one) for one in found if one["loc"][0] == name)
    shown = json.dumps(first["input"], default=str)
    return InputError(f"{name}{of} is {shown}, expected {' or '.join(alike)}")


def _expected(error: ErrorDetails) -> str:
    about = error.get("ctx", {})
    if error["type"] == "greater_than_equal":
        return f"at least {about['ge']}"
    if error["type"] == "literal_error":
        return str(about["expected"])
    return _EXPECTED.get(error["type"], error["msg"])
