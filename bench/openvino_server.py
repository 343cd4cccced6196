"""OpenVINO GenAI behind the least of an OpenAI-compatible API, for the comparison of servers.

OpenVINO GenAI is a library, so it is given a door here: this file is run as a script in the
environment that OpenVINO GenAI is installed in, with nothing else than that, NumPy and Pillow. It
uses continuous batching with prefix caching, the setting in which the library keeps what it knows.
One request is answered at a time. A token's text is sent as soon as the token exists.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

Event = dict[str, Any]


class Model:
    """A pipeline, and conversations made into what it takes."""

    def __init__(self, folder: str, threads: int, precision: str) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
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

    def answer(self, body: Event, tell: Any) -> Event:
        """Say an answer piece by piece; the usage comes back."""
        images: list[Any] = []
        prompt = "".join(self._message(message, images) for message in body["messages"])
        settings = self._pipeline.get_generation_config()
        settings.max_new_tokens, settings.do_sample = body["max_tokens"], False
        settings.apply_chat_template = False  # it is rendered here
        streamer = self._streamer(tell)
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
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        text = ""
        for part in parts:
            if part["type"] == "text":
                text += part["text"]
            else:
                text += f"<ov_genai_image_{len(images)}>"
                images.append(self._picture(part["image_url"]["url"]))
        return f"<|im_start|>{message['role']}\n{text}<|im_end|>\n"

    def _picture(self, uri: str) -> Any:
        numpy: Any = importlib.import_module("numpy")
        pillow: Any = importlib.import_module("PIL.Image")
        data = io.BytesIO(base64.b64decode(uri.partition(",")[2]))
        return self._openvino.Tensor(numpy.asarray(pillow.open(data).convert("RGB"))[None])

    def _streamer(self, tell: Any) -> Any:
        """The library's own streamer holds three tokens back; this one only halves of letters."""
        genai, tokenizer = self._genai, self._pipeline.get_tokenizer()
        base: Any = genai.StreamerBase

        class AtOnce(base):
            def __init__(self) -> None:
                super().__init__()
                self.tokens: list[int] = []
                self.said = ""

            def write(self, token: Any) -> Any:
                self.tokens += token if isinstance(token, list) else [token]
                text = tokenizer.decode(self.tokens)
                if not text.endswith("\ufffd"):
                    tell(text[len(self.said) :])
                    self.said = text
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                text = tokenizer.decode(self.tokens)
                tell(text[len(self.said) :])

        return AtOnce()


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


def main(argv: list[str]) -> None:
    """`openvino_server.py FOLDER PORT THREADS PRECISION`."""
    folder, port, threads, precision = argv
    Door.model = Model(folder, int(threads), precision)
    HTTPServer(("127.0.0.1", int(port)), Door).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
