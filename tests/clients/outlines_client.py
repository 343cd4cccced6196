"""outlines with OpenAI's client, and with vLLM's fields: types, choices, expressions."""

from __future__ import annotations

import base64
import io
from typing import Literal

import openai
import outlines
from common import PICTURE, QUESTION, URL, check
from outlines.inputs import Chat, Image
from outlines.types import Regex
from PIL import Image as Pictures
from shape import Shape

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
picture = Pictures.open(io.BytesIO(base64.b64decode(PICTURE.partition(",")[2])))
asked = Chat([{"role": "user", "content": [QUESTION, Image(picture)]}])

model = outlines.from_openai(client, "demo")
Shape.model_validate_json(model(asked, Shape, max_tokens=200))
check(True, "OpenAI: a type")
model = outlines.from_vllm(client, "demo")
Shape.model_validate_json(model(asked, Shape, max_tokens=200))
check(model(asked, Literal["ring", "star"], max_tokens=20) in ("ring", "star"), "vLLM: a choice")
check(len(model(asked, Regex("[ab]{3}"), max_tokens=20)) == 3, "vLLM: an expression")
