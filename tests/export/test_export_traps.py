"""Traps of the installed exporters and runtimes that an export steps around.

Each test shows that the trap is still there. When one fails, upstream has mended it, and the place
named in the test can be simplified.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.exported_models import small
from support.models import picture, stock_inputs, turn

from keepsight.export.graphs import tracing
from keepsight.models.renamed import EncoderOutput
from keepsight.runtimes import imports

AUTO = torch.export.Dim.AUTO
LOOK = [turn("Look.", picture(1))]


def test_components_for_generation_lack_the_image_encoder() -> None:
    """export/graphs/parts.py: parts of our own; upstream's let the model answer blindly."""
    from transformers.exporters.utils import decompose_for_generation

    model, processor = small("qwen3_vl")
    parts = decompose_for_generation(model, stock_inputs(processor, LOOK))
    assert "language_model" in parts
    assert not any("image" in name or "vision" in name for name in parts)


def test_an_exported_tower_is_wrong_for_mixed_sizes() -> None:
    """export/graphs/towers.py: one picture a call, and attention of our own."""
    imports.onnxruntime()
    from transformers.exporters import OnnxConfig
    from transformers.exporters.exporter_onnx import OnnxExporter
    from transformers.exporters.utils import precompute_export_inputs

    tower = small("qwen3_5")[0].model.visual
    width = 3 * 2 * 16**2

    def sample(*grids: tuple[int, int]) -> dict[str, Any]:
        rows = torch.randn(sum(h * w for h, w in grids), width)
        return {"hidden_states": rows, "grid_thw": torch.tensor([[1, *grid] for grid in grids])}

    same, mixed = sample((4, 4), (4, 4)), sample((4, 4), (8, 4))
    exported = OnnxExporter().export(tower, sample((4, 6), (4, 6)), OnnxConfig(dynamic=True))
    for inputs, right in ((same, True), (mixed, False)):
        with torch.inference_mode():
            wanted = tower(**inputs).pooler_output
        precompute_export_inputs(tower, inputs)
        off = float((exported(**inputs).pooler_output - wanted).abs().max() / wanted.abs().max())
        assert (off < 1e-4) == right, "silently wrong no more"


def test_the_chunked_delta_rule_is_traced_for_one_length() -> None:
    """export/graphs/tracing.py, `delta_rule`: blocks as a scan."""
    decoder = small("qwen3_5")[0].get_decoder()
    rule = sys.modules[type(decoder).__module__].torch_chunk_gated_delta_rule

    class Rule(torch.nn.Module):
        def forward(self, query: Any, key: Any, value: Any, g: Any, beta: Any, state: Any) -> Any:
            options = {"initial_state": state, "output_final_state": True, "chunk_size": 4}
            return rule(query, key, value, g=g, beta=beta, **options)

    tokens = 10
    wide = [torch.randn(1, tokens, 2, 16) for _ in range(3)]
    flat = [-torch.rand(1, tokens, 2), torch.rand(1, tokens, 2)]
    inputs = (*wide, *flat, torch.zeros(1, 2, 16, 16))
    length = torch.export.Dim("length", min=2, max=4096)
    varies = (*[{1: length}] * 5, None)
    with pytest.raises(Exception, match="(?i)length|specializ|guard"):
        torch.export.export(Rule(), inputs, dynamic_shapes=varies)
    # Ours takes any.
    cache = SimpleNamespace(places=[torch.tensor([[0]])])
    tracing.begin(cache)  # type: ignore[arg-type]

    class Ours(torch.nn.Module):
        def forward(self, query: Any, key: Any, value: Any, g: Any, beta: Any, state: Any) -> Any:
            options = {"initial_state": state, "use_qk_l2norm_in_kernel": True}
            return tracing.delta_rule(query, key, value, g, beta, **options)

    torch.export.export(Ours(), inputs, dynamic_shapes=(*[{1: AUTO}] * 5, None))


def test_features_in_a_list_are_traced_for_one_count() -> None:
    """export/graphs/towers.py, `WholeTower`: one picture a call."""
    core = small("llava")[0].model

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = core

        def forward(self, pixel_values: Any) -> Any:
            return torch.cat(self.core.get_image_features(pixel_values).pooler_output)

    count = torch.export.Dim("count", min=2, max=16)
    with pytest.raises(Exception, match="(?i)count|specializ|constraint"):
        torch.export.export(
            Tower(), (torch.randn(3, 3, 48, 48),), dynamic_shapes={"pixel_values": {0: count}}
        )


def test_beams_look_into_an_empty_list_of_levels() -> None:
    """runtimes/modules.py, `PackedTowerStandIn`: no list where there are no levels."""
    model, processor = small("qwen2_vl")
    inputs = stock_inputs(processor, LOOK)
    with torch.inference_mode():
        features = model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"]
        ).pooler_output
    output = EncoderOutput(pooler_output=list(features), deepstack_features=[])
    options = {n: v for n, v in inputs.items() if n != "pixel_values"}
    with pytest.raises(IndexError):
        model.generate(
            **options, mm_encoder_outputs={"image": output}, num_beams=2, max_new_tokens=2
        )
