"""Prefills answers for their next turns, while no request waits.

Decoded state is never remembered, so the next turn would start by prefilling the previous answer.
That can be done while its reader still reads. To find how much of the next prompt is certain, it is
rendered twice, with two different questions after the answer. The common part is prefilled up to
its last boundary, in the chunks of the next turn.

If the answered prompt was deleted or evicted meanwhile, nothing is computed for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from keepsight.core.call import Call
from keepsight.core.decoding.sampling import DEFAULT_CHAT_TOKENS
from keepsight.core.rendering.messages import parse_messages
from keepsight.core.turn import Turn
from keepsight.errors import ImageError
from keepsight.kinds import Message, Options
from keepsight.media.medium import Medium
from keepsight.models.families import Pixels
from keepsight.prefix.prompt import Prompt, common
from keepsight.scheduler.counters import Counts
from keepsight.scheduler.intake import Request, with_media
from keepsight.vlm import VLM

logger = logging.getLogger(__name__)

_MOST = 16  # waiting conversations; the oldest are dropped
_QUESTIONS = ("And?", "Why so?")  # possible next questions, different from their first letter on

Render = Callable[[list[Message], list[Medium], Call], Prompt]


@dataclass(eq=False)
class Follower:
    """A conversation whose answer is to be prefilled. It holds no pictures, only their names."""

    messages: list[Message]  # the last message is the answer
    media: list[Medium]
    call: Call
    base: int  # tokens remembered when it was answered
    bound: object  # the weights and settings of its media names
    until: int = 0  # how far the next prompt is certain, and where it may be cut
    turn: Turn | None = None
    work: Iterator[int] | None = None

    def release(self) -> None:
        """Release its lane and path; what was prefilled stays remembered."""
        turn, work, self.turn, self.work = self.turn, self.work, None, None
        try:
            if work is not None:
                work.close()  # type: ignore[attr-defined]
        finally:
            if turn is not None:
                turn.finish()


class PrefillAhead:
    """Prefill for conversations that may continue. Only the scheduler's thread uses it."""

    def __init__(self, vlm: VLM, render: Render, counts: Counts) -> None:
        self._vlm, self._render, self._counts = vlm, render, counts
        self._followers: deque[Follower] = deque(maxlen=_MOST)

    def __len__(self) -> int:
        return len(self._followers)

    def follow(self, request: Request) -> None:
        """Record an answered request and what its next turn will depend on. An error here must not
        spoil the answer."""
        try:
            self._follow(request)
        except Exception:
            logger.exception("what an answer becomes in the next turn is not known")

    def _follow(self, request: Request) -> None:
        order, node = request.order, request.turn.reached
        message = request.follow("".join(request.texts)) if request.follow is not None else None
        if node.terminal and node.parent is not None:
            node = node.parent
        if message is None or order is None or not node.end or not order.call.exact:
            return
        if len(parse_messages(order.messages)[1]) != len(order.media):
            return  # it was rendered again, under other settings
        media = [replace(medium, recall=_gone, opened=None) for medium in order.media]
        messages = [*with_media(order.messages, media), message]
        self._followers.append(Follower(messages, media, order.call, node.end, order.bound))

    def piece(self) -> None:
        """Prefill one chunk for the conversation that was answered last."""
        with self._vlm.runtime.lock:
            follower = self._followers[-1]
            try:
                going_on = self._piece(follower)
            except Exception as error:  # the next request for it will report the error
                logger.debug("an answer is not prefilled ahead: %s", error)
                going_on = False
            if not going_on:
                self._followers.remove(follower)
                _release(follower)

    def put_aside(self) -> None:
        """Pause because a request came: release lanes and paths."""
        begun = [follower for follower in self._followers if follower.turn is not None]
        if begun:
            with self._vlm.runtime.lock:
                for follower in begun:
                    _release(follower)

    def clear(self) -> None:
        """Forget all waiting conversations."""
        self.put_aside()
        self._followers.clear()

    def _piece(self, follower: Follower) -> bool:
        if follower.turn is None:
            self._begin(follower)
        turn = follower.turn
        if turn is None or follower.work is None or turn.out_of_date():
            return False
        tokens = next(follower.work, 0)
        self._counts.ahead_tokens += tokens
        return bool(tokens) and turn.done_tokens < follower.until

    def _begin(self, follower: Follower) -> None:
        """Find how much of the next prompt is certain, and start from what is remembered."""
        memory, call = self._vlm.runtime, follower.call
        if memory.vision_of(call.tenant).namer.bound is not follower.bound:
            return
        one, other = (self._next_prompt(follower, question) for question in _QUESTIONS)
        certain = common(one.ids, one.spans, other.ids, other.spans)
        cuts = [cut for cut in one.boundaries(memory.rule) if cut <= certain]
        follower.until = cuts[-1] if cuts else 0
        options: Options = {}
        follower.turn = turn = Turn(
            memory, lambda: one, options, True, DEFAULT_CHAT_TOKENS, call.tenant
        )
        turn.begin(sample=False)
        at = turn.match.length
        if follower.base <= at < follower.until and not one.clip(at, follower.until):
            follower.work = turn.work(shared=True)

    def _next_prompt(self, follower: Follower, question: str) -> Prompt:
        behind: Message = {"role": "user", "content": question}
        if calls := follower.messages[-1].get("tool_calls"):
            behind = {"role": "tool", "content": question, "tool_call_id": calls[0].get("id", "")}
        return self._render([*follower.messages, behind], follower.media, follower.call)


def _release(follower: Follower) -> None:
    """Release it; errors here do not concern waiting requests."""
    try:
        follower.release()
    except Exception:
        logger.exception("not all that was held for a next turn could be let go of")


def plain_answer(text: str) -> Message | None:
    """The message that an answer becomes if no parser splits it."""
    return {"role": "assistant", "content": text}


def _gone() -> Pixels:
    raise ImageError("pictures are not opened while prefilling ahead")
