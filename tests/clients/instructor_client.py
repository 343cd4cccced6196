"""instructor: answers as pydantic models, by tools and by JSON schemas."""

from __future__ import annotations

import instructor
import openai
from common import ASKED, URL, check
from shape import Shape

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=mode)
    found = client.chat.completions.create(
        model="demo", messages=[ASKED], response_model=Shape, max_tokens=200, max_retries=0
    )
    check(isinstance(found, Shape), f"{mode.name}: a model")
