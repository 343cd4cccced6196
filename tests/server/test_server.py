"""The server through OpenAI's own client: answers, streams, files, what is remembered and told."""

from __future__ import annotations

import functools
import gc
import io
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch
from PIL import Image
from support.server_harness import QUESTION, Live, asked, live, opening, png, scene, until, uri

import keepsight as ks
from keepsight.media.sources import Source

Ask = Callable[..., Any]


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )


@pytest.fixture
def ask(client: openai.OpenAI) -> Ask:
    return functools.partial(client.chat.completions.create, model="demo")


# -- chat completions --------------------------------------------------------------------------


def test_an_answer_is_the_librarys_own(server: Live, ask: Ask) -> None:
    image = scene(1)
    reply = ask(messages=asked(image), max_tokens=30)
    content = [{"type": "image", "image": png(image)}, {"type": "text", "text": QUESTION}]
    wanted = server.service.vlm.chat([{"role": "user", "content": content}], max_new_tokens=30)
    assert reply.choices[0].message.content == wanted.text
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.usage.images == reply.usage.images_encoded == 1
    assert reply.timings["prompt_n"] == reply.usage.prompt_tokens


def test_a_stream_says_the_same(ask: Ask) -> None:
    whole = ask(messages=asked(scene(2)), max_tokens=30)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(messages=asked(scene(2)), max_tokens=30, **options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_a_message_that_comes_back_matches(ask: Ask) -> None:
    messages: list[Any] = asked(scene(3))
    first = ask(messages=messages, max_tokens=30)
    messages += [first.choices[0].message, {"role": "user", "content": "What colour is it?"}]
    second = ask(messages=messages, max_tokens=30, extra_body={"keepsight": {"report": True}})
    # All of the first prompt but the words that ask for an answer, which history has not.
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 16
    images = second.keepsight["report"]["images"]
    assert [image["status"] for image in images] == ["reused"]
    assert second.usage.images_encoded == 0


def test_log_probabilities_are_those_of_the_model(server: Live, ask: Ask) -> None:
    image = scene(4)
    reply = ask(messages=asked(image), max_tokens=6, logprobs=True, top_logprobs=3)
    vlm = server.service.vlm
    content = [{"type": "image", "image": png(image)}, {"type": "text", "text": QUESTION}]
    inputs = vlm.inputs([{"role": "user", "content": content}])
    stock = vlm.model.generate(
        **inputs, max_new_tokens=6, output_logits=True, return_dict_in_generate=True
    )
    rows = reply.choices[0].logprobs.content
    assert len(rows) == 6 and "".join(row.token for row in rows) == reply.choices[0].message.content
    for row, logits in zip(rows, stock.logits, strict=True):
        best = logits[0].log_softmax(-1).topk(3).values
        shown = torch.tensor([top.logprob for top in row.top_logprobs])
        assert torch.allclose(shown, best, atol=1e-3)
        assert row.logprob == pytest.approx(float(best[0]), abs=1e-3)


def test_choices_share_the_prompt_and_have_seeds(ask: Ask) -> None:
    vague = asked(scene(5), text="What now, then?")  # the model is not sure what to say to this
    some = {"n": 8, "temperature": 2.0, "seed": 7, "max_tokens": 24}
    one, two = (ask(messages=vague, **some) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices] and len(set(texts)) > 1
    assert [choice.index for choice in one.choices] == [*range(8)]
    assert one.usage.images_encoded <= 1 and one.usage.completion_tokens > 24


def test_stops_limits_and_biases(server: Live, ask: Ask) -> None:
    def say(**options: Any) -> Any:
        return ask(messages=asked(scene(1)), temperature=0, **options).choices[0]

    plain = say(max_tokens=30)
    words = plain.message.content.split()
    stopped = say(max_tokens=30, stop=[words[2]])
    assert stopped.message.content == plain.message.content.split(words[2])[0]
    assert stopped.finish_reason == "stop"
    assert say(max_completion_tokens=2).finish_reason == "length"
    first = say(max_tokens=1, logprobs=True, top_logprobs=2).logprobs.content[0]
    [token] = server.service.model.tokenizer(first.token, add_special_tokens=False)["input_ids"]
    biased = say(max_tokens=1, logit_bias={str(token): -100})
    assert biased.message.content != first.token
    repeated = say(max_tokens=12, logit_bias={str(token): 100})
    assert repeated.message.content == first.token * 12


def test_pictures_that_were_uploaded(client: openai.OpenAI, ask: Ask) -> None:
    image = scene(6)
    large = image.resize((1600, 1600), Image.Resampling.NEAREST)
    sent = client.files.create(file=("a.png", png(image)), purpose="vision")
    again = client.files.create(file=("b.png", png(image)), purpose="vision")
    assert sent.id == again.id and len(client.files.list().data) == 1
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": uri(image)}},
        {"type": "image_url", "image_url": {"url": sent.id}},
        {"type": "file", "file": {"file_id": sent.id}},
        {"type": "file", "file": {"file_data": uri(image), "filename": "x.png"}},
        {"type": "image_url", "image_url": {"url": uri(large), "detail": "low"}},
    ]
    encoded = []
    for part in parts:
        messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
        reply = ask(messages=messages, max_tokens=2)
        encoded.append(reply.usage.images_encoded)
    assert encoded == [1, 0, 0, 0, 1]  # 512 x 512 are other pixels, so it is another picture
    assert client.files.content(sent.id).read() == png(image)
    assert client.files.delete(sent.id).deleted
    with pytest.raises(openai.NotFoundError, match="no such file"):
        client.files.retrieve(sent.id)


def test_files_are_listed_in_either_order(
    client: openai.OpenAI, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for n, ago in ((1, 10), (2, 0)):
        monkeypatch.setattr(server.service.files, "_clock", lambda ago=ago: time.time() - ago)
        made.append(client.files.create(file=("a.png", bytes([n])), purpose="vision"))
    listed = [[f.id for f in client.files.list(order=order)] for order in ("asc", "desc")]
    ids = [file.id for file in made]
    assert [i for i in listed[0] if i in ids] == ids == [i for i in listed[1] if i in ids][::-1]
    for file in made:
        client.files.delete(file.id)


def test_pdf_pages_are_pictures(client: openai.OpenAI, ask: Ask) -> None:
    buffer = io.BytesIO()
    scene(1).save(buffer, "PDF", save_all=True, append_images=[scene(2)])
    sent = client.files.create(file=("a.pdf", buffer.getvalue()), purpose="user_data")
    part = {"type": "file", "file": {"file_id": sent.id}}
    messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
    first = ask(messages=messages, max_tokens=4)
    again = ask(messages=messages, max_tokens=4)
    assert first.usage.images == first.usage.images_encoded == again.usage.images_reused == 2


# -- responses ---------------------------------------------------------------------------------


def test_responses_and_their_events(client: openai.OpenAI, ask: Ask) -> None:
    part = {"type": "input_image", "image_url": uri(scene(7)), "detail": "auto"}
    words = {"type": "input_text", "text": QUESTION}
    items: Any = [{"role": "user", "content": [part, words]}]
    chat = ask(messages=asked(scene(7)), max_tokens=40)
    with client.responses.stream(model="demo", input=items, max_output_tokens=40) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == chat.choices[0].message.content and final.status == "completed"
    assert final.usage.input_tokens_details.cached_tokens == chat.usage.prompt_tokens
    assert final.usage.input_tokens_details.cache_write_tokens == 0
    assert chat.usage.prompt_tokens_details.cache_write_tokens > 0
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(set(numbers))
    items += [*final.output, {"role": "user", "content": "What colour is it?"}]
    after = client.responses.create(model="demo", input=items, instructions=None)
    assert after.usage.input_tokens_details.cached_tokens >= final.usage.input_tokens - 16
    short = client.responses.create(model="demo", input="Hello", max_output_tokens=1)
    assert short.status == "incomplete"
    assert short.incomplete_details.reason == "max_output_tokens"
    plain = final.output_text
    for more, told in (
        ({"stop": [plain.split()[2]]}, plain.split(plain.split()[2])[0]),
        ({"skip_special_tokens": False}, plain + "<|im_end|>"),
    ):
        found = client.responses.create(model="demo", input=items[:1], extra_body=more)
        assert found.output_text == told, more


# -- what is remembered ------------------------------------------------------------------------


def test_prepare_explain_stats_reset(server: Live) -> None:
    body = {"model": "demo", "messages": asked(scene(8))}
    status, before, _ = server.call("/v1/cache/explain", body)
    assert status == 200 and before["report"]["images"][0]["features"] == "tower"
    assert before["report"]["cached_tokens"] <= opening(before["report"])
    assert server.call("/v1/prepare", body)[0] == 200
    after = server.call("/v1/cache/explain", body)[1]["report"]
    assert after["cached_tokens"] == after["prompt_tokens"]
    reply = server.chat({"messages": body["messages"], "max_tokens": 4})[1]
    assert reply["timings"]["prompt_n"] == 0
    assert server.call("/v1/cache/stats")[1]["prefix"]["bytes"] > 0
    assert server.call("/v1/cache/reset", {})[0] == 200
    again = server.call("/v1/cache/explain", body)[1]["report"]
    assert again["cached_tokens"] == 0 and again["images"][0]["features"] == "tower"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/prepare", "/v1/decisions"])
def test_a_picture_is_let_go_with_its_answer(server: Live, path: str) -> None:
    """Not when the garbage collector comes by: it counts objects, and one may be 60 MB."""

    def held() -> list[Source]:
        return [one for one in gc.get_objects() if type(one) is Source]

    body: dict[str, Any] = {"model": "demo", "max_pixels": 12_000}  # another size has a source
    if path == "/v1/decisions":
        shown = [{"type": "input_image", "image_url": uri(scene(13))}]
        body |= {"input": [{"role": "user", "content": shown}]}
        body |= {"questions": [{"type": "predicate", "instructions": "It is red."}]}
    else:
        body |= {"messages": asked(scene(13))}
    assert server.call(path, body)[0] == 200
    gc.collect()
    before = held()  # held from here on, so that their ids stay theirs
    known = set(map(id, before))
    gc.disable()
    try:
        assert server.call(path, body)[0] == 200
        until(lambda: known.issuperset(map(id, held())))
    finally:
        gc.enable()


@pytest.mark.parametrize("tenant", [None, "house"])
def test_a_reset_without_a_salt_leaves_other_salts_alone(
    demo_parts: dict[str, Any], tenant: str | None
) -> None:
    def cached(**more: str) -> int:
        body = {"model": "demo", "messages": asked(scene(8)), **more}
        return int(server.call("/v1/cache/explain", body)[1]["report"]["cached_tokens"])

    with ks.wrap(*demo_parts["demo"], tenant=tenant) as vlm, live(vlm) as server:
        for more in ({}, {"cache_salt": "s"}):
            server.call("/v1/prepare", {"model": "demo", "messages": asked(scene(8)), **more})
        assert server.call("/v1/cache/stats")[1]["features"]["packages"] == 2
        assert server.call("/v1/cache/reset", {})[1]["everyone"] is False
        assert cached() == 0 and cached(cache_salt="s") > 0
        assert server.call("/v1/cache/reset", {"everyone": True})[1]["everyone"] is True
        assert cached(cache_salt="s") == 0
        assert server.call("/v1/cache/stats")[1]["features"]["packages"] == 0


def test_a_salt_hides_what_was_seen(server: Live) -> None:
    """Under another salt a known picture looks exactly like one that nobody has seen."""

    def report(salt: str | None, seed: int) -> Any:
        body: dict[str, Any] = {"messages": asked(scene(seed)), "max_tokens": 3}
        body |= {"keepsight": {"report": True}, **({"cache_salt": salt} if salt else {})}
        told = server.chat(body)[1]
        segments = told["keepsight"]["report"]["segments"]
        return told["usage"], [(s["status"], s["reason"], s["features"]) for s in segments]

    report("ann", 9)
    assert report("ann", 9)[0]["prompt_tokens_details"]["cached_tokens"] > 0
    seen_by_ann, never_seen = report("bob", 9), report("bea", 10)
    assert seen_by_ann[1] == never_seen[1]
    assert seen_by_ann[0]["images_encoded"] == 1
    report(None, 11)  # without a salt the opening of a prompt is known from here on
    seen_by_ann, never_seen = report(None, 9), report(None, 12)
    assert seen_by_ann[1] == never_seen[1]
    assert seen_by_ann[0]["images_encoded"] == 1
    details = [told[0]["prompt_tokens_details"] for told in (seen_by_ann, never_seen)]
    assert details[0]["cached_tokens"] == details[1]["cached_tokens"]
    body = {"model": "demo", "messages": asked(scene(9)), "cache_salt": "cy"}
    assert server.call("/v1/cache/explain", body)[1]["report"]["cached_tokens"] == 0
    own = server.call("/v1/cache/stats?cache_salt=nobody")[1]
    assert own["prefix"]["bytes"] == 0 and own["features"]["packages"] == 0


def test_models_health_metrics_schema(server: Live, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    model = client.models.retrieve("demo")
    assert model.owned_by == "keepsight"
    # vLLM's name, which clients read.
    assert model.to_dict()["max_model_len"] == 32768
    assert server.call("/health")[1] == {"status": "ok"}
    server.chat({"messages": asked(scene(11)), "max_tokens": 1})
    before = _metrics(server)
    server.chat({"messages": asked(scene(11)), "max_tokens": 1})
    after = _metrics(server)
    for name in ("prefix_cache_hits_total", "mm_cache_hits_total", "generation_tokens_total"):
        assert after[f"keepsight_{name}"] > before[f"keepsight_{name}"], name
    assert server.call("/openapi.json")[1]["openapi"].startswith("3.")
    assert "page/docs.js" in server.call("/docs")[1]
    fields = server.call("/openapi.json")[1]["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["audio"]["description"] == "Refused: answers are text."
    assert server.call("/")[0] == 200


def _metrics(server: Live) -> dict[str, float]:
    lines = server.call("/metrics")[1].splitlines()
    rows = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in rows}
