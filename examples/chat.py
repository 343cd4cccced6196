"""Two questions about one picture, with OpenAI's Python client: pip install openai.

    python examples/chat.py examples/picture.png

The second answer says how many tokens of its prompt were remembered, and the picture is sent as
before: nothing about the client changes.
"""

from __future__ import annotations

import base64
import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("KEEPSIGHT_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("KEEPSIGHT_KEY", "none"),
)
model = client.models.list().data[0].id

with open(sys.argv[1], "rb") as file:
    url = "data:image/png;base64," + base64.b64encode(file.read()).decode()
picture = {"type": "image_url", "image_url": {"url": url}}
question = {"type": "text", "text": "What is in the picture?"}
messages: list = [{"role": "user", "content": [picture, question]}]

stream = client.chat.completions.create(
    model=model, messages=messages, stream=True, stream_options={"include_usage": True}
)
answer = ""
for chunk in stream:
    if chunk.choices:
        answer += chunk.choices[0].delta.content or ""
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n[{chunk.usage.prompt_tokens} tokens, {chunk.usage.images_encoded} encoded]")

messages += [
    {"role": "assistant", "content": answer},
    {"role": "user", "content": "What colour is it?"},
]
reply = client.chat.completions.create(
    model=model, messages=messages, extra_body={"keepsight": {"report": True}}
)
print(reply.choices[0].message.content)
usage = reply.usage
print(f"[{usage.prompt_tokens} tokens, {usage.prompt_tokens_details.cached_tokens} remembered]")
for image in reply.keepsight["report"]["images"]:
    print(f"[image {image['image']}: {image['status']}, {image['reason']}]")
