"""`keepsight plan`: what it says from a configuration is what a loaded model then takes."""

from __future__ import annotations

import json
from pathlib import Path

import PIL.Image
import pytest
from typer.testing import CliRunner

import keepsight as ks
from keepsight.cli.app import app
from keepsight.core.plan import DTYPES, plan
from keepsight.errors import ModelError, UnsupportedModel

SIZE = (96, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["demo", "demo-hybrid"])
def test_a_plan_is_what_is_then_held(name: str, dtype: str) -> None:
    planned = plan(name, SIZE)
    with ks.load(name, dtype=dtype) as vlm:
        weights = sum(weight.nbytes for weight in vlm.model.parameters())
        picture = PIL.Image.new("RGB", SIZE)
        package = vlm.encode(picture)
        vlm.prepare([{"role": "user", "content": [{"type": "image", "image": picture}]}])
        nodes = list(vlm.runtime.tree.nodes())
        tokens = max(node.end for node in nodes)
        rows = sum(sum(t.nbytes for t in (node.kv or {}).values()) for node in nodes)
        states = [sum(t.nbytes for t in node.fixed.values()) for node in nodes if node.fixed]
        kinds = vlm.runtime.engine.shape.kinds
        assert planned.model_type == vlm.model.config.model_type
    assert planned.weights(dtype) == weights
    assert planned.picture_tokens == package.tokens
    assert planned.features(dtype) == sum(t.nbytes for t in package.tensors.values())
    logits = sum((node.kv or {})["logits"].nbytes for node in nodes if "logits" in (node.kv or {}))
    assert rows - logits == tokens * planned.token(dtype)
    assert bool(planned.snapshot(dtype)) == ("linear" in kinds)
    assert all(planned.snapshot(dtype) <= state <= 5 * planned.snapshot(dtype) for state in states)


def test_the_command_says_it_for_people_and_for_machines() -> None:
    words = ["plan", "demo", "--size", "96x64", "--pictures", "10"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "a picture of 96x64:" in shown.output
    assert "10 pictures in a store" in shown.output
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).output.splitlines()[-1])
    planned = plan("demo", SIZE)
    assert told["picture_tokens"] == planned.picture_tokens
    assert told["bfloat16"]["store"] == 10 * (
        planned.features("bfloat16") + planned.prefix("bfloat16")
    )


def test_what_cannot_be_planned_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModel, match="has no vision encoder"):
        plan(str(tmp_path), SIZE)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(ModelError):
        plan(str(tmp_path), SIZE)
