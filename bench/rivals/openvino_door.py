"""OpenVINO GenAI behind the least of an OpenAI-compatible API, for the comparison of servers.

This file is run as a script in the environment that OpenVINO GenAI is installed in, with nothing
else than that, NumPy and Pillow. It uses continuous batching with prefix caching, the setting in
which the library keeps what it knows. One request is answered at a time. A token's text is sent as
soon as the token exists.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

Event = dict[str, Any]


class Model:
    """A pipeline, and conversations made into what it takes."""

    def __init__(self, folder: str, threads: int, precision: str) -> None:
        names = ("openvino_genai", "openvino", "numpy", "PIL.Image")
        self._genai, self._openvino, self._numpy, self._pillow = map(importlib.import_module, names)
        plan = self._genai.SchedulerConfig()
        plan.cache_size, plan.enable_prefix_caching, plan.max_num_batched_tokens = 2, True, 8192
        self._pipeline = self._genai.VLMPipeline(
            folder,
            "CPU",
            scheduler_config=plan,
            INFERENCE_NUM_THREADS=threads,
            INFERENCE_PRECISION_HINT=precision,
            KV_CACHE_PRECISION=precision,
        )

    def answer(self, body: Event, tell: Callable[[str], None]) -> Event:
        """Say an answer piece by piece; the usage comes back."""
        images: list[Any] = []
        prompt = "".join(self._message(message, images) for message in body["messages"])
        settings = self._pipeline.get_generation_config()
        settings.max_new_tokens, settings.do_sample = body["max_tokens"], False
        settings.apply_chat_template = False  # it is rendered here
        tokenizer, tokens, said = self._pipeline.get_tokenizer(), list[int](), ""

        def hear(token: Any) -> Any:
            """The library's own streamer holds three tokens back; this one halves of letters."""
            nonlocal said
            tokens.extend(token if isinstance(token, list) else [token])
            text = tokenizer.decode(tokens)
            if not text.endswith("\ufffd"):
                tell(text[len(said) :])
                said = text
            return self._genai.StreamingStatus.RUNNING

        base: Any = self._genai.StreamerBase
        own = {"write": lambda _, token: hear(token), "end": lambda _: hear([])}
        streamer = type("AtOnce", (base,), own)()
        done = self._pipeline.generate(
            f"{prompt}<|im_start|>assistant\n",
            images=images,
            generation_config=settings,
            streamer=streamer,
        )
        metrics = done.perf_metrics
        return {
            "prompt_tokens": metrics.get_num_input_tokens(),
            "completion_tokens": metrics.get_num_generated_tokens(),
        }

    def _message(self, message: Event, images: list[Any]) -> str:
        """One message as Qwen's template writes it; its pictures are put beside."""
        parts = message["content"]
        text = parts if isinstance(parts, str) else ""
        for part in () if isinstance(parts, str) else parts:
            if part["type"] == "text":
                text += part["text"]
                continue
            text += f"<ov_genai_image_{len(images)}>"
            uri = part["image_url"]["url"]
            data = io.BytesIO(base64.b64decode(uri.partition(",")[2]))
            pixels = self._numpy.asarray(self._pillow.open(data).convert("RGB"))
            images.append(self._openvino.Tensor(pixels[None]))
        return f"<|im_start|>{message['role']}\n{text}<|im_end|>\n"


class Door(BaseHTTPRequestHandler):
    """`/health`, and `/v1/chat/completions` as a stream."""

    model: Model

    def do_GET(self) -> None:
        """It listens only once the model is loaded, so it is well."""
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        """One answer."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()

        def tell(text: str) -> None:
            if text:
                self._send({"choices": [{"index": 0, "delta": {"content": text}}]})

        try:
            self._send({"choices": [], "usage": self.model.answer(body, tell)})
        except RuntimeError as error:
            self._send({"error": str(error)})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: Event) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a line for each request would be timed too."""


if __name__ == "__main__":
    Door.model = Model(sys.argv[1], int(sys.argv[3]), sys.argv[4])
    HTTPServer(("127.0.0.1", int(sys.argv[2])), Door).serve_forever()
