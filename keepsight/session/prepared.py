"""A prepared prefix: messages whose media are encoded and whose tokens are prefilled once, for any
number of queries.

Its snapshots are held in the tree while it lives; they are never copied. A query is answered like
the whole conversation: rendered as a whole, whatever the template does, and computed from the end
of the common part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from keepsight.core.answer import answer, asked, read
from keepsight.core.call import Call
from keepsight.core.runtime import Runtime
from keepsight.core.signatures import shows
from keepsight.errors import InputError, MessagesError, UnsupportedInput
from keepsight.kinds import Asking, Message, Options
from keepsight.media.medium import Pictures
from keepsight.prefix.node import Node
from keepsight.prefix.prompt import Prompt
from keepsight.prompt.messages import NO_MESSAGES, kept_notes
from keepsight.prompt.question import user_turn
from keepsight.report import Piece, Reply, Report
from keepsight.session.session import Session
from keepsight.stock.generate import Generated, GenerateRequest, request, run


class Prefix:
    """Messages that are ready for queries. Safe to use from several threads."""

    def __init__(
        self,
        runtime: Runtime,
        history: Session,
        call: Call,
        messages: list[Message] | None = None,
    ) -> None:
        if messages is not None:
            history.messages = history.named(messages)
        self._runtime, self._history, self._call = runtime, history, call
        self._held: Node | None = None
        self._namespace = ""
        self._prompt = Prompt(np.empty(0, dtype=np.int64))
        self._closed = False
        self.report = Report()
        self._renewed()

    @property
    def messages(self) -> list[Message]:
        """The messages, with named images in place of pixels."""
        return list(self._history.messages)

    @property
    def notes(self) -> list[str]:
        """Notes from loading: features or prefixes that were made elsewhere."""
        return list(self._history.notes)

    @property
    def tokens(self) -> int:
        """The number of prepared tokens."""
        return len(self._prompt)

    # -- queries -----------------------------------------------------------------------------------

    @shows(Asking)
    def ask(self, *given: Pictures | None, **options: object) -> Reply:
        """Ask one question, with or without images, after the prefix; in either order."""
        return self.chat([user_turn(given, options)], **options)

    def chat(self, messages: list[Message], **options: object) -> Reply:
        """Answer messages that follow those of the prefix."""
        return Reply.of(self.stream(messages, **options))

    def stream(self, messages: list[Message], **options: object) -> Iterator[Piece]:
        """Answer piece by piece, as `chat`."""
        call = self._call_of(options)
        self._require_open()
        more = [messages] if isinstance(messages, dict) else messages
        if not isinstance(more, list | tuple):
            raise MessagesError(NO_MESSAGES)
        whole = [*self._history.messages, *more]
        return self._noted(answer(self._runtime, whole, call))

    def _noted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.report is not None:
                piece.report.notes += [*self._history.notes, *kept_notes(self._history.messages)]
                self._renewed()  # hold what this answer had to compute again
            yield piece

    def _call_of(self, options: Options) -> Call:
        whose = options.pop("tenant", None)
        if whose is not None and whose != self._call.tenant:
            raise InputError(
                f"this prefix belongs to tenant {self._call.tenant!r}, not to {whose!r}"
            )
        call = Call.of(options, self._call.tenant)
        call.template = {**self._call.template, **call.template}
        return call

    def generate(
        self, inputs: torch.Tensor | None = None, **options: object
    ) -> torch.Tensor | Generated:
        """Tensors in, tensors out, as `vlm.generate`.

        The ids are those of the whole conversation, with all of its pixels, or those of the query
        alone, with the pixels of its own images; a query is placed right after the prefix. The
        result starts with the given ids.
        """
        if options.pop("tenant", None) not in (None, self._call.tenant):
            raise InputError(f"this prefix belongs to tenant {self._call.tenant!r}")
        runtime = self._runtime
        with runtime.lock:
            self._require_open()
            if runtime.refresh(self._call.tenant) != self._namespace:
                messages = self._history.messages
                self._prompt = runtime.render(messages, self._call, generate=False)
            positions = options.get("position_ids")
            order = request(runtime, inputs, options, self._call.tenant)
            mine = self._prompt.ids  # a whole conversation starts with it
            behind = [not np.array_equal(one.ids[: len(mine)], mine) for one in order.prompts]
            if any(behind):
                if not all(behind):
                    raise InputError("some rows are whole conversations and some are queries alone")
                if positions is not None:
                    raise UnsupportedInput(
                        "position_ids cannot be given for a query behind a prefix; leave them out"
                    )
                self._put_behind(order)
        found = run(runtime, order)
        self._renewed()
        return found

    def _put_behind(self, asked: GenerateRequest) -> None:
        start = int(self._prompt.ids[0])
        tokenizer = getattr(self._runtime.processor, "tokenizer", None)
        bos = getattr(tokenizer, "bos_token_id", None)
        joined: dict[int, Prompt] = {}
        for prompt in asked.prompts:
            if bos is not None and start == bos == int(prompt.ids[0]):
                raise InputError(
                    "the query starts with the token that begins a text, as the prefix does; "
                    "leave it out, or give the whole conversation, or use prefix.chat"
                )
            joined.setdefault(id(prompt), behind(self._prompt, prompt))
        asked.prompts = [joined[id(prompt)] for prompt in asked.prompts]

    # -- held snapshots ---------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise InputError("this prefix is closed; make a new one with vlm.prefix")
        self._runtime.require_open()

    def _renewed(self) -> None:
        """Prefill and hold what is not: everything at first; later only what was forgotten or made
        invalid by a changed model."""
        runtime, tenant = self._runtime, self._call.tenant
        with runtime.lock:
            held = self._held is not None and not self._held.gone
            if held and runtime.refresh(tenant) == self._namespace:
                return
            if self._closed or runtime.closed:  # meanwhile
                return
            seq = asked(runtime, self._history.messages, self._call, answers=False, generate=False)
            seq.keeps_node = True
            read(runtime, seq)
            self._let_go()
            if seq.node is not None and not seq.node.gone:
                runtime.tree.keep(seq.node)
                self._held = seq.node
            if seq.node is not None:
                runtime.tree.release(seq.node)
            self._prompt, self._namespace = seq.prompt, seq.namespace
            self.report = seq.report()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._runtime.tree.let_go(held)

    def save(self, path: str | Path) -> Path:
        """Write messages, packages and snapshots to one `.keep` file. `vlm.prefix(path)` loads it;
        `vlm.resume(path)` opens it as a conversation."""
        if self._call.template:
            raise UnsupportedInput("a prefix with tools or template options cannot be saved")
        parts = [p for m in self.messages if isinstance(m["content"], list) for p in m["content"]]
        if other := sorted({part["type"] for part in parts} - {"text", "image"}):
            raise UnsupportedInput(
                f"a prefix with {other[0]} in it cannot be saved; only pictures can"
            )
        self._require_open()
        self._renewed()
        return self._history.save(path)

    def close(self) -> None:
        """Release the snapshots, so that they can be evicted."""
        with self._runtime.lock:
            self._closed = True
            self._let_go()

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: a copy would release what this one holds."""
        raise InputError("a prefix cannot be copied; make another with vlm.prefix, or save it")

    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is not None:  # the garbage collector must not wait for the lock
            self._runtime.lock.leave(partial(self._runtime.tree.let_go, held))


def behind(first: Prompt, second: Prompt) -> Prompt:
    """Join two prompts, the second right after the first."""
    shift = len(first)
    moved = tuple(tuple((a + shift, b + shift) for a, b in its) for its in second.ranges)
    return dataclasses.replace(
        first,
        ids=np.concatenate([first.ids, second.ids]),
        media=(*first.media, *second.media),
        ranges=(*first.ranges, *moved),
        text=None,
    )
