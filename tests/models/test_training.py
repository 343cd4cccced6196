"""Training from packages: the same losses and gradients as with pixels, and no tower anywhere.

What is compared with is always the stock forward with pixels, on the same batch.
"""

from __future__ import annotations

import copy
import pickle
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.models import ALL, TEMPLATE, build, picture, turn
from torch.utils.data import DataLoader

import keepsight as ks
from keepsight.errors import (
    DamagedFile,
    InputError,
    MessagesError,
    StoreError,
    UnsupportedInput,
    WrongIdentity,
)
from keepsight.models import loading
from keepsight.training import IGNORED, Features, PackageDataset

ROOT = Path(__file__).parents[2]
ANSWERS = ("It is a cat and a dog.", "A house.", "Nothing much")
REFUSED = ("mllama", "ovis2", "paligemma", "paligemma2")
QUICK = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "internvl", "gemma3", "gemma4", "llama4")


def pictures() -> list[Image.Image]:
    return [picture(1), picture(2, 128, 64), picture(3)]


def records() -> list[Any]:
    """Two pictures in a row, none, and one."""
    one, two, three = pictures()
    return [
        ([turn("What are these two?", one, two)], ANSWERS[0]),
        ([turn("Say it")], ANSWERS[1]),
        ([turn("And this?", three)], ANSWERS[2]),
    ]


def batch_of(data: PackageDataset) -> dict[str, Any]:
    return data.collator()([data[i] for i in range(len(data))])


def step(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one batch in training mode, and the gradients of the language model."""
    model.zero_grad()
    model.train()
    try:
        loss = model(**batch).loss
        loss.backward()
        named = model.get_decoder().named_parameters()
        return loss.item(), {name: p.grad.clone() for name, p in named if p.grad is not None}
    finally:
        model.eval()
        model.zero_grad()


def assert_like_pixels(vlm: Any, batch: dict[str, Any], pixels: dict[str, Any]) -> None:
    mine, gradients = step(vlm.model, batch)
    stock = {name: value for name, value in batch.items() if name != "mm_encoder_outputs"}
    theirs, expected = step(vlm.model, {**stock, **pixels})
    assert mine == pytest.approx(theirs, rel=1e-5)
    assert gradients.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-12
        assert float((gradients[name] - gradient).abs().max()) <= 1e-4 * scale, name


# -- the same numbers as with pixels -------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
        for kind in ALL
        if kind not in REFUSED
    ],
)
def test_losses_and_gradients_are_those_of_pixels(kind: str) -> None:
    model, processor = build(kind)
    with ks.wrap(model, processor) as vlm:
        vlm.encode(pictures())
        batch = batch_of(PackageDataset(vlm, records()))
        pixels = [vlm.runtime.vision.name(image).recall() for image in pictures()]
        assert_like_pixels(vlm, batch, vlm.runtime.family.join_pixels(pixels))
        wrong = [vlm.runtime.vision.name(image).recall() for image in (picture(7), *pictures()[1:])]
        with pytest.raises(AssertionError):
            assert_like_pixels(vlm, batch, vlm.runtime.family.join_pixels(wrong))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "gemma3"])
def test_a_batch_is_what_the_stock_processor_makes(kind: str) -> None:
    model, processor = build(kind)
    side, processor.tokenizer.padding_side = processor.tokenizer.padding_side, "right"
    try:
        with ks.wrap(model, processor) as vlm:
            vlm.encode(pictures())
            batch = batch_of(PackageDataset(vlm, records()))
        texts = [
            processor.apply_chat_template(
                [*messages, {"role": "assistant", "content": answer}], tokenize=False
            ).rstrip("\n")
            for messages, answer in records()
        ]
        images = [pictures()[:2], [], pictures()[2:]]
        stock = processor(text=texts, images=images, return_tensors="pt", padding=True)
    finally:
        processor.tokenizer.padding_side = side
    assert batch.keys() - {"labels", "mm_encoder_outputs"} == stock.keys() - {"pixel_values"}
    for name in stock.keys() & batch.keys():
        assert torch.equal(batch[name], stock[name]), name
    assert_like_pixels(vlm, batch, {"pixel_values": stock["pixel_values"]})


def test_only_the_answer_is_learnt() -> None:
    model, processor = build("qwen3_vl")
    tokenizer = processor.tokenizer
    with ks.wrap(model, processor) as vlm:
        vlm.encode(pictures())
        batch = batch_of(PackageDataset(vlm, records()))
        for row, (messages, answer) in enumerate(records()):
            learnt = batch["labels"][row] != IGNORED
            ids = batch["input_ids"][row][learnt]
            assert tokenizer.decode(ids) == f"{answer}<|im_end|>"
            prompt = vlm.render(messages)
            assert not learnt[: len(prompt)].any()
            assert torch.equal(batch["input_ids"][row][: len(prompt)], torch.tensor(prompt.ids))
            assert int(batch["attention_mask"][row].sum()) == len(prompt) + len(ids)


def test_a_batch_of_text_has_no_features() -> None:
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        batch = batch_of(PackageDataset(vlm, records()[1:2]))
        assert "mm_encoder_outputs" not in batch
        assert_like_pixels(vlm, batch, {})


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_test_has_trained_is_refused(kind: str) -> None:
    model, processor = build(kind)
    with (
        ks.wrap(model, processor) as vlm,
        pytest.raises(UnsupportedInput, match="cannot be trained from packages"),
    ):
        PackageDataset(vlm, records())


# -- without the tower ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of the demo model, and the pictures that they are of."""
    made = tmp_path_factory.mktemp("encoded")
    with ks.load("demo", dtype="float32") as vlm:
        for number, image in enumerate(pictures()):
            image.save(made / f"{number}.png")
            vlm.encode(image).save(made / f"{number}.sight")
    return made


@pytest.fixture
def folder(encoded: Path, tmp_path: Path) -> Path:
    """The same, for a test to change."""
    return shutil.copytree(encoded, tmp_path, dirs_exist_ok=True)


def records_in(folder: Path, suffix: str) -> list[Any]:
    paths = [str(folder / f"{number}{suffix}") for number in range(3)]
    return [
        ([turn("What is it?", path)], answer) for path, answer in zip(paths, ANSWERS, strict=True)
    ]


def losses(model: Any, batches: list[dict[str, Any]], rate: float = 1e-3) -> list[float]:
    learning = [p for name, p in model.named_parameters() if ".visual." not in name]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".visual." not in name)
    optimizer = torch.optim.AdamW(learning, lr=rate)
    model.train()
    found = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    model.eval()
    return found


def test_the_loss_curve_is_that_of_pixels_with_the_tower_absent(folder: Path) -> None:
    path = loading.model_path("demo")
    with ks.load("demo", dtype="float32", vision=False) as vlm:
        assert not list(vlm.model.base_model.visual.parameters())
        data = PackageDataset(vlm, records_in(folder, ".sight"))
        batch = batch_of(data)
        mine = losses(vlm.model, [batch] * 4)
        # The memory sees the weights that training made, and answers from the same packages.
        package = ks.Package.load(folder / "0.sight")
        told = [turn("What is it?", package)]
        after = vlm.chat(told, max_new_tokens=4, do_sample=False)
        assert after.tokens and after.usage.cached_tokens == 0
    model, processor = (
        loading.load_named(path, "float32", None, None)[0],
        loading.load_processor(path, None),
    )
    pixels = processor.image_processor(pictures(), return_tensors="pt")["pixel_values"]
    stock = {name: value for name, value in batch.items() if name != "mm_encoder_outputs"}
    theirs = losses(model, [{**stock, "pixel_values": pixels}] * 4)
    assert mine == pytest.approx(theirs, rel=1e-5)
    assert mine[-1] < mine[0]


def test_the_trainer_of_transformers_takes_it(folder: Path, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    with ks.load("demo", dtype="float32", vision=False) as vlm:
        data = PackageDataset(vlm, records_in(folder, ".sight"))
        by_hand = losses(vlm.model, [batch_of(data)] * 2)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=3,
        max_steps=2,
        learning_rate=1e-3,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    with ks.load("demo", dtype="float32", vision=False) as vlm:
        data = PackageDataset(vlm, records_in(folder, ".sight"))
        trainer = Trainer(
            model=vlm.model, args=arguments, train_dataset=data, data_collator=data.collator()
        )
        trainer.train()
        told = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert told == pytest.approx(by_hand, rel=1e-3)  # the log rounds, and rows are shuffled


def test_the_curves_of_the_example_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "finetune.py"))
    argv = ["--steps", "3", "--pictures", "8", "--batch", "4", "--folder", str(tmp_path)]
    untaught = example["prepare"](example["_options"](argv), tmp_path)
    both = {kind: example["main"]([*argv, "--run", kind]) for kind in ("packages", "pixels")}
    assert both["packages"]["losses"] == pytest.approx(both["pixels"]["losses"], rel=1e-5)
    assert both["packages"]["weights"] < both["pixels"]["weights"]
    capsys.readouterr()
    example["show"]({**both, "untaught": untaught})
    assert "the losses are the same" in capsys.readouterr().out


def zeroed(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value.zero_()
    else:
        inner = value if isinstance(value, list | tuple) else vars(value).values()
        for part in filter(lambda part: part is not None, inner):
            zeroed(part)


def test_changes_of_a_batch_reach_nothing_else() -> None:
    """Nor those of inputs for stock `generate`."""
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        vlm.encode(pictures())
        data = PackageDataset(vlm, records())
        given = [batch_of(data), vlm.inputs(records()[0][0])]
        kept = copy.deepcopy([inputs["mm_encoder_outputs"]["image"] for inputs in given])
        for inputs in given:
            zeroed(inputs["mm_encoder_outputs"]["image"])
        again = [batch_of(data), vlm.inputs(records()[0][0])]
        for inputs, true in zip(again, kept, strict=True):
            assert _same(vars(inputs["mm_encoder_outputs"]["image"]), vars(true))


# -- workers -------------------------------------------------------------------------------------


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Features):
        return _same(vars(one), vars(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def test_workers_make_the_same_batches_and_hold_nothing_of_the_model(folder: Path) -> None:
    with ks.load("demo", dtype="float32", vision=False) as vlm:
        data = PackageDataset(vlm, records_in(folder, ".sight"))
        weights = sum(p.nbytes for p in vlm.model.parameters())
    assert len(pickle.dumps((data, data.collator()))) < weights / 50
    kept = list(DataLoader(data, batch_size=2, collate_fn=data.collator()))
    loader = DataLoader(
        data,
        batch_size=2,
        collate_fn=data.collator(),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    assert _same(list(loader), kept) and len(kept) == 2
    assert data.lengths() == [int(n) for batch in kept for n in batch["attention_mask"].sum(1)]


def test_features_move_as_a_tensor_does() -> None:
    features = Features(pooler_output=(torch.ones(2), torch.zeros(1)), levels=[torch.ones(1)], n=3)
    moved = features.to("cpu", dtype=torch.bfloat16)
    assert [t.dtype for t in (*moved.pooler_output, *moved.levels)] == [torch.bfloat16] * 3
    assert moved.n == 3 and isinstance(moved.pooler_output, tuple)
    assert features.pooler_output[0].dtype == torch.float32


# -- where packages come from --------------------------------------------------------------------


def test_images_are_found_in_a_folder_by_what_they_are(folder: Path) -> None:
    with ks.load("demo", dtype="float32", vision=False) as vlm:
        direct = batch_of(PackageDataset(vlm, records_in(folder, ".sight")))
        found = PackageDataset(vlm, records_in(folder, ".png"), packages=folder)
        assert _same(batch_of(found), direct)
        (folder / "0.png").rename(folder / "another name.png")
        renamed = [([turn("What is it?", str(folder / "another name.png"))], ANSWERS[0])]
        assert _same(
            batch_of(PackageDataset(vlm, renamed, packages=folder)),
            batch_of(PackageDataset(vlm, records_in(folder, ".sight")[:1])),
        )


def test_images_are_found_in_a_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with ks.load("demo", dtype="float32", store=store) as vlm:
        packages = vlm.encode(pictures())
        vlm.flush()
        asked = [([turn("What is it?", image)], "A cat.") for image in pictures()]
        at_hand = batch_of(PackageDataset(vlm, asked))
    with ks.load("demo", dtype="float32", vision=False) as vlm:
        data = PackageDataset(vlm, asked, store=store)
        assert _same(batch_of(data), at_hand)
        assert _same(batch_of(pickle.loads(pickle.dumps(data))), at_hand)
        handed = [([turn("What is it?", package)], "A cat.") for package in packages]
        assert _same(batch_of(PackageDataset(vlm, handed)), at_hand)
        data._store().clear()
        with pytest.raises(StoreError, match="lost the package"):
            data[0]


def test_files_and_plain_pictures_keep_their_own_features(folder: Path) -> None:
    """Media of files are let go of in turn, and later media take their places in memory."""
    with ks.load("demo", dtype="float32") as vlm:
        file, of_file = str(folder / "0.sight"), vlm.encode(pictures()[0]).key
        plain = [picture(number) for number in range(10, 26)]
        keys = [package.key for package in vlm.encode(plain)]
        asked, expected = [], []
        for image, key in zip(plain, keys, strict=True):
            asked += [(file, file), (image, file), (file, image)]
            expected += [(of_file, of_file), (key, of_file), (of_file, key)]
        data = PackageDataset(vlm, [([turn("Which?", *given)], "A cat.") for given in asked])
        loaded = [data[n].packages for n in range(len(data))]
        assert [(one.key, two.key) for one, two in loaded] == expected


def test_an_image_without_a_package_is_told_before_training(folder: Path) -> None:
    (folder / "1.sight").unlink()
    with ks.load("demo", dtype="float32") as vlm:
        with pytest.raises(InputError, match=r"record 1: .* has no package"):
            PackageDataset(vlm, records_in(folder, ".png"), packages=folder)
        assert vlm.stats()["features"]["encoded"] == 0


def test_packages_of_another_model_are_refused_by_field(folder: Path) -> None:
    with ks.load("demo-hybrid", dtype="float32", vision=False) as vlm:
        with pytest.raises(WrongIdentity, match="vision weights"):
            PackageDataset(vlm, records_in(folder, ".sight"))
        with pytest.raises(InputError, match="has no package"):
            PackageDataset(vlm, records_in(folder, ".png"), packages=folder)


def test_files_that_change_while_training_are_noticed(folder: Path) -> None:
    with ks.load("demo", dtype="float32", vision=False) as vlm:
        data = PackageDataset(vlm, records_in(folder, ".sight"))
    (folder / "0.sight").write_bytes((folder / "1.sight").read_bytes())
    with pytest.raises(WrongIdentity, match="identity"):
        data[0]
    whole = (folder / "2.sight").read_bytes()
    (folder / "2.sight").write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(DamagedFile):
        data[2]


def test_records_of_the_wrong_shape_are_named() -> None:
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        for bad, said in ((["one"], "record 0 is not a pair"), ([([turn("a")], "")], "no text")):
            with pytest.raises(MessagesError, match=said):
                PackageDataset(vlm, bad)
        with pytest.raises(InputError, match="is no folder"):
            PackageDataset(vlm, [], packages="nowhere at all")
        for none in (None, 3):
            with pytest.raises(MessagesError, match="is no list of"):
                PackageDataset(vlm, none)  # type: ignore[arg-type]
        with pytest.raises(MessagesError, match="record 0 is not a pair"):
            PackageDataset(vlm, [(None, "a")])  # type: ignore[list-item]
        with pytest.raises(InputError, match="is no model of"):
            PackageDataset(model, records())
        data = PackageDataset(vlm, records()[1:2])
        for index in (slice(0, 2), "0", [0]):
            with pytest.raises(InputError, match="the number of one example"):
                data[index]  # type: ignore[index]
        for rows in ([], None, data[0], [0]):
            with pytest.raises(InputError, match="a batch is made of"):
                data.collator()(rows)  # type: ignore[arg-type]
    fickle = TEMPLATE.replace("IMAGE", "x").replace("assistant\n", "assistant\nthink ")
    with ks.wrap(model, processor, chat_template=fickle) as vlm:
        with pytest.raises(MessagesError, match="differently once"):
            PackageDataset(vlm, [([turn("a")], "b")])
    with ks.wrap(model, None) as vlm, pytest.raises(InputError, match="processor"):
        PackageDataset(vlm, [([turn("a")], "b")])
