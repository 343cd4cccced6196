"""The ids of a text that begins as an earlier one did are those of the text by itself.

Texts grow, are edited and come back, with characters beside their control tokens that tokenizers
join, drop or put spaces before; tokenizers are of every kind, and are changed between.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import chat_templates
from support.models import build, picture
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AddedToken, PreTrainedTokenizerFast

import keepsight as ks
from keepsight.prompt.control_tokens import ControlTokens
from keepsight.prompt.encodings import Encodings

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]"]
BITS = [
    *("a", "b ", " c", "  ", "\n", "\n\n", "\t", "\u00a0", "\u2581", "e\u0301", "\u0301"),
    *("\ufb01x", "\u4e2d\u6587", "\U0001f469\u200d\U0001f467", "12", "'s", "<", "|"),
    *("im_end", "<|im_", "\u0e33"),
    *("The quick brown fox.", "x = [1, 2]", "\u200d", "\r\n", "\u1100\u1161", "<|x|>", "INST"),
]
TRAINED = ["the quick brown fox jumps over the lazy dog " * 3, "x = [1, 2]\n\ndef f(): pass\n" * 3]


def trained(model: Any, trainer: Any, normal: Any, before: Any, decoder: Any = None) -> Any:
    raw = Tokenizer(model)
    raw.normalizer, raw.pre_tokenizer = normal, before
    raw.decoder = decoder or decoders.ByteLevel()
    raw.train_from_iterator(TRAINED, trainer)
    return raw


def byte_level(prefix: bool, normal: Any) -> Any:
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    return trained(models.BPE(), trainer, normal, level)


def sentencepiece(scheme: str, normal: Any = None) -> Any:
    trainer = trainers.UnigramTrainer(
        vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    space = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return trained(models.Unigram(), trainer, normal, space, decoders.Metaspace())


def words() -> Any:
    trainer = trainers.WordPieceTrainer(
        vocab_size=90, show_progress=False, special_tokens=["[UNK]"]
    )
    model = models.WordPiece(unk_token="[UNK]")
    lower = normalizers.BertNormalizer(lowercase=True)
    return trained(model, trainer, lower, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece())


def prepended() -> Any:
    """As Llama's old tokenizers: a space before each stretch, by the normalizer."""
    replace = normalizers.Replace(" ", "\u2581")
    normal = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    return trained(models.BPE(), trainer, normal, None, decoders.Metaspace())


KINDS: dict[str, Callable[[], Any]] = {
    "byte level": lambda: byte_level(False, normalizers.NFC()),
    "byte level with a space": lambda: byte_level(True, None),
    "byte level, NFKC": lambda: byte_level(False, normalizers.NFKC()),
    "space first": lambda: sentencepiece("first"),
    "space always": lambda: sentencepiece("always", normalizers.NFKC()),
    "words": words,
    "prepended": prepended,
}


def tokenizer_of(kind: str, bos: bool = False, **flags: bool) -> Any:
    raw = KINDS[kind]()
    given = {"special": True, "normalized": False, **flags}
    raw.add_special_tokens([AddedToken(name, **given) for name in SPECIAL])
    raw.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if bos:
        pair = ("<s>", raw.token_to_id("<s>"))
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[pair])
    unknown = getattr(raw.model, "unk_token", None) or "<unk>"
    named = {"unk_token": unknown} if raw.token_to_id(unknown) is not None else {}
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>" if bos else None, **named)


def text_of(chance: random.Random) -> str:
    turns = ("".join(chance.choices(BITS, k=chance.randint(0, 6))) for _ in range(4))
    return "".join(f"{chance.choice(SPECIAL)}{turn}" for turn in turns)


def changed(text: str, chance: random.Random) -> str:
    deed = chance.choice(["go on", "go on", "edit", "cut", "again"])
    if deed == "go on":
        return text + text_of(chance)
    spot = chance.randrange(len(text) + 1)
    if deed == "edit":
        return text[:spot] + chance.choice([*BITS, *SPECIAL]) + text[spot:]
    return text[:spot] if deed == "cut" else text


def encodings(tokenizer: Any) -> Any:
    return Encodings(tokenizer, ControlTokens("{{ x }}", tokenizer))


def made(mine: Any, tenant: str, text: str) -> int:
    """Characters that are tokenized for a text, whose ids are those of the text by itself."""
    seen: list[str] = []
    real = Encodings._made
    mine._made = lambda parts: seen.extend(parts) or real(mine, parts)
    found = mine.encode(text, tenant)
    begins = mine._tokenizer.bos_token is not None and text.startswith("<s>")
    wanted = mine._tokenizer(text, add_special_tokens=not begins)["input_ids"]
    assert found.tolist() == wanted, text
    return sum(map(len, seen))


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_of_a_text_changes_its_ids(kind: str, bos: bool) -> None:
    chance, mine = random.Random(kind), encodings(tokenizer_of(kind, bos))
    texts = [text_of(chance) for _ in range(3)]
    tokenized = whole = 0
    for _ in range(150):
        spot = chance.randrange(len(texts))
        texts[spot] = changed(texts[spot], chance)[-3000:] or text_of(chance)
        tokenized += made(mine, "", texts[spot])
        whole += len(texts[spot])
    assert tokenized < 0.6 * whole


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_tokens_that_look_beside_them_are_no_seams(flag: str) -> None:
    tokenizer = tokenizer_of("byte level", **{flag: True})
    mine = encodings(tokenizer)
    made(mine, "", 9 * "<s>hello</s>")
    assert not len(mine)


def test_a_tokenizer_that_ends_texts_is_not_cut() -> None:
    tokenizer = tokenizer_of("byte level")
    end = ("</s>", tokenizer.convert_tokens_to_ids("</s>"))
    post = processors.TemplateProcessing(single="$A </s>", special_tokens=[end])
    tokenizer.backend_tokenizer.post_processor = post
    mine = encodings(tokenizer)
    made(mine, "", 9 * "<s>hello</s>")
    assert not len(mine)


def started(tokenizer: Any) -> None:
    pair = ("<s>", tokenizer.convert_tokens_to_ids("<s>"))
    post = processors.TemplateProcessing(single="<s> $A", special_tokens=[pair])
    tokenizer.backend_tokenizer.post_processor = post


def added(name: str, **more: bool) -> Callable[[Any], None]:
    token = AddedToken(name, special=False, normalized=False, **more)
    return lambda tokenizer: tokenizer.add_tokens([token])


def with_part(name: str, part: Any) -> Callable[[Any], None]:
    return lambda tokenizer: setattr(tokenizer.backend_tokenizer, name, part)


@pytest.mark.parametrize(
    "change",
    [
        with_part("normalizer", normalizers.Lowercase()),
        with_part("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        started,
        added("quick"),
        added("<think>", lstrip=True),
        lambda tokenizer: tokenizer.add_special_tokens({"additional_special_tokens": ["A</s>"]}),
    ],
)
def test_a_changed_tokenizer_is_asked_again(change: Callable[[Any], None]) -> None:
    model, processor = build("qwen3_vl")
    processor = copy.copy(processor)
    tokenizer = processor.tokenizer = tokenizer_of("byte level")
    source = "{% for m in messages %}<s>{{ m.content }}A{% endfor %}</s>"
    placeholder = AddedToken("<|image_pad|>", special=True, normalized=False)
    tokenizer.add_tokens([placeholder], special_tokens=True)
    with ks.wrap(model, processor, chat_template=source) as vlm:
        vlm.runtime.family.placeholders["image"] = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        talk = [{"role": "user", "content": "The quick brown fox. <think> \ufb01"}] * 3
        before = vlm.render(talk).ids.tolist()
        change(tokenizer)
        prompt = vlm.render(talk)
        assert prompt.ids.tolist() == tokenizer(prompt.text)["input_ids"] != before


def test_a_longer_token_at_the_seam_is_seen() -> None:
    """What ends in the new part may begin before the seam, or in its place."""
    tokenizer = tokenizer_of("byte level")
    tokenizer.add_special_tokens({"additional_special_tokens": ["b</s>cd", "</s>xyz"]})
    mine = encodings(tokenizer)
    for start in ("<s>a</s>a</s>a</s>ab</s>c", "<s>a</s>a</s>a</s>a</s>xy"):
        for more in ("", "d", "z", "</s>"):
            made(mine, "", start)
            made(mine, "", start + more)


def test_a_tenant_is_not_answered_sooner_for_what_another_asked() -> None:
    mine = encodings(tokenizer_of("byte level"))
    text = "".join(f"<s>hello {n}</s>" for n in range(9))
    first = made(mine, "a", text)
    assert made(mine, "b", text) == first and made(mine, "a", text) == 0
    mine.clear("a")
    assert made(mine, "b", text) == 0 and made(mine, "a", text) == first
    mine.clear()
    assert not len(mine) and not mine.nbytes


def test_texts_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.prompt.encodings._BUDGET", 10_000)
    mine = encodings(tokenizer_of("byte level"))
    for number in range(50):
        made(mine, "", f"<s>hello {number}</s>")
        assert 0 < mine.nbytes <= 10_000


# -- whole conversations -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["TOOLS", "ROLES", "THOUGHTS", "COMPOSED", ""])
def vlm(request: Any) -> Iterator[Any]:
    model, processor = build("qwen3_vl")
    processor = copy.copy(processor)
    tokenizer = processor.tokenizer = copy.deepcopy(processor.tokenizer)
    names = ["<|user|>", "<|assistant|>", "<|end|>", "<s>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    template = getattr(chat_templates, request.param) if request.param else None
    with ks.wrap(model, processor, chat_template=template) as it:
        yield it


def message(chance: random.Random, pictures: bool) -> dict[str, Any]:
    said = "".join(chance.choices([*BITS, "<think>hm</think>", "<|im_end|>"], k=5))
    role = chance.choice(["user", "assistant", "assistant", "system"])
    if pictures and role == "user" and chance.random() < 0.3:
        image = {"type": "image", "image": picture(chance.randrange(3))}
        return {"role": role, "content": [image, {"type": "text", "text": said}]}
    return {"role": role, "content": said}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_a_conversation_is_rendered_as_by_somebody_who_never_saw_it(vlm: Any, seed: int) -> None:
    chance, renderer = random.Random(seed), vlm.runtime.renderer
    pictures = "image" in renderer.template
    talk = [message(chance, pictures) for _ in range(6)]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}]
    for _ in range(25):
        deed = chance.choice(["more", "more", "more", "edit", "cut"])
        if deed == "more":
            talk.append(message(chance, pictures))
        elif deed == "edit":
            talk[chance.randrange(len(talk))] = message(chance, pictures)
        else:
            talk = talk[: chance.randint(1, len(talk))]
        more = chance.choice([{}, {}, {"tools": tools}, {"enable_thinking": False}])
        mine = vlm.render(talk, **more)
        wanted = renderer.render(talk, vlm.runtime.vision.name, True, None, **more)
        assert np.array_equal(mine.ids, wanted.ids), json.dumps(talk, default=str)
        assert mine.spans == wanted.spans and mine.text == wanted.text


def test_what_was_asked_is_forgotten_with_everything_else(vlm: Any) -> None:
    vlm.render([{"role": "user", "content": "hello " * 40}])
    assert len(vlm.runtime.renderer.encodings)
    vlm.clear()
    assert not len(vlm.runtime.renderer.encodings)
