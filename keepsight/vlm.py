"""The public API: `load`, `wrap`, and a model that remembers. May import session, questions,
runtimes and below.

Nothing is computed here: each call sorts its options, refuses unknown ones by name, and calls the
rooms that do the work, under one lock.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack, cast, overload

import torch
from transformers import PreTrainedModel, ProcessorMixin

from keepsight.core.answer import answer, prepare
from keepsight.core.call import Call
from keepsight.core.display import described, model_as_html
from keepsight.core.in_thread import gathered, in_thread
from keepsight.core.pins import clear, delete, pin, predict_report
from keepsight.core.runtime import Runtime
from keepsight.core.settings import (
    WRAP_DEFAULTS,
    RuntimeSettings,
    check_options,
    check_processor,
    chosen_store,
    tenant_name,
)
from keepsight.core.signatures import shows
from keepsight.errors import InputError, ModelError, UnsupportedInput
from keepsight.formats.package import Package
from keepsight.kinds import (
    Answering,
    Asking,
    AskOptions,
    DeviceMap,
    Dtype,
    Generating,
    Message,
    Options,
    Preparing,
    Processor,
    Record,
    Wrapping,
)
from keepsight.media.medium import Picture, Pictures
from keepsight.models import loading
from keepsight.models.blindfold import blindfold
from keepsight.models.deciding import without_head
from keepsight.models.families import family_of
from keepsight.models.identity import Identity
from keepsight.models.narrow import narrow
from keepsight.prefix.prompt import Prompt
from keepsight.prompt.question import user_turn
from keepsight.prompt.render import Renderer
from keepsight.questions.decide import Config, Decider, Decisions
from keepsight.questions.many import in_order, pairs_of
from keepsight.questions.score import Scores, in_lists, score
from keepsight.report import Piece, Reply, Report
from keepsight.runtimes.load import is_export, load_exported
from keepsight.session import Session
from keepsight.session.prepared import Prefix
from keepsight.stock.generate import Generated, generate
from keepsight.stock.inputs import stock_inputs
from keepsight.stock.installed import INSTALLING, InstalledGenerate, installed_in
from keepsight.stock.probe import settle
from keepsight.stock.verify import Verification, verify
from keepsight.system import digests
from keepsight.system.places import expanded


def load(
    name: str | os.PathLike[str],
    *,
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    revision: str | None = None,
    vision: bool = True,
    mlx: bool = False,
    weights: str | None = None,
    **options: Any,
) -> VLM:
    """Load a checkpoint in PyTorch or MLX, or an export; `ks.load` chooses the runtime first."""
    check_options(options, "load")
    path = loading.model_path(os.fspath(name))
    how = (dtype, device_map, vision, revision)
    if mlx:
        from keepsight.runtimes.mlx import load_mlx  # requires an optional library

        model, files = load_mlx(path, *how)
    elif is_export(path):
        model, files = load_exported(path, *how, options.get("store"))
    else:
        loading.check_loadable(path, device_map, revision)
        load_named = loading.load_named if vision else loading.load_without_tower
        model, files = load_named(path, dtype, device_map, revision)
        if (commit := loading.commit_of(path, revision)) is not None:
            model.config._commit_hash = commit  # for packages; Transformers notes it no more
        if weights is not None:
            narrow(model, family_of(model).text_modules())
            files = files and digests.digest("weights of files", files, weights)
    processor = loading.load_processor(path, revision)
    return VLM(model, processor, files=files, owned=True, **options)


@shows(Wrapping, **WRAP_DEFAULTS)
def wrap(
    model: PreTrainedModel,
    processor: Processor | ProcessorMixin | None = None,
    **options: Unpack[Wrapping],
) -> VLM:
    """Wrap a live Transformers model. Without a processor only `generate` with tensors works.

    Options: `cache_budget`, `host_budget`, `vision_budget`, `store`, `store_budget`,
    `remote`, `tenant`, `tenant_quota`, `ttl`, `accept_features`, `feature_codec`, `chat_template`,
    `image_options`; docs/settings.md explains each.
    """
    check_options(options, "wrap")
    return VLM(model, processor, **options)


@shows(Wrapping, **WRAP_DEFAULTS)
def install(
    model: PreTrainedModel,
    processor: Processor | ProcessorMixin | None = None,
    *,
    forwards: bool = False,
    **options: Unpack[Wrapping],
) -> VLM:
    """Make the model's own `generate` remember, for any code that calls it.

    With `forwards`, `model(**inputs)` without gradients also takes features in place of pixels.
    Options are those of `wrap`. Calls that Keepsight does not support go to the model unchanged,
    and `vlm.report()` says why. Installing twice has no further effect.
    """
    with INSTALLING:
        there = installed_in(model)
        if there is None:
            vlm = wrap(model, processor, **options)
            there = InstalledGenerate(vlm, vlm.runtime, vlm.tenant, dict(options), forwards)
            vlm.installed = there
            there.put()
        else:
            there.again(processor, dict(options), forwards)
        return cast("VLM", there.owner)


def uninstall(model: PreTrainedModel) -> None:
    """Undo one `install`; the last one restores the model and closes what it made."""
    with INSTALLING:
        there = installed_in(model)
        if there is None:
            raise ModelError("Keepsight is not installed in this model")
        if there.take_away():
            cast("VLM", there.owner).close()


@shows(Wrapping, **WRAP_DEFAULTS)
@contextmanager
def installed(
    model: PreTrainedModel,
    processor: Processor | ProcessorMixin | None = None,
    *,
    forwards: bool = False,
    **options: Unpack[Wrapping],
) -> Iterator[VLM]:
    """`install` for the length of a `with` block."""
    vlm = install(model, processor, forwards=forwards, **options)
    try:
        yield vlm
    finally:
        uninstall(model)


class VLM:
    """A vision-language model with a memory. Safe to call from several threads; they take turns."""

    chosen_runtime: Record | None = None  # the runtime and its reason, if `load` was given one

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Processor | ProcessorMixin | None = None,
        *,
        chat_template: str | None = None,
        store: str | os.PathLike[str] | None = None,
        store_budget: int | str | None = None,
        remote: str | None = None,
        image_options: Options | None = None,
        tenant: str | None = None,
        files: str | None = None,
        owned: bool = False,
        **settings: Any,
    ) -> None:
        self.tenant, self.installed = tenant_name(tenant), cast("InstalledGenerate | None", None)
        if not isinstance(model, PreTrainedModel):
            hint = "; give its get_base_model()" if hasattr(model, "get_base_model") else ""
            raise ModelError(f"expected a Transformers model, got a {type(model).__name__}{hint}")
        model, head = without_head(model)
        family = family_of(model)
        self.model, self.processor = model, family.processor(processor)
        processor = self.processor
        check_processor(processor, not family.packages_only)
        chosen = RuntimeSettings(image_options=tuple((image_options or {}).items()), **settings)
        chosen.check()
        chosen = chosen.on(model.device)
        kept = chosen_store(
            store,
            store_budget,
            remote,
            chosen.tenant_quota,
            (chosen.cache_budget or 0, chosen.vision_budget),
        )
        weights = Identity(model, family)
        if not family.proven:
            settle(model, family, processor, weights)
        renderer = None
        if processor is not None and not family.packages_only:
            renderer = Renderer(family, processor, chat_template)
        self.runtime = Runtime(
            model, family, processor, weights, chosen, kept, renderer, owned=owned
        )
        self.decider = Decider(self.runtime, head)
        self.runtime.decides_only = head is not None
        self._fingerprint(files)
        if self.runtime.store is not None and not family.packages_only:
            self.runtime.engine.snapshot_pattern()  # so that no turn has to wait for it

    def _fingerprint(self, files: str | None) -> None:
        """Hash the weights now, or take the digests that the store has for these files. All other
        parts of the fingerprint are always read from the model."""
        known = self.runtime.store.note("weights", files) if self.runtime.store and files else None
        if known is not None and not {"tensors", "vision_tensors"} <= known.keys():
            known = None
        self.runtime.refresh(remembered=known)
        if self.runtime.store and files and known is None:
            weights = self.runtime.weights
            self.runtime.store.put_note("weights", files, weights.record())

    # -- asking ----------------------------------------------------------------------------------

    @shows(Answering)
    def chat(self, messages: list[Message], **options: Unpack[Generating]) -> Reply:
        """Answer a conversation; return the text with its measurements."""
        return Reply.of(self._answer(messages, dict(options), "chat"))

    @shows(Asking)
    def ask(self, *given: Pictures | None, **options: Unpack[AskOptions]) -> Reply:
        """`ask("cat.jpg", "What is it?")`, or `images=` and `question=`; the order is free."""
        left: Options = dict(options)
        return Reply.of(self._answer([user_turn(given, left, True)], left, "ask"))

    @shows(Answering)
    def stream(self, messages: list[Message], **options: Unpack[Generating]) -> Iterator[Piece]:
        """Yield pieces of the answer as they come; the last one carries usage and report."""
        return self._answer(messages, dict(options), "stream")

    @shows(Answering)
    def astream(
        self, messages: list[Message], **options: Unpack[Generating]
    ) -> AsyncGenerator[Piece, None]:
        """`stream` for `async for`; the answer is computed in its own thread."""
        return in_thread(partial(self.stream, messages, **options))

    @shows(Answering)
    async def achat(self, messages: list[Message], **options: Unpack[Generating]) -> Reply:
        """`chat` for `await`; cancelling the task cancels the answer."""
        return await gathered(self.astream(messages, **options))

    @shows(Asking)
    async def aask(self, *given: Pictures | None, **options: Unpack[AskOptions]) -> Reply:
        """`ask` for `await`."""
        left: Options = dict(options)
        return await self.achat([user_turn(given, left, True)], **left)

    def _answer(self, messages: list[Message], options: Options, where: str) -> Iterator[Piece]:
        return answer(self.runtime, messages, Call.of(options, self.tenant, where))

    @shows(Preparing)
    def prepare(self, messages: list[Message], **options: Unpack[Preparing]) -> Report:
        """Encode and prefill now; the same call to `chat` later only decodes."""
        call = Call.before_decoding(dict(options), self.tenant, "prepare")
        return prepare(self.runtime, messages, call)

    @shows(Preparing)
    def explain(self, messages: list[Message], **options: Unpack[Preparing]) -> Report:
        """The report that `chat` would give, without computing or changing anything."""
        call = Call.before_decoding(dict(options), self.tenant, "explain")
        return predict_report(self.runtime, messages, call)

    def decide(
        self,
        state: object,
        questions: Record | None = None,
        *,
        assets: dict[str, Any] | None = None,
        decision_config: Config = None,
        tenant: str | None = None,
    ) -> Decisions | list[Decisions]:
        """Answer typed questions (`noul`, `choice`, `score`) about a state by probabilities.

        Without `questions`, `state` is a request as Transformers' `DecisionPipeline` takes it, or a
        list of such. `assets` are images by the placeholders that name them in texts.
        """
        whose = self._whose(tenant)
        if questions is not None:
            request = {"state": state, "questions": questions, "assets": assets}
            return self.decider.decide([request], decision_config, whose)[0]
        if assets is not None:
            raise InputError("assets came without questions; a request holds its own assets")
        requests = state if isinstance(state, list) else [state]
        found = self.decider.decide(requests, decision_config, whose)
        return found if isinstance(state, list) else found[0]

    @shows(Preparing)
    def score(
        self,
        messages: list[Message] | list[list[Message]],
        continuations: Sequence[Any],
        **options: Unpack[Preparing],
    ) -> Scores | list[Scores]:
        """Log-probabilities of texts (or token ids) behind a conversation, which is read once.

        For several conversations `continuations` are those of all, or a list for each.
        """
        call = Call.before_decoding(dict(options), self.tenant, "score")
        conversations, given, one = in_lists(messages, continuations)
        found = score(self.runtime, conversations, given, call)
        return found[0] if one else found

    @shows(Answering)
    def ask_many(
        self, images: object, questions: Sequence[str], **options: Unpack[Generating]
    ) -> Iterator[Reply]:
        """Answers to many questions in their order, decoded together and grouped by picture.

        `images` is one picture for all questions, or a list with one entry (a picture, a list of
        pictures, or None) for each question. An error is raised when its turn has come.
        """
        call = Call.of(dict(options), self.tenant, "ask_many")
        return in_order(self.runtime, pairs_of(images, questions), call)

    def verify(self, messages: list[Message], *, stock: bool = False) -> Verification:
        """Compare cold with warm on your own model and pictures, and with stock if asked."""
        self.runtime.require_answers()
        with self.runtime.lock:
            return verify(self.runtime, messages, stock, self.tenant)

    def session(self, system: str | None = None, *, tenant: str | None = None) -> Session:
        """A conversation that keeps its own history."""
        self.runtime.require_answers()
        return Session(self.runtime, system, self._whose(tenant))

    def resume(
        self, path: str | Path, *, tenant: str | None = None, accept_features: str | None = None
    ) -> Session:
        """Open a conversation saved with `session.save`.

        Its packages are used whoever made them, like any package from a caller, and reported with
        their origin; `accept_features="same"` refuses those that this model would make differently.
        """
        self.runtime.require_answers()
        return Session.load(self.runtime, expanded(path), self._whose(tenant), accept_features)

    @shows(Preparing)
    def prefix(self, messages: list[Message] | str | Path, **options: Unpack[Preparing]) -> Prefix:
        """Messages prepared once for many queries, or a saved `.keep` file of them."""
        self.runtime.require_answers()
        call = Call.before_decoding(dict(options), self.tenant, "prefix")
        if isinstance(messages, str | Path):
            file = Session.load(self.runtime, expanded(messages), call.tenant)
            return Prefix(self.runtime, file, call)
        return Prefix(self.runtime, Session(self.runtime, tenant=call.tenant), call, messages)

    # -- tensors ---------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *,
        return_dict_in_generate: Literal[True],
        **options: Any,
    ) -> Generated: ...

    @overload
    def generate(
        self, inputs: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor | Generated: ...

    @shows(Answering)
    def generate(
        self, inputs: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor | Generated:
        """Tensors in and out, as `model.generate`: a processor's outputs and its options."""
        self.runtime.require_answers()
        whose = self._whose(options.pop("tenant", None))
        return generate(self.runtime, inputs, options, whose)

    def report(self) -> Report:
        """The report on this thread's latest `model.generate` since `install`."""
        if self.installed is None:
            raise InputError("report() is for models that Keepsight is installed in; see install()")
        return self.installed.report()

    @shows(Preparing)
    def inputs(self, messages: list[Message], **options: Unpack[Preparing]) -> Record:
        """Inputs for stock `model.generate`: processor outputs, with features from packages.

        The vision encoder does not run for images seen before. The wrappers are new on each call,
        because `generate` changes those it gets.
        """
        self.runtime.require_answers()
        call = Call.before_decoding(dict(options), self.tenant, "inputs")
        with self.runtime.lock:
            self.runtime.refresh(tenant=call.tenant)
            prompt = self.runtime.render(messages, call)
            if prompt.media and not self.runtime.family.feeds_stock:
                raise UnsupportedInput(
                    f"stock generate takes no features of {self.model.config.model_type} (it would "
                    "feed them again with each token); answer with generate, chat or ask"
                )
            return stock_inputs(self.runtime, prompt, True, call.tenant)

    # A text is a path, although it is also a sequence of texts: the first match counts.
    @overload
    def encode(  # type: ignore[overload-overlap]
        self, image: Picture | Message, *, batch: int = 1, tenant: str | None = None
    ) -> Package: ...

    @overload
    def encode(
        self, image: Sequence[Picture | Message], *, batch: int = 1, tenant: str | None = None
    ) -> list[Package]: ...

    def encode(
        self,
        image: Picture | Message | Sequence[Picture | Message],
        *,
        batch: int = 1,
        tenant: str | None = None,
    ) -> Package | list[Package]:
        """The package of an image, or of each of several; unknown ones are encoded.

        `batch` pictures go through the vision encoder in one pass. That is faster where it has many
        cores or an accelerator, and may round otherwise, so such features have another name: a chat
        takes them only with `accept_features="any"`, or handed in.
        """
        self.runtime.require_open()
        whose = self._whose(tenant)
        with self.runtime.lock:
            self.runtime.refresh(tenant=whose)
            vision = self.runtime.vision_of(whose).batched(batch)
            if isinstance(image, list | tuple):
                return vision.encode_all(image)
            return vision.encode(image)

    def render(self, messages: list[Message], generate: bool = True, **template: object) -> Prompt:
        """The prompt of a conversation: ids, images and their ranges. Nothing is encoded."""
        self.runtime.require_open()
        with self.runtime.lock:
            self.runtime.refresh(tenant=self.tenant)
            call = Call(self.tenant, template, {})
            return self.runtime.render(messages, call, generate)

    def blindfold(self) -> AbstractContextManager[None]:
        """`with vlm.blindfold():` makes any run of the vision or audio encoder an error, in
        every thread: proof that only features were used."""
        self.runtime.require_open()
        return blindfold(self.runtime.family)

    # -- housekeeping ----------------------------------------------------------------------------

    def stats(self, tenant: str | None = None) -> Record:
        """Bytes and counts per tier: of everything this object serves, or of one tenant.

        Never waits for running work or a disk: the store's numbers are those of its last count.
        """
        whose = self._whose(tenant)
        stats = self.runtime.stats(whose if tenant is not None or self.tenant else None)
        return stats | ({"runtime": self.chosen_runtime} if self.chosen_runtime else {})

    def pin(self, what: Pictures | list[Message], pinned: bool = True, **options: object) -> None:
        """Pin an image's features, or all of a conversation's prompt, whatever the budgets.

        What is missing is computed. `pinned=False` makes it evictable again.
        """
        self.runtime.require_open()
        pin(self.runtime, what, pinned, Call.before_decoding(dict(options), self.tenant, "pin"))

    def delete(self, what: Pictures | list[Message], **options: object) -> int:
        """Remove an image and everything computed from it, or all images of a conversation and its
        prefilled prompt, from every tier; return the bytes freed.

        Waits for the disk as long as necessary; answers go on meanwhile.
        """
        self.runtime.require_open()
        return delete(
            self.runtime, what, Call.before_decoding(dict(options), self.tenant, "delete")
        )

    def refresh(self) -> None:
        """Announce a change of model or processor that is not noticed by itself.

        All weights are hashed again. If they are as before, something else changed that has no
        name: then nothing remembered so far is used, and the store is left alone, until the model
        is wrapped again. docs/limits.md says what is noticed without this.
        """
        self.runtime.require_open()
        with self.runtime.lock:
            self.runtime.announce()

    def flush(self) -> None:
        """Return when everything remembered so far is on the disk (with a store)."""
        if self.runtime.store is not None:
            self.runtime.store.flush()

    def clear(self, *, store: bool = False, tenant: str | None = None) -> None:
        """Forget everything in memory, and with `store` also in all tiers of the store.

        For all tenants, or for one alone (`""` is the default tenant).
        """
        whose = (self.tenant or None) if tenant is None else tenant and tenant_name(tenant)
        clear(self.runtime, whose, store)

    def __repr__(self) -> str:
        return f"<VLM {described(self.runtime)}>"

    def _repr_html_(self) -> str:
        return model_as_html(f"VLM {described(self.runtime)}", self.stats())

    def close(self) -> None:
        """Finish writing and release everything. The model itself stays usable."""
        self.runtime.close()

    def __enter__(self) -> VLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _whose(self, tenant: str | None) -> str:
        return self.tenant if tenant is None else tenant_name(tenant)
