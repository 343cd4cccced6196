"""Packages over HTTP in place of pictures: uploaded, or in the request itself."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from support.server_harness import Live, live, scene, uri

import keepsight as ks


@pytest.fixture(scope="module")
def sight(demo_parts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path: Path = tmp_path_factory.mktemp("made") / "a.sight"
    with ks.wrap(*demo_parts["demo"]) as vlm:
        vlm.encode(scene(1)).save(path)
    return path.read_bytes()


def asked(*pieces: Any) -> dict[str, Any]:
    content = [*pieces, {"type": "text", "text": "What shape is it?"}]
    messages = [{"role": "user", "content": content}]
    return {"model": "demo", "messages": messages, "max_tokens": 6, "temperature": 0}


def embeds(data: Any) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": data}


def text_of(answer: tuple[int, Any]) -> str:
    assert answer[0] == 200, answer
    text: str = answer[1]["choices"][0]["message"]["content"]
    return text


def test_features_answer_as_the_picture(server: Live, sight: bytes) -> None:
    encoded = server.service.vlm.stats()["features"]["encoded"]
    b64 = base64.b64encode(sight).decode()
    ways = (embeds(b64), embeds(f"data:application/octet-stream;base64,{b64}"))
    texts = [text_of(server.chat(asked(part))[:2]) for part in ways]
    file = {"type": "file", "file": {"file_data": f"data:;base64,{b64}"}}
    sent = server.service.files.put("", sight, "a.sight", "vision", None, None)
    for part in (file, embeds(sent.id), {"type": "file", "file": {"file_id": sent.id}}):
        texts.append(text_of(server.chat(asked(part))[:2]))
    assert server.service.vlm.stats()["features"]["encoded"] == encoded
    picture = {"type": "image_url", "image_url": {"url": uri(scene(1))}}
    assert {*texts} == {text_of(server.chat(asked(picture))[:2])}


def test_what_is_refused(server: Live, sight: bytes) -> None:
    tensor = base64.b64encode(b"\x80\x02ctorch").decode()
    wrong = {
        "no identity": embeds({"image_embeds": tensor, "image_grid_thw": tensor}),
        "a tensor alone": embeds(uri(scene(1))),
        "the file": embeds(base64.b64encode(sight[:-7]).decode()),
        "flipped": embeds(base64.b64encode(sight[:-1] + bytes([sight[-1] ^ 1])).decode()),
    }
    for words, part in wrong.items():
        status, body = server.chat(asked(part))[:2]
        assert status == 400 and body["error"]["param"].startswith("messages[0].content[0]"), body
        assert words in body["error"]["message"] or words == "flipped"


def test_another_models_are_refused_by_field_and_values(
    demo_parts: dict[str, Any], sight: bytes
) -> None:
    with ks.wrap(*demo_parts["demo-hybrid"]) as vlm, live(vlm) as running:
        part = embeds(base64.b64encode(sight).decode())
        status, body = running.chat(asked(part))[:2]
        assert status == 400 and body["error"]["code"] == "invalid_package"
        assert "vision weights" in body["error"]["message"]
        assert vlm.runtime.weights.vision in body["error"]["message"]
