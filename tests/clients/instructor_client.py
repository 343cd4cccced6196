"""instructor: answers as pydantic models, by tools and by JSON schemas."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from common import PICTURE, QUESTION, URL, check
from pydantic import BaseModel, Field


class Shape(BaseModel):
    """A shape in a picture."""

    colour: Literal["red", "green", "blue"]
    sides: int = Field(ge=0, le=9)


asked = {
    "role": "user",
    "content": [
        {"type": "image_url", "image_url": {"url": PICTURE}},
        {"type": "text", "text": QUESTION},
    ],
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=mode)
    found = client.chat.completions.create(
        model="demo", messages=[asked], response_model=Shape, max_tokens=200, max_retries=0
    )
    check(isinstance(found, Shape), f"{mode.name}: a model")
