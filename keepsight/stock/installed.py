"""Replaces `generate` of a live model while Keepsight is installed in it.

A caller of `model.generate` gets what the model's own `generate` gives. Calls that Keepsight
supports are served from memory; all others go unchanged to the model's own `generate`, and their
report says why.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING

import torch
from transformers import Cache, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput

from keepsight.core.decoding.sampling import (
    DEFAULT_GENERATE_TOKENS,
    check_length,
    option_of,
    sampler,
)
from keepsight.core.runtime import Runtime
from keepsight.errors import Forked, InputError, KeepsightError, ModelError, UnsupportedInput
from keepsight.kinds import Options
from keepsight.models.renamed import NEW, OLD
from keepsight.report import Report
from keepsight.stock.forward import InstalledForward
from keepsight.stock.generate import Generated, GenerateRequest, request, run
from keepsight.stock.inputs import pixels_in, with_features

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "generate"
# Arguments of `generate` for unsupported ways of decoding, with their neutral values.
_STOCK_ONLY: dict[str, tuple[object, ...]] = {
    "synced_gpus": (None, False),
    "assistant_model": (None,),
    "assistant_tokenizer": (None,),
    "negative_prompt_ids": (None,),
    "negative_prompt_attention_mask": (None,),
    "custom_generate": (None,),
    "inputs_embeds": (None,),  # without ids Transformers computes positions differently
}
# With these a call of stock code has its own layout of the prompt.
_AS_PIXELS = ("custom_generate", "inputs_embeds", OLD, NEW, "mm_encoder_outputs")
_CALLERS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
_OURS = ("seed", "stop", "tenant", "skip_special_tokens", "max_tokens")
_Ref = weakref.ReferenceType["InstalledGenerate"]
_OF: weakref.WeakKeyDictionary[PreTrainedModel, _Ref] = weakref.WeakKeyDictionary()
_NO_CACHE = "past_key_values are not returned: Keepsight keeps its own"


class InstalledGenerate:
    """Stands in place of one model's `generate`; may be installed several times."""

    def __init__(
        self,
        owner: object,
        runtime: Runtime,
        tenant: str,
        options: Options,
        forwards: bool = False,
    ) -> None:
        self.owner, self.depth, self._forwards = owner, 0, forwards
        self._forward = InstalledForward(runtime, tenant, self._note)
        self._runtime, self._tenant, self._options = runtime, tenant, options
        self._before = vars(runtime.model).get(_NAME)
        self.stock: Callable[..., object] = runtime.model.generate
        self._signature = inspect.signature(self.stock)
        self._mine = threading.local()
        self._latest: Report | None = None
        functools.update_wrapper(self, self.stock, updated=())

    # -- installation -----------------------------------------------------------------------------

    def put(self) -> None:
        """Replace `generate` of the model; refuse if it is already replaced."""
        model = self._runtime.model
        stock = getattr(self._before, "__func__", None) is type(model).generate
        if self._before is not None and not stock:
            raise ModelError(
                "somebody else replaced generate of this model object; undo that before install()"
            )
        if type(model).generate is not GenerationMixin.generate:
            raise ModelError(
                f"{type(model).__name__} has its own generate, which install() cannot replace; "
                "use wrap() and vlm.generate"
            )
        self.depth, _OF[model] = 1, weakref.ref(self)
        vars(model)[_NAME] = self
        if self._forwards:
            self._forward.put()

    def again(self, processor: object, options: Options, forwards: bool = False) -> None:
        """Install once more with the same settings; refuse other settings."""
        other = processor is not None and processor is not self._runtime.processor
        if other or (options and options != self._options):
            raise ModelError(
                "Keepsight is installed in this model with another processor or other options; "
                "uninstall() it first, or leave them out to use what is installed"
            )
        if forwards and not self._forwards:
            raise ModelError(
                "Keepsight is installed in this model without forwards=True; uninstall() it first"
            )
        self.depth += 1

    def take_away(self) -> bool:
        """Undo one installation; the last one restores the model and returns True. A later
        replacement by somebody else stays and still reaches the model's own `generate`."""
        self.depth -= 1
        if self.depth:
            return False
        model = self._runtime.model
        self._forward.take_away()
        _OF.pop(model, None)
        if vars(model).get(_NAME) is self:
            del vars(model)[_NAME]
            if self._before is not None:
                vars(model)[_NAME] = self._before
        return True

    # -- copies of the model are stock -------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        model = self._runtime.model
        other = memo.get(id(model), model)
        return MethodType(type(model).generate, other)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, str]]:
        return getattr, (self._runtime.model, _NAME)

    # -- calls -------------------------------------------------------------------------------------

    def __call__(self, *args: object, **options: object) -> object:
        """As the model's own `generate`."""
        if not self.depth:  # somebody kept a reference after uninstall
            return self.stock(*args, **options)
        try:
            asked = self._asked(args, options)
        except (KeepsightError, TypeError) as error:  # arguments that nobody knows
            return self._stock(str(error), args, options)
        found = run(self._runtime, asked)
        if not isinstance(found, Generated):
            raise ModelError("the answer came without its report")
        self._note(found.report)
        if not asked.options["return_dict_in_generate"]:
            return found.sequences
        found.report.notes.append(_NO_CACHE)
        return GenerateDecoderOnlyOutput(
            sequences=found.sequences, scores=found.scores, logits=found.logits
        )

    def report(self) -> Report:
        """The report on the latest call of this thread, or else of any thread."""
        found: Report | None = getattr(self._mine, "report", self._latest)
        if found is None:
            raise InputError("model.generate was not called since install()")
        return found

    def _note(self, report: Report) -> None:
        self._mine.report = self._latest = report

    def _stock(self, why: str, args: tuple[object, ...], options: Options) -> object:
        """Call the model's own `generate` under the lock, because both use the model's state. It
        gets remembered features in place of pixels if possible."""
        self._refuse_without_pictures(args, options)
        with _turn(self._runtime):
            try:
                args, options, report = self._with_features(args, options)
            except KeepsightError as error:
                report = Report(notes=[f"its pictures went as pixels: {error}"])
            except TypeError:  # arguments that the signature does not accept
                report = Report()
            found = self.stock(*args, **options)
        report.notes.insert(0, f"handed to the model's own generate: {why}")
        self._note(report)
        return found

    def _refuse_without_pictures(self, args: tuple[object, ...], options: Options) -> None:
        """Refuse a call without the pictures of its placeholders. Our replies have no cache, so a
        caller who continues one passes None; stock would silently read placeholders as text."""
        try:
            given = self._given(args, options)
        except TypeError:  # stock says so
            return
        ids = given.get("input_ids", given.get("inputs"))
        family = self._runtime.family
        none = [name for name in (OLD, NEW) if name in given and given[name] is None]
        if not none or not isinstance(ids, torch.Tensor):
            return
        features = [given.get(name) for name in ("mm_encoder_outputs", "inputs_embeds")]
        if pixels_in(family, given) or any(one is not None for one in features):
            return
        if any(bool((ids == token).any()) for token in family.placeholders.values()):
            raise InputError(
                f"{none[0]} is None, and input_ids has placeholders of pictures that are not "
                f"given: Keepsight's replies hold no {none[0]}. Give the pictures again; they "
                "are remembered, and nothing is computed twice"
            )

    def _with_features(
        self, args: tuple[object, ...], options: Options
    ) -> tuple[tuple[object, ...], Options, Report]:
        """Call stock code with features in place of pixels; refuse what cannot be served so."""
        given = self._given(args, options)
        if given.get("inputs") is not None and given.get("input_ids") is None:
            given["input_ids"] = given.pop("inputs")
        if not pixels_in(self._runtime.family, given):
            return args, options, Report()
        for name in _AS_PIXELS:
            value = given.get(name)
            if value is not None and not (isinstance(value, Cache) and not value.get_seq_length()):
                raise UnsupportedInput(f"{name} is set by the caller")
        stage = "the model's own generate"
        return (), *with_features(self._runtime, self._tenant, given, stage, True)

    def _given(self, args: tuple[object, ...], options: Options) -> Options:
        """The arguments of a call by name; TypeError if the signature does not accept them."""
        given: Options = dict(self._signature.bind(*args, **options).arguments)
        given |= given.pop("kwargs", {})
        return given

    def _asked(self, args: tuple[object, ...], options: Options) -> GenerateRequest:
        """The request, fully checked; raises if Keepsight does not support it."""
        runtime = self._runtime
        runtime.require_answers()
        given = self._given(args, options)
        inputs = given.pop("inputs", None)
        for name, harmless in _STOCK_ONLY.items():
            if not any(given.get(name) is value for value in harmless):
                raise UnsupportedInput(f"{name} is for the model's own generate")
            given.pop(name, None)
        for name in _OURS:
            if name in given:
                raise UnsupportedInput(f"{name} is no option of the model's own generate")
        tokenizer = given.pop("tokenizer", None)  # comes with stop strings
        if tokenizer not in (None, getattr(runtime.processor, "tokenizer", None)):
            raise UnsupportedInput("the tokenizer is not the processor's")
        as_dict = bool(option_of(runtime.model, given, "return_dict_in_generate"))
        given = {name: value for name, value in given.items() if value is not None}
        asked = request(runtime, inputs, {**given, "return_dict_in_generate": True}, self._tenant)
        asked.options["return_dict_in_generate"] = as_dict
        self._check(asked, given, as_dict)
        asked.as_dict = True
        return asked

    def _check(self, asked: GenerateRequest, given: Options, as_dict: bool) -> None:
        """Refuse calls for which the model's own `generate` treats the batch as a whole, or gives
        another result."""
        runtime, model = self._runtime, self._runtime.model
        rows = [torch.from_numpy(prompt.ids)[None] for prompt in asked.prompts]
        padded = any(row.shape[1] != asked.ids.shape[1] for row in rows)
        own = [name for name in _CALLERS if given.get(name)]
        if own and (len(rows) > 1 or padded):
            raise UnsupportedInput(f"the caller's own {own[0]} applies to a batch as a whole")
        for row in rows:
            check_length(model, row.shape[1])
        tokenizer = getattr(runtime.processor, "tokenizer", None)
        first = rows[0].to(model.device)
        config = sampler(
            model, tokenizer, first, dict(asked.options), DEFAULT_GENERATE_TOKENS
        ).config
        scored = as_dict and (config.output_scores or config.output_logits)
        if scored and (len(rows) > 1 or given.get("stopping_criteria")):
            raise UnsupportedInput("scores of a batch, or custom stopping criteria")


@contextmanager
def _turn(runtime: Runtime) -> Iterator[None]:
    try:
        runtime.lock.acquire()
    except Forked:  # Keepsight cannot run in this process, the model can
        yield
        return
    try:
        yield
    finally:
        runtime.lock.release()


INSTALLING = threading.RLock()  # one thread at a time


def installed_in(model: PreTrainedModel) -> InstalledGenerate | None:
    """The installation on a model, or None."""
    found = _OF.get(model) if isinstance(model, torch.nn.Module) else None
    return found() if found is not None else None
