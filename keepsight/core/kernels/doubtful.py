"""Records torch functions whose results may depend on neighbouring rows, while a model computes.

Matrix products add in an order that depends on the number of rows. Some elementwise functions round
the last numbers, which fill no whole vector, differently. Composite functions such as `einsum` are
checked by their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from keepsight.core.kernels.passes import is_inside
from keepsight.kinds import Record
from keepsight.models import upstream
from keepsight.models.upstream import Args, TorchFunction

_PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "matmul", "linear", "_grouped_mm"),
    *("addbmm", "addr", "vdot", "_trilinear", "_cdist_forward", "_euclidean_dist", "_sparse_mm"),
    *("_int_mm", "_scaled_mm", "_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu"),
    *("_dyn_quant_matmul_4bit", "_embedding_bag", "_embedding_bag_forward_only"),
    *("convolution", "_convolution", "conv1d", "cumsum", "cumprod", "logcumsumexp"),
    *("mkldnn_rnn_layer", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    *("linalg_solve_triangular", "_linalg_solve_ex", "linalg_inv_ex", "linalg_lu_factor_ex"),
    *("linalg_matrix_exp", "linalg_cholesky_ex", "_fft_r2c", "_fft_c2c", "_fft_c2r"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math"),
    *("scaled_dot_product_attention", "_linear_pointwise", "_mkl_linear"),
}
# Measured with AVX2 and AVX-512, on one, two and three threads.
_UNEVEN = {
    *("gelu", "silu", "sigmoid", "softplus", "rsqrt", "elu", "celu", "mish", "pow", "exp2"),
    *("sinh", "cosh", "atanh", "atan2", "logaddexp", "logaddexp2", "selu", "glu"),
}
_SCALED = ("add", "sub", "rsub")  # where one of the two is multiplied first
_COMPLEX = ("mul", "div", "addcmul", "reciprocal")  # of complex numbers
_EVEN_POWERS = (0.5, 1, 2, 3, -1, -2)  # each a function of its own
_UNEVEN_HALVES = ("gelu", "rsqrt", "pow", *_SCALED)  # in bfloat16
_VECTOR = 64
_EXACT = 1 << 24  # float32 adds whole numbers up to here exactly


def noted_in(names: set[str], tokens: int) -> AbstractContextManager[object]:
    """Collect the names of such functions called in this thread outside of our kernels, in a pass
    over `tokens` tokens."""

    def run(function: TorchFunction, given: Args, options: Record) -> object:
        name = str(function).split(".")[1].rstrip("_")  # such as aten.mm.default
        known = name in _PRODUCTS or name in _UNEVEN
        if is_inside():
            return function(*given, **options)
        if not known:
            with upstream.watched(run):
                found = function.decompose(*given, **options)
            if found is not NotImplemented:
                return found
        if (name in _PRODUCTS and not _harmless(given)) or (
            _is_uneven(name, given, options) and not leaves_none(name, given, tokens)
        ):
            names.add(name)
        return function(*given, **options)

    return upstream.watched(run)


def _is_uneven(name: str, given: Args, options: Record) -> bool:
    if name in _SCALED:
        return bool(options.get("alpha", given[2] if len(given) > 2 else 1) != 1)
    if name in _COMPLEX:
        return any(isinstance(arg, torch.Tensor) and arg.is_complex() for arg in given)
    return name in _UNEVEN


def _harmless(args: Sequence[object]) -> bool:
    """Whether a product is exact in any order: it adds nothing (an outer product, as for rotary
    positions), or it adds whole numbers."""
    given = [arg for arg in args if isinstance(arg, torch.Tensor)]
    sizes = [arg.shape for arg in given]
    outer = len(sizes) == 2 and len(sizes[0]) > 1 and sizes[0][-1] == 1
    return outer or (len(given) == 1 and _counts(given[0]))


def leaves_none(name: str, args: Sequence[object], tokens: int) -> bool:
    """Whether every number of tokens fills whole vectors."""
    given = next(arg for arg in args if isinstance(arg, torch.Tensor))
    power = args[1] if name == "pow" and isinstance(args[1], int | float) else None
    if power in _EVEN_POWERS:
        return True
    root = name == "rsqrt" or power == -0.5
    if given.dtype == torch.float32 and root:
        return True
    if given.dtype == torch.bfloat16 and name not in _UNEVEN_HALVES:
        return True
    return torch.get_num_threads() == 1 and given.numel() % (_VECTOR * tokens) == 0


def _counts(given: torch.Tensor) -> bool:
    return bool((given == given.round()).all()) and float(given.abs().sum()) < _EXACT
