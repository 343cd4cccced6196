"""Layers in few bits, and tables that adapters wrap: they work, or they are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import cold, logits
from support.models import ALL, build, built, picture, stock_inputs, turn

import keepsight as ks
from keepsight.errors import UnreadableWeights, UnsupportedModel

FIRST = [turn("What do you see in this picture here?", picture(1))]
SECOND = [*FIRST, turn("A pattern.", role="assistant"), turn("And this one?", picture(2))]
OTHER = [turn("Another question about it.", picture(1))]


def expect_exact(vlm: ks.VLM, *asked: list[Any]) -> None:
    """Each is answered as by a memory that has seen nothing."""
    for messages in asked:
        assert torch.equal(logits(vlm, messages), cold(vlm, messages))


class OnePass(torch.nn.Linear):
    """Its input in eight bits, with one scale for all tokens of a pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale(x) / 127
        return super().forward((x / scale).round().clamp(-127, 127) * scale)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().max()


class EachToken(OnePass):
    """A scale for each token, as torchao's dynamic layers have it."""

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax(-1, keepdim=True)


class Fixed(OnePass):
    """A scale that was measured before, as quanto's activations have it."""

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(4.0)


@pytest.fixture
def parts() -> tuple[Any, Any]:
    return build("qwen3_vl")


def put_in(model: Any, kind: type[torch.nn.Module]) -> None:
    """Another class for two of the decoder's layers, with the weights that they have."""
    attention = model.get_decoder().layers[1].self_attn
    for name in ("q_proj", "o_proj"):
        old = getattr(attention, name)
        new: Any = kind(old.in_features, old.out_features, bias=old.bias is not None)
        if isinstance(new, torch.nn.Linear):
            new.weight = old.weight
        setattr(attention, name, new.eval())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("after", [False, True])
def test_a_scale_over_a_whole_pass_is_refused(parts: tuple[Any, Any], after: bool) -> None:
    model, processor = parts

    def quantise() -> None:
        torch.ao.quantization.quantize_dynamic(
            model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True
        )

    refused = pytest.raises(UnsupportedModel, match=r"qkv .*quantized\.dynamic.*tokens computed")
    if not after:
        quantise()
        with refused:
            ks.wrap(model, processor)
        return
    with ks.wrap(model, processor) as vlm:
        vlm.chat(FIRST, max_new_tokens=1)
        quantise()
        with refused:
            vlm.chat(FIRST, max_new_tokens=1)


_PER_TENSOR = {"num_bits": 8, "dynamic": True, "strategy": "tensor"}
_QUARK = {"is_dynamic": True, "qscheme": "per_tensor"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "llm_int8_threshold"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"input_activations": _PER_TENSOR}},
            },
            "compressed-tensors scales activations",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"input_tensors": _QUARK}},
            "quark scales activations",
        ),
    ],
)
def test_a_checkpoint_that_asks_for_such_a_scale_is_refused(
    parts: tuple[Any, Any], config: dict[str, Any], named: str
) -> None:
    model, processor = parts
    model.config.quantization_config = config
    with pytest.raises(UnsupportedModel, match=f"{named}.*whole pass.*scale for each token"):
        ks.wrap(model, processor)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 0.0},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"input_activations": {**_PER_TENSOR, "strategy": "token"}},
                "group_1": {"weights": _PER_TENSOR, "input_activations": None},
            },
        },
        {"quant_method": "torchao"},
    ],
)
def test_other_schemes_are_taken(parts: tuple[Any, Any], config: dict[str, Any]) -> None:
    model, processor = parts
    model.config.quantization_config = config
    with ks.wrap(model, processor) as vlm:
        expect_exact(vlm, FIRST)


def test_no_layer_runs_when_a_model_is_wrapped(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    put_in(model, EachToken)
    seen: list[int] = []
    tower = model.base_model.visual.merger.linear_fc1
    tower.__class__ = type("Counted", (EachToken,), {"scale": lambda *given: seen.append(1)})
    ks.wrap(model, processor).close()
    assert not seen


def test_activations_of_quanto_are_refused(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    model.get_decoder().layers[1].self_attn.q_proj.activation_qtype = "qint8"
    with pytest.raises(UnsupportedModel, match="q_proj .*quanto.*class of its own"):
        ks.wrap(model, processor)


@pytest.mark.filterwarnings("ignore")
def test_weights_in_half_precision_are_no_scale(parts: tuple[Any, Any]) -> None:
    """The same class of torch's, and nothing of the input is quantised."""
    model, processor = parts
    quantise = torch.ao.quantization.quantize_dynamic
    layer = model.get_decoder().layers[1]
    quantise(layer, {torch.nn.Linear}, dtype=torch.float16, inplace=True)
    with ks.wrap(model, processor) as vlm:
        expect_exact(vlm, FIRST, SECOND, FIRST)


@pytest.mark.parametrize("kind", [EachToken, Fixed])
def test_layers_that_treat_each_token_alone_are_taken(
    parts: tuple[Any, Any], kind: type[torch.nn.Module]
) -> None:
    model, processor = parts
    put_in(model, kind)
    with ks.wrap(model, processor) as vlm:
        expect_exact(vlm, FIRST, SECOND, OTHER, FIRST, SECOND)


@pytest.mark.parametrize("hybrid", ["qwen3_vl", "qwen3_5", "sliding"])
def test_a_model_that_needs_no_inference_mode(tmp_path: Path, hybrid: str) -> None:
    """All ways to and from a lane: a store, a batch, requests together, the device tier."""
    model, processor = build(hybrid)
    layer = model.get_decoder().layers[-1].self_attn.q_proj
    layer.weight = torch.nn.Parameter(in_eight_bits(layer.weight), requires_grad=False)
    for _ in range(2):
        with ks.wrap(model, processor, store=tmp_path, cache_budget="1MiB") as vlm:
            expect_exact(vlm, FIRST, SECOND, OTHER, SECOND)
            assert vlm.verify(SECOND, stock=True).equal
            with ks.Together(vlm) as together:
                tickets = [together.submit(m, max_new_tokens=3) for m in (FIRST, OTHER)]
                assert all(ticket.result().tokens for ticket in tickets)


class Opaque(torch.Tensor):
    """Values in a class of their own, as torchao's weights are, that nobody can lay out anew."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in ("view", "reshape", "numpy", "contiguous"):
            raise NotImplementedError("attempting to run an operator that is not there")
        return super().__torch_function__(function, types, arguments, options or {})


class Around(torch.Tensor):
    """Whole numbers and a scale in a tensor that has no storage of its own, as torchao and quanto
    keep weights in few bits."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values_in_few_bits, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_in_few_bits", "scale"], None

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].values_in_few_bits, arguments[0].scale)

        if torch.is_inference_mode_enabled():
            raise RuntimeError("Cannot set version_counter for inference tensor")

        def plain(x: Any) -> Any:
            return x.values_in_few_bits * x.scale if isinstance(x, cls) else x

        return function(*map(plain, arguments), **(options or {}))


def in_eight_bits(weight: torch.Tensor) -> torch.Tensor:
    """Such a weight, that works outside of inference mode only."""
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return Around((weight.detach() / scale).round().to(torch.int8), scale)


@pytest.mark.parametrize("packed", [True, False])
def test_compressed_layers_that_nothing_unpacks_are_refused(
    parts: tuple[Any, Any], packed: bool
) -> None:
    """As compressed-tensors leaves them on a CPU: no weight at all, or one in eight bits."""
    model, processor = parts
    layer = model.get_decoder().layers[1].self_attn.q_proj
    layer.quantization_scheme = "of another library"
    if packed:
        del layer.weight
        layer.register_buffer("weight_packed", torch.zeros(64, 8, dtype=torch.int32))
    else:
        weight = layer.weight.detach().to(torch.float8_e4m3fn)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(UnsupportedModel, match="is quantised, and nothing here unpacks"):
        ks.wrap(model, processor)


def test_weights_around_other_tensors_are_taken(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    for layer in (model.get_decoder().layers[1].self_attn.q_proj, model.base_model.visual.merger):
        layer = getattr(layer, "linear_fc1", layer)
        layer.weight = torch.nn.Parameter(in_eight_bits(layer.weight), requires_grad=False)
    with ks.wrap(model, processor) as vlm:
        expect_exact(vlm, FIRST, SECOND, OTHER, FIRST, SECOND)
        first = logits(vlm, FIRST)
        layer.weight.scale.mul_(1.5)  # a change inside is one of the weight
        assert not torch.equal(logits(vlm, FIRST), first)
        expect_exact(vlm, FIRST)


def test_weights_that_cannot_be_read_are_refused_by_name(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    layer = model.get_decoder().layers[1].self_attn.q_proj
    opaque = layer.weight.detach().clone().as_subclass(Opaque)
    layer.weight = torch.nn.Parameter(opaque, requires_grad=False)
    assert type(layer.weight) is Opaque
    with pytest.raises(UnreadableWeights, match="(?i)opaque.* cannot be"):
        ks.wrap(model, processor)


@pytest.mark.parametrize("kind", ["qwen3_vl", "mllama"])
def test_tokens_trained_by_an_adapter(kind: str, tmp_path: Path) -> None:
    """PEFT wraps the table of embeddings then, and the wrapper does not know its size."""
    peft = pytest.importorskip("peft")
    model, processor = build(kind)
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[40, 41])
    model.add_adapter(config)
    model.eval()
    with ks.wrap(model, processor) as vlm:
        out = vlm.generate(**stock_inputs(processor, FIRST), max_new_tokens=1)
        assert out.shape[0] == 1
        vlm.encode(picture(1)).save(tmp_path / "one.sight")
        package = ks.Package.load(tmp_path / "one.sight")
        assert vlm.ask(package, "What is it?", max_new_tokens=1).usage.images_encoded == 0
        expect_exact(vlm, SECOND)


def test_experts_in_a_dtype_that_torch_has_no_product_for() -> None:
    """The model's own code raises: said by name, also when it becomes so later, with a way out."""
    model, processor = build("qwen3_vl_moe")
    with ks.wrap(model, processor) as vlm:
        vlm.chat(FIRST, max_new_tokens=2)
        model.double()
        for _ in range(2):
            with pytest.raises(UnsupportedModel, match=r"grouped_mm.*float64.*'eager'"):
                vlm.chat(FIRST, max_new_tokens=2)
        with pytest.raises(UnsupportedModel, match=r"experts by 'grouped_mm'.*bfloat16.*float64"):
            ks.wrap(model, processor)
        model.set_experts_implementation("eager")
        answer = vlm.chat(FIRST, max_new_tokens=2).text
        with ks.wrap(model, processor) as fresh:
            assert fresh.chat(FIRST, max_new_tokens=2).text == answer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_whose_rows_torch_has_no_product_for(dtype: torch.dtype) -> None:
    """Rows of 72 bytes: the model's own code raises; said by name, with a way out."""
    model_class, config, processor = ALL["qwen3_vl_moe"]()
    config.text_config.moe_intermediate_size = 36
    model, processor = built(lambda: (model_class, config, processor), dtype)
    inputs = stock_inputs(processor, [turn("Words.")])
    with pytest.raises(RuntimeError, match="16 bytes"):
        model.generate(**inputs, max_new_tokens=2)
    with pytest.raises(UnsupportedModel, match=r"multiple of 16 bytes.*36.*'eager'"):
        ks.wrap(model, processor)
    model.set_experts_implementation("eager")
    wanted = model.generate(**inputs, max_new_tokens=2, do_sample=False)[0, -2:].tolist()
    with ks.wrap(model, processor) as vlm:
        found = vlm.chat([turn("Words.")], max_new_tokens=2, do_sample=False).tokens
        assert found == wanted[: len(found)]
