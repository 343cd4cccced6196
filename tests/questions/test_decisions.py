"""Typed questions, answered as Transformers' `DecisionPipeline` answers them, with one reading of
what they share."""

from __future__ import annotations

import base64
import copy
import functools
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import build, picture
from transformers import DecisionConfig, JevConfig, JevForDecision
from transformers.pipelines import DecisionPipeline

import keepsight as ks
from keepsight.errors import ImageError, InputError, UnsupportedInput
from keepsight.models import loading
from keepsight.questions.decide import Decisions

KINDS = ("qwen3_vl", "qwen3_5")
NEAR = 1e-4


def letters(processor: Any, count: int) -> list[str]:
    """Single-token labels: the tiny tokenizer has no Yes or No."""
    tokenizer = processor.tokenizer
    ids = {name: i for name, i in tokenizer.get_vocab().items() if name.isalpha()}
    alone = [name for name in ids if len(tokenizer(name, add_special_tokens=False).input_ids) == 1]
    return sorted(alone)[:count]


@functools.cache
def parts(kind: str) -> tuple[Any, Any, DecisionConfig]:
    model, processor = build(kind)[:2]
    names = letters(processor, 8)
    labels = {"noul": names[:2], "choice": names, "score": names[2:]}
    return model, processor, DecisionConfig(labels=labels, temperature={"choice": 1.7})


def questions(count: int = 5) -> dict[str, Any]:
    asked: dict[str, Any] = {
        f"is {i}": {"type": "noul", "instructions": f"Is this picture one of number {i}?"}
        for i in range(count)
    }
    asked["said"] = {
        "type": "noul",
        "instructions": {"ask": "Refund?", "of": ["a", 1]},
        "criteria": {"true": "Money back is wanted", "false": None},
    }
    asked["tone"] = {
        "type": "choice",
        "instructions": "What is the tone, as in <second>?",
        "criteria": {"calm": "Polite", "angry": None, "like it": "As <second> is"},
    }
    asked["urgent"] = {"type": "score", "criteria": ["Can wait", "This week", "Today"]}
    return asked


def request(seed: int = 1, count: int = 5) -> dict[str, Any]:
    return {
        "state": {"photo": "before <first> behind", "notes": ["one", 2, None, "two"]},
        "questions": questions(count),
        "assets": {"<first>": picture(seed), "<second>": picture(seed + 50, 160)},
    }


def pipeline(kind: str, config: DecisionConfig | None = None, model: Any = None) -> Any:
    """Transformers' own, with a tokenizer of its own: it adds tokens to it."""
    usual, processor, own = parts(kind)
    processor = copy.copy(processor)
    tokenizer = processor.tokenizer = copy.deepcopy(processor.tokenizer)
    settings = {} if hasattr(model, "decision_config") else {"decision_config": config or own}
    return DecisionPipeline(
        model=model or usual, tokenizer=tokenizer, processor=processor, **settings
    )


def expect_equal(ours: Any, theirs: Any) -> None:
    """The same names, types, options and order; numbers to 1e-4."""
    assert type(ours) is type(theirs) or isinstance(ours, dict)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for name in theirs:
            expect_equal(ours[name], theirs[name])
    elif isinstance(theirs, float):
        assert abs(ours - theirs) < NEAR
    else:
        assert ours == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_pipeline(kind: str) -> None:
    model, processor, config = parts(kind)
    given = [request(3, 5), request(4, 2), {**request(3, 1), "state": "x <first> y <second>"}]
    with ks.wrap(model, processor) as vlm:
        ours = vlm.decide(given, decision_config=config)
        assert isinstance(ours, list)
        pipe = pipeline(kind)
        for mine, one in zip(ours, given, strict=True):
            expect_equal(mine, pipe(one))
        assert ours[0].report.images == 4
        assert ours[0].report.images_encoded == 4
        spread = [answer["noul"] for answer in ours[0].values() if answer["type"] == "noul"]
        assert len({round(noul, 3) for noul in spread}) > 3, "a blind model would pass"
        state, asked, assets = (given[0][name] for name in ("state", "questions", "assets"))
        assert vlm.decide(state, asked, assets=assets, decision_config=config) == ours[0]
        vlm.runtime.check()


@pytest.mark.parametrize("kind", KINDS)
def test_the_tower_runs_once_and_the_beginning_is_read_once(kind: str) -> None:
    model, processor, config = parts(kind)
    ran: list[int] = []
    tower = model.model.visual
    handle = tower.register_forward_hook(lambda *_: ran.append(1))
    try:
        with ks.wrap(model, processor) as vlm:
            given = request(7, 10)
            given["questions"] = {k: q for k, q in given["questions"].items() if "tone" not in k}
            del given["assets"]["<second>"]
            ours = vlm.decide(given, decision_config=config)
            report = ours.report
            assert len(ran) == 1 == report.images_encoded
            ids = [len(one.segments) and one.prompt_tokens for one in report.reports]
            assert report.prompt_tokens == sum(ids)
            first = report.shared[0]
            assert (first.start, first.prompts) == (0, 13)  # with the one that nobody asks
            tails = sum(length - first.end for length in ids)
            deeper = sum((s.prompts - 1) * (s.end - s.start) for s in report.shared[1:])
            assert report.computed_tokens == first.end + tails - deeper
            expect_equal(ours, pipeline(kind)(given))
            # Another question about the same input starts where the input ends.
            ran.clear()
            more = {**given, "questions": {"new": {"type": "noul", "instructions": "Another?"}}}
            later = vlm.decide(more, decision_config=config)
            assert not ran
            assert later.report.computed_tokens == later.report.prompt_tokens - first.end
            expect_equal(later, pipeline(kind)(more))
            vlm.runtime.check()
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", KINDS)
def test_remembered_and_afresh_are_equal_bit_for_bit(kind: str) -> None:
    model, processor, config = parts(kind)
    with ks.wrap(model, processor) as vlm, ks.wrap(model, processor) as fresh:
        assert vlm.stats()["engine"]["exactness"] == "bits"
        given = request(9, 6)
        vlm.decide(request(9, 2), decision_config=config)
        warm = vlm.decide(given, decision_config=config)
        assert warm == vlm.decide(given, decision_config=config)
        for name, question in given["questions"].items():
            fresh.clear()
            alone = {**given, "questions": {name: question}}
            if name != "tone":
                alone["assets"] = {"<first>": given["assets"]["<first>"]}
            assert fresh.decide(alone, decision_config=config) == {name: warm[name]}


def test_questions_beyond_the_running_and_twice_the_same() -> None:
    model, processor, config = parts("qwen3_vl")
    given = request(2, 60)
    given["questions"]["again"] = given["questions"]["is 3"]
    with ks.wrap(model, processor) as vlm:
        ours = vlm.decide(given, decision_config=config)
        assert ours["again"] == ours["is 3"]
        assert ours.report.prompts == 63
        assert len(vlm.runtime.engine.lanes._idle) <= 4
        expect_equal(ours, pipeline("qwen3_vl")(given))


def test_a_small_memory_answers_the_same() -> None:
    model, processor, config = parts("qwen3_5")
    given = request(2, 12)
    with ks.wrap(model, processor, cache_budget=20_000) as vlm:
        expect_equal(vlm.decide(given, decision_config=config), pipeline("qwen3_5")(given))
        vlm.runtime.check()


@pytest.mark.parametrize("kind", ["internvl", "gemma3", "mllama", "molmo2", "paligemma"])
def test_other_kinds_of_layers(kind: str) -> None:
    """Media that stay whole, cross attention, prompts that are reused with the same media or not at
    all."""
    model, processor, config = parts(kind)
    given = request(8, 3)
    with ks.wrap(model, processor) as vlm:
        ours = vlm.decide(given, decision_config=config)
        expect_equal(ours, pipeline(kind)(request(8, 3)))
        assert ours.report.images_encoded == 2
        expect_equal(vlm.decide(given, decision_config=config), ours)
        vlm.runtime.check()


def test_tenants_share_nothing_and_changed_weights_are_noticed() -> None:
    model, processor = build("qwen3_vl")[:2]
    config, given = parts("qwen3_vl")[2], request(11, 2)
    with ks.wrap(model, processor) as vlm:
        mine = vlm.decide(given, decision_config=config, tenant="a")
        theirs = vlm.decide(given, decision_config=config, tenant="b")
        assert isinstance(mine, Decisions) and mine == theirs
        assert theirs.report.images_encoded == 2
        assert theirs.report.computed_tokens == mine.report.computed_tokens
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        changed = vlm.decide(given, decision_config=config, tenant="a")
        assert changed != mine
        expect_equal(changed, pipeline("qwen3_vl", model=model)(given))


def test_answers_of_others_go_on_beside_decisions() -> None:
    model, processor, config = parts("qwen3_5")
    messages = [{"role": "user", "content": "Tell me something about it."}]
    with ks.wrap(model, processor) as vlm, ks.wrap(model, processor) as alone:
        wanted = alone.chat(messages, max_new_tokens=24, min_new_tokens=24).text
        theirs = alone.decide(request(5, 40), decision_config=config)
        found: list[str] = []
        chat = threading.Thread(
            target=lambda: found.append(
                vlm.chat(messages, max_new_tokens=24, min_new_tokens=24).text
            )
        )
        chat.start()
        assert vlm.decide(request(5, 40), decision_config=config) == theirs
        chat.join()
        assert found == [wanted]
        vlm.runtime.check()


TEMPLATE = (
    "{% for part in [state] %}{% if part is string %}{{ part }}{% else %}{% for p in part %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% for q in questions %}\n{{ q.name }}: {{ q.instructions }} answer:<|mark|>{% endfor %}\nend"
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_with_a_mark_for_each_question(kind: str, tmp_path: Path) -> None:
    """One prompt for all questions; the settings come from files as in a repository."""
    model, processor, own = parts(kind)
    config = DecisionConfig(labels=own.labels, chat_template=TEMPLATE)
    config.save_pretrained(tmp_path)
    given = {
        "state": "see <first>, so <|mark|> it is",
        "questions": {
            name: q for name, q in questions(6).items() if isinstance(q.get("instructions"), str)
        },
        "assets": {"<first>": picture(1)},
    }
    del given["questions"]["tone"]
    theirs = pipeline(kind, config)(given)
    with ks.wrap(model, processor) as vlm:
        ours = vlm.decide(given, decision_config=str(tmp_path))
        expect_equal(ours, theirs)
        assert ours.report.prompts == 1
        assert "<|mark|>" not in vlm.processor.tokenizer.get_vocab()
        expect_equal(vlm.decide(given, decision_config=tmp_path), theirs)


def test_assets_in_the_shape_of_system_one(tmp_path: Path) -> None:
    model, processor, config = parts("qwen3_vl")
    given = request(5, 2)
    theirs = pipeline("qwen3_vl")(given)
    for name, image in given["assets"].items():
        data = io.BytesIO()
        image.save(data, "PNG")
        path = tmp_path / f"{name.strip('<>')}.png"
        path.write_bytes(data.getvalue())
        code = base64.b64encode(data.getvalue()).decode()
        given["assets"][name] = (
            {"type": "image", "format": "png", "data_base64": code} if "first" in name else path
        )
    with ks.wrap(model, processor) as vlm:
        expect_equal(vlm.decide(given, decision_config=config), theirs)
        text = json.dumps({**given, "assets": {}})
        expect_equal(vlm.decide(text, decision_config=config), pipeline("qwen3_vl")(text))


def test_placeholders_of_the_model_in_a_text_stay_text() -> None:
    model, processor, config = parts("qwen3_vl")
    given = request(5, 2)
    given["state"]["notes"] = "typed <|image_pad|> and <|im_end|> and <|mark|> by a user"
    with ks.wrap(model, processor) as vlm:
        expect_equal(vlm.decide(given, decision_config=config), pipeline("qwen3_vl")(given))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no state": ({"state": ...}, "state"),
    "no questions": ({"questions": {}}, "at least one question"),
    "a list": ({"questions": ["x"]}, "questions"),
    "an unknown type": ({"questions": {"q": {"type": "essay"}}}, "'q'"),
    "no type": ({"questions": {"q": "is it?"}}, "'q'"),
    "an unknown field": ({"questions": {"q": {"type": "noul", "weight": 3}}}, "'q'"),
    "no criteria": ({"questions": {"q": {"type": "choice", "criteria": {}}}}, "'q'"),
    "too many options": (
        {"questions": {"q": {"type": "score", "criteria": ["x"] * 20}}},
        "at most 6 options",
    ),
    "an asset nobody names": (
        {"assets": {"<first>": picture(1), "<second>": picture(2), "<third>": picture(3)}},
        r"assets\['<third>'\]",
    ),
    "an asset that is no image": ({"assets": {"<first>": b"nothing"}}, r"assets\['<first>'\]"),
    "an asset of a sound": ({"assets": {"<first>": {"type": "audio"}}}, r"assets\['<first>'\]"),
    "an asset with bad data": (
        {"assets": {"<first>": {"type": "image", "data_base64": "?"}}},
        r"assets\['<first>'\].data_base64",
    ),
    "an asset without a name": ({"assets": {"": picture(1)}}, "assets"),
    "assets in a list": ({"assets": [picture(1)]}, "assets"),
    "an object in the state": ({"state": {"x": object()}}, "state"),
    "an unknown part": ({"question": {}}, "question"),
}


def test_bad_input_is_named_and_the_next_request_is_served() -> None:
    model, processor, config = parts("qwen3_vl")
    good = request(6, 1)
    theirs = pipeline("qwen3_vl")(good)
    with ks.wrap(model, processor) as vlm:
        for name, (change, said) in BAD.items():
            bad = {key: value for key, value in {**good, **change}.items() if value is not ...}
            with pytest.raises(InputError, match=said):
                vlm.decide(bad, decision_config=config)
                pytest.fail(name)
        with pytest.raises(InputError, match="not JSON"):
            vlm.decide("{", decision_config=config)
        with pytest.raises(InputError, match=r"questions\['is 0'\].*single tokens"):
            vlm.decide(
                good, decision_config=DecisionConfig(labels={"noul": ["Certainly", "So so"]})
            )
        with pytest.raises(ImageError, match=r"assets\['<first>'\]"):
            vlm.decide({**good, "assets": {**good["assets"], "<first>": "/no/such.png"}})
        for place in (__file__ + "/decision.json", 3, b"decision.json"):
            with pytest.raises(InputError, match="decision_config"):
                vlm.decide(good, decision_config=place)
        expect_equal(vlm.decide(good, decision_config=config), theirs)
        vlm.runtime.check()


@functools.cache
def deciding(softcap: float | None) -> Any:
    """A decision model around the hybrid: its head scores options."""
    inner = parts("qwen3_5")[0]
    config = JevConfig(
        hidden_size=inner.config.text_config.hidden_size,
        softcap=softcap,
        text_config=inner.config.to_dict(),
    )
    model = JevForDecision(config).eval()
    model.model.load_state_dict(inner.model.state_dict())
    torch.nn.init.normal_(model.proj.weight, generator=torch.Generator().manual_seed(1))
    mark = "{{ state }} {{ question.type }} {{ question.instructions }}:<|mark|> end"
    model.decision_config = DecisionConfig(chat_template=mark, temperature={"noul": 2.0})
    return model


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_head_of_a_decision_model(softcap: float | None, tmp_path: Path) -> None:
    model = deciding(softcap)
    given = {"state": "a text", "questions": {k: q for k, q in questions(3).items() if k != "tone"}}
    pipe = pipeline("qwen3_5", model=model)
    theirs = pipe(given)
    with ks.wrap(model, parts("qwen3_5")[1]) as vlm:
        ours = vlm.decide(given)
        expect_equal(ours, theirs)
        assert len({round(one["noul"], 4) for one in list(ours.values())[:3]}) == 3
        messages = [{"role": "user", "content": "Hello?"}]
        for call in (vlm.chat, vlm.generate, lambda m: vlm.score(m, ["a"])):
            with pytest.raises(UnsupportedInput, match="decision model"):
                call(messages if call != vlm.generate else torch.tensor([[20, 21]]))
        assert vlm.decide(given) == ours
    model.save_pretrained(tmp_path)
    pipe.tokenizer.save_pretrained(tmp_path)
    loaded = loading.load_named(str(tmp_path), "float32", None, None)[0]
    with ks.wrap(loaded, parts("qwen3_5")[1]) as vlm:
        expect_equal(vlm.decide(given), theirs)
