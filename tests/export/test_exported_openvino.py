"""Exports that OpenVINO runs: as their PyTorch models, and the same bits for the same input."""

from __future__ import annotations

import functools
import importlib.util
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import exported_models
from support.exported_models import exported_demo, small
from support.exported_tests import exported_suite
from support.models import picture, turn
from torch import Tensor

import keepsight as ks
from keepsight.errors import ModelError
from keepsight.export.graphs.check import deviation
from keepsight.export.graphs.writing import quantise
from keepsight.runtimes import imports
from keepsight.runtimes.manifest import files_in, read
from keepsight.runtimes.openvino import OpenVinoSession

if importlib.util.find_spec("openvino") is None:
    pytest.skip("needs openvino", allow_module_level=True)
openvino = imports.openvino()


exported_folder = functools.partial(exported_models.exported_folder, runtime="openvino")
exported = functools.partial(exported_models.exported, runtime="openvino")


# -- one graph -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums and products of two inputs, one of them of any size."""
    ops = openvino.opset13
    x = ops.parameter([-1, -1], openvino.Type.f32, name="x")
    w = ops.constant(torch.randn(8, 8).numpy())
    doubled = ops.add(x, x)
    model = openvino.Model([doubled, ops.matmul(x, w, False, False)], [x], "both")
    model.inputs[0].get_tensor().set_names({"x"})
    for port, name in zip(model.outputs, ("doubled", "product"), strict=True):
        port.get_tensor().set_names({name})
    path = tmp_path_factory.mktemp("graph") / "both.xml"
    openvino.save_model(model, str(path), compress_to_fp16=False)
    return path


def test_what_a_run_gave_outlives_the_next(graph: Path) -> None:
    session = OpenVinoSession(graph, 1)
    first = session.run({"x": torch.ones(3, 8)})
    kept = {name: tensor.clone() for name, tensor in first.items()}
    session.run({"x": torch.full((3, 8), 7.0)})
    assert first.keys() == kept.keys() == {"doubled", "product"}
    assert all(torch.equal(first[name], kept[name]) for name in kept)
    assert torch.equal(first["doubled"], torch.full((3, 8), 2.0))


def test_outputs_are_written_where_they_shall_lie(graph: Path) -> None:
    session = OpenVinoSession(graph, 1)
    for rows in (3, 5):
        place = torch.zeros(rows, 8)
        found = session.run({"x": torch.ones(rows, 8)}, {"doubled": place})
        assert found["doubled"] is place and bool((place == 2).all())
    before = place.clone()
    session.run({"x": torch.full((5, 8), 9.0)})  # nothing named: nothing may be written there
    assert torch.equal(place, before)


def test_inputs_may_lie_apart_or_be_empty(graph: Path) -> None:
    session = OpenVinoSession(graph, 1)
    for rows in (4, 9, 2):
        apart = torch.randn(rows, 16)[:, ::2]
        assert torch.equal(session.run({"x": apart})["doubled"], 2 * apart)
    assert session.run({"x": torch.zeros(0, 8)})["product"].shape == (0, 8)


def test_many_callers_get_each_their_own(graph: Path) -> None:
    session, wrong = OpenVinoSession(graph, 1), []

    def call(number: int) -> None:
        for _ in range(20):
            found = session.run({"x": torch.full((64, 8), float(number))})
            if not bool((found["doubled"] == 2 * number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_nothing_is_computed_in_fewer_bits(graph: Path) -> None:
    compiled = OpenVinoSession(graph, 1)._request.get_compiled_model()
    assert compiled.get_property("INFERENCE_PRECISION_HINT") == openvino.Type.f32
    assert compiled.get_property("KV_CACHE_PRECISION") == openvino.Type.f32
    assert compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == 0
    assert compiled.get_property("NUM_STREAMS") == 1
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1


def test_a_graph_that_breaks_off_is_named_and_runs_again(graph: Path) -> None:
    session = OpenVinoSession(graph, 1)
    with pytest.raises(ModelError, match=r"failed in both\.xml"):
        session.run({"x": torch.ones(3, 8, dtype=torch.long)})
    assert session.run({"x": torch.ones(3, 8)})["product"].shape == (3, 8)


def test_a_graph_that_it_cannot_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "decoder.xml").write_text("<net version='11'><layers>")
    with pytest.raises(ModelError, match=r"cannot run decoder\.xml"):
        OpenVinoSession(tmp_path / "decoder.xml", 1)


# -- the same bits -------------------------------------------------------------------------------


def feeds(kind: str, rows: int, past: int, tokens: int) -> dict[str, Tensor]:
    """Noise for a decoder: `tokens` behind `past`."""
    torch.manual_seed(rows * 10_000 + past * 10 + tokens)
    path = exported_folder(kind) / "graphs" / "decoder.xml"
    total, room = past + tokens, past + tokens + 64
    unseen = torch.arange(room) > torch.arange(past, total)[:, None]
    bias = torch.zeros(rows, 1, tokens, room).masked_fill_(unseen, float("-inf"))
    known = {"bias": bias, "position_ids": torch.arange(past, total).expand(4, rows, -1)}
    known["places"] = torch.arange(past, total).expand(rows, -1)
    config = small(kind)[0].config.text_config
    width, heads = config.hidden_size, (config.num_key_value_heads, room, config.head_dim)
    for port in openvino.Core().read_model(path).inputs:
        name = port.get_any_name()
        if name[:2] in ("k_", "v_"):
            known[name] = torch.randn(rows, *heads)
        elif name not in known:  # embeddings, and what is added behind early layers
            known[name] = torch.randn(rows, tokens, width)
    return known


def test_the_same_bits_whatever_ran_before_and_wherever_it_lies() -> None:
    """The runtime keeps kernels by shape, and chooses some by the first shape that it sees."""
    path = exported_folder("qwen3_vl") / "graphs" / "decoder.xml"
    sizes = [(1, 0, 16), (1, 16, 16), (1, 48, 1), (1, 49, 1), (2, 49, 1), (4, 100, 1), (1, 300, 64)]
    inputs = {size: feeds("qwen3_vl", *size) for size in sizes}
    wanted = {size: OpenVinoSession(path, 1).run(inputs[size]) for size in sizes}
    session, chance = OpenVinoSession(path, 1), random.Random(0)
    for _ in range(60):
        size, offset = chance.choice(sizes), chance.randrange(5)
        moved = {name: elsewhere(tensor, offset) for name, tensor in inputs[size].items()}
        found = session.run(moved)
        assert all(torch.equal(found[name], wanted[size][name]) for name in found), size


def elsewhere(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins some elements behind an aligned address."""
    room = tensor.new_empty(tensor.numel() + offset)
    return room[offset:].view(tensor.shape).copy_(tensor)


def test_any_cut_and_any_company_give_the_same_bits() -> None:
    """Prompts that part anywhere, a reply kept as it was decoded, rows of a batch."""
    processor, options = small("qwen3_vl")[1], {"max_new_tokens": 6, "min_new_tokens": 6}
    options |= {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 400, (1, 150), generator=draw)
    with ks.wrap(exported("qwen3_vl"), processor) as vlm, ks.wrap(vlm.model, processor) as fresh:
        engine = vlm.stats()["engine"]
        assert engine["exactness"] == "bits", engine["rounding_because"]
        vlm.generate(input_ids=ids, **options)
        prompts = [torch.cat([ids[:, :n], ids[:, :9] + 100], dim=1) for n in (1, 33, 77, 150)]
        pads = [torch.zeros(1, 159 - one.shape[1], dtype=torch.long) for one in prompts]
        left = [torch.cat(pair, dim=1) for pair in zip(pads, prompts, strict=True)]
        seen = [
            torch.cat([pad, torch.ones_like(one)], 1)
            for pad, one in zip(pads, prompts, strict=True)
        ]
        before = vlm.stats()["engine"]["prefill_tokens"]
        both: Any = vlm.generate(
            input_ids=torch.cat(left), attention_mask=torch.cat(seen), **options
        )
        assert vlm.stats()["engine"]["prefill_tokens"] - before == 4 * 9
        for row, prompt in enumerate(prompts):
            fresh.clear()
            alone: Any = fresh.generate(input_ids=prompt, **options)
            for mine, theirs in zip(both.logits, alone.logits, strict=True):
                assert torch.equal(mine[row], theirs[0])
            kept = torch.cat([alone.sequences, ids[:, :3]], dim=1)
            fresh.clear()
            one: Any = vlm.generate(input_ids=kept, **options)
            other: Any = fresh.generate(input_ids=kept, **options)
            assert torch.equal(one.logits[0], other.logits[0])


# -- whole models --------------------------------------------------------------------------------


# The shipped suite of families; compared with stock `generate` of the model exported.
suite = functools.partial(exported_suite, runtime="openvino")
TestQwen25VL = pytest.mark.slow(suite("qwen2_5_vl"))  # its tower looks through windows
TestQwen3VL = suite("qwen3_vl")  # whose graphs other tests of this file need as well
TestQwen35 = pytest.mark.slow(
    suite("qwen3_5", decodes_together=False)
)  # its linear layers come by way of ONNX
TestQwen2VL = pytest.mark.slow(suite("qwen2_vl"))
TestGemma3 = pytest.mark.slow(suite("gemma3_sliding", decodes_together=False, nests_images=True))
TestLlava = pytest.mark.slow(suite("llava"))
TestInternVL = pytest.mark.slow(suite("internvl"))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_in_few_bits_are_near_and_as_exact_as_is_said(kind: str, tmp_path: Path) -> None:
    source, target = exported_folder("qwen3_vl"), tmp_path / kind
    shutil.copytree(source, target)
    for part in ("decoder", "head"):
        quantise("openvino", target / "graphs" / part, kind)
        sizes = [(each / "graphs" / f"{part}.bin").stat().st_size for each in (source, target)]
        assert sizes[0] > (5 if (kind, part) == ("int4", "decoder") else 3) * sizes[1]
    manifest = replace(read(source), quantised=kind, files=files_in(target))
    manifest.save(target)
    model, processor = small("qwen3_vl")
    off = deviation(ks.wrap(model, processor), target, manifest)
    assert off["features"] < 1e-5  # the tower is as it was
    assert 1e-4 < off["logits"] < (0.1 if kind == "int8" else 0.5)
    messages = [turn("What do you see?", picture(1, 96, 96)), turn("And?", picture(2, 160, 96))]
    with ks.load(target) as vlm:
        found = vlm.verify(messages)
        # Its kernels for such weights give other bits when a prompt is cut, and that is said.
        assert found and (found.equal or found.exactness == "rounding"), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["demo", "demo-hybrid"])
def test_the_demo_models_answer_as_ever(kind: str) -> None:
    images = [picture(4, 128, 96), picture(5, 96, 128), picture(6, 192, 64)]
    folder = exported_demo(kind, "openvino")
    with ks.load(folder) as vlm, ks.load(kind, dtype="float32") as own:
        messages = [turn("What do you see?", images[0])]
        for image in images[1:]:
            answers = [
                each.chat(messages, max_new_tokens=24, do_sample=False) for each in (vlm, own)
            ]
            assert answers[0].tokens == answers[1].tokens
            messages += [turn(str(answers[0]), role="assistant"), turn("And this?", image)]
        found = vlm.verify(messages, stock=True)
        assert found.cached_tokens and found.stock_same_tokens
        assert found.equal if kind == "demo" else found.exactness == "rounding"  # its layers recur
        assert found.max_difference <= found.tolerance
