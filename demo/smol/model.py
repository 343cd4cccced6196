"""The model as it is trained: the modules of Transformers' `idefics3`, by the same names.

Written out here so that a layer compiles once and a pass over the language model merges the
adapter as it goes; `tests/demo` shows that both give what the stock modules give.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from demo.smol.draw import CHARS, COLOR_NAMES, GRID, KINDS, LONGEST, PATCH
from keepsight.models.demo_smol import NEW_TOKENS, text_weights

WIDE, HEADS, DEEP, INNER = 384, 6, 7, 1152
CELL = 4  # patches a side that the connector joins into one token
TOKENS = (GRID // CELL) ** 2
TEXT_WIDE, TEXT_DEEP, TEXT_HEADS, TEXT_KV, TEXT_INNER, VOCABULARY = 576, 30, 9, 3, 1536, 49152
IMAGE_ID = VOCABULARY + 2
RANK = 16
PROJECTIONS = {
    "self_attn.q_proj": (576, 576), "self_attn.k_proj": (192, 576), "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576), "mlp.gate_proj": (1536, 576), "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}  # fmt: skip


def compiled(function: Callable[..., Tensor], on: bool) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False) if on else function


def vision_layer(x: Tensor, parameters: tuple[Tensor, ...]) -> Tensor:
    """One layer of the vision encoder; the parameters in the order in which `Layer` makes them."""
    k_w, k_b, v_w, v_b, q_w, q_b, o_w, o_b, n1_w, n1_b, up_w, up_b, down_w, down_b, n2_w, n2_b = (
        p.to(x.dtype) for p in parameters
    )
    h = F.layer_norm(x, (WIDE,), n1_w, n1_b, 1e-6)
    q, k, v = (
        F.linear(h, w, b).view(*h.shape[:2], HEADS, -1).transpose(1, 2)
        for w, b in ((q_w, q_b), (k_w, k_b), (v_w, v_b))
    )
    h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + F.linear(h, o_w, o_b)
    h = F.layer_norm(x, (WIDE,), n2_w, n2_b, 1e-6)
    return x + F.linear(F.gelu(F.linear(h, up_w, up_b), approximate="tanh"), down_w, down_b)


class Layer(nn.Module):
    """The parameters of one layer of the vision encoder, by Transformers' names."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict(
            {f"{n}_proj": nn.Linear(WIDE, WIDE) for n in ("k", "v", "q", "out")}
        )
        self.layer_norm1 = nn.LayerNorm(WIDE, 1e-6)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDE, INNER), "fc2": nn.Linear(INNER, WIDE)})
        self.layer_norm2 = nn.LayerNorm(WIDE, 1e-6)


class Tower(nn.Module):
    """Vision encoder and connector: pixels to tokens of the language model's width."""

    def __init__(self, compile_layers: bool = False) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, WIDE, PATCH, PATCH)
        self.position_embedding = nn.Embedding(GRID * GRID, WIDE)
        self.layers = nn.ModuleList(Layer() for _ in range(DEEP))
        self.post_layernorm = nn.LayerNorm(WIDE, 1e-6)
        self.proj = nn.Linear(WIDE * CELL**2, TEXT_WIDE, bias=False)
        nn.init.normal_(self.position_embedding.weight, std=0.02)
        for layer in self.layers:
            for linear in layer.modules():
                if isinstance(linear, nn.Linear):
                    nn.init.trunc_normal_(linear.weight, std=0.02)
                    nn.init.zeros_(linear.bias)
        self.run = compiled(vision_layer, compile_layers)

    def patches(self, pixels: Tensor) -> Tensor:
        """(n, 3, 448, 448) in -1..1 to (n, 784, 384)."""
        n = len(pixels)
        x = (
            pixels.view(n, 3, GRID, PATCH, GRID, PATCH)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(n, GRID**2, -1)
        )
        first, kind = self.patch_embedding, x.dtype
        x = F.linear(x, first.weight.flatten(1).to(kind), first.bias.to(kind))
        x = x + self.position_embedding.weight.to(kind)
        for layer in self.layers:
            x = self.run(x, tuple(layer.parameters()))
        norm = self.post_layernorm
        return F.layer_norm(x, (WIDE,), norm.weight.to(kind), norm.bias.to(kind), 1e-6)

    def tokens(self, patches: Tensor) -> Tensor:
        """Idefics3's pixel shuffle, and its one projection."""
        n, side = len(patches), GRID // CELL
        x = patches.view(n, side, CELL, side, CELL, WIDE).permute(0, 1, 3, 2, 4, 5)
        return F.linear(x.reshape(n, TOKENS, -1), self.proj.weight.to(x.dtype))

    def named_for_transformers(self) -> dict[str, Tensor]:
        found = {}
        for name, value in self.state_dict().items():
            if name == "proj.weight":
                found["model.connector.modality_projection.proj.weight"] = value
            else:
                room = {
                    "patch_embedding": "embeddings.",
                    "position_embedding": "embeddings.",
                    "layers": "encoder.",
                }
                found[f"model.vision_model.{room.get(name.split('.')[0], '')}{name}"] = value
        return found


class Heads(nn.Module):
    """What the tower learns from before it meets the language model; not part of the demo.

    One label for each patch, and a reader that is given a box and says what stands there from the
    connector's tokens alone: what it can spell, the language model can learn to spell.
    """

    def __init__(self, emoji: int, wide: int = 384, deep: int = 2) -> None:
        super().__init__()
        sizes = len(KINDS), len(COLOR_NAMES) + 1, emoji + 1, len(CHARS), len(CHARS)
        self.dense = nn.ModuleList(nn.Linear(WIDE, n) for n in sizes)
        self.read = nn.ModuleList(nn.Linear(wide, n) for n in sizes[:4])
        self.memory_norm = nn.LayerNorm(TEXT_WIDE)
        self.memory = nn.Linear(TEXT_WIDE, wide)
        self.memory_place = nn.Parameter(torch.randn(TOKENS, wide) * 0.02)
        self.box = nn.Sequential(nn.Linear(4 * 16, wide), nn.GELU(), nn.Linear(wide, wide))
        self.slot = nn.Parameter(torch.randn(1 + LONGEST, wide) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerDecoderLayer(
                wide, 6, wide * 2, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(deep)
        )
        self.norm = nn.LayerNorm(wide)

    def reading(self, tokens: Tensor, boxes: Tensor) -> list[Tensor]:
        """Logits of (n, items): kind, colour, emoji, and of (n, items, letters)."""
        n, items = boxes.shape[:2]
        scales = 2.0 ** torch.arange(8, device=boxes.device) * math.pi / 2
        angles = (boxes[..., None] * scales).flatten(2)
        query = self.box(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None] + self.slot
        memory = self.memory(self.memory_norm(tokens)) + self.memory_place
        query = query.flatten(0, 1)  # the letters of one item see each other
        memory = memory[:, None].expand(-1, items, -1, -1).flatten(0, 1)
        for block in self.blocks:
            query = block(query, memory)
        query = self.norm(query).view(n, items, 1 + LONGEST, -1)
        return [head(query[:, :, 0]) for head in self.read[:3]] + [self.read[3](query[:, :, 1:])]


def tower_losses(
    heads: Heads, patches: Tensor, tokens: Tensor, unit: dict[str, Tensor]
) -> dict[str, Tensor]:
    maps = unit["maps"].flatten(2).long()
    kind, color, emoji, left, right = maps.unbind(1)
    text = kind == KINDS.index("text")
    wanted = {
        "kind": kind,
        "color": torch.where(color > 0, color, -1),
        "emoji": torch.where(emoji > 0, emoji, -1),
        "left": torch.where(text, left, -1),
        "right": torch.where(text, right, -1),
    }
    found: dict[str, Tensor] = {}
    for head, (name, labels) in zip(heads.dense, wanted.items(), strict=True):
        logits = head(patches).flatten(0, 1).float()
        weight = None
        if name == "kind":
            weight = torch.ones(len(KINDS), device=logits.device)
            weight[0] = 0.2
        found[name] = _loss(logits, labels.flatten(), weight)
    boxes, labels = unit["boxes"], unit["labels"].long()
    for name, logits, target in zip(
        ("read kind", "read color", "read emoji", "read letters"),
        heads.reading(tokens, boxes),
        (labels[..., 0], labels[..., 1], labels[..., 2], labels[..., 3:]),
        strict=True,
    ):
        found[name] = _loss(logits.flatten(0, -2).float(), target.flatten())
    return found


def _loss(logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    total = F.cross_entropy(logits, labels, weight, ignore_index=-1, reduction="sum")
    return total / (labels >= 0).sum().clamp(min=1)


def pixels_of(unit: Tensor, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    """uint8 (n, 448, 448, 3) to -1..1, in training with what cameras and screens do to pictures."""
    x = unit.permute(0, 3, 1, 2).to(dtype) / 127.5 - 1
    if generator is not None and len(x) >= 8:
        n = len(x) // 4

        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, device=x.device, generator=generator).to(dtype)

        light = torch.where(rand(len(x), 1, 1, 1) < 0.3, 0.8 + 0.3 * rand(len(x), 1, 1, 1), 1.0)
        x = ((x + 1) * light.to(dtype) - 1).clamp(-1, 1)
        soft = F.avg_pool2d(F.pad(x[:n], (1, 1, 1, 1), "replicate"), 3, 1)
        blend = rand(n, 1, 1, 1)
        side = int(x.shape[-1] * (0.6 + 0.35 * float(torch.rand((), generator=None))))
        small = F.interpolate(
            x[n : 2 * n].float(), size=(side, side), mode="bilinear", antialias=True
        )
        again = F.interpolate(small, size=x.shape[-2:], mode="bilinear").to(dtype)
        noise = torch.randn(
            x[2 * n : 3 * n].shape, device=x.device, generator=generator, dtype=torch.float32
        )
        strength = rand(n, 1, 1, 1) * 0.1
        x = torch.cat(
            [
                x[:n] * (1 - blend) + soft * blend,
                again,
                x[2 * n : 3 * n] + noise.to(dtype) * strength,
                x[3 * n :],
            ]
        )
    return x.contiguous()


# -- the language model -------------------------------------------------------------------------


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (y.to(x.dtype)) * weight


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def text_layer(
    x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, norms: tuple[Tensor, Tensor],
    base: tuple[Tensor, ...], down: tuple[Tensor, ...], up: tuple[Tensor, ...],
) -> Tensor:  # fmt: skip
    """One layer of Llama, its matrices merged with the adapter first."""
    q_w, k_w, v_w, o_w, gate, raise_, lower = (
        (w + b @ a).to(x.dtype) for w, a, b in zip(base, down, up, strict=True)
    )
    n, length, _ = x.shape
    h = _norm(x, norms[0])
    q = F.linear(h, q_w).view(n, length, TEXT_HEADS, -1).transpose(1, 2)
    k = F.linear(h, k_w).view(n, length, TEXT_KV, -1).transpose(1, 2)
    v = F.linear(h, v_w).view(n, length, TEXT_KV, -1).transpose(1, 2)
    q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    k, v = (t.repeat_interleave(TEXT_HEADS // TEXT_KV, 1) for t in (k, v))
    h = (
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        .transpose(1, 2)
        .reshape(n, length, -1)
    )
    x = x + F.linear(h, o_w)
    h = _norm(x, norms[1])
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, raise_), lower)


class Speaker(nn.Module):
    """SmolLM2, frozen, with a trained adapter and the rows of four new tokens."""

    def __init__(
        self, base: dict[str, Tensor], compile_layers: bool = False, deep: int = TEXT_DEEP
    ) -> None:
        super().__init__()
        self.deep = deep
        self.register_buffer(
            "embedding", base["model.embed_tokens.weight"].to(torch.bfloat16), persistent=False
        )
        self.register_buffer("last_norm", base["model.norm.weight"], persistent=False)
        for i in range(deep):
            for name in PROJECTIONS:
                self.register_buffer(
                    _flat(i, name),
                    base[f"model.layers.{i}.{name}.weight"].float(),
                    persistent=False,
                )
            for j, name in enumerate(("input_layernorm", "post_attention_layernorm")):
                self.register_buffer(
                    f"n{i}_{j}", base[f"model.layers.{i}.{name}.weight"], persistent=False
                )
        self.a = nn.ParameterDict()
        self.b = nn.ParameterDict()
        for i in range(deep):
            for name, (out, into) in PROJECTIONS.items():
                self.a[_flat(i, name)] = nn.Parameter(torch.randn(RANK, into) / math.sqrt(into))
                self.b[_flat(i, name)] = nn.Parameter(torch.zeros(out, RANK))
        self.extra = nn.Parameter(
            torch.randn(len(NEW_TOKENS), TEXT_WIDE) * float(self.embedding.float().std())
        )
        self.run = compiled(text_layer, compile_layers)
        self.adapted = True

    def forward(self, ids: Tensor, images: Tensor, position: Tensor, group: Tensor) -> Tensor:
        """Hidden states; `images` are the pictures' tokens in order of their places."""
        table = torch.cat([self.embedding, self.extra.to(self.embedding.dtype)])
        x = F.embedding(ids, table)
        where = ids == IMAGE_ID
        x = x.masked_scatter(where[..., None], images.to(x.dtype))
        angle = position[..., None].float() / 100000.0 ** (
            torch.arange(0, 64, 2, device=ids.device) / 64
        )
        angle = torch.cat([angle, angle], -1)[:, None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        same = (group[:, None, :] == 0) | (group[:, None, :] == group[:, :, None])
        mask = (causal & same)[:, None]
        for i in range(self.deep):
            keys = [_flat(i, name) for name in PROJECTIONS]
            norms = (getattr(self, f"n{i}_0").to(x.dtype), getattr(self, f"n{i}_1").to(x.dtype))
            base = tuple(getattr(self, key) for key in keys)
            x = self.run(
                x,
                cos,
                sin,
                mask,
                norms,
                base,
                tuple(self.a[k] for k in keys),
                tuple(self.b[k] for k in keys),
            )
        return _norm(x, self.last_norm.to(x.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, torch.cat([self.embedding, self.extra.to(self.embedding.dtype)]))


def _flat(i: int, name: str) -> str:
    return f"l{i}_{name.replace('.', '_')}"


def read_gguf(folder: Path) -> dict[str, Tensor]:
    """SmolLM2's tensors by Transformers' names, from one GGUF file (or its parts in a folder)."""
    parts = sorted(folder.glob("*.gguf*"))
    if not parts:
        raise SystemExit(f"no .gguf file in {folder}")
    path = parts[0]
    if len(parts) > 1:
        path = folder / "joined"
        path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return text_weights(path)


def random_base(deep: int) -> dict[str, Tensor]:
    """Weights of the same shapes, to try the code."""
    found = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, TEXT_WIDE) * 0.05,
        "model.norm.weight": torch.ones(TEXT_WIDE),
    }
    for i in range(deep):
        for name, shape in PROJECTIONS.items():
            found[f"model.layers.{i}.{name}.weight"] = torch.randn(shape) * 0.03
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{name}.weight"] = torch.ones(TEXT_WIDE)
    return found


# -- files --------------------------------------------------------------------------------------


def save_parts(tensors: dict[str, Tensor], folder: Path, name: str, most: int = 14 * 2**20) -> None:
    """In bfloat16, in parts of at most `most` bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    used = 0
    for key, value in tensors.items():
        half = value.detach().to("cpu", torch.bfloat16).contiguous()
        size = half.numel() * 2
        if used + size > most and parts[-1]:
            parts.append({})
            used = 0
        parts[-1][key] = half
        used += size
    for i, part in enumerate(parts):
        save_file(part, folder / f"{name}-{i}.safetensors")


def load_parts(folder: Path, name: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{name}-*.safetensors")):
        found |= load_file(path)
    return {key: value.float() for key, value in found.items()}


def chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, start + size)


State = dict[str, Any]
