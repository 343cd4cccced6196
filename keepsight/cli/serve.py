"""`keepsight serve`: a model behind an OpenAI-compatible API.

The flags are made from the settings in `server/config.py` when the command is called, so other
commands need not import what the server needs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from keepsight.cli import options
from keepsight.cli.terminal import json_line
from keepsight.errors import InputError, MissingExtra
from keepsight.kinds import Options
from keepsight.system.places import check_device, check_listen, check_store_writable
from keepsight.system.words import check_dtype

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from keepsight.server.config import ServerConfig
    from keepsight.vlm import VLM

_LIBRARIES = (
    *("pydantic", "pydantic_settings", "fastapi", "uvicorn"),
    *("prometheus_client", "python_multipart"),
)
_NAMES = {"device_map": ("--device", "--device-map"), "model": ("--model", "-m")}


class ServeCommand(TyperCommand):
    """The command; its flags are generated on demand."""

    def get_params(self, ctx: Any) -> list[Any]:  # typer brings its own click types, or click does
        """Return the flags of the settings."""
        if not self.params:
            made = typer.Typer(add_completion=False)
            made.command()(_with_flags())
            command = typer.main.get_command(made)
            self.params, self.callback = command.params, command.callback
        return super().get_params(ctx)


def serve() -> None:
    """Serve a model to OpenAI clients: /v1/chat/completions, /v1/responses and more."""


def _with_flags() -> Callable[..., None]:
    """The function that serves, with a parameter for each setting."""
    _check_libraries()
    from keepsight.server.config import ServerConfig  # optional: needs the extra

    def call(**given: object) -> None:
        run({name: value for name, value in given.items() if value is not None})

    fields = {name: one for name, one in ServerConfig.model_fields.items() if name != "keys"}
    about, as_json = fields["model"].description, "The address and the log as lines of JSON."
    flags = {
        "named": Annotated[str | None, typer.Argument(metavar="MODEL", help=about)],
        **{name: _flag(name, field) for name, field in fields.items()},
        "as_json": Annotated[
            bool | None, typer.Option("--json", help=as_json, rich_help_panel="Network")
        ],
    }
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__annotations__ = flags
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, kind, default=None, annotation=a) for n, a in flags.items()]
    )
    return call


def _flag(name: str, field: FieldInfo) -> Any:
    """A setting as a flag. Sizes, times and the like are parsed from text."""
    default, text = field.default, field.description or ""
    flag = f"--{name.replace('_', '-')}"
    kind: Any = str | None
    names: tuple[str, ...] = _NAMES.get(name, (flag,))
    if isinstance(default, bool):
        kind, names = bool | None, (f"{flag}/--no-{flag[2:]}" if default else flag,)
    elif default == ():
        kind = list[str] | None
    elif default is not None:
        kind = int | None if isinstance(default, int) else kind
        text = f"{text.removesuffix('.')}; default {default}."
    panel = field.title or "Options"
    option = typer.Option(*names, help=text, show_default=False, rich_help_panel=panel)
    return Annotated[kind, option]


def run(given: Options) -> None:
    """Build the settings from flags, environment and file, and run the server."""
    with _ending_at_once():
        _check_libraries()
        from keepsight.server.config import ServerConfig  # optional: needs the extra

        as_json = bool(given.pop("as_json", False))
        if (named := given.pop("named", None)) is not None:
            given["model"] = options.one_model(named, given.get("model"))
        config = ServerConfig(**given)
        if (name := config.model) is None:
            raise InputError("which model? write: keepsight serve demo")
        check_device(config.device_map)
        for store in (config.store, config.remote):
            check_store_writable(store or "")
        check_dtype(config.dtype)
        options.check_model(name)
        options.check_decision_config(config.decision_config)
        check_listen(config.host, config.port)
        with _loaded(config) as vlm:
            from keepsight.server.running import serve as listen  # start-up time

            listen(vlm, name, config, lambda port: announce(name, config, port, as_json), as_json)


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Let SIGTERM end the process at once until the server listens, and again after it has drained.

    That is the default, except for the first process of a container: there a signal without a
    handler is ignored, and the process could not be stopped while it loads a model.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_libraries() -> None:
    for library in _LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise MissingExtra.named(library.replace("_", "-"), "server")


def _loaded(config: ServerConfig) -> VLM:
    return options.load(**config.of_model())


def announce(name: str, config: ServerConfig, port: int, as_json: bool = False) -> None:
    """Print where it listens, and an example command.

    As JSON it is one line, which a program that started the server reads to know its address.
    """
    host = config.host if config.host not in ("0.0.0.0", "::") else "127.0.0.1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    shown = config.model_name or name
    if as_json:
        json_line({"event": "listening", "model": shown, "url": url})
        return
    key = ' -H "Authorization: Bearer YOUR_KEY"' if config.keys else ""
    typer.echo(f"Keepsight serves {shown} at {url}  (API: /docs, page: /)")
    typer.echo(
        f"Try:\n  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json'"
        f""" -d '{{"model": "{shown}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""
    )
