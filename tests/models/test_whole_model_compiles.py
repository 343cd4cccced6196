"""The whole model in one graph: a picture's tensors, ids and positions in, logits out.

Each family's whole forward is compiled with
`fullgraph=True` from pixels and from features, as the engine calls it, and exported. What the
installed Transformers cannot is listed with its error, and the test says when that changes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import models
from support.tiny_models import glm_image, mlcd
from transformers import DynamicCache, StaticCache
from transformers.exporters import exporter_dynamo  # noqa: F401  registers its patches
from transformers.exporters.utils import apply_patches

from keepsight.core.decoding.state import Lane, Shape
from keepsight.models.families import Family, family_of
from keepsight.models.renamed import EncoderOutput

KINDS = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker",
    "glm4v",
    "glm4v_moe",
    "glm46v",
    "glm_ocr",
    "ernie4_5_vl_moe",
    "video_llama_3",
    "paddleocr_vl",
)
WAYS = ("pixels", "features", "step", "export", "export features")  # columns in docs/compiling.md
# Attention in windows: with `sdpa` each window's length is compared with 1 inside the graph, and
# the exporter's patches run all windows as one batch.
WINDOWED = {"qwen2_5_vl", "qwen2_5_omni_thinker"}
_EMPTY = "Could not guard on data-dependent expression"
CANNOT: dict[tuple[str, str], str] = {
    ("pixels", "ernie4_5_vl_moe"): "trace builtin operator `range`|Data-dependent branching",
    ("features", "ernie4_5_vl_moe"): "Data-dependent branching",
    ("export", "ernie4_5_vl_moe"): "Could not extract specialized integer",
    ("export features", "ernie4_5_vl_moe"): _EMPTY,
    ("pixels", "video_llama_3"): _EMPTY,
    ("export", "video_llama_3"): r"Cannot call numel\(\) on tensor with symbolic sizes",
}
# Whole windows of 56 pixels, where there are windows.
TEXTS = (("What is it?", (112, 112)), ("And what do you see in that one?", (168, 112)))
RAGGED = (("A rim?", (140, 112)),)
Call = dict[str, Any]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@dataclass
class Case:
    """One prompt with one picture, as the engine would hand it to the model."""

    own: Family
    ids: torch.Tensor
    types: np.ndarray
    vision: Call
    grid: dict[str, list[Any]]
    features: dict[str, torch.Tensor]

    def text(self, start: int = 0, end: int | None = None) -> Call:
        """Ids, explicit positions and what the family adds to them, for a range of tokens."""
        end = self.ids.shape[1] if end is None else end
        ids = self.ids[0].numpy()
        positions = self.own.positions(ids, self.types, [self.grid])
        extra = self.own.chunk_inputs(ids, self.types, start, end)
        given = {"input_ids": self.ids[:, start:end], "position_ids": positions[..., start:end]}
        return {**given, **extra}

    def pixels(self) -> Call:
        """The whole prompt with pixels, and with the tensors that the tower works out."""
        tensors = self.own.tower_tensors.of(self.vision)
        made = {f"image_{name}": tensor for name, tensor in tensors.items()}
        return {**self.text(), **self.vision, **made}

    def outputs(self) -> Call:
        """`mm_encoder_outputs` from remembered features.

        Rows are marked: upstream writes their number into an error message while it is traced, and
        without the mark each number would get a graph of its own.
        """
        for tensor in self.features.values():
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        return seen(self.features)


def seen(features: dict[str, torch.Tensor]) -> Call:
    deepstack = [(tensor,) for name, tensor in features.items() if name != "features"]
    image = EncoderOutput(pooler_output=(features["features"],), deepstack_features=deepstack)
    return {"mm_encoder_outputs": {"image": image}}


def cases(kind: str, texts: Any = TEXTS) -> tuple[Any, list[Case]]:
    """The model, and two prompts of other lengths with pictures of other sizes."""
    model, processor = models.build(kind)
    own = family_of(model)
    found = []
    for seed, (text, size) in enumerate(texts, 1):
        image = models.picture(seed, *size)
        inputs = models.stock_inputs(processor, [models.turn(text, image)])
        pixels = own.preprocess(processor, image, {})
        types = (inputs["input_ids"][0].numpy() == own.image_token_id).astype(np.int64)
        vision = dict(pixels.tensors)
        features = own.encode(pixels)[0]
        found.append(Case(own, inputs["input_ids"], types, vision, pixels.grid, features))
    return model, found


class Logits(torch.nn.Module):
    """What is compiled and exported: tensors in, logits out.

    With a cache and `mm_encoder_outputs` among them, or with features as plain tensors for export.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Call, features: Call | None = None) -> torch.Tensor:
        outputs = seen(features) if features else {}
        output: Any = self.model(**call, **outputs, use_cache="past_key_values" in call)
        return output.logits


def stock(model: Any, case: Case) -> torch.Tensor:
    """Logits of the model as it is, from pixels alone: positions and tower left to upstream."""
    inputs: Call = {"input_ids": case.ids, **case.vision}
    extra = case.own.chunk_inputs(case.ids[0].numpy(), case.types, 0, case.ids.shape[1])
    if case.own.mrope:
        inputs["mm_token_type_ids"] = torch.from_numpy(case.types)[None]
    inputs["attention_mask"] = torch.ones_like(case.ids)
    logits: torch.Tensor = model(**inputs, **extra, use_cache=False).logits
    return logits


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal within float32 rounding of the logits' scale."""
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def compiled(model: Any, dynamic: bool | None = True) -> tuple[Any, list[Any]]:
    """The whole forward, and every graph that was made for it."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(Logits(model), fullgraph=True, backend=backend, dynamic=dynamic), graphs


@contextlib.contextmanager
def listed(way: str, kind: str) -> Iterator[None]:
    """Whether it works is as listed: an error of ours, or one that has gone, fails the test."""
    error = CANNOT.get((way, kind))
    with pytest.raises(Exception, match=error) if error else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def attention(model: Any, kind: str) -> Iterator[None]:
    """`eager` attention in towers that look through windows."""
    config = model.config.vision_config
    before = config._attn_implementation
    if kind in WINDOWED:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = before


def marked(*quick: str) -> list[Any]:
    return [pytest.param(k, marks=() if k in quick else pytest.mark.slow) for k in KINDS]


# -- prefill -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", marked("qwen3_vl", "ernie4_5_vl_moe", "video_llama_3"))
def test_from_pixels(kind: str) -> None:
    model, found = cases(kind)
    with attention(model, kind), listed("pixels", kind):
        forward, graphs = compiled(model)
        for case in found:
            close(forward(case.pixels()), stock(model, case))
        # A graph with windows in it serves one number of windows.
        assert len(graphs) == (2 if kind in WINDOWED else 1)


@pytest.mark.parametrize("kind", marked("qwen3_5", "ernie4_5_vl_moe"))
def test_from_features_behind_what_a_lane_holds(kind: str) -> None:
    """As the engine prefills: a few tokens stand already, the picture's come behind them."""
    model, found = cases(kind)
    with listed("features", kind):
        forward, graphs = compiled(model)
        for case in found:
            logits = []
            for run in (Logits(model), forward):
                lane, start = Lane(model, Shape.of(model)), 2
                lane.reserve(case.ids.shape[1])
                model(**case.text(0, start), past_key_values=lane.cache, use_cache=True)
                call = {**case.text(start), **case.outputs()}
                logits.append(run({**call, "past_key_values": lane.cache}))
            close(logits[0], stock(model, case)[:, start:])
            close(logits[1], logits[0])
        assert len(graphs) == 1


# -- decode --------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["lane", "static"])
@pytest.mark.parametrize("kind", marked("qwen3_5", "ernie4_5_vl_moe"))
def test_a_decode_step(kind: str, memory: str) -> None:
    """A graph for one step serves the steps behind it, on the engine's lane and on StaticCache."""
    model, found = cases(kind)
    forward, graphs = compiled(model, None if memory == "static" else True)
    for case in found:
        length = case.ids.shape[1]
        cache: Any = StaticCache(config=model.config, max_cache_len=128)
        if memory == "lane":
            lane = Lane(model, Shape.of(model))
            lane.reserve(length + 16)
            cache = lane.cache
        plain = DynamicCache(config=model.config)
        for memories in (cache, plain):
            call = {**case.text(), **case.outputs()}
            model(**call, past_key_values=memories, use_cache=True)
        behind = case.text()["position_ids"][..., -1:] + 1
        for step in range(10):
            call = {"input_ids": torch.tensor([[5 + step]]), "position_ids": behind + step}
            call |= case.own.step_inputs(1, length + step + 1)
            wanted = model(**call, past_key_values=plain, use_cache=True).logits
            close(forward({**call, "past_key_values": cache}), wanted)
    assert len(graphs) == 1


# -- export --------------------------------------------------------------------------------------


def export(model: Any, call: Call, features: Call, patched: bool) -> Any:
    """For any sizes; `patched` as upstream's exporter patches attention for the trace."""
    auto = torch.export.Dim.AUTO
    shapes = tuple(
        {name: dict.fromkeys(range(tensor.dim()), auto) for name, tensor in given.items()}
        for given in (call, features)
    )
    with apply_patches("dynamo") if patched else contextlib.nullcontext():
        return torch.export.export(
            Logits(model),
            (dict(call), dict(features)),
            dynamic_shapes=shapes,
            prefer_deferred_runtime_asserts_over_guards=True,
        ).module()


@pytest.mark.parametrize("kind", marked())
def test_exported_from_pixels(kind: str) -> None:
    model, found = cases(kind)
    with listed("export", kind):
        program = export(model, found[0].pixels(), {}, kind in WINDOWED)
        for case in found:
            close(program(case.pixels(), {}), stock(model, case))
    if kind in WINDOWED:  # refused by the program itself, not answered wrongly
        _, (ragged,) = cases(kind, RAGGED)
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            program(ragged.pixels(), {})


@pytest.mark.parametrize("kind", marked("qwen3_vl"))
def test_exported_from_features(kind: str) -> None:
    model, found = cases(kind)
    with listed("export features", kind):
        program = export(model, found[0].text(), found[0].features, False)
        for case in found:
            close(program(case.text(), case.features), stock(model, case))


# -- two that stand apart ------------------------------------------------------------------------


def test_a_tower_alone_is_one_graph() -> None:
    """MLCD has no language model: pixels in, features out, for any number of pictures."""
    model, _ = mlcd()
    batches = [torch.randn(count, 3, 56, 56) for count in (2, 3)]
    forward = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    shapes = {"pixel_values": {0: torch.export.Dim.AUTO}}
    program = torch.export.export(
        model, (), {"pixel_values": batches[0]}, dynamic_shapes=shapes
    ).module()
    for pixels in batches:
        wanted = model(pixels).last_hidden_state
        close(forward(pixels).last_hidden_state, wanted)
        close(program(pixel_values=pixels).last_hidden_state, wanted)


def glm_image_call(model: Any, down: int, across: int) -> tuple[Call, list[torch.Tensor]]:
    """Ids and positions of a prompt around one picture, and the picture's features."""
    count = down * across
    config = model.config
    begin, end = config.image_start_token_id, config.image_end_token_id
    ids = torch.tensor([[5, begin, *[config.image_token_id] * count, end, 7, 8, 9, begin]])
    positions = torch.arange(ids.shape[1])[None, None].expand(3, 1, -1)
    torch.manual_seed(count)
    pixels = torch.randn(count, 3 * 16 * 16)
    grid = torch.tensor([[1, down, across]])
    features = model.model.get_image_features(pixels, grid, return_dict=True).pooler_output
    return {"input_ids": ids, "position_ids": positions}, features


def test_glm_image_steps_in_one_graph_and_cannot_look_in_one() -> None:
    """Its prefill counts picture tokens with an `if`; a step with positions given is one graph."""
    model, _ = glm_image()
    call, features = glm_image_call(model, 4, 4)
    pictured = {**call, "mm_encoder_outputs": {"image": EncoderOutput(pooler_output=features)}}
    with pytest.raises(Exception, match="Data-dependent branching"):
        compiled(model)[0](pictured)
    torch._dynamo.reset()
    forward, graphs = compiled(model)
    for size in ((4, 4), (4, 6)):
        call, features = glm_image_call(model, *size)
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        for cache in caches:
            seen_now = {"image": EncoderOutput(pooler_output=features)}
            model(**call, mm_encoder_outputs=seen_now, past_key_values=cache, use_cache=True)
        step = {"input_ids": torch.tensor([[9]])}
        step["position_ids"] = call["position_ids"][..., -1:] + 1
        wanted = model(**step, past_key_values=caches[0], use_cache=True).logits
        close(forward({**step, "past_key_values": caches[1]}), wanted)
    assert len(graphs) == 1


# -- what the page says --------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "compiling.md"


def test_the_page_says_what_was_tried() -> None:
    """Every family's line in the table: `yes` where it works, `no` where it is listed above."""
    table = PAGE.read_text().partition("## The whole model in one graph")[2]
    said: dict[str, list[str]] = {}
    for line in table.splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", first) if len(cells) == len(WAYS) else ():
            said[name] = [cell.split()[0].strip(",:") for cell in cells]
    for kind in KINDS:
        assert said[kind] == ["no" if (way, kind) in CANNOT else "yes" for way in WAYS], kind
    assert said["glm_image"][:3] == ["no", "no", "yes"] and "mlcd_vision_model" in said
