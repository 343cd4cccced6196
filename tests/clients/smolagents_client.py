"""smolagents: an agent with a tool, steps with pictures, streams."""

from __future__ import annotations

import json
import os

from common import QUESTION, SCHEMA, URL, check
from PIL import Image
from smolagents import CodeAgent, OpenAIServerModel, tool

model = OpenAIServerModel(
    model_id="demo", api_base=URL, api_key="none", client_kwargs={"max_retries": 0}, max_tokens=12
)


@tool
def look(where: str) -> str:
    """Look closer.

    Args:
        where: At what.
    """
    return "A ring."


image = Image.open(os.environ["KEEPSIGHT_PICTURE"]).convert("RGB")
parts = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
reply = model([{"role": "user", "content": parts}])
check(reply.token_usage.input_tokens > 0, "usage")
reply = model([{"role": "user", "content": QUESTION}], stop_sequences=["Observation:"])
pieces = list(model.generate_stream([{"role": "user", "content": parts}]))
check(any(piece.token_usage for piece in pieces), "usage of a stream")
agent = CodeAgent(tools=[look], model=model, max_steps=2, verbosity_level=0)
agent.run(QUESTION, images=[image])
steps = [step for step in agent.memory.steps if getattr(step, "model_output", None)]
check(steps, "an agent of code")


@tool
def mark(colour: str) -> str:
    """Mark a shape.

    Args:
        colour: Its colour.
    """
    return colour


mark.inputs["colour"]["enum"] = ["red", "green", "blue"]
schema = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}}
model.kwargs["max_tokens"] = 200
reply = model([{"role": "user", "content": parts}], response_format=schema)
check(json.loads(reply.content)["colour"] in ("red", "green", "blue"), "a structured answer")
reply = model([{"role": "user", "content": parts}], tools_to_call_from=[mark])
check(reply.tool_calls[0].function.name == "mark", "a forced call")
