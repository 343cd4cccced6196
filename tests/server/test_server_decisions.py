"""Decisions, scores and completions over HTTP, in the shapes that their clients know."""

from __future__ import annotations

import base64
from typing import Any

import openai
import torch
from support.server_harness import Live, png, scene, until, uri

import keepsight as ks

PICTURE, OTHER = scene(1), scene(2)


def asset(image: Any) -> dict[str, str]:
    data = base64.b64encode(png(image)).decode()
    return {"type": "image", "format": "png", "data_base64": data}


def system_one(count: int = 3) -> dict[str, Any]:
    asked: dict[str, Any] = {
        f"q{i}": {"type": "noul", "instructions": f"Is it number {i}?"} for i in range(count)
    }
    asked["shape"] = {"type": "choice", "criteria": {"circle": None, "square": "As <b> shows"}}
    asked["size"] = {"type": "score", "criteria": ["small", "middle", "large"]}
    return {
        "model": "demo",
        "state": {"seen": "<a>", "more": [1, None]},
        "questions": asked,
        "assets": {"<a>": asset(PICTURE), "<b>": asset(OTHER)},
    }


def test_system_one(server: Live, vlm: ks.VLM) -> None:
    body = system_one(40)
    status, found, _ = server.call("/v1/systemone", body)
    assert status == 200, found
    own = vlm.decide(
        body["state"], body["questions"], assets={"<a>": png(PICTURE), "<b>": png(OTHER)}
    )
    assert found["answers"] == own
    assert list(found["answers"]) == list(body["questions"])
    assert found["usage"] == {
        "input_tokens": own.usage.prompt_tokens,
        "output_tokens": 0,
    }
    status, found, _ = server.call("/v1/systemone", {**body, "keepsight": {"report": True}})
    report = found["keepsight"]["report"]
    assert report["images_encoded"] == 0 and report["images"] == 2
    assert report["computed_tokens"] < report["prompt_tokens"] / 2
    assert report["shared"][0]["start"] == 0


def test_decisions_of_the_openai_client(server: Live, vlm: ks.VLM) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.decisions.create(
        model="demo",
        input=[
            {"role": "system", "content": "Judge <picture-1> it."},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Look:"},
                    {"type": "input_image", "image_url": uri(PICTURE)},
                    {"type": "input_json", "data": {"of": ["a", 1]}},
                ],
            },
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "seen"},
        ],
        questions=[
            {"type": "predicate", "name": "red", "instructions": "It is red."},
            {"type": "predicate", "instructions": "It is blue."},
            {
                "type": "choice",
                "name": "like",
                "instructions": [
                    {"type": "input_text", "text": "Is it like this one?"},
                    {"type": "input_image", "image_url": uri(OTHER)},
                ],
                "choices": [
                    {"value": True},
                    {"value": "true", "description": "so"},
                    {"value": "x"},
                ],
            },
            {
                "type": "score",
                "name": "size",
                "instructions": "How large?",
                "levels": [{"label": "small"}, {"label": "large", "description": "fills it"}],
            },
        ],
    )
    red, blue, like, size = found.answers
    assert (red.type, red.name, blue.name) == ("predicate", "red", None)
    assert 0 < red.probability < 1 and red.probability != blue.probability
    assert like.type == "choice" and [p.value for p in like.probabilities] == [True, "true", "x"]
    assert like.choice in (True, "true", "x")
    assert abs(sum(p.probability for p in like.probabilities) - 1) < 1e-5
    assert size.type == "score" and 0 <= size.score <= 1
    assert [(p.value, p.label) for p in size.probabilities] == [(0, "small"), (1, "large")]
    usage = found.usage
    assert usage.output_tokens == 0 and usage.input_tokens == usage.total_tokens
    assert usage.input_tokens_details.cached_tokens > 0
    # The same as one of System One, with the placeholders that no text has.
    state = [
        {"role": "system", "content": "Judge <picture-1> it."},
        {"role": "user", "content": 'Look:\n<picture\'-1>\n{"of": ["a", 1]}'},
        {"call": "look", "call_id": "c", "arguments": "{}"},
        {"call_id": "c", "output": "seen"},
    ]
    own = vlm.decide(
        state,
        {"red": {"type": "noul", "instructions": "It is red."}},
        assets={"<picture'-1>": PICTURE},
    )
    assert own["red"]["noul"] == red.probability


def test_four_hundred_questions(server: Live) -> None:
    questions = [{"type": "predicate", "instructions": f"Is {i} in it?"} for i in range(400)]
    body = {"model": "demo", "input": "a text", "questions": questions}
    status, found, _ = server.call("/v1/decisions", body)
    assert status == 200 and len(found["answers"]) == 400


def test_score_and_rerank(server: Live) -> None:
    words = ["a red circle", "a blue square", "the sea"]
    status, found, _ = server.call("/v1/score", {"text_1": "circles", "text_2": words})
    assert status == 200 and found["object"] == "list"
    scores = [one["score"] for one in found["data"]]
    assert [one["index"] for one in found["data"]] == [0, 1, 2] and len(set(scores)) == 3
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0
    status, one, _ = server.call("/v1/score", {"text_1": ["circles"], "text_2": words[1]})
    assert status == 200 and one["data"][0]["score"] == scores[1]
    body = {"query": "circles", "documents": words, "top_n": 2}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        status, found, _ = server.call(path, body)
        assert status == 200
        best = sorted(range(3), key=lambda i: -scores[i])[:2]
        assert [r["index"] for r in found["results"]] == best
        assert [r["relevance_score"] for r in found["results"]] == [scores[i] for i in best]
        assert found["results"][0]["document"] == {"text": words[best[0]]}


def test_pictures_are_ranked_and_remembered_for_the_next_query(server: Live) -> None:
    def page(image: Any) -> dict[str, Any]:
        return {"content": [{"type": "image_url", "image_url": {"url": uri(image)}}]}

    documents = [page(scene(5)), page(scene(6)), "a text"]
    more = {"documents": documents, "keepsight": {"report": True}}
    status, first, _ = server.call("/v1/rerank", {"query": "Where is the ring?", **more})
    assert status == 200, first
    status, second, _ = server.call("/v1/rerank", {"query": "And a green star?", **more})
    reports = [one["keepsight"]["report"] for one in (first, second)]
    assert [report["images_encoded"] for report in reports] == [2, 0]
    assert reports[1]["computed_tokens"] < reports[0]["computed_tokens"] - 30
    assert {r["relevance_score"] for r in first["results"]}.isdisjoint(
        {r["relevance_score"] for r in second["results"]}
    )


# -- completions -----------------------------------------------------------------------------------


def stock_chances(vlm: ks.VLM, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return vlm.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_completions_as_a_harness_asks(server: Live, vlm: ks.VLM) -> None:
    """As lm-eval: token ids, one token behind them, and the chances of all that was sent."""
    tokenizer = vlm.processor.tokenizer
    context = tokenizer("The picture shows a large red square. " * 4)["input_ids"]
    several = [[*context, *tokenizer(text)["input_ids"]] for text in (" circle", " ring", " star")]
    body = {"model": "demo", "prompt": several, "temperature": 0, "max_tokens": 1, "seed": 1234}
    body |= {"logprobs": 1, "echo": True}
    status, found, _ = server.call("/v1/completions", body)
    assert status == 200, found
    for ids, choice in zip(several, found["choices"], strict=True):
        chances = stock_chances(vlm, ids)
        scored = choice["logprobs"]
        own = scored["token_logprobs"]
        assert own[0] is None and len(own) == len(ids) + 1
        for place, token in enumerate(ids[1:]):
            assert abs(own[place + 1] - float(chances[place, token])) < 1e-3
            greedy = own[place + 1] == max(scored["top_logprobs"][place + 1].values())
            assert greedy == (int(chances[place].argmax()) == token)
        assert abs(own[-1] - float(chances[-1].max())) < 1e-3
        assert choice["text"].startswith(tokenizer.decode(ids))
        assert choice["finish_reason"] in ("length", "stop")
        assert scored["text_offset"][0] == 0
    assert found["usage"]["prompt_tokens"] == sum(map(len, several))
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(context)
    nothing = {**body, "max_tokens": 0, "prompt": several[0]}
    status, found, _ = server.call("/v1/completions", nothing)
    scored = found["choices"][0]["logprobs"]
    assert status == 200 and len(scored["token_logprobs"]) == len(several[0])


def test_completions_of_a_given_form(server: Live) -> None:
    asked = {"prompt": ["It is", "Not"], "max_tokens": 12, "guided_choice": ["crimson", "azure"]}
    status, found, _ = server.call("/v1/completions", asked)
    assert status == 200
    assert {choice["text"] for choice in found["choices"]} <= {"crimson", "azure"}


def test_completions_of_the_openai_client(server: Live, vlm: ks.VLM) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    prompts = ["The picture shows", "What color is the"]
    found = client.completions.create(
        model="demo", prompt=prompts, max_tokens=5, temperature=0, logprobs=2, stop=["zzz"], n=1
    )
    for prompt, choice in zip(prompts, found.choices, strict=True):
        ids = vlm.processor.tokenizer(prompt, return_tensors="pt")
        own = vlm.generate(ids["input_ids"], max_new_tokens=5, do_sample=False)
        new = own[0, ids["input_ids"].shape[1] :]
        assert choice.text == vlm.processor.tokenizer.decode(new, skip_special_tokens=True)
        assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None
        assert len(choice.logprobs.token_logprobs or []) == len(new)
        assert all(len(top) in (1, 2, 3) for top in choice.logprobs.top_logprobs)
    assert found.usage is not None and found.usage.completion_tokens > 0


def test_tokens_and_texts(server: Live, vlm: ks.VLM) -> None:
    text = "What is in <|im_end|> it?"
    status, found, _ = server.call("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200 and found["tokens"] == vlm.processor.tokenizer(text)["input_ids"]
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] > 0
    status, back, _ = server.call("/detokenize", {"tokens": found["tokens"]})
    assert status == 200 and back == {"prompt": text}
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": uri(PICTURE)}}]
    parts.append({"type": "text", "text": "What?"})
    body = {"messages": [{"role": "user", "content": parts}]}
    status, found, _ = server.call("/tokenize", body)
    parts[0] = {"type": "image", "image": PICTURE}
    messages = [{"role": "user", "content": parts}]
    assert status == 200 and found["tokens"] == vlm.render(messages).ids.tolist()


def test_one_who_hangs_up_is_let_go(server: Live, vlm: ks.VLM) -> None:
    questions = [{"type": "predicate", "instructions": f"Or {i}? " * 30} for i in range(400)]
    engine, together = vlm.runtime.engine, server.service.together
    with server.sending("/v1/decisions", {"input": "x", "questions": questions}):
        until(lambda: engine.busy)
    until(lambda: not engine.busy and not together.stats()["in_flight"])
    assert server.call("/v1/systemone", system_one(1))[0] == 200
    vlm.runtime.check()
