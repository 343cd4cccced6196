"""A conversation that keeps its own history, branches, and is saved to a file. May import core and
below.

Pictures in the history are named media, so a turn neither hashes nor opens again what an earlier
turn has seen. A `.keep` file holds the messages, the packages and the snapshots of the history;
docs/package-format.md describes it.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import torch

from keepsight.core.answer import answer
from keepsight.core.call import Call
from keepsight.core.display import described, history, history_as_html
from keepsight.core.in_thread import gathered, in_thread
from keepsight.core.question import user_turn
from keepsight.core.runtime import Runtime
from keepsight.errors import DamagedFile, InputError, KeepsightError, MadeElsewhere
from keepsight.formats import tensorfile
from keepsight.formats.package import Package
from keepsight.kinds import Message, Options, Record
from keepsight.media.features import Vision
from keepsight.media.medium import Medium, Pictures
from keepsight.prefix.node import Node
from keepsight.prefix.prompt import Prompt
from keepsight.prefix.tree import Tree
from keepsight.report import Piece, Reply

FORMAT = 1
KIND = "session"
_MEDIA = ("image", "video", "audio")


class Session:
    """One conversation. `messages` is its history, with named media in place of pictures."""

    def __init__(self, runtime: Runtime, system: str | None = None, tenant: str = "") -> None:
        self.runtime, self.tenant = runtime, tenant
        self.messages: list[Message] = []
        self.notes: list[str] = []
        self._awaited = False  # whether an asynchronous turn runs
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def __repr__(self) -> str:
        return f"<Session {described(self.runtime)}; {history(self.messages)}>"

    def _repr_html_(self) -> str:
        return history_as_html(self.messages)

    # -- talking ---------------------------------------------------------------------------------

    def ask(
        self,
        *given: Pictures | None,
        images: Pictures | None = None,
        question: str | None = None,
        **options: object,
    ) -> Reply:
        """The next turn: `ask("What is it?", images=[...])`, or both in either order."""
        return Reply.of(self.stream(*given, images=images, question=question, **options))

    def stream(self, *given: Pictures | None, **options: object) -> Iterator[Piece]:
        """The next turn, piece by piece. The history grows when the answer is complete."""
        message = user_turn(given, options)
        return self._answer([*self.messages, self._named(message)], options)

    async def aask(self, *given: Pictures | None, **options: object) -> Reply:
        """`ask` for programs with an event loop; a cancelled task cancels the turn."""
        return await gathered(self.astream(*given, **options))

    async def astream(
        self, *given: Pictures | None, **options: object
    ) -> AsyncGenerator[Piece, None]:
        """`stream` by `async for`; the turn runs in a thread of its own, one at a time."""
        message = user_turn(given, options)
        if self._awaited:
            raise InputError("this session is answering already; await that, or ask a fork()")
        asked: list[Message] = []

        def answer() -> Iterator[Piece]:
            asked.extend([*self.messages, self._named(message)])
            return self._pieces(asked, options)

        self._awaited, text = True, ""
        try:
            async with aclosing(in_thread(answer)) as pieces:
                async for piece in pieces:
                    text += piece.text
                    if piece.usage is not None:
                        self._remember(asked, text)
                    yield piece
        finally:
            self._awaited = False

    def edit(
        self, turn: int, text: str, images: Pictures | None = None, **options: object
    ) -> Reply:
        """Ask something else in user turn `turn` (0 is the first); what came after is dropped.

        Without `images` the turn keeps its pictures.
        """
        spot = self._user_turn(turn)
        if images is None:
            content = self.messages[spot]["content"]
            images = [part["image"] for part in content if part.get("type") == "image"]
        before = self.messages
        self.messages = self.messages[:spot]
        try:
            return Reply.of(self.stream(text, images, **options))
        except BaseException:
            self.messages = before
            raise

    def regenerate(self, **options: object) -> Reply:
        """Answer the last user turn again."""
        spot = self._user_turn(-1)
        before = self.messages
        try:
            return Reply.of(self._answer(self.messages[: spot + 1], options))
        except BaseException:
            self.messages = before
            raise

    def fork(self) -> Session:
        """A conversation with the same past and a future of its own."""
        other = Session(self.runtime, tenant=self.tenant)
        other.messages = copy.copy(self.messages)
        other.notes = list(self.notes)
        return other

    def _answer(self, asked: list[Message], options: Options) -> Iterator[Piece]:
        text = ""
        for piece in self._pieces(asked, options):
            text += piece.text
            if piece.usage is not None:
                self._remember(asked, text)
            yield piece

    def _remember(self, asked: list[Message], text: str) -> None:
        """Let the history grow, as the template will render it; prefilled with the next turn."""
        self.messages = [*asked, {"role": "assistant", "content": [_text(text)]}]

    def _pieces(self, asked: list[Message], options: Options) -> Iterator[Piece]:
        whose = options.pop("tenant", None)
        if whose is not None and whose != self.tenant:
            raise InputError(f"this session is of tenant {self.tenant!r}, not of {whose!r}")
        for piece in answer(self.runtime, asked, Call.of(options, self.tenant)):
            if piece.report is not None:
                piece.report.notes += self.notes
            yield piece

    def _named(self, message: Message) -> Message:
        """The message with its pictures named once, for this and every later turn."""
        with self.runtime.lock:
            self.runtime.require_open()
            self.runtime.refresh(tenant=self.tenant)
            parts = [
                dict(part, **{kind: self.vision.name(part[kind], kind)})
                if (kind := part["type"]) in _MEDIA
                else part
                for part in message["content"]
            ]
        return dict(message, content=parts)

    @property
    def vision(self) -> Vision:
        return self.runtime.vision_of(self.tenant)

    def prompt(self) -> Prompt:
        """The history as it will be rendered next time."""
        call = Call(True, self.tenant, {}, {})
        return self.runtime.render(self.messages, call, generate=False)

    def _user_turn(self, turn: int) -> int:
        spots = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        try:
            return spots[turn]
        except IndexError:
            raise InputError(f"there is no user turn {turn}; there are {len(spots)}") from None

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the conversation, its packages and its snapshots to one `.keep` file."""
        path = Path(path)
        runtime = self.runtime
        with runtime.lock:
            runtime.require_open()
            namespace = runtime.refresh(tenant=self.tenant)
            tensors: dict[str, torch.Tensor] = {}
            media, messages = self._flatten(tensors)
            snapshots = self._snapshots(namespace, tensors) if self.messages else []
            record = {
                "messages": messages,
                "media": media,
                "snapshots": snapshots,
                "weights": runtime.weights.all,
                "vision_weights": runtime.weights.vision,
                "about": self.vision.tower.about,
                "made": runtime.environment(),
            }
            tensorfile.save(path, KIND, FORMAT, tensors, record)
        return path

    def _flatten(self, tensors: dict[str, torch.Tensor]) -> tuple[list[Record], list[Message]]:
        """Messages with media replaced by numbers, and the packages those numbers mean."""
        numbers: dict[str, int] = {}
        media: list[Record] = []
        messages = []
        for message in self.messages:
            content = message["content"]
            if isinstance(content, list):
                content = [self._flat_part(p, numbers, media, tensors) for p in content]
            messages.append(dict(message, content=content))
        return media, messages

    def _flat_part(
        self,
        part: Message,
        numbers: dict[str, int],
        media: list[Record],
        tensors: dict[str, torch.Tensor],
    ) -> Record:
        kind = part.get("type")
        if kind not in _MEDIA:
            return part
        medium = self.vision.name(part[kind], kind)
        if medium.feature_id not in numbers:
            number = numbers[medium.feature_id] = len(media)
            package = self.vision.encode(medium)
            # Under another name than its claim stands what the caller handed in: it must not come
            # back as what we made ourselves.
            handed_in = medium.feature_id != package.feature_id
            media.append(package.record() | ({"handed_in": True} if handed_in else {}))
            tensors |= {f"media/{number}/{k}": t for k, t in package.stored.items()}
        return {"type": kind, "medium": numbers[medium.feature_id]}

    def _snapshots(self, namespace: str, tensors: dict[str, torch.Tensor]) -> list[Record]:
        """The snapshots of the history as it will be rendered next time."""
        memory = self.runtime
        prompt = self.prompt()
        if memory.rule.any_cut:
            match = memory.tree.match_tokens(namespace, prompt, memory.rule)
        else:
            cuts = prompt.boundaries(memory.rule)
            after = dict(zip([0, *cuts], cuts, strict=False))
            match = memory.tree.match(namespace, prompt, after.get)
        node = match.base
        if node.terminal and node.parent is not None:
            node = node.parent
        memory.tree.hold(node)
        try:
            if not memory.tree.load(node, prompt):
                return []
            return [_put_node(n, i, tensors) for i, n in enumerate(node.chain())]
        finally:
            memory.tree.release(node)

    @classmethod
    def load(
        cls, runtime: Runtime, path: Path, tenant: str = "", accept_features: str | None = None
    ) -> Session:
        """Read a `.keep` file. Other vision weights are refused; another environment means that
        the packages are used and the prefixes computed again, which `notes` and reports say."""
        if accept_features not in (None, "same", "any"):
            raise InputError(f"accept_features={accept_features!r}; expected 'same' or 'any'")
        tensors, record = tensorfile.read(path, KIND, FORMAT)
        session = cls(runtime, tenant=tenant)
        with runtime.lock:
            namespace = runtime.refresh(tenant=tenant)
            try:
                media = _media_of(session, tensors, record, path, accept_features)
                session.messages = [_with_media(m, media) for m in record["messages"]]
                # The name of a tenant is private: the file names none.
                differs = _other_environment(runtime, record)
                if differs:
                    session.notes.append(f"prefixes are computed again: {differs}")
                else:
                    _put_back(session, namespace, tensors, record["snapshots"])
            except KeepsightError:
                raise
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise DamagedFile(f"{path}: the record lacks something: {error!r}") from error
        return session


def _other_environment(memory: Runtime, record: Record) -> str:
    """What is not as it was where the file was written; empty when all is the same."""
    if record["weights"] != memory.weights.all:
        return "made under other weights"
    there, here = record.get("made", {}), memory.environment()
    if there == here:
        return ""
    names = [name for name in here if here[name] != there.get(name)]
    changes = [f"{name} {there.get(name)!r} there, {here[name]!r} here" for name in names]
    return "made elsewhere: " + ("; ".join(changes) or "under another version")


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _put_node(node: Node, number: int, tensors: dict[str, torch.Tensor]) -> Record:
    name = f"snapshot/{number}"
    tensors |= {f"{name}/kv/{k}": t for k, t in (node.kv or {}).items()}
    tensors |= {f"{name}/fixed/{k}": t for k, t in (node.fixed or {}).items()}
    tensors[f"{name}/ids"] = torch.from_numpy(node.ids)
    spans = [span.plain()[:4] for span in node.spans]
    return {"start": node.start, "end": node.end, "spans": spans, "fixed": node.fixed is not None}


def _media_of(
    session: Session,
    tensors: dict[str, torch.Tensor],
    record: Record,
    path: Path,
    accept_features: str | None,
) -> list[Medium]:
    media = []
    for number, entry in enumerate(record["media"]):
        own = _under(tensors, f"media/{number}/")
        package = Package.from_record(own, entry, f"{path}, medium {number}")
        elsewhere = session.vision.differences(package)
        if elsewhere and accept_features == "same":
            raise MadeElsewhere(
                f"{path}: the features of medium {number} were made elsewhere ({elsewhere}); "
                "resume it with accept_features='any' to use them as they are"
            )
        if elsewhere:
            session.notes.append(f"features of medium {number} were made elsewhere: {elsewhere}")
        media.append(session.vision.admit(package, bool(entry.get("handed_in"))))
    return media


def _with_media(message: Message, media: list[Medium]) -> Message:
    content = message["content"]
    if not isinstance(content, list):
        return dict(message)
    parts = [
        {"type": kind, kind: media[part["medium"]]} if (kind := part["type"]) in _MEDIA else part
        for part in content
    ]
    return dict(message, content=parts)


def _put_back(
    session: Session, namespace: str, tensors: dict[str, torch.Tensor], snapshots: list[Record]
) -> None:
    """Snapshots into the tree, after comparing each with the history it claims to hold."""
    tree: Tree = session.runtime.tree
    prompt = session.prompt()
    node = tree.root(namespace)
    tree.hold(node)
    try:
        for number, entry in enumerate(snapshots):
            own = _under(tensors, f"snapshot/{number}/")
            kv = {k: t.clone() for k, t in _under(own, "kv/").items()}
            fixed = {k: t.clone() for k, t in _under(own, "fixed/").items()}
            start, end = entry["start"], entry["end"]
            belongs = _belongs(prompt, start, end, entry, own["ids"], kv)
            received = tree.receive(kv, fixed if entry["fixed"] else None)
            if start != node.end or not belongs or received is None:
                session.notes.append("a snapshot does not belong to this history; computed again")
                break
            child = tree.insert(node, prompt, end, *received)
            tree.release(node)
            node = child
    finally:
        tree.release(node)


def _belongs(
    prompt: Prompt,
    start: int,
    end: int,
    described: Record,
    ids: torch.Tensor,
    kv: dict[str, torch.Tensor],
) -> bool:
    """Whether a snapshot is that of this stretch: its path compared, a row for every token."""
    true = [
        [s.start - start, s.end - start, s.feature_id, s.offset] for s in prompt.clip(start, end)
    ]
    if not start < end <= len(prompt) or [span[:4] for span in described["spans"]] != true:
        return False
    grown = [tensor for name, tensor in kv.items() if not name.startswith("cross.")]
    rows = all(t.dim() > 1 and t.shape[-2] == end - start for t in grown)
    return rows and np.array_equal(ids.numpy(), prompt.ids[start:end])


def _under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
