"""Every setting of `keepsight serve` in one model.

Flags, environment variables (`KEEPSIGHT_MAX_BODY`), the `--config` file and the table in
`docs/settings.md` come from it. A flag counts before the environment, and that before the file. A
wrong value is refused with its name, the value and what was expected.
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from keepsight.errors import InputError, UnknownOption
from keepsight.system.optional import optional
from keepsight.system.units import parse_bytes, parse_seconds

_MAX_CONFIG = 1 << 20


def _never_or_seconds(value: float | str) -> float | str:
    return value if value == "never" else parse_seconds(value)


def _origin(value: str) -> str:
    if value != "*" and not re.fullmatch(r"https?://[^/\s?#]+", value):
        raise ValueError("expected one like https://app.example.com, without a path, or *")
    return value


def _proxy(value: str) -> str:
    try:
        return str(ipaddress.ip_network(value))
    except ValueError:
        raise ValueError("expected an address or a network, such as 10.0.0.0/24") from None


def _no_bool(value: object) -> object:
    """TOML has true and false, which Python would take for numbers."""
    if isinstance(value, bool):
        raise ValueError("expected a whole number")
    return value


def _texts(value: Any) -> Any:
    """A text with commas, as in a variable of the environment, or a list."""
    return tuple(value.split(",")) if isinstance(value, str) else value


def _each(check: Callable[[str], str]) -> AfterValidator:
    return AfterValidator(lambda values: tuple(map(check, values)))


Size = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
SecondsOrNever = Annotated[float | str, BeforeValidator(_never_or_seconds)]
Whole = Annotated[int, BeforeValidator(_no_bool)]
Count = Annotated[Whole, Field(ge=1)]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_texts)]
Origins = Annotated[Texts, _each(_origin)]
Proxies = Annotated[Texts, _each(_proxy)]


@dataclass(frozen=True, config={"extra": "forbid"})
class ApiKey:
    """A key, the tenant whose memory it opens, and its limits."""

    name: str
    key: str = field(repr=False)
    tenant: str = ""  # empty: the key's name
    admin: bool = False  # may see and reset entries of all tenants
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    answers: Count | None = None  # at the same time
    files_bytes: Size | None = None  # of uploads; None: an equal share

    def __post_init__(self) -> None:
        if not self.name or not self.key:
            raise InputError("a key needs a name and a key; write --api-key NAME:KEY")
        if not re.fullmatch(r"[!-~]+", self.key):
            raise InputError(
                f"key {self.name!r}: a key goes in a header, so it is made of ASCII letters, "
                "digits and signs, without spaces"
            )

    @property
    def whose(self) -> str:
        return self.tenant or self.name

    @classmethod
    def parse(cls, text: str, admin: bool = False) -> ApiKey:
        """Read `name:key`; a key alone is called `default`."""
        name, colon, key = text.partition(":")
        return cls(name, key, admin=admin) if colon else cls("default", text, admin=admin)


def _group(title: str) -> Callable[[object, str], Any]:
    return lambda default, text: Field(default, description=text, title=title)


_usual, _model, _network = _group("Usual"), _group("Model and memory"), _group("Network")
_limit, _keep, _answer = (
    _group("Limits of a request"),
    _group("Kept for clients"),
    _group("Answers"),
)


class ServerConfig(BaseSettings):
    """All settings, by groups: times in seconds or "10m", sizes in bytes or "20MiB"."""

    model_config = SettingsConfigDict(
        env_prefix="KEEPSIGHT_",
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        validate_default=True,
    )

    model: str | None = _usual(None, "demo, demo-hybrid, demo-smol, a folder, or a hub id.")
    host: str = _usual("127.0.0.1", "Address to listen on.")
    port: Annotated[Whole, Field(ge=0, lt=65536)] = _usual(8000, "Port; 0 takes any free one.")
    api_key: Texts = _usual((), "NAME:KEY; repeatable, one tenant each.")
    store: str | None = _usual(None, "Folder to remember in; without one, memory only.")
    device_map: str | None = _usual(None, "Where the model goes: cpu, cuda, auto.")
    dtype: str = _usual("auto", "auto, float32, bfloat16 or float16.")
    max_running: Count = _usual(16, "Most answers decoded together.")
    allow_path: Texts = _usual((), "Folder of readable pictures; repeatable.")
    config: str | None = _usual(None, "TOML or YAML with these settings.")

    runtime: str | None = _model(
        None, "torch, mlx, auto, or onnx or openvino: exported once, into the store."
    )
    weights: str | None = _model(None, "int8; int4 in an exported runtime.")
    store_budget: Size | None = _model(None, "Bytes of the store.")
    remote: str | None = _model(None, "Address behind the store, such as s3://bucket/name.")
    tenant: str | None = _model(None, "Whose memory this is; tenants of a store share nothing.")
    tenant_quota: Size | None = _model(None, "Bytes that one tenant may hold.")
    ttl: SecondsOrNever | None = _model(None, "How long an unused entry is remembered, or never.")
    cache_budget: Size | None = _model(
        None, "Prefixes on the device; if not set, 2GiB or a third of an accelerator."
    )
    host_budget: Size | None = _model(None, "Prefixes in host memory.")
    vision_budget: Size | None = _model(None, "Features in memory; 2GiB if not set.")
    min_pixels: Count | None = _model(None, "Enlarge smaller images to this.")
    max_pixels: Count | None = _model(None, "Shrink larger images to this.")

    model_name: str | None = _answer(None, "What clients call the model.")
    max_waiting: Annotated[Whole, Field(ge=0)] = _answer(64, "Most requests that wait.")
    max_tokens: Count | None = _answer(None, "The longest answer that anybody gets.")
    max_choices: Count = _answer(8, "Answers to one request (n).")
    request_timeout: Seconds = _answer("10m", "Longest time for an answer.")
    prefill_piece: Count = _answer(512, "Tokens of a prompt between two steps of running answers.")
    decision_config: str | None = _answer(
        None, "decision.json of /v1/systemone; the model's own if not set."
    )
    warm_up: bool = _answer(True, "At start, make one small answer.")

    admin_key: Texts = _network((), "NAME:KEY that also sees metrics; repeatable.")
    keys: tuple[ApiKey, ...] = _network((), "API keys with limits; in the file.")
    allow_origin: Origins = _network((), "Web origin for CORS; repeatable.")
    trusted_proxy: Proxies = _network((), "Proxy whose X-Forwarded-For is believed; repeatable.")
    allow_private_urls: bool = _network(False, "Fetch from private networks too.")
    max_connections: Count = _network(4096, "Most open connections.")
    idle_timeout: Seconds = _network("75s", "Close a connection idle for this long.")
    body_timeout: Seconds = _network("60s", "Longest time for a body to arrive.")
    drain: Seconds = _network("30s", "Longest time that running answers get after SIGTERM.")
    log: bool = _network(True, "Log a line for each request.")

    max_body: Annotated[Size, Field(ge=1)] = _limit("64MiB", "Largest request.")
    max_messages: Count = _limit(20_000, "Most messages in a request.")
    max_images: Count = _limit(64, "Most images in a request.")
    max_image_pixels: Count = _limit(40_000_000, "Most pixels of an image.")
    pdf_dpi: Count = _limit(144, "Resolution of PDF pages.")
    clip_bytes: Size = _limit("1GiB", "Bytes of a video or sound when decoded.")
    url_timeout: Seconds = _limit("20s", "Longest time for fetching pictures.")
    url_bytes: Size = _limit("64MiB", "Bytes fetched for one request.")

    files_budget: Size = _keep("512MiB", "Bytes of all uploads.")
    file_ttl: Seconds = _keep("1d", "How long uploads last.")
    responses_budget: Size = _keep("64MiB", "Bytes of stored responses; 0: none.")

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _refusal(error) from None
        except SettingsError as error:
            raise InputError(f"a variable of the environment: {error}") from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then the file."""
        path = {**env_settings(), **init_settings()}.get("config")
        given = {} if path is None else read_file(str(path))
        return init_settings, env_settings, InitSettingsSource(settings_cls, given)

    @model_validator(mode="before")
    @classmethod
    def _with_keys(cls, given: dict[str, Any]) -> dict[str, Any]:
        keys = given.get("keys", ())
        if not isinstance(keys, list | tuple):
            return given  # it is refused by its name
        keys = list(keys)
        for name in ("api_key", "admin_key"):
            texts = _texts(given.get(name, ()))
            keys += [ApiKey.parse(text, admin=name == "admin_key") for text in texts]
        return {**given, "keys": keys, "api_key": (), "admin_key": ()}

    @model_validator(mode="after")
    def _no_key_twice(self) -> ServerConfig:
        if len({key.key for key in self.keys}) < len(self.keys):
            raise InputError("two API keys are the same; each needs a value of its own")
        return self

    def of_model(self) -> dict[str, Any]:
        """The options that `load` takes."""
        names = [n for n, f in type(self).model_fields.items() if f.title == "Model and memory"]
        names += ["model", "dtype", "device_map", "store"]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def read_file(path: str) -> dict[str, Any]:
    try:
        data = Path(path).read_bytes()
        text = data[:_MAX_CONFIG].decode("utf-8")
        is_yaml = Path(path).suffix in (".yaml", ".yml")
        given = _yaml(text) if is_yaml else tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as a configuration: {error}") from None
    if not isinstance(given, dict) or len(data) > _MAX_CONFIG:
        raise InputError(f"{path}: expected names and values, at most {_MAX_CONFIG} bytes")
    given = {str(name).replace("-", "_"): value for name, value in given.items()}
    UnknownOption.refuse(given, ServerConfig.model_fields, path)
    return given


def _yaml(text: str) -> object:
    yaml = optional("yaml", "server", "pyyaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _refusal(error: ValidationError) -> Exception:
    first = error.errors()[0]
    cause, place = first.get("ctx", {}).get("error"), first["loc"]
    name = str(place[0]) if place else ""
    if first["type"] == "unexpected_keyword_argument":
        return UnknownOption.among([str(place[-1])], ApiKey.__dataclass_fields__, "a key")
    if first["type"] == "extra_forbidden":
        return UnknownOption.among([name], ServerConfig.model_fields, "the server")
    why = str(cause or first["msg"]).replace("Input should be", "expected")
    if not place:
        return InputError(why)
    if name == "keys":  # never shown: it may hold a secret
        return InputError(f"{'.'.join(map(str, place))}: {why}")
    return InputError(f"{name} is {json.dumps(first['input'], default=str)}: {why}")
