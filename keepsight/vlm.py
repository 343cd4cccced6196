"""The public face: `load`, `wrap`, and what one can do with a model that remembers.

Nothing is computed here: each call sorts its options, refuses by name what it does not know, and
hands the rest to the rooms that do the work, under one lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from keepsight import loading
from keepsight.chat import Session
from keepsight.errors import Closed, InputError, ModelError, UnknownOption, UnsupportedInput
from keepsight.families import family_of
from keepsight.generation import DEFAULT_CHAT_TOKENS, Detokenizer, known_options
from keepsight.memory import Memory, Settings
from keepsight.package import Package
from keepsight.prompt import Prompt
from keepsight.render import Message, Renderer, user_message
from keepsight.report import Piece, Reply, Report
from keepsight.store import DiskStore, parse_bytes
from keepsight.tensors import Generated, generate
from keepsight.trial import settle
from keepsight.turn import Turn
from keepsight.verify import Verification, verify
from keepsight.weights import Weights

_CHAT_OPTIONS = ("exact", "tenant", "tools", "template_kwargs")


def load(
    name: str | os.PathLike[str],
    *,
    device_map: Any = None,
    dtype: Any = "auto",
    revision: str | None = None,
    **options: Any,
) -> VLM:
    """A model by name: `"demo"`, `"demo-hybrid"`, a folder, or a hub id.

    Further options are those of `wrap`.
    """
    _check_options(options)
    path = loading.model_path(os.fspath(name))
    if str(name) in loading.DEMO:
        options.setdefault("grain", loading.DEMO_GRAIN)
    model = loading.load_model(path, dtype, device_map, revision)
    processor = loading.load_processor(path, revision)
    return VLM(model, processor, files=loading.files_digest(path, model.dtype), **options)


def wrap(model: PreTrainedModel, processor: Any = None, **options: Any) -> VLM:
    """A live Transformers model. Without a processor only `generate` with tensors works.

    Options: `grain`, `cache_budget`, `vision_budget`, `store`, `store_budget`, `accept_features`,
    `chat_template`, `image_options`; docs/quickstart.md explains each.
    """
    _check_options(options)
    return VLM(model, processor, **options)


_WRAP_OPTIONS = (
    "accept_features",
    "cache_budget",
    "chat_template",
    "grain",
    "image_options",
    "store",
    "store_budget",
    "tenant",
    "vision_budget",
)


def _check_options(options: dict[str, Any]) -> None:
    if set(options) - set(_WRAP_OPTIONS):
        raise UnknownOption.among(options, _WRAP_OPTIONS, "load")


@dataclass
class _Call:
    """The options of one chat call, sorted by who listens to them."""

    exact: bool
    template: dict[str, Any]
    decoding: dict[str, Any]

    @classmethod
    def of(cls, options: dict[str, Any]) -> _Call:
        known = [*known_options(), *_CHAT_OPTIONS]
        if set(options) - set(known):
            raise UnknownOption.among(options, known, "chat")
        options = dict(options)
        _refuse_tenant(options.pop("tenant", None))
        exact = options.pop("exact", True)
        template = dict(options.pop("template_kwargs", None) or {})
        if (tools := options.pop("tools", None)) is not None:
            template["tools"] = tools
        return cls(bool(exact), template, options)

    @classmethod
    def before_decoding(cls, options: dict[str, Any], where: str) -> _Call:
        """For calls that decode nothing: what only decoding listens to is refused, not ignored."""
        if set(options) - set(_CHAT_OPTIONS):
            raise UnknownOption.among(options, _CHAT_OPTIONS, where)
        return cls.of(options)


class VLM:
    """A vision-language model with a memory. Safe to call from several threads; they take turns."""

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Any = None,
        *,
        chat_template: str | None = None,
        store: str | os.PathLike[str] | None = None,
        store_budget: int | str | None = None,
        image_options: dict[str, Any] | None = None,
        tenant: str | None = None,
        files: str | None = None,
        **settings: Any,
    ) -> None:
        _refuse_tenant(tenant)
        if not isinstance(model, PreTrainedModel):
            raise ModelError(f"expected a Transformers model, got a {type(model).__name__}")
        family = family_of(model)
        self.model, self.processor = model, family.processor(processor)
        processor = self.processor
        _check_processor(processor, family.answers)
        self._lock = RLock()
        self._closed = False
        folder = store if store is not None else os.environ.get("KEEPSIGHT_STORE")
        budget = None if store_budget is None else parse_bytes(store_budget)
        self._store = DiskStore(Path(folder), budget) if folder else None
        chosen = Settings(
            store=str(folder) if folder else None,
            image_options=tuple((image_options or {}).items()),
            **settings,
        )
        weights = Weights(model, family)
        if not family.proven:
            settle(model, family, processor, weights)
        self.memory = Memory(model, family, processor, weights, chosen, self._store)
        self._renderer: Renderer | None = None
        if processor is not None and family.answers:
            self._renderer = Renderer(family, processor, chat_template)
        self._fingerprint(files)
        if self._store is not None and family.answers:
            self.memory.engine.snapshot_pattern()  # now: no turn after a restart pays for it

    def _fingerprint(self, files: str | None) -> None:
        """Hash the weights now, or take the fingerprints that the store has for these files."""
        known = self._store.note("weights", files) if self._store and files else None
        if known is not None and not {"all", "vision"} <= known.keys():
            known = None
        self.memory.refresh(remembered=known)
        if self._store and files and known is None:
            weights = self.memory.weights
            self._store.put_note("weights", files, {"all": weights.all, "vision": weights.vision})

    # -- asking ----------------------------------------------------------------------------------

    def chat(self, messages: list[Message], **options: Any) -> Reply:
        """The answer to a conversation, with its measurements."""
        text, tokens, last = "", [], None
        for piece in self.stream(messages, **options):
            text += piece.text
            tokens += [] if piece.token is None else [piece.token]
            last = piece
        if last is None or last.usage is None or last.report is None:
            raise InputError("nothing was generated")
        return Reply(text, last.usage, last.report, tokens, last.finish_reason or "stop")

    def ask(self, images: Any, question: str, **options: Any) -> Reply:
        """The same for one or several images and a question."""
        return self.chat([user_message(question, images)], **options)

    def stream(self, messages: list[Message], **options: Any) -> Iterator[Piece]:
        """Pieces of the answer as they come; the last one carries usage and report."""
        call = _Call.of(options)
        turn = self._turn(messages, call)
        return self._pieces(turn)

    def _pieces(self, turn: Turn) -> Iterator[Piece]:
        tokens = turn.tokens()
        try:
            detokenizer = None
            for token in tokens:
                if detokenizer is None:
                    stop = turn.sampler.stop if turn.sampler else []
                    detokenizer = Detokenizer(self._tokenizer(), stop)
                yield Piece(detokenizer.push(token), token)
            rest = detokenizer.rest() if detokenizer is not None else ""
            reason = turn.sampler.finish_reason if turn.sampler else "stop"
            yield Piece(rest, None, turn.usage(), turn.report(), reason)
        finally:
            tokens.close()  # type: ignore[attr-defined]

    def prepare(self, messages: list[Message], **options: Any) -> Report:
        """Encode and prefill now, answer later: the same call to `chat` then only decodes."""
        turn = self._turn(messages, _Call.before_decoding(options, "prepare"))
        with self._lock:
            try:
                turn.begin(sample=False)
                turn.prefill()
                return turn.report()
            finally:
                turn.finish()

    def explain(self, messages: list[Message], **options: Any) -> Report:
        """The report that `chat` would give, computing nothing with the model."""
        turn = self._turn(messages, _Call.before_decoding(options, "explain"))
        with self._lock:
            try:
                turn.begin(sample=False)
                return turn.report()
            finally:
                turn.finish()

    def verify(self, messages: list[Message], *, stock: bool = False) -> Verification:
        """Cold against warm on your own model and pictures; against stock Transformers if asked."""
        self._answering()
        with self._lock:
            return verify(self, messages, stock)

    def session(self, system: str | None = None) -> Session:
        """A conversation that keeps its own history."""
        self._answering()
        return Session(self, system)

    def resume(self, path: str | Path) -> Session:
        """A conversation saved with `session.save`."""
        self._answering()
        return Session.load(self, Path(path))

    # -- tensors ---------------------------------------------------------------------------------

    def generate(self, inputs: Any = None, **options: Any) -> torch.Tensor | Generated:
        """Tensors in, tensors out, as `model.generate`: a processor's outputs and its options."""
        self._answering()
        _refuse_tenant(options.pop("tenant", None))
        found: torch.Tensor | Generated = generate(self.memory, self._lock, inputs, options)
        return found

    def inputs(self, messages: list[Message], **options: Any) -> dict[str, Any]:
        """For stock `model.generate`: processor outputs, with features from packages.

        The vision tower stays untouched for images that were seen before. New wrappers are made on
        each call, because `generate` changes the ones it is given.
        """
        self._answering()
        with self._lock:
            self.memory.refresh()
            call = _Call.before_decoding(options, "inputs")
            prompt = self.render(messages, **call.template)
            if prompt.media and not self.memory.family.feeds_stock:
                raise UnsupportedInput(
                    f"stock generate takes no features of {self.model.config.model_type} (it would "
                    "feed them again with each token); answer with generate, chat or ask"
                )
            return self._stock_inputs(prompt)

    def _stock_inputs(self, prompt: Prompt, features: bool = True) -> dict[str, Any]:
        family, vision = self.memory.family, self.memory.vision
        device = self.model.device
        ids = torch.from_numpy(prompt.ids)[None].to(device)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        more = family.prompt_inputs(prompt.ids, prompt.types, prompt.grids)
        inputs |= {name: tensor.to(device) for name, tensor in more.items()}
        if prompt.media and features:
            parts = [(vision.package(m)[0], 0, m.tokens) for m in prompt.media]
            inputs |= family.feature_inputs(parts, ids)
        return inputs

    def encode(self, image: Any) -> Package | list[Package]:
        """The package of an image, or of each of several; encoded only if nobody has yet."""
        self._open()
        with self._lock:
            self.memory.refresh()
            if isinstance(image, list | tuple):
                return [self.memory.vision.encode(one) for one in image]
            return self.memory.vision.encode(image)

    def render(self, messages: list[Message], generate: bool = True, **template: Any) -> Prompt:
        """The prompt of a conversation: ids, media and their ranges. Nothing is encoded."""
        if self._renderer is None:
            raise InputError("this model was wrapped without a processor: use generate(**tensors)")
        return self._renderer.render(messages, self.memory.vision.name, generate, **template)

    # -- housekeeping ----------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Bytes and counts per tier."""
        with self._lock:
            return self.memory.stats()

    def flush(self) -> None:
        """Return when all that was remembered so far is on the disk (with a store)."""
        if self._store is not None:
            self._store.flush()

    def clear(self) -> None:
        """Forget everything in memory; a store keeps what it has."""
        with self._lock:
            self.memory.clear()

    def close(self) -> None:
        """Finish writing and let go of everything. The model itself is left alone."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.memory.clear()
                if self._store is not None:
                    self._store.close()

    def __enter__(self) -> VLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _turn(self, messages: list[Message], call: _Call) -> Turn:
        self._answering()
        self._tokenizer()
        return Turn(
            self.memory,
            self._lock,
            lambda: self.render(messages, **call.template),
            call.decoding,
            call.exact,
            DEFAULT_CHAT_TOKENS,
        )

    def _tokenizer(self) -> Any:
        if self.processor is None:
            raise InputError("this model was wrapped without a processor: use generate(**tensors)")
        return self.processor.tokenizer

    def _open(self) -> None:
        if self._closed:
            raise Closed("this VLM was closed; load or wrap the model again")

    def _answering(self) -> None:
        self._open()
        if not self.memory.family.answers:
            raise UnsupportedInput(
                f"{self.model.config.model_type} is a vision tower without a language model: it "
                "makes packages, with encode(), and answers nothing"
            )


def _check_processor(processor: Any, answers: bool) -> None:
    """A processor must have what naming an image and rendering a prompt take."""
    wanted = ("image_processor", "tokenizer") if answers else ("image_processor",)
    missing = [name for name in wanted if not hasattr(processor, name)]
    if processor is not None and missing:
        raise ModelError(
            f"the processor is a {type(processor).__name__} without {' and '.join(missing)}; pass "
            "the checkpoint's own (transformers.AutoProcessor.from_pretrained), or None to use "
            "tensors only"
        )


def _refuse_tenant(tenant: Any) -> None:
    if tenant is not None:
        raise UnsupportedInput("tenants are not supported yet; use one store for each tenant")
