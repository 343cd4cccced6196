"""Every private API of Transformers and torch that Keepsight uses, for the pinned versions.

No other file names a private API, except those in `NAMED` (tests/models/test_upstream.py), so this
is the place to look at when a pin moves. What is slow to import is imported where it is used.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from jinja2 import Template, nodes
from numpy import ndarray
from torch import Tensor
from torch._higher_order_ops import scan
from torch._ops import OpOverload
from torch.backends import opt_einsum
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import ACT2FN
from transformers.cache_utils import (
    DummyLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.integrations import sdpa_attention
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import cached_file, chat_template_utils

from keepsight.kinds import Decoded, Inputs, Message, Options, Processor, Record
from keepsight.models.tested import refuse_unknown

__all__ = [
    "Dropout",
    "DummyLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "RunningNorm",
    "scan",  # a loop over rows in the form that torch writes into a graph
]

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
        *("_mkl_reorder_linear_weight", "_mkl_linear", "_weight_int8pack_mm", "_packed_params"),
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)


# -- text ------------------------------------------------------------------------------------------

# The ids of a text in which control tokens that are none stand between markers.
encode_marked: Callable[[PreTrainedTokenizerBase, str], list[int]]
encode_marked = chat_template_utils.encode_marked_chat
# Data as a chat template sees it: numbers, strings, lists and records.
plain_data: Callable[[object], Any] = chat_template_utils._plain_template_data
_template: Callable[[str], Template] = chat_template_utils._compile_jinja_template


def rendered(
    source: str, tokenizer: PreTrainedTokenizerBase, messages: list[Message], generate: bool
) -> str:
    """Plain messages under a chat template, without the copies that Transformers makes first."""
    more = {"tools": None, "documents": None, "add_generation_prompt": generate}
    return _template(source).render(messages=messages, **more, **tokenizer.special_tokens_map)


def parsed_template(source: str) -> nodes.Template:
    """A chat template as Transformers parses it."""
    return _template(source).environment.parse(source)


def template_variables(source: str) -> frozenset[str]:
    """The variables that a template reads."""
    return frozenset(chat_template_utils._get_template_variables(source))


# -- decisions -------------------------------------------------------------------------------------


def decisions() -> Any:
    """Transformers' own decisions: questions, prompts and labels."""
    return importlib.import_module("transformers.decision.template_utils")


def decision_models() -> Any:
    """Transformers' own reading of decisions from scores."""
    return importlib.import_module("transformers.decision.modeling_utils")


def decision_text(state: object, question: object) -> str:
    """The generic prompt of one question, for models without a decision template."""
    return _template(decisions().DECISION_PROMPT).render(state=state, question=question)


def split_at_placeholders(
    text: str, assets: Mapping[str, object], load: Callable[[str], object]
) -> list[Record]:
    """A text in parts: texts, and images where a placeholder stands."""
    parts: list[Record] = decisions()._split_at_placeholders(text, assets, load)
    return parts


def insert_images(
    inputs: Record, assets: Mapping[str, object], load: Callable[[str], object]
) -> tuple[Record, list[object]]:
    """The inputs of a decision template with image parts at placeholders, and the images."""
    made: tuple[Record, list[object]] = decisions()._insert_images(inputs, assets, load)
    return made


# -- checkpoints and processors --------------------------------------------------------------------

Processed = tuple[transformers.BatchFeature, list[str]]


def checkpoint_file(path: str, file: str, options: Options) -> str | None:
    """The path of a checkpoint's file, downloaded if needed; None if the checkpoint has none."""
    given = {**options, "_raise_exceptions_for_missing_entries": False}
    found: str | None = cached_file(path, file, **given)
    return found


def processed(
    processor: Processor, kind: str, media: Sequence[Decoded | ndarray], **options: object
) -> Processed:
    """Process media of one kind (images, videos or audio) with a composite processor; also returns
    their placeholder texts."""
    found: Processed = getattr(processor, f"_process_{kind}")(media, **options)
    return found


def merged_options(processor: Any, given: Options) -> Record:
    """The options of each part of a composite processor, including a caller's."""
    known = processor.tokenizer.init_kwargs
    merged: Record = processor._merge_kwargs(tokenizer_init_kwargs=known, **given)
    return merged


def sound_tokens(tower: PreTrainedModel, frames: int) -> int:
    """The number of tokens that an audio tower makes of some frames."""
    lengths = torch.tensor([frames])
    own = getattr(tower, "_get_feat_extract_output_lengths", None)
    if own is not None:
        return int(own(lengths)[1][0])
    module: Any = importlib.import_module(type(tower).__module__)  # a function in Qwen3-Omni
    return int(module._get_feat_extract_output_lengths(lengths, tower.n_window)[0])


def tiles_of(size: Tensor, pinpoints: list[list[int]], side: int) -> int:
    """The number of tiles of an image of a size, for LLaVA-NeXT and similar."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    count: int = image_size_to_num_patches(size, pinpoints, side)
    return count


# -- generation ------------------------------------------------------------------------------------


def generation_config(model: PreTrainedModel, given: object, options: Options) -> Any:
    """The settings of one call, and a record of the options that are none."""
    return model._prepare_generation_config(given, **options)


def prepare_special_tokens(model: PreTrainedModel, config: object, device: torch.device) -> None:
    """Store begin, end and padding tokens in the settings of one call as tensors."""
    model._prepare_special_tokens(config, True, device=device, batch_size=1)


def logits_processors(model: PreTrainedModel, **given: object) -> transformers.LogitsProcessorList:
    """The logits processors for the settings of one call."""
    return model._get_logits_processor(**given)


def stopping_criteria(model: PreTrainedModel, **given: object) -> transformers.StoppingCriteriaList:
    """The stopping criteria for the settings of one call."""
    return model._get_stopping_criteria(**given)


def padding_of(config: GenerationConfig) -> int:
    """The padding token for answers; 0 if there is none."""
    found = getattr(config, "_pad_token_tensor", None)
    found = getattr(config, "pad_token_id", None) if found is None else found
    return 0 if found is None else int(found)


# -- attention and kernels -------------------------------------------------------------------------

# Torch's flash attention: the operator below its public functions, whose names move.
flash_attention: Callable[[], Callable[..., tuple[Tensor, ...]]]
flash_attention = functools.partial(getattr, torch.ops.aten, "_flash_attention_forward")
# An activation by its name in a configuration.
activation: Callable[[str], Callable[[Tensor], Tensor]] = functools.cache(ACT2FN.__getitem__)


def for_scripts(**functions: Callable[..., object]) -> None:
    """Let scripts take these functions for operators of torch."""
    for name, function in functions.items():
        torch.jit._builtins._register_builtin(function, f"aten::{name}")


def ask_first(ours: Callable[[], bool]) -> None:
    """Make Transformers' attention ask us whether to leave grouped keys and values in place."""
    theirs = sdpa_attention.use_gqa_in_sdpa

    @functools.wraps(theirs)
    def answer(*arguments: object, **options: object) -> object:
        return True if ours() else theirs(*arguments, **options)

    sdpa_attention.use_gqa_in_sdpa = answer


def precompute(tower: PreTrainedModel, inputs: Inputs) -> None:
    """Add to a tower's inputs what follows from their sizes, as Transformers' exporter does."""
    from transformers.exporters.utils import precompute_export_inputs

    precompute_export_inputs(tower, inputs)


def registered_functions() -> dict[str, tuple[Mapping[str, Callable[..., object]], ...]]:
    """The functions that a model looks up by name when it runs, by kind."""
    return {
        "attention": (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS),
        "experts": (ALL_EXPERTS_FUNCTIONS,),
    }


def watched(run: Callable[[TorchFunction, Args, Record], object]) -> AbstractContextManager[object]:
    """Route every torch function called in this thread through `run`."""

    class FunctionWatch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: TorchFunction, types: object, args: Args = (), kwargs: Record | None = None
        ) -> object:
            return run(func, args, kwargs or {})

    watch: AbstractContextManager[object] = FunctionWatch()
    return watch


# -- graphs ----------------------------------------------------------------------------------------

_DEEPSTACK = "_deepstack_process"


def deepstack_with(
    decoder: PreTrainedModel, add: Callable[[Tensor, Tensor], Tensor]
) -> list[tuple[PreTrainedModel, str, object]]:
    """What to exchange so that deepstack features are added with `add(hidden, features)` to all
    tokens, as graphs need."""

    def process(
        hidden: Tensor, at: object, features: Tensor, *more: object, **options: object
    ) -> Tensor:
        refuse_unknown(_DEEPSTACK, more, options)
        return add(hidden, features)

    return [(decoder, _DEEPSTACK, process)] if hasattr(decoder, _DEEPSTACK) else []


# -- torch's settings, which switches.py reads before each call -----------------------------------


def precision_reader(backend: str, operation: str) -> Callable[[], object]:
    """The function that reads a backend's precision of an operation."""
    return functools.partial(torch._C._get_fp32_precision_getter, backend, operation)


def sdp_order() -> tuple[object, ...]:
    """The order in which kernels of attention are tried."""
    return tuple(torch._C._get_sdp_priority_order())


def einsum_readers() -> tuple[Callable[[], object], Callable[[], object]]:
    """The functions that read how products are ordered: whether, and by which strategy."""
    return opt_einsum._get_enabled, opt_einsum._get_strategy


def modes() -> list[object]:
    """Torch modes that intercept calls before the kernel, such as a default device."""
    found: list[object] = []
    if torch._C._len_torch_function_stack():
        found += _get_current_function_mode_stack()
    if torch._C._len_torch_dispatch_stack():
        found += _get_current_dispatch_mode_stack()
    return found


def compiler_stance() -> str:
    """The choice made with `torch.compiler.set_stance`; none if the compiler is not loaded."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    return "default" if compiler is None else str(compiler._stance.stance)


def kernels_left_out() -> tuple[str, ...]:
    """The kernels that `torch.backends.python_native` leaves out."""
    registry: Any = sys.modules.get("torch._native.registry")
    states = {} if registry is None else vars(registry._filter_state)
    return tuple(sorted(str(name) for names in states.values() for name in names))


def switch(name: str) -> Callable[[], object] | None:
    """The function that reads one of torch's settings; None if this build has no such setting."""
    return getattr(torch._C, f"_get_{name}", None)
