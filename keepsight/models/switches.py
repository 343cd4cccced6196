"""The process and thread settings that change the bits of a result.

They are: the kernels torch may choose, their precision, the processor's rounding, functions
registered with Transformers, and environment variables of numerical libraries. Only differences
from a new process are named. Some settings belong to a thread, so all are read in the thread that
runs the model, before each call; that costs a few microseconds.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable, Iterator

import torch

from keepsight.kinds import Record
from keepsight.models import nameless, upstream

# Functions of `torch._C` that read a setting, without the leading "_get_", and their values in a
# new process. A test names those of the installed torch that are in no table here.
ANYWHERE: Record = {
    "flash_sdp_enabled": True,
    "mem_efficient_sdp_enabled": True,
    "math_sdp_enabled": True,
    "cudnn_sdp_enabled": True,
    "overrideable_sdp_enabled": True,
    "fa3_sdp_enabled": False,
    "fa4_sdp_enabled": False,
    "math_sdp_allow_fp16_bf16_reduction": False,
    "mkldnn_enabled": True,
    "mkldnn_deterministic": False,
    "onednn_allow_tf32": None,
    "nnpack_enabled": True,
    "qengine": 4,
    "deterministic_algorithms": False,
    "deterministic_algorithms_warn_only": False,
    "deterministic_fill_uninitialized_memory": True,
    "float32_matmul_precision": "highest",
    "cpu_allow_fp16_reduced_precision_reduction": False,
    "linalg_preferred_backend": "_LinalgBackend.Default",
}
ON_CUDA: Record = {
    "cublas_allow_bf16_reduced_precision_reduction": (True, True),
    "cublas_allow_fp16_reduced_precision_reduction": (True, True),
    "cublas_allow_fp16_accumulation": False,
    "cublas_allow_tf32": False,
    "cublaslt_prefer_grouped_gemm": False,
    "blas_preferred_backend": "_BlasBackend.Cublas",
    "rocm_fa_preferred_backend": "_ROCmFABackend.Default",
    "sm_carveout_experimental": None,
    "cudnn_enabled": True,
    "cudnn_benchmark": False,
    "cudnn_deterministic": False,
    "cudnn_depthwise_kernel": "auto",
    "cudnn_allow_tf32": True,
    "miopen_immediate": False,
    "native_aot_enabled": True,
    "native_aot_unconditional_masked": False,
}
# (backend, operation) -> the precision that "none" means in a new process.
_PRECISIONS: dict[tuple[str, str], str] = {
    ("generic", "all"): "ieee",
    ("mkldnn", "all"): "ieee",
    ("mkldnn", "matmul"): "ieee",
    ("mkldnn", "conv"): "ieee",
    ("mkldnn", "rnn"): "ieee",
    ("cuda", "all"): "ieee",
    ("cuda", "matmul"): "ieee",
    ("cuda", "conv"): "tf32",
    ("cuda", "rnn"): "tf32",
}
# Prefixes of variables that numerical libraries read, mostly when they are loaded.
_VARIABLES = (
    "ATEN_CPU_", "CUBLAS", "CUDNN_", "DISABLE_ADDMM_", "DNNL_", "GLIBC_TUNABLES", "HIPBLAS",
    "MIOPEN_", "MKL_", "NVIDIA_TF32_", "OMP_DYNAMIC", "OMP_THREAD_LIMIT", "ONEDNN_", "PYTORCH_MPS_",
    "PYTORCH_TUNABLEOP_", "ROCBLAS_", "TORCHDYNAMO_DISABLE", "TORCH_ALLOW_TF32_", "TORCH_BLAS_",
    "TORCH_COMPILE_DISABLE", "TORCH_CUDNN_", "TORCH_LINALG_", "USE_HUB_KERNELS", "XLA_",
)  # fmt: skip
_SILENT = ("VERBOSE", "LOG", "CACHE", "DUMP")  # parts of names of variables that change no result
_LIVE = ("TRANSFORMERS_SDPA_FORCE_GQA", "TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR")  # read by each pass
# Libraries that replace kernels of a model when they are installed.
_LIBRARIES = (
    "causal-conv1d", "flash-attn", "flash-attn-3", "flash-linear-attention", "kernels",
    "liger-kernel", "mamba-ssm", "opt-einsum", "xformers",
)  # fmt: skip
_LEAST = 2.0**-1022  # whose half is no zero by IEEE rules


def switches(device: str, chosen: Iterable[tuple[str, str]]) -> list[str]:
    """`name=value` for each setting that differs from a new process, for a model on a type of
    device.

    `chosen` are the kinds of functions that the model looks up in Transformers, and their names.
    """
    found = [*_unusual(device != "cpu"), *_environment()]
    found += [f"{name}={os.environ[name]}" for name in _LIVE if name in os.environ]
    if _LEAST / 2 == 0:
        found.append("denormals=flushed")
    found += [f"mode={called(mode)}{_device_of(mode)}" for mode in upstream.modes()]
    return found + [f"{name}={called(function)}" for name, function in _foreign(chosen)]


# -- torch ---------------------------------------------------------------------------------------


@functools.cache
def _settings(accelerated: bool) -> tuple[tuple[str, Callable[[], object], object], ...]:
    """The settings: name, the function that reads it, its value in a new process."""
    found: list[tuple[str, Callable[[], object], object]] = []
    for name, usual in {**ANYWHERE, **(ON_CUDA if accelerated else {})}.items():
        reader = upstream.switch(name)
        if reader is not None:
            found.append((name, reader, usual))
    for (backend, operation), usual in _PRECISIONS.items():
        if accelerated or backend != "cuda":
            reader = upstream.precision_reader(backend, operation)
            found.append((f"{backend}.{operation}.fp32_precision", reader, usual))
    found += [
        ("sdp_priority_order", upstream.sdp_order, (1, 2, 0, 3, 4)),
        ("default_dtype", torch.get_default_dtype, torch.float32),
        ("mha_fastpath", torch.backends.mha.get_fastpath_enabled, True),
        ("compiler.stance", upstream.compiler_stance, "default"),
        ("python_native", upstream.kernels_left_out, ()),
    ]
    if torch.backends.opt_einsum.is_available():
        enabled, strategy = upstream.einsum_readers()
        found += [("opt_einsum", enabled, True), ("opt_einsum.strategy", strategy, "auto")]
    return tuple(found)


def _unusual(accelerated: bool) -> Iterator[str]:
    for name, read, usual in _settings(accelerated):
        try:
            value = read()
        except RuntimeError:  # the old and the new way of choosing a precision, mixed
            value = "mixed"
        given = "ieee" if value == "none" else value
        if given != usual and str(given) != usual:
            yield f"{name}={given}"


@functools.cache
def _environment() -> tuple[str, ...]:
    """Variables and libraries as they were when the first model was wrapped: they are read once."""
    found = []
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES) and not any(word in name for word in _SILENT):
            found.append(f"{name}={value}")
    for library in _LIBRARIES:
        try:
            found.append(f"{library}={importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


# -- registered functions and modes --------------------------------------------------------------


def _device_of(mode: object) -> str:
    device = getattr(mode, "device", None)
    return f" {device}" if isinstance(device, torch.device) else ""


def _foreign(chosen: Iterable[tuple[str, str]]) -> Iterator[tuple[str, object]]:
    """Functions that a model looks up in Transformers and that are not Transformers' own."""
    registries = upstream.registered_functions()
    for kind, name in chosen:
        for registry in registries[kind]:
            function = registry.get(name)
            if function is not None and not _is_own(function, "transformers"):
                yield f"{kind} {name}", function


def _is_own(thing: object, library: str) -> bool:
    """Whether an object is what a library defines under its name."""
    place = str(getattr(thing, "__module__", ""))
    name = getattr(thing, "__qualname__", "")
    return place.split(".")[0] == library and getattr(sys.modules.get(place), name, None) is thing


def called(thing: object) -> str:
    """A name that two different objects never share, in this process or between two."""
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is not thing and _is_own(kind, "torch"):
        return name
    return f"{name} {nameless.PROCESS}-{nameless.number_of(thing)}"
