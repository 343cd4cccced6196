"""`keepsight serve`: a model behind an OpenAI-compatible API.

Each flag has the same name in a `--config` file; a flag that is given wins over the file. The
server itself, and the libraries that it needs, are imported only when it starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepsight.cli import options
from keepsight.errors import InputError, MissingExtra
from keepsight.kinds import Options, Record

if TYPE_CHECKING:
    from keepsight.server.config import ServerConfig

_LIBRARIES = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
# Options of the model, which a file may hold beside those of the server.
_OF_MODEL = (
    "cache_budget",
    "device_map",
    "dtype",
    "grain",
    "host_budget",
    "max_pixels",
    "min_pixels",
    "model",
    "remote",
    "store",
    "store_budget",
    "tenant",
    "tenant_quota",
    "ttl",
    "vision_budget",
)

Size = str | None


def _option(help_text: str) -> Any:
    return typer.Option(help=help_text, show_default=False)


def _flag(names: str, help_text: str) -> Any:
    return typer.Option(names, help=help_text)


def serve(
    model: Annotated[
        str | None, typer.Argument(help="demo, demo-hybrid, a folder, or a hub id.")
    ] = None,
    config: Annotated[str | None, _option("TOML or YAML with these flags.")] = None,
    host: Annotated[str | None, _option("Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, _option("Port; 0 takes any free one; default 8000.")] = None,
    model_name: Annotated[str | None, _option("What clients call the model.")] = None,
    api_key: Annotated[list[str] | None, _option("NAME:KEY; repeatable, one tenant each.")] = None,
    admin_key: Annotated[list[str] | None, _option("NAME:KEY that also sees metrics.")] = None,
    allow_origin: Annotated[list[str] | None, _option("Web origin for CORS; repeatable.")] = None,
    allow_path: Annotated[list[str] | None, _option("Folder of readable pictures.")] = None,
    allow_private_urls: Annotated[
        bool | None, typer.Option("--allow-private-urls", help="Fetch from private networks too.")
    ] = None,
    max_body: Annotated[Size, _option("Largest request; default 64MiB.")] = None,
    max_images: Annotated[int | None, _option("Images in a request; default 64.")] = None,
    max_image_pixels: Annotated[int | None, _option("Pixels of an image; 40000000.")] = None,
    max_messages: Annotated[int | None, _option("Messages in a request; default 20000.")] = None,
    max_choices: Annotated[int | None, _option("Largest n; default 8.")] = None,
    max_tokens: Annotated[int | None, _option("The longest answer anybody gets.")] = None,
    max_running: Annotated[int | None, _option("Answers decoded together; default 16.")] = None,
    max_waiting: Annotated[int | None, _option("Requests that wait; default 64.")] = None,
    max_connections: Annotated[int | None, _option("Open connections; default 4096.")] = None,
    request_timeout: Annotated[Size, _option("Longest answer in time; default 10m.")] = None,
    body_timeout: Annotated[Size, _option("For a body to arrive; default 60s.")] = None,
    idle_timeout: Annotated[Size, _option("For idle connections; default 75s.")] = None,
    url_timeout: Annotated[Size, _option("For fetching a picture; default 20s.")] = None,
    url_bytes: Annotated[Size, _option("Fetched for one request; default 64MiB.")] = None,
    files_budget: Annotated[Size, _option("Bytes of all uploads; default 512MiB.")] = None,
    file_ttl: Annotated[Size, _option("How long uploads last; default 1d.")] = None,
    responses_budget: Annotated[Size, _option("Bytes of kept responses; 64MiB; 0: none.")] = None,
    clip_bytes: Annotated[Size, _option("A video or sound, decoded; default 1GiB.")] = None,
    pdf_dpi: Annotated[int | None, _option("Resolution of PDF pages; default 144.")] = None,
    unknown_fields: Annotated[Size, _option("Of requests: name (default) or refuse.")] = None,
    prefill_ahead: Annotated[Size, _option("Quiet before prefilling ahead; 0.25s.")] = None,
    drain: Annotated[Size, _option("For running answers on SIGTERM; 30s.")] = None,
    warm_up: Annotated[
        bool | None, typer.Option("--warm-up/--no-warm-up", help="One small answer at start.")
    ] = None,
    log: Annotated[bool | None, _flag("--log/--no-log", "A line for each request.")] = None,
    dtype: Annotated[str | None, _option("auto, float32, bfloat16 or float16.")] = None,
    device_map: options.DeviceMap = None,
    store: options.Store = None,
    store_budget: Annotated[Size, _option("Bytes of the store.")] = None,
    remote: options.Remote = None,
    tenant: options.Tenant = None,
    tenant_quota: Annotated[Size, _option("Bytes that one tenant may hold.")] = None,
    ttl: Annotated[Size, _option("How long what is remembered lasts unused.")] = None,
    cache_budget: Annotated[Size, _option("Prefixes on the device; default 2GiB.")] = None,
    host_budget: Annotated[Size, _option("Prefixes in host memory.")] = None,
    vision_budget: Annotated[Size, _option("Features in memory; default 2GiB.")] = None,
    grain: options.Grain = None,
    min_pixels: options.MinPixels = None,
    max_pixels: options.MaxPixels = None,
) -> None:
    """Serve a model to OpenAI clients: /v1/chat/completions, /v1/responses and more."""
    given = {name: value for name, value in locals().items() if value is not None}
    run(given)


def run(given: Options) -> None:
    """Settings from flags and file to a listening server."""
    with _ending_at_once():
        _run(given)


def _run(given: Options) -> None:
    _check_libraries()
    from keepsight.server.running import serve as listen

    settings, server = _sorted(given)
    name = settings.pop("model", None)
    if name is None:
        raise InputError("which model? write: keepsight serve demo")
    with _loaded(name, settings) as vlm:
        listen(vlm, name, server, lambda port: _say(name, server, port))


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Until the server listens, and again when it has drained, SIGTERM ends the process at once.

    It does so by itself, but not for the first process of a container: for that one a signal that
    nobody handles is dropped, and it could not be stopped while it loads a model.
    """

    def end(number: int, frame: object) -> None:
        os._exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_libraries() -> None:
    from importlib.util import find_spec

    for library in _LIBRARIES:
        if find_spec(library) is None:
            raise MissingExtra.named(library.replace("_", "-"), "server")


def _sorted(given: Options) -> tuple[Record, ServerConfig]:
    """What the model is told, and what the server is told."""
    from keepsight.server.config import ApiKey, ServerConfig, read_config

    given = dict(given)
    keys = [ApiKey.parse(text) for text in given.pop("api_key", None) or []]
    keys += [ApiKey.parse(text, admin=True) for text in given.pop("admin_key", None) or []]
    path = given.pop("config", None)
    settings = read_config(path, _OF_MODEL) if path is not None else {}
    settings |= {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    if keys:
        settings["keys"] = (*settings.get("keys", ()), *keys)
    of_model = {name: settings.pop(name) for name in _OF_MODEL if name in settings}
    return of_model, ServerConfig(**settings)


def _loaded(name: str, settings: Options) -> Any:
    pixels = (settings.pop("min_pixels", None), settings.pop("max_pixels", None))
    settings.setdefault("dtype", "auto")
    try:
        return options.load(name, pixels=pixels, **settings)
    except TypeError as error:  # a value of the wrong kind in a file
        raise InputError(f"an option of the model has a wrong value: {error}") from error


def _say(name: str, config: ServerConfig, port: int) -> None:
    """Where it listens, and a line to try it with."""
    host = config.host if config.host not in ("0.0.0.0", "::") else "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    shown = config.model_name or name
    key = ' -H "Authorization: Bearer YOUR_KEY"' if config.keys else ""
    typer.echo(f"Keepsight serves {shown} at http://{host}:{port}  (API: /docs, page: /)")
    typer.echo("Try:")
    typer.echo(
        f"  curl http://{host}:{port}/v1/chat/completions{key} -H 'Content-Type: application/json'"
        f""" -d '{{"model": "{shown}", "messages": [{{"role": "user", "content": [{{"type": """
        """"image_url", "image_url": {"url": "data:image/png;base64,'"$(base64 < picture.png | tr"""
        """ -d '\\n')"'"}}, {"type": "text", "text": "What is in the picture?"}]}]}'"""
    )
