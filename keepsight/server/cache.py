"""Routes to prepare, explain, count, pin and forget what is remembered, for the tenant of the key.

A tenant sees and forgets only its own entries. Entries of all tenants are for whoever runs the
server: without API keys everyone who can reach it, with keys an administrator.
"""

from __future__ import annotations

import functools
import heapq
import json
import operator
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from keepsight.core import pins
from keepsight.errors import StoreError
from keepsight.kinds import Options, Record
from keepsight.media.medium import Medium
from keepsight.report import Report
from keepsight.server.access import Visit, posts, visit_of
from keepsight.server.errors import ApiError, invalid, refused
from keepsight.server.schema import (
    HeldRequest,
    PinRequest,
    PixelLimits,
    Rendering,
    ResetRequest,
    Salt,
)
from keepsight.server.service import Service, tools_of
from keepsight.server.streaming import report_of
from keepsight.server.turns import is_large
from keepsight.session import Session, keep_file

_TEMPLATE = ("tools", "chat_template_kwargs")  # fields besides messages that decide a prompt
_MOST = 1000  # most pictures of a store that are listed
_ONLY = "a .keep file holds only messages and pictures"
_PIECE = 1 << 20  # bytes sent at once
_Salt = Annotated[Salt | None, Query()]
_FILE: dict[int | str, Record] = {
    200: {"content": {"application/octet-stream": {}}, "description": "A `.keep` file."}
}


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["cache"])
    _add_reports(router, service)
    _add_held(router, service)
    _add_whole(router, service)
    return router


# -- reports and files of conversations ------------------------------------------------------------


def _add_reports(router: APIRouter, service: Service) -> None:
    together, threads = service.together, service.threads

    async def reported(
        body: Rendering, visit: Visit, call: Callable[..., Awaitable[Report]]
    ) -> Record:
        messages, template, tenant = await service.rendering(body, visit)
        report = await call(messages, **_options_of(body, template, tenant))
        report.notes += visit.unused.notes()
        return {"object": "cache.report", "model": service.model.name, "report": report_of(report)}

    @posts(router, "/v1/prepare", Rendering, "prepare")
    async def prepare(body: Rendering, visit: Visit) -> Record:
        """Encode and prefill now, so that these messages are answered at once."""
        return await reported(body, visit, functools.partial(service.prepare, visit=visit))

    @posts(router, "/v1/cache/explain", Rendering, "explain")
    async def explain(body: Rendering, visit: Visit) -> Record:
        """The report that an answer would get, without running the model."""

        def look(messages: list[Record], **options: object) -> Awaitable[Report]:
            work = functools.partial(together.explain, messages, **options)
            return threads.run(work, is_large(messages))

        return await reported(body, visit, look)

    more = {"response_class": StreamingResponse, "responses": _FILE}

    @posts(router, "/v1/cache/save", Rendering, "cache_save", **more)
    async def save(body: Rendering, visit: Visit) -> StreamingResponse:
        """A conversation with features and states as a `.keep` file, computed if missing."""
        for name in _TEMPLATE:
            if getattr(body, name):
                raise refused(name, _ONLY)
        given, template, tenant = await service.rendering(body, visit)
        if template:  # of fields for thinking
            raise refused("chat_template_kwargs", _ONLY)
        # Pictures are opened and prompts computed where no other client's tokens wait for them.
        named = await threads.run(lambda: together.named(given, tenant), is_large(given))
        await service.prepare(named, visit, tenant=tenant or None)
        session = Session(service.vlm.runtime, tenant=tenant)
        session.messages = [_of_session(message) for message in named]
        parts = await service.change_cache(lambda: list(keep_file.spelled(session)))
        headers = {
            "content-disposition": 'attachment; filename="conversation.keep"',
            "content-length": str(sum(map(len, parts))),
        }
        pieces = (
            bytes(part[start : start + _PIECE])
            for part in parts
            for start in range(0, len(part), _PIECE)
        )
        return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


def _options_of(body: Rendering, template: Record, tenant: str) -> Options:
    """The library's options for the fields besides messages that decide a prompt."""
    options = {"tenant": tenant, "template_kwargs": template, "tools": tools_of(body.shown_tools)}
    return {name: value for name, value in options.items() if value}


def _of_session(message: Record) -> Record:
    """A message in a session's form: text as a part, and only pictures as media."""
    content = message["content"]
    if isinstance(content, str) and message["role"] != "system":
        content = [{"type": "text", "text": content}]
    for part in content if isinstance(content, list) else ():
        if part["type"] not in ("text", "image"):
            raise refused("messages", f"a .keep file holds pictures, and no {part['type']}")
    return {"role": message["role"], "content": content}


# -- pictures and conversations that are held ------------------------------------------------------


def _add_held(router: APIRouter, service: Service) -> None:
    vlm, change = service.vlm, service.change_cache

    async def meant(
        body: HeldRequest, visit: Visit, learn: bool
    ) -> tuple[list[Record] | list[Medium], Options, list[Record]]:
        """What a request with messages means, the library's options, and its messages."""
        if body.messages is None:
            raise invalid("messages", "give messages, or images by their keys")
        if body.pictures_only:
            _refuse_with(body, "pictures_only", *_TEMPLATE)
        fields = ("model", "messages", "cache_salt", *_TEMPLATE, *PixelLimits.model_fields)
        rendering = Rendering.model_construct(**{name: getattr(body, name) for name in fields})
        given, template, tenant = await service.rendering(rendering, visit)
        # Pictures are opened here, where no client's tokens wait for them.
        named = await service.threads.run(
            lambda: service.together.named(given, tenant, learn), is_large(given)
        )
        what = [medium for _, medium in _media_in(named)] if body.pictures_only else named
        if not what:
            raise invalid("messages", "there is no picture in these messages")
        return what, _options_of(rendering, template, tenant), named

    def keys_of(messages: list[Record], tenant: str) -> list[str]:
        with vlm.runtime.lock:
            vlm.runtime.refresh(tenant=tenant)
            vision = vlm.runtime.vision_of(tenant)
            return [vision.name(medium, kind).key for kind, medium in _media_in(messages)]

    @router.get("/v1/cache/images", operation_id="cache_images")
    async def images(request: Request, cache_salt: _Salt = None, stored: bool = False) -> Record:
        """The pictures with features in memory, by key, for one tenant; with `stored` also those
        that only the store has, the most recently used first, at most a thousand of them."""
        tenant = visit_of(request).who().salted(cache_salt)
        return {"object": "list", "data": await change(lambda: _rows(service, tenant, stored))}

    @posts(router, "/v1/cache/pin", PinRequest, "cache_pin")
    async def pin(body: PinRequest, visit: Visit) -> Record:
        """Pin pictures or a whole conversation. What messages need and is missing is computed; a
        picture given by key must be remembered."""
        tenant = visit.who().salted(body.cache_salt)
        if keys := _keys_in(body):
            await change(lambda: _pin_images(service, keys, tenant, pinned=body.pinned))
        else:
            what, options, named = await meant(body, visit, learn=True)
            # Computed in turn with other requests; unpinning matches the whole path too.
            if not body.pictures_only:
                await service.prepare(named, visit, **options)

            def keep() -> list[str]:
                keys = keys_of(named, tenant)
                vlm.pin(what, body.pinned, **options)
                return keys

            keys = await change(keep)
        return {"object": "cache.pin", "pinned": body.pinned, "images": keys}

    @posts(router, "/v1/cache/delete", HeldRequest, "cache_delete")
    async def delete(body: HeldRequest, visit: Visit) -> Record:
        """Remove pictures, or a whole conversation, and everything computed from them."""
        tenant = visit.who().salted(body.cache_salt)
        if keys := _keys_in(body):
            freed = await change(lambda: pins.delete_images(vlm.runtime, keys, tenant))
        else:
            what, options, named = await meant(body, visit, learn=False)
            keys, freed = await change(
                lambda: (keys_of(named, tenant), vlm.delete(what, **options))
            )
        return {"object": "cache.delete", "bytes_freed": freed, "images": keys}


def _keys_in(body: HeldRequest) -> list[str]:
    """The keys that a request names; none if it speaks of messages."""
    if body.images is None:
        return []
    if body.messages is not None:
        raise invalid("images", "give either images by their keys, or messages")
    _refuse_with(body, "images", "pictures_only", *_TEMPLATE, *PixelLimits.model_fields)
    return list(dict.fromkeys(body.images))


def _refuse_with(body: HeldRequest, field: str, *names: str) -> None:
    """Refuse fields that mean nothing together with another."""
    for name in names:
        if getattr(body, name):
            raise refused(name, f"only goes with whole messages; leave it out with {field}")


def _pin_images(service: Service, keys: list[str], tenant: str, *, pinned: bool) -> None:
    for key, is_known in pins.are_known(service.vlm.runtime, keys, tenant).items():
        if not is_known:  # check all of them first, so that a refusal changes nothing
            raise ApiError(
                404,
                f"no such picture: {key}; nothing is remembered of it. Give the picture itself in "
                "messages, or a key that /v1/cache/images lists",
                param="images",
                code="image_not_found",
            )
    pins.pin_images(service.vlm.runtime, keys, pinned, tenant)


def _media_in(messages: list[Record]) -> Iterator[tuple[str, Medium]]:
    """(kind, medium) for each medium of gathered messages."""
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] != "text":
                yield part["type"], part[part["type"]]


def _rows(service: Service, tenant: str, stored: bool) -> list[Record]:
    """The pictures in memory; with `stored` also those that only the store has, which are not
    opened, so that nothing is known of their tokens and kinds."""
    runtime = service.vlm.runtime
    packages, store = runtime.caches.packages, runtime.store_of(tenant)
    with runtime.lock:
        held = [(package, packages.pinned(tenant, key)) for key, package in packages.items(tenant)]
    rows = [
        _row(one.key, one.modality, one.tokens, one.nbytes, pinned, "memory")
        for one, pinned in held
    ]
    if store is None or not stored:
        return rows
    nearer = {row["key"] for row in rows}
    entries = (e for e in store.entries() if e.kind == "package" and e.media)
    new = (entry for entry in entries if entry.media[0] not in nearer)
    for entry in heapq.nlargest(_MOST, new, operator.attrgetter("used")):
        tier = store.tier("package", entry.key)
        rows.append(_row(entry.media[0], None, None, entry.nbytes, entry.pinned, tier))
    return rows


def _row(*values: object) -> Record:
    names = ("key", "kind", "tokens", "bytes", "pinned", "tier")
    return dict(zip(names, values, strict=True))


# -- all that is remembered ------------------------------------------------------------------------


def _add_whole(router: APIRouter, service: Service) -> None:
    @router.get("/v1/cache/stats", operation_id="cache_stats")
    async def stats(request: Request, cache_salt: _Salt = None) -> Record:
        """Bytes and counts of one tenant; of all for an administrator without a salt."""
        caller = visit_of(request).who()
        everyone = caller.admin and cache_salt is None
        whose = None if everyone else caller.salted(cache_salt)

        def work() -> Record:
            stats = service.vlm.runtime.stats(whose)
            files = [f.nbytes for f in service.files.of(caller.tenant)]
            stats["files"] = {"bytes": sum(files), "files": len(files)}
            if everyone:
                stats["runtime"] = service.vlm.chosen_runtime
                stats["scheduler"] = service.together.stats()
            made: Record = json.loads(json.dumps(stats, default=str))
            return {"object": "cache.stats", "everyone": everyone, **made}

        return await service.threads.wait(work)

    @posts(router, "/v1/cache/reset", ResetRequest, "cache_reset")
    async def reset(body: ResetRequest, visit: Visit) -> Record:
        """Forget what is remembered in memory; with `store`, also on disk."""
        if body.everyone and not visit.who().admin:
            text = "forgetting entries of all keys needs an administrator's key"
            raise ApiError(403, text, code="admin_key_required")
        if body.everyone and body.cache_salt is not None:
            raise ApiError(400, "give either everyone or cache_salt", param="everyone")
        whose = None if body.everyone else visit.who().salted(body.cache_salt)

        def work() -> None:
            pins.clear(service.vlm.runtime, whose, body.store)
            service.responses.forget(whose)

        await service.change_cache(work)
        return {"object": "cache.reset", "everyone": whose is None}

    @router.post("/v1/cache/flush", operation_id="cache_flush")
    async def flush(request: Request) -> Record:
        """Answer when everything remembered so far is safe on the disk; otherwise the error says
        what is not. It covers all tenants, so with API keys it needs an administrator's."""
        if not visit_of(request).who().admin:
            text = "flushing is for all keys together: it needs an administrator's key"
            raise ApiError(403, text, code="admin_key_required")
        try:
            await service.threads.wait(service.vlm.flush)
        except StoreError as error:
            raise ApiError(503, str(error), code="not_written") from error
        return {"object": "cache.flush", "stored": service.vlm.runtime.store is not None}
