"""Models in MLX remember, and answer as PyTorch and as mlx-vlm itself do.

`make test-mlx` installs MLX's own build for Linux and runs these; without it they are skipped, but
for those of what is said where it is missing.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from support.model_parts import TEXT
from support.models import ALL, built, folder_of, picture, saved, turn
from transformers import AutoProcessor, InternVLConfig, Qwen3Config

import keepsight as ks
from keepsight import Together
from keepsight.errors import InputError, MissingExtra, ModelError, UnsupportedInput

HERE = all(importlib.util.find_spec(name) for name in ("mlx", "mlx_vlm"))
in_mlx = pytest.mark.skipif(not HERE, reason="mlx-vlm is not installed (make test-mlx)")
QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
KINDS = (*QWENS, "gemma3", "gemma3_sliding", "llava", "internvl")
GREEDY: dict[str, Any] = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
TALK = [
    [turn("What is it?", picture(1))],
    [turn("And these two?", picture(2), picture(1))],
    [turn("Words alone, this time.")],
]


def _as_mlx_vlm_takes_it(kind: str) -> Any:
    """The family's parts, with settings as trained checkpoints have them."""
    model_class, config, processor = ALL[kind]()
    if kind.startswith("gemma3"):  # tied, as all that are trained
        config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    if kind == "internvl":
        config = InternVLConfig(
            vision_config=config.vision_config,
            text_config=Qwen3Config(**TEXT, head_dim=16),
            image_token_id=config.image_token_id,
            image_seq_length=config.image_seq_length,
        )
    return model_class, config, processor


def _saved(kind: str, path: Path) -> Path:
    model, processor = built(lambda: _as_mlx_vlm_takes_it(kind))
    if kind.startswith("gemma3"):  # or each token answers itself
        model.get_input_embeddings().weight.data.mul_(0.05)
    return saved(model, processor, path)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved(request.param, tmp_path_factory.mktemp(request.param))


@in_mlx
def test_answers_are_those_of_pytorch_and_nothing_is_computed_twice(
    folder: Path, tmp_path: Path
) -> None:
    with ks.load(folder) as vlm:
        wanted = [vlm.chat(messages, **GREEDY).tokens for messages in TALK]
        large = PIL.Image.effect_noise((420, 300), 90).convert("RGB")
        features = vlm.encode(large).tensors
    with ks.load(folder, runtime="mlx", store=tmp_path) as vlm:
        replies = [vlm.chat(messages, **GREEDY) for messages in TALK]
        assert [reply.tokens for reply in replies] == wanted
        assert [reply.usage.images_encoded for reply in replies] == [1, 1, 0]
        long = [*TALK[1], {"role": "assistant", "content": "So."}, turn("And " + "more " * 90)]
        first, second = (vlm.chat(long, **GREEDY) for _ in range(2))
        assert first.tokens == second.tokens and first.usage.cached_tokens >= 16
        for name, tensor in vlm.encode(large).tensors.items():
            assert torch.allclose(tensor, features[name], atol=1e-4)
        again = vlm.chat(TALK[1], **GREEDY)
        assert again.tokens == wanted[1] and again.usage.cached_tokens == again.usage.prompt_tokens
        assert vlm.verify(TALK[1]).equal
        assert "MLX" in vlm.stats()["engine"]["rounding_because"]
        vlm.flush()
    with ks.load(folder, runtime="mlx", store=tmp_path) as vlm, vlm.blindfold():
        reply = vlm.chat(TALK[1], **GREEDY)
        assert reply.tokens == wanted[1] and reply.usage.cached_tokens == reply.usage.prompt_tokens


@in_mlx
def test_turns_edits_and_sequences_together(folder: Path) -> None:
    with ks.load(folder) as torch_vlm, ks.load(folder, runtime="mlx") as vlm:
        said = []
        for one in (torch_vlm, vlm):
            session = one.session()
            said.append(session.ask("What is it?", images=[picture(1)], **GREEDY).tokens)
            said.append(session.ask("And this?", images=[picture(2)], **GREEDY).tokens)
            said.append(one.chat([turn("What else?", picture(1), picture(3))], **GREEDY).tokens)
        assert said[:3] == said[3:]
        wanted = [torch_vlm.chat(messages, **GREEDY).tokens for messages in TALK]
        with Together(vlm) as together:
            waiting = [together.submit(messages, **GREEDY) for messages in TALK]
            assert [one.result().tokens for one in waiting] == wanted


@in_mlx
def test_answers_are_those_of_mlx_vlm_itself(folder: Path) -> None:
    """As it answers when it computes everything afresh for each token."""
    import mlx.core as mx
    from mlx_vlm.utils import load_model

    from keepsight.runtimes.mlx_library import as_mlx_reads_it, own_names

    with ks.load(folder, runtime="mlx") as vlm:
        kind = vlm.model.config.model_type
        pictured = kind in ("llava", "internvl")  # what follows from a grid is mlx-vlm's own matter
        messages = TALK[0] if pictured else TALK[2]
        found, inputs = vlm.chat(messages, **GREEDY).tokens, vlm.inputs(messages)
        pixels = None
        if pictured:
            found_pixels = vlm.processor.image_processor(picture(1), return_tensors="np")
            pixels = mx.array(found_pixels["pixel_values"])
    with as_mlx_reads_it(folder) as readable, own_names():
        model: Any = load_model(readable)
    wanted: list[int] = []
    for _ in range(GREEDY["max_new_tokens"]):
        ids = mx.array([[*inputs["input_ids"][0].tolist(), *wanted]])
        model.language_model._position_ids = None  # those of the prompt before, which it keeps
        embeds = model.get_input_embeddings(ids, pixels).inputs_embeds
        logits = model.language_model(ids, inputs_embeds=embeds).logits[0, -1]
        logits[2] = -mx.inf  # the answer is not to end
        wanted.append(int(mx.argmax(logits)))
    assert found == wanted


@in_mlx
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "qwen2_5_vl", "qwen3_5"])
@pytest.mark.parametrize("bits", [4, 8])
def test_checkpoints_in_few_bits_answer_as_mlx_vlm_does(
    bits: int, kind: str, tmp_path: Path
) -> None:
    import mlx.core as mx
    import mlx.nn
    from mlx.utils import tree_flatten
    from mlx_vlm.utils import load_model

    plain = _saved(kind, tmp_path / "plain")
    with ks.load(plain, runtime="mlx") as vlm:
        whole = vlm.chat(TALK[2], **GREEDY).tokens
    # As mlx_vlm.convert writes it: rope and tower by their old names, and what was quantised.
    from keepsight.runtimes.mlx_library import as_mlx_reads_it, own_names

    folder = tmp_path / "few"
    with as_mlx_reads_it(plain) as readable, own_names():
        shutil.copytree(readable, folder)
        model: Any = load_model(readable)
    mlx.nn.quantize(model.language_model, group_size=32, bits=bits)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))

    with ks.load(folder, runtime="mlx", store=tmp_path / "store") as vlm:
        found = vlm.chat(TALK[2], **GREEDY).tokens
        ids = vlm.render(TALK[2]).ids.tolist()
        assert vlm.chat(TALK[1], **GREEDY).usage.images_encoded == 2
        assert vlm.verify(TALK[1]).equal
    wanted: list[int] = []
    for _ in range(GREEDY["max_new_tokens"]):
        rows = mx.array([[*ids, *wanted]])
        places: dict[str, Any] = {}
        if kind != "gemma3":  # else they are taken from the pass before
            places = {"position_ids": mx.broadcast_to(mx.arange(rows.size), (3, *rows.shape))}
        logits = model.language_model(rows, **places).logits[0, -1]
        logits[2] = -mx.inf  # the answer is not to end
        wanted.append(int(mx.argmax(logits)))
    assert found == wanted and (bits == 8 or found != whole)


@in_mlx
@pytest.mark.parametrize("kinds", ["s", "f", "ss", "ssfs"])
def test_layers_of_gemma3_in_unusual_orders(kinds: str, tmp_path: Path) -> None:
    model_class, config, processor = _as_mlx_vlm_takes_it("gemma3_sliding")
    named = {"s": "sliding_attention", "f": "full_attention"}
    config.text_config.layer_types = [named[kind] for kind in kinds]
    config.text_config.num_hidden_layers = len(kinds)
    model, processor = built(lambda: (model_class, config, processor))
    model.get_input_embeddings().weight.data.mul_(0.05)
    folder = saved(model, processor, tmp_path / "model")
    with ks.load(folder) as torch_vlm, ks.load(folder, runtime="mlx") as vlm:
        for messages in TALK:
            assert vlm.chat(messages, **GREEDY).tokens == torch_vlm.chat(messages, **GREEDY).tokens
        assert vlm.verify(TALK[1]).equal


@in_mlx
def test_transformers_processors_stay_what_they_are(folder: Path) -> None:
    before = vars(AutoProcessor)["from_pretrained"]
    with ks.load(folder, runtime="mlx"):
        assert vars(AutoProcessor)["from_pretrained"] is before


@in_mlx
def test_what_does_not_run_in_mlx_is_refused_by_name(tmp_path: Path) -> None:
    for kind, said in (
        ("glm4v", "glm4v do not run in MLX here; those of qwen2_vl"),
        ("sliding", "mlx-vlm does not give a sliding window"),
        ("gemma3", "tie_word_embeddings is False, but mlx-vlm always computes True"),
        ("internvl", "text_config.model_type is 'qwen2', but mlx-vlm always computes 'qwen3'"),
    ):
        other = folder_of(kind, tmp_path / kind)
        with pytest.raises(UnsupportedInput, match=said):
            ks.load(other, runtime="mlx")
    folder = folder_of("qwen3_vl", tmp_path / "qwen3_vl")
    for options, said in (
        ({"dtype": "float16"}, "mlx_vlm.convert"),
        ({"vision": False}, "has its vision encoder"),
        ({"device_map": "cpu"}, "chooses its device"),
        ({"revision": "main"}, "no revisions"),
        ({"weights": "int8"}, "mlx_vlm.convert -q"),
    ):
        with pytest.raises(UnsupportedInput, match=said):
            ks.load(folder, runtime="mlx", **options)
    with pytest.raises((UnsupportedInput, InputError)):
        ks.load("nobody/nothing", runtime="mlx")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ModelError, match="mlx-vlm cannot load"):
        ks.load(folder, runtime="mlx")
    weights.unlink()
    with pytest.raises(ModelError, match="mlx-vlm cannot load"):
        ks.load(folder, runtime="mlx")


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("qwen3_vl", tmp_path)
    for name in ("mlx", "mlx.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match="mlx-vlm is not installed .keepsight's extra 'mlx'."):
        ks.load(folder, runtime="mlx")
