"""The loop of an agent that looks at a screen: each step appends one screenshot and asks.

    python examples/agent.py

The screen is drawn here, so the example runs anywhere; put your own `screenshot` and `act` in its
place. With each step the conversation grows by one picture, and the server computes no more than
that picture and the new words: watch the remembered tokens grow with the prompt. Needs: pip install
openai pillow.
"""

from __future__ import annotations

import base64
import io
import os

from openai import OpenAI
from PIL import Image, ImageDraw

STEPS = 4
COLOURS = ("red", "green", "blue", "yellow")


def screenshot(step: int) -> Image.Image:
    """What the screen shows now."""
    screen = Image.new("RGB", (96, 96), "white")
    corner = 8 + 12 * step
    box = (corner, corner, corner + 36, corner + 36)
    ImageDraw.Draw(screen).ellipse(box, fill=COLOURS[step % len(COLOURS)])
    return screen


def act(answer: str) -> None:
    """What the agent does about it."""
    print(f"  the model says: {answer}")


def as_part(image: Image.Image) -> dict:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


client = OpenAI(
    base_url=os.environ.get("KEEPSIGHT_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("KEEPSIGHT_KEY", "none"),
)
model = client.models.list().data[0].id
messages: list = [{"role": "system", "content": "You look at a screen and say what is on it."}]
for step in range(STEPS):
    words = {"type": "text", "text": f"What is in picture {step + 1}?"}
    messages.append({"role": "user", "content": [as_part(screenshot(step)), words]})
    reply = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
    usage = reply.usage
    print(
        f"step {step + 1}: {usage.prompt_tokens} tokens, "
        f"{usage.prompt_tokens_details.cached_tokens} remembered, "
        f"{usage.images} images, {usage.images_encoded} encoded"
    )
    act(reply.choices[0].message.content)
    messages.append(reply.choices[0].message)
