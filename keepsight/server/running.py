"""Runs the server: loads and warms the model, listens, and shuts down in order.

On SIGTERM admitted requests may finish within the drain time. New requests, and those whose bodies
are still arriving, get an error that asks them to retry later. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import h11
import uvicorn
from PIL import Image
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepsight.core.together import Together
from keepsight.errors import InputError, KeepsightError
from keepsight.server import log
from keepsight.server.app import build
from keepsight.server.config import ServerConfig
from keepsight.server.service import Service

if TYPE_CHECKING:
    from keepsight.vlm import VLM

logger = logging.getLogger("keepsight.server")

_POLL = 0.05
_SWEEP = 30.0  # seconds
_LAST_WORDS = 2.0  # seconds to tell clients that the drain time is over
_TURN = 0.0005  # seconds a thread holds the GIL; the model's thread always asks for it
_HEAD = 16 << 10  # bytes of a request before its body


def make_service(vlm: VLM, name: str, config: ServerConfig) -> Service:
    """The service for a model: warmed, with its scheduler."""
    if config.decision_config is not None:
        vlm.decider.config = config.decision_config
    if config.warm_up:
        _warm_up(vlm)
    together = Together(
        vlm,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        prefill_piece=config.prefill_piece,
    )
    return Service(vlm, together, name, config)


def _warm_up(vlm: VLM) -> None:
    """Give one small answer, so that the first client does not wait for one-time work."""
    whose, image = "keepsight warm-up", Image.new("RGB", (64, 64), "white")
    content = [{"type": "image", "image": image}, {"type": "text", "text": "x"}]
    with contextlib.suppress(KeepsightError):  # a model without pictures is warm without one
        vlm.chat([{"role": "user", "content": content}], max_new_tokens=2, tenant=whose)
    vlm.clear(store=True, tenant=whose)


class Server(uvicorn.Server):
    """Uvicorn, but draining before it stops listening."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service, self._drain = service, service.config.drain
        self.ready: Callable[[int], object] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends."""
        if self._service.draining:
            self.should_exit = self.force_exit = True
        self._service.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.ready is not None and self.servers:
            self.ready(self.servers[0].sockets[0].getsockname()[1])

    async def main_loop(self) -> None:
        closing: asyncio.Task | None = None
        sweeping = asyncio.create_task(self._sweep_now_and_then())
        while not self.should_exit:
            await self.on_tick(0)
            if self._service.draining and closing is None:
                self._service.bodies.refuse_incomplete()
                closing = asyncio.create_task(self._close_soon())
            await asyncio.sleep(_POLL)
        sweeping.cancel()
        if closing is not None:
            closing.cancel()

    async def _sweep_now_and_then(self) -> None:
        """Remove expired data on time, also from a disk, without waiting for a request."""
        while True:
            try:
                await self._service.threads.run(self._service.responses.sweep)
                await self._service.threads.wait(self._service.files.sweep)
            except OSError as error:
                logger.warning("uploads that have expired cannot be removed: %s", error)
            await asyncio.sleep(_SWEEP)

    async def _close_soon(self) -> None:
        await self._done_within(self._drain)
        if self._service.admitted:
            # What still runs ends with an error that its client can read.
            ending = asyncio.create_task(asyncio.to_thread(self._service.together.close, 0.0))
            await self._done_within(_LAST_WORDS)
            ending.cancel()
        self.should_exit = True

    async def _done_within(self, seconds: float) -> None:
        """Wait for all admitted requests; not for refusals, and clients still sending bodies."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._service.admitted:
                    await asyncio.sleep(_POLL)


class Connection(H11Protocol):
    """A connection that is closed when idle, even if bytes trickle in."""

    idle = 75.0  # seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._seen: object = None
        self._watch = self.loop.call_later(self.idle, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand over no more of a head than it may have: a whole one is parsed at any length."""
        while data and self.conn.their_state is h11.IDLE:
            room = max(1, _HEAD + 1 - len(self.conn.trailing_data[0]))
            super().data_received(data[:room])
            data = data[room:]
        if data and not self.transport.is_closing():
            super().data_received(data)

    def _look(self) -> None:
        """Close if no request began since the last check and none is being answered."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if not busy and self._seen is self.cycle:
            self.transport.close()
            return
        self._seen = self.cycle
        self._watch = self.loop.call_later(self.idle, self._look)


def make_server(service: Service) -> Server:
    config = service.config
    settings = uvicorn.Config(
        build(service),
        host=config.host,
        port=config.port,
        http=type("Connection", (Connection,), {"idle": config.idle_timeout}),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(config.trusted_proxy),  # otherwise it trusts all local clients
        forwarded_allow_ips=list(config.trusted_proxy),
        timeout_keep_alive=int(config.idle_timeout) or 1,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=_HEAD,
        limit_concurrency=config.max_connections + 1,
        backlog=2048,
    )
    return Server(settings, service)


def serve(
    vlm: VLM, name: str, config: ServerConfig, ready: Callable[[int], object], as_json: bool = False
) -> None:
    """Serve until a signal ends it. `ready` gets the port and announces it."""
    log.start(config.log, as_json)
    service = make_service(vlm, name, config)
    server = make_server(service)
    server.ready = ready
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN)
    gc.collect()
    gc.freeze()  # a look through all that loading made takes 0.2 s, amid somebody's answer
    try:
        server.run()
    except SystemExit as error:  # uvicorn's sign that it could not listen
        where = f"{config.host}:{config.port}"
        raise InputError(f"cannot listen on {where}; is something else there?") from error
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
        service.draining = True
        service.close()
