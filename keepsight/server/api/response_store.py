"""Stored responses, which later ones may continue by id.

In memory only, like uploads without a store: limited in number and bytes per key, and gone when
they expire, are deleted, or their tenant forgets everything. Tenants and salts do not see each
other's: a foreign id looks like an unknown one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import TypeAdapter

from keepsight import digests
from keepsight.kinds import Options, Record
from keepsight.server.api.items import Item, Reference
from keepsight.server.api.responses_schema import Placed, ResponsesRequest, items_of
from keepsight.server.errors import ApiError

_MOST = 10_000  # responses per key
_LONGEST = 10_000  # responses per chain
_LARGEST = 64 << 20  # bytes of a conversation with all ids resolved
BEFORE = "previous_response_id"  # a client's name for the items of earlier responses
_ITEM: TypeAdapter[Item] = TypeAdapter(Item)


@dataclass(frozen=True)
class StoredResponse:
    """One response: the request, the answer, and the response that it continues."""

    id: str
    whose: str  # the tenant, with its salt
    previous: str | None
    asked: bytes  # the items of the request as JSON
    response: bytes  # the response as its client got it, as JSON
    item_ids: tuple[str, ...]
    expires: float

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return len(self.asked) + len(self.response)

    def items(self) -> list[Record]:
        """The items of the request and the answer, in order."""
        asked: list[Options] = json.loads(self.asked)
        return asked + list(json.loads(self.response)["output"])


class ResponseStore:
    """All stored responses. `owners`: the number of keys that share the bytes."""

    def __init__(
        self,
        budget: int,
        ttl: float,
        owners: int = 1,
        clock: Callable[[], float] = time.time,
        most: int = _MOST,
        largest: int = _LARGEST,
    ) -> None:
        self.share = budget // max(1, owners)
        self._ttl, self._clock, self._most, self._largest = ttl, clock, most, largest
        self._held: Counter[str] = Counter()  # bytes by key
        # By key, then by (tenant, id); the least recently used first.
        self._stored: dict[str, OrderedDict[tuple[str, str], StoredResponse]] = {}
        self._items: dict[
            tuple[str, str], tuple[str, str]
        ] = {}  # (tenant, item) -> (key, response)
        self._lock = threading.Lock()

    def put(self, owner: str, whose: str, asked: list[Item], response: Record) -> bool:
        """Store a response and its request's items; False if it exceeds its key's share."""
        new = StoredResponse(
            response["id"],
            _digest(whose),
            response["previous_response_id"],
            _json([item.model_dump(mode="json", exclude_none=True) for item in asked]),
            _json(response),
            tuple(item["id"] for item in response["output"]),
            self._clock() + self._ttl,
        )
        if new.nbytes > self.share:
            return False
        with self._lock:
            own = self._stored.setdefault(owner, OrderedDict())
            if (old := own.get((new.whose, new.id))) is not None:
                self._drop(owner, old)
            own[new.whose, new.id] = new
            self._held[owner] += new.nbytes
            for item_id in new.item_ids:
                self._items[new.whose, item_id] = (owner, new.id)
            self._make_room(owner, own)
        return True

    def _make_room(self, owner: str, own: OrderedDict[tuple[str, str], StoredResponse]) -> None:
        while own and (self._held[owner] > self.share or len(own) > self._most):
            self._drop(owner, next(iter(own.values())))

    def sweep(self) -> None:
        """Drop expired responses, even without requests."""
        now = self._clock()
        with self._lock:
            for owner, own in self._stored.items():
                for stored in [stored for stored in own.values() if stored.expires <= now]:
                    self._drop(owner, stored)

    def _drop(self, owner: str, stored: StoredResponse) -> None:
        if self._stored[owner].pop((stored.whose, stored.id), None) is not None:
            self._held[owner] -= stored.nbytes
        for item_id in stored.item_ids:
            if self._items.get((stored.whose, item_id)) == (owner, stored.id):
                del self._items[stored.whose, item_id]

    # -- lookup ------------------------------------------------------------------------------------

    def get(
        self, owner: str, whose: str, response_id: str, param: str = "response_id"
    ) -> StoredResponse:
        """A response of this tenant; those of others are unknown."""
        with self._lock:
            stored = self._find(owner, _digest(whose), response_id)
        if stored is None:
            raise _unknown("response", response_id, param)
        return stored

    def _find(self, owner: str, whose: str, response_id: str) -> StoredResponse | None:
        own = self._stored.get(owner, OrderedDict())
        stored = own.get((whose, response_id))
        if stored is not None and stored.expires <= self._clock():
            self._drop(owner, stored)
            return None
        if stored is not None:
            own.move_to_end((whose, response_id))
        return stored

    def delete(self, owner: str, whose: str, response_id: str) -> None:
        """Delete one response; its continuations cannot be continued any more."""
        stored = self.get(owner, whose, response_id)
        with self._lock:
            self._drop(owner, stored)

    def forget(self, whose: str | None = None) -> None:
        """Forget all responses of one tenant, or of all."""
        digest = None if whose is None else _digest(whose)
        with self._lock:
            for owner, own in self._stored.items():
                for stored in [k for k in own.values() if digest in (None, k.whose)]:
                    self._drop(owner, stored)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        with self._lock:
            return self._held.total()

    # -- continuation ------------------------------------------------------------------------------

    def conversation(self, owner: str, whose: str, body: ResponsesRequest) -> list[Placed]:
        """The items of a whole conversation: those of earlier responses, then those of the body
        with ids resolved."""
        chain = self._chain(owner, whose, body.previous_response_id)
        meant = _ReferencedResponses(self._largest)
        for stored in chain:
            meant.take(stored.nbytes, BEFORE)  # before any of it is read
        before = [
            (_ITEM.validate_python(item), BEFORE) for stored in chain for item in stored.items()
        ]
        found = [self._resolved(owner, whose, placed, meant) for placed in items_of(body)]
        return before + found

    def _chain(self, owner: str, whose: str, last: str | None) -> list[StoredResponse]:
        chain: list[StoredResponse] = []
        while last is not None:
            if len(chain) == _LONGEST:
                raise _unknown("response", last, BEFORE)
            chain.append(self.get(owner, whose, last, BEFORE))
            last = chain[-1].previous
        return chain[::-1]

    def _resolved(
        self, owner: str, whose: str, placed: Placed, meant: _ReferencedResponses
    ) -> Placed:
        item, place = placed
        if not isinstance(item, Reference):
            return placed
        with self._lock:
            where = self._items.get((_digest(whose), item.id))
            stored = self._find(owner, _digest(whose), where[1]) if where else None
        if stored is None:
            raise _unknown("item", item.id, f"{place}.id")
        return meant.item(stored, item.id, place), place


class _ReferencedResponses:
    """Resolves the ids of one request. Each response is read once, however often it is referenced,
    and the total size is limited like a body with the full text."""

    def __init__(self, largest: int) -> None:
        self._largest, self._taken = largest, 0
        self._items: dict[str, dict[str, tuple[Item, int]]] = {}  # by response and item

    def take(self, nbytes: int, param: str) -> None:
        """Add bytes; refuse too many."""
        self._taken += nbytes
        if self._taken > self._largest:
            raise ApiError(
                400,
                f"the references in this request take more than {self._largest} bytes in full; "
                "begin a new conversation, or send the items that matter as input",
                param=param,
                code="conversation_too_large",
            )

    def item(self, stored: StoredResponse, item_id: str, place: str) -> Item:
        """An output item of a response."""
        if stored.id not in self._items:
            self._items[stored.id] = {
                one["id"]: (_ITEM.validate_python(one), len(_json(one)))
                for one in json.loads(stored.response)["output"]
            }
        found, nbytes = self._items[stored.id][item_id]
        self.take(nbytes, f"{place}.id")
        return found


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        errors="surrogatepass"
    )


def _digest(whose: str) -> str:
    return digests.digest("owner of responses", whose)


def _unknown(what: str, given: str, param: str) -> ApiError:
    return ApiError(
        404,
        f"no such {what}: {given[:100]!r}; it was never stored here, was deleted, or has expired. "
        "Send the items of the conversation as input",
        param=param,
        code=f"{what}_not_found",
    )
