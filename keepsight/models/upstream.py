"""Every private API of Transformers and torch that Keepsight uses, and the fallback without it.

The next version of either may drop what it does not promise. So each private API has a row here,
and is looked up when it is needed, not when Keepsight is imported. If it is missing, the fallback
is used if there is one; otherwise an error says what is missing, since which version, and what it
is for. No other file names a private API, except those in `NAMED` (tests/test_upstream.py).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from jinja2 import nodes
from numpy import ndarray
from torch import Tensor
from torch._ops import OpOverload
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from keepsight.kinds import Decoded, Inputs, Message, Options, Processor, Record
from keepsight.models.private import PrivateApi
from keepsight.models.tested import refuse_unknown

# Hooks that only record what passes: Transformers leaves them on a model that was once asked for
# hidden states.
SILENT_HOOKS = frozenset(
    {
        ("transformers.utils.output_capturing", "output_capturing_hook"),
        ("transformers.modeling_utils", "make_inputs_require_grads"),
        ("peft.utils.other", "make_inputs_require_grad"),
    }
)

TorchFunction = OpOverload
Args = tuple[object, ...]

# Names that other files use directly: fields of a configuration, marks of PEFT, of torch's compiler
# and of late modules, kernels of torch, all of which may be absent; and old names.
NAMED = frozenset(
    {
        *("_attn_implementation", "_attn_implementation_internal"),
        *("_experts_implementation", "_experts_implementation_internal", "_commit_hash"),
        *("_active_adapter", "_disable_adapters", "_compiled_call_impl", "_name_or_path"),
        *("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"),
        *("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"),
        *("_init_weights", "_cdata", "_schema", "_forward_hooks", "_make_wrapper_subclass"),
        *("_mkl_reorder_linear_weight", "_mkl_linear", "_weight_int8pack_mm"),
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)


# -- text ------------------------------------------------------------------------------------------

_MARKED = PrivateApi(
    "transformers.utils.chat_template_utils",
    "encode_marked_chat",
    "to encode a typed control token as text",
)
_PLAIN = PrivateApi(
    "transformers.utils.chat_template_utils",
    "_plain_template_data",
    "to render messages with objects in them",
)
_COMPILED = PrivateApi(
    "transformers.utils.chat_template_utils",
    "_compile_jinja_template",
    "to read chat templates and render plain messages without copies",
)


def encode_marked(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text in which control tokens that are none stand between markers."""
    ids: list[int] = _MARKED.needed()(tokenizer, text)
    return ids


def plain_data(value: object) -> Any:
    """Data as a chat template sees it: numbers, strings, lists and records."""
    return _PLAIN.needed()(value)


def rendered(
    source: str, tokenizer: PreTrainedTokenizerBase, messages: list[Message], generate: bool
) -> str:
    """Plain messages under a chat template, without the copies that Transformers makes first."""
    named = tokenizer.special_tokens_map
    more = {"tools": None, "documents": None, "add_generation_prompt": generate}
    text: str = _COMPILED.needed()(source).render(messages=messages, **more, **named)
    return text


def parsed_template(source: str) -> nodes.Template:
    """A chat template as Transformers parses it."""
    tree: nodes.Template = _COMPILED.needed()(source).environment.parse(source)
    return tree


# -- decisions -------------------------------------------------------------------------------------

_TEMPLATES = "transformers.decision.template_utils"
_SPLIT = PrivateApi(_TEMPLATES, "_split_at_placeholders", "to put assets at their placeholders")
_INSERT = PrivateApi(_TEMPLATES, "_insert_images", "to put assets into a decision template")
_VARIABLES = PrivateApi(
    "transformers.utils.chat_template_utils",
    "_get_template_variables",
    "to learn what a decision template reads",
)


def decisions() -> Any:
    """Transformers' own decisions: questions, prompts and labels."""
    return importlib.import_module(_TEMPLATES)


def decision_models() -> Any:
    """Transformers' own reading of decisions from scores."""
    return importlib.import_module("transformers.decision.modeling_utils")


def template_variables(source: str) -> frozenset[str]:
    """The variables that a template reads."""
    return frozenset(_VARIABLES.needed()(source))


def decision_text(state: object, question: object) -> str:
    """The generic prompt of one question, for models without a decision template."""
    template = _COMPILED.needed()(decisions().DECISION_PROMPT)
    text: str = template.render(state=state, question=question)
    return text


def split_at_placeholders(
    text: str, assets: Mapping[str, object], load: Callable[[str], object]
) -> list[Record]:
    """A text in parts: texts, and images where a placeholder stands."""
    parts: list[Record] = _SPLIT.needed()(text, assets, load)
    return parts


def insert_images(
    inputs: Record, assets: Mapping[str, object], load: Callable[[str], object]
) -> tuple[Record, list[object]]:
    """The inputs of a decision template with image parts at placeholders, and the images."""
    made: tuple[Record, list[object]] = _INSERT.needed()(inputs, assets, load)
    return made


# -- checkpoints -----------------------------------------------------------------------------------

_FILE = PrivateApi("transformers.utils", "cached_file", "to read a checkpoint's files")
_FINISH = PrivateApi(
    "transformers.PreTrainedModel", "_finalize_model_loading", "to read weights one by one"
)
_IGNORED = PrivateApi(
    "transformers.PreTrainedModel",
    "_keys_to_ignore_on_load_unexpected",
    "to load a model without its tower quietly",
    without="Transformers reports each weight that is not read",
)


def checkpoint_file(path: str, file: str, options: Options) -> str | None:
    """The path of a checkpoint's file, downloaded if needed; None if the checkpoint has none."""
    given = {**options, "_raise_exceptions_for_missing_entries": False}
    found: str | None = _FILE.needed()(path, file, **given)
    return found


def unfinished(kind: type[PreTrainedModel]) -> Record:
    """The overrides with which a class of models skips work after its weights are loaded."""
    _FINISH.needed(kind)

    def finish(model: object, config: object, loaded: object, *_: object, **__: object) -> object:
        return loaded

    return {_FINISH.name: staticmethod(finish)}


def ignore_weights(model: PreTrainedModel, patterns: set[str]) -> None:
    """Make Transformers silently skip weights of a checkpoint."""
    setattr(model, _IGNORED.name, {*(_IGNORED.found(model) or ()), *patterns})


# -- processors ------------------------------------------------------------------------------------

_IMAGES, _VIDEOS, _SOUND = (
    PrivateApi("transformers.ProcessorMixin", f"_process_{kind}", f"to prepare {kind}")
    for kind in ("images", "videos", "audio")
)
_PROCESS = {"images": _IMAGES, "videos": _VIDEOS, "audio": _SOUND}
_MERGE = PrivateApi(
    "transformers.ProcessorMixin", "_merge_kwargs", "to pass a processor's options to its parts"
)
_HEARD = PrivateApi(
    "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe",
    "_get_feat_extract_output_lengths",
    "to count the tokens of a sound",
)
_TILES = PrivateApi(
    "transformers.models.llava_next.modeling_llava_next",
    "image_size_to_num_patches",
    "to count the tiles of an image",
)

Processed = tuple[transformers.BatchFeature, list[str]]


def processed(
    processor: Processor, kind: str, media: Sequence[Decoded | ndarray], **options: object
) -> Processed:
    """Process media of one kind with a composite processor; also returns their placeholder
    texts."""
    found: Processed = _PROCESS[kind].needed(processor)(media, **options)
    return found


def merged_options(processor: Processor, given: Options) -> Record:
    """The options of each part of a composite processor, including a caller's."""
    known = processor.tokenizer.init_kwargs
    merged: Record = _MERGE.needed(processor)(tokenizer_init_kwargs=known, **given)
    return merged


def sound_tokens(tower: PreTrainedModel, frames: int) -> int:
    """The number of tokens that an audio tower makes of some frames."""
    lengths = torch.tensor([frames])
    if (own := _HEARD.found(tower)) is not None:
        return int(own(lengths)[1][0])
    module = importlib.import_module(type(tower).__module__)  # Qwen3-Omni has it as a function
    return int(_HEARD.needed(module)(lengths, tower.n_window)[0])


def tiles_of(size: Tensor, pinpoints: list[list[int]], side: int) -> int:
    """The number of tiles of an image of a size, for LLaVA-NeXT and similar."""
    count: int = _TILES.needed()(size, pinpoints, side)
    return count


# -- generation ------------------------------------------------------------------------------------

_CONFIG, _SPECIAL, _PROCESSORS, _CRITERIA = (
    PrivateApi("transformers.GenerationMixin", name, "to decode as a checkpoint's settings say")
    for name in (
        *("_prepare_generation_config", "_prepare_special_tokens"),
        *("_get_logits_processor", "_get_stopping_criteria"),
    )
)


def generation_config(model: PreTrainedModel, given: object, options: Options) -> Any:
    """The settings of one call, and a record of the options that are none."""
    return _CONFIG.needed(model)(given, **options)


def prepare_special_tokens(model: PreTrainedModel, config: object, device: torch.device) -> None:
    """Store begin, end and padding tokens in the settings of one call as tensors."""
    _SPECIAL.needed(model)(config, True, device=device, batch_size=1)


def logits_processors(model: PreTrainedModel, **given: object) -> transformers.LogitsProcessorList:
    """The logits processors for the settings of one call."""
    return _PROCESSORS.needed(model)(**given)


def stopping_criteria(model: PreTrainedModel, **given: object) -> transformers.StoppingCriteriaList:
    """The stopping criteria for the settings of one call."""
    return _CRITERIA.needed(model)(**given)


def padding_of(config: GenerationConfig) -> int:
    """The padding token for answers; 0 if there is none."""
    found = getattr(config, "_pad_token_tensor", None)
    found = getattr(config, "pad_token_id", None) if found is None else found
    return 0 if found is None else int(found)


# -- caches and attention --------------------------------------------------------------------------


def _layer(name: str) -> tuple[PrivateApi, type[transformers.CacheLayerMixin]]:
    """A class of cache layer, or one that no model has: then such layers are refused as unknown."""
    row = PrivateApi(
        "transformers.cache_utils",
        name,
        "to remember what such a layer does",
        without="models with such layers are refused",
    )
    return row, row.found() or type(name, (), {})


_DUMMY, DummyLayer = _layer("DummyLayer")
_SLIDING, DynamicSlidingWindowLayer = _layer("DynamicSlidingWindowLayer")
_LINEAR, LinearAttentionLayer = _layer("LinearAttentionLayer")
_BOTH, LinearAttentionAndFullAttentionLayer = _layer("LinearAttentionAndFullAttentionLayer")
_EITHER, LinearAttentionAndSlidingWindowAttentionLayer = _layer(
    "LinearAttentionAndSlidingWindowAttentionLayer"
)
_GROUPED = PrivateApi(
    "transformers.integrations.sdpa_attention",
    "use_gqa_in_sdpa",
    "to read grouped keys and values where they lie",
    without="keys and values are copied for each query of a group, which is slower",
)
_PRECOMPUTE = PrivateApi(
    "transformers.exporters.utils",
    "precompute_export_inputs",
    "to make a tower's tensors once for each size",
    without="each tower makes them itself, for every image",
)
_ATTENTION = PrivateApi(
    "transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", "to notice exchanged attention"
)
_MASKS = PrivateApi(
    "transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS", "to notice exchanged masks"
)
_EXPERTS = PrivateApi(
    "transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS", "to notice exchanged experts"
)


def ask_first(ours: Callable[[], bool]) -> None:
    """Make Transformers' attention ask us whether to leave grouped keys and values in place."""
    theirs = _GROUPED.found()
    if theirs is None:
        return

    @functools.wraps(theirs)
    def answer(*arguments: object, **options: object) -> object:
        return True if ours() else theirs(*arguments, **options)

    setattr(importlib.import_module(_GROUPED.owner), _GROUPED.name, answer)


def precompute(tower: PreTrainedModel, inputs: Inputs) -> None:
    """Add to a tower's inputs what follows from their sizes, as Transformers' exporter does."""
    make = _PRECOMPUTE.found()
    if make is not None:
        make(tower, inputs)


def registered_functions() -> dict[str, tuple[Mapping[str, Callable[..., object]], ...]]:
    """The functions that a model looks up by name when it runs, by kind."""
    return {
        "attention": (_ATTENTION.needed(), _MASKS.needed()),
        "experts": (_EXPERTS.needed(),),
    }


# -- kernels ---------------------------------------------------------------------------------------

_DISPATCH = PrivateApi(
    "torch.utils._python_dispatch",
    "TorchDispatchMode",
    "to see which products a model computes",
    without="answers are equal to rounding only, and pictures go through the tower alone",
)
_ACTIVATIONS = PrivateApi("transformers.activations", "ACT2FN", "to compute gated delta rules")


@functools.cache
def activation(name: str) -> Callable[[Tensor], Tensor]:
    """An activation by its name in a configuration."""
    found: Callable[[Tensor], Tensor] = _ACTIVATIONS.needed()[name]
    return found


def watched(run: Callable[[TorchFunction, Args, Record], object]) -> AbstractContextManager[object]:
    """Route every torch function called in this thread through `run`."""
    mode: Any = _DISPATCH.needed()

    class FunctionWatch(mode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: TorchFunction, types: object, args: Args = (), kwargs: Record | None = None
        ) -> object:
            return run(func, args, kwargs or {})

    watch: AbstractContextManager[object] = FunctionWatch()
    return watch


# -- graphs ----------------------------------------------------------------------------------------

_DEEPSTACK = PrivateApi(
    "transformers.Qwen3VLTextModel",
    "_deepstack_process",
    "to write a graph of a model with deepstack",
    without="its graph is compared with the model, and refused where it differs",
)
_SCAN = PrivateApi("torch._higher_order_ops", "scan", "to write a loop into a graph")
_found_scan = _SCAN.found()  # looked up now, because lookup fails while a graph is traced


def replace_deepstack(decoder: PreTrainedModel, add: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Add deepstack features with `add(hidden, features)` to all tokens, as graphs need."""

    def process(
        hidden: Tensor, at: object, features: Tensor, *more: object, **options: object
    ) -> Tensor:
        refuse_unknown(_DEEPSTACK.name, more, options)
        return add(hidden, features)

    if _DEEPSTACK.found(decoder) is not None:
        setattr(decoder, _DEEPSTACK.name, process)


def restore_deepstack(decoder: PreTrainedModel) -> None:
    """Undo `replace_deepstack`."""
    vars(decoder).pop(_DEEPSTACK.name, None)


def scan(step: Callable[..., tuple[Tensor, Tensor]], first: Tensor, rows: Tensor) -> Any:
    """A loop over rows in the form that torch writes into a graph."""
    return (_found_scan or _SCAN.needed())(step, first, rows)


# -- torch's settings, which switches.py reads before each call -----------------------------------

PRECISION, SDP_ORDER, FUNCTION_MODES, DISPATCH_MODES = (
    PrivateApi("torch._C", name, "to notice a switch that changes results")
    for name in (
        *("_get_fp32_precision_getter", "_get_sdp_priority_order"),
        *("_len_torch_function_stack", "_len_torch_dispatch_stack"),
    )
)
FUNCTION_STACK = PrivateApi(
    "torch.overrides", "_get_current_function_mode_stack", "to notice a mode such as a device's"
)
DISPATCH_STACK = PrivateApi(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", "to notice a mode"
)
STANCE = PrivateApi("torch._dynamo.eval_frame", "_stance", "to notice its compiler's stance")
NATIVE = PrivateApi("torch._native.registry", "_filter_state", "to notice kernels left out")
DROPOUT = PrivateApi("torch.nn.modules.dropout", "_DropoutNd", "to tell what is random in training")
NORM = PrivateApi("torch.nn.modules.batchnorm", "_NormBase", DROPOUT.use)
EINSUM, STRATEGY = (
    PrivateApi("torch.backends.opt_einsum", name, "to notice how products are ordered")
    for name in ("_get_enabled", "_get_strategy")
)


def switch(name: str) -> Callable[[], object] | None:
    """The function that reads one of torch's settings; None if this torch has no such setting."""
    return getattr(torch._C, f"_get_{name}", None)


PRIVATE = tuple(row for row in dict(globals()).values() if isinstance(row, PrivateApi))
