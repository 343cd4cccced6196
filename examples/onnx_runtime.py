"""An exported model without Keepsight, Transformers or torch: its graphs, driven by hand.

    keepsight export demo --to demo-onnx
    keepsight encode picture.png --files --to packages --model demo-onnx
    python examples/onnx_runtime.py demo-onnx packages/*.sight "Describe the picture."

It needs onnxruntime, numpy, safetensors and tokenizers, and shows how the graphs fit together: the
embedding puts features in the places of a picture, the decoder takes explicit positions and appends
to buffers of keys and values, the head makes logits. Features come from a package (`.sight`), a
safetensors file. The tower's graph would make them from patches; docs/exporting.md has its inputs.
What is here is the smallest way that works, for exports of the Qwen-VL kind that append in place.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # or it reports its use, from its import on

import numpy as np
import onnxruntime
from safetensors import safe_open
from tokenizers import Tokenizer

ROOM = 512  # tokens that the buffers of keys and values hold
MOST = 64  # tokens of an answer
# The demo's chat template, written out; yours is in chat_template.jinja of the export.
PROMPT = (
    "<|im_start|>user\nPicture 1: <|vision_start|>{picture}<|vision_end|>{question}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
HIDDEN = np.finfo(np.float32).min
NOTHING = np.zeros(1)  # stands for arrays without elements, which have no place
TYPES = {"float32": 1, "int32": 6, "int64": 7, "bool": 9}  # as ONNX numbers them


class Graph:
    """One graph, run on numpy arrays. Outputs that are named in `into` are written there."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.shapes = {spec.name: spec.shape for spec in self.session.get_inputs()}
        self.outputs = [spec.name for spec in self.session.get_outputs()]

    def __call__(self, into: dict | None = None, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        binding, into = self.session.io_binding(), into or {}
        arrays = {name: np.ascontiguousarray(arrays[name]) for name in self.shapes}
        for name, array in arrays.items():
            place = array.ctypes.data if array.size else NOTHING.ctypes.data
            binding.bind_input(name, "cpu", 0, TYPES[str(array.dtype)], array.shape, place)
        for name in self.outputs:
            if name in into:
                out = into[name]
                kind = TYPES[str(out.dtype)]
                binding.bind_output(name, "cpu", 0, kind, out.shape, out.ctypes.data)
            else:
                binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        found = dict(zip(self.outputs, binding.get_outputs(), strict=True))
        return {n: into[n] if n in into else value.numpy() for n, value in found.items()}


class Model:
    """The graphs of an export, and what one conversation remembers."""

    def __init__(self, folder: Path) -> None:
        record = json.loads((folder / "keepsight.json").read_text())
        if not record["appends"]:
            sys.exit("this export joins keys and values; the example shows one that appends")
        parts = {name: Graph(folder / f"graphs/{name}.onnx") for name in ("embedding", "head")}
        self.embedding, self.head = parts["embedding"], parts["head"]
        self.decoder = Graph(folder / "graphs/decoder.onnx")
        self.config = json.loads((folder / "config.json").read_text())
        self.levels = [name for name in self.decoder.shapes if name.startswith("deepstack_")]
        # One buffer for each state, longer than what it holds.
        self.states = {
            name: np.zeros((1, shape[1], ROOM, shape[3]), np.float32)
            for name, shape in self.decoder.shapes.items()
            if name.startswith(("k_", "v_"))
        }
        self.length = 0  # tokens that the buffers hold

    def step(
        self, ids: np.ndarray, positions: np.ndarray, features: dict[str, np.ndarray] | None = None
    ) -> int:
        """Read some more tokens, with the features of their pictures; the likeliest next."""
        features = features or {}
        spots = ids == self.config["image_token_id"] if features else np.zeros(len(ids), bool)
        width = self.config["text_config"]["hidden_size"]
        rows = features.get("features", np.zeros((0, width), np.float32))
        embeds = self.embedding(input_ids=ids[None], features=rows, spots=spots[None])
        total = self.length + len(ids)
        if total > ROOM:
            sys.exit(f"{total} tokens do not fit the {ROOM} of the buffers")
        places = np.arange(self.length, total)
        # Features for early layers: a row for each token, zeros where no picture is.
        deep = {name: np.zeros((1, len(ids), width), np.float32) for name in self.levels}
        for name, dense in deep.items():
            if features:
                dense[0, spots] = features[name.replace("_", ".")]
        found = self.decoder(
            # Old and new keys are one buffer: the graph appends in place.
            into={f"new_{name}": buffer for name, buffer in self.states.items()},
            inputs_embeds=embeds["inputs_embeds"],
            position_ids=positions[:, None],
            # What comes later is hidden, and what the buffers do not hold yet.
            bias=np.where(np.arange(ROOM) > places[:, None], HIDDEN, 0)[None, None],
            places=places[None],
            **deep,
            **self.states,
        )
        self.length = total
        logits = self.head(hidden=found["hidden"][:, -1:])["logits"]
        return int(logits[0, -1].argmax())


def positions_of(ids: np.ndarray, image: int, grid: tuple[int, int]) -> np.ndarray:
    """Four rows: the place in the text, and time, height and width as rope sees them.

    The tokens of a picture stand at one moment, in rows and columns; behind it counting goes on
    after its longer side.
    """
    first = int((ids == image).argmax())
    rows, columns = grid
    there = np.indices((rows, columns)).reshape(2, -1) + first
    rope = np.tile(np.arange(len(ids)), (3, 1))
    end = first + rows * columns
    rope[0, first:end] = first
    rope[1:, first:end] = there
    rope[:, end:] += first + max(rows, columns) - end
    return np.concatenate([np.arange(len(ids))[None], rope])


def answer(folder: Path, package: Path, question: str) -> list[int]:
    """The tokens of a greedy answer to a question about one picture."""
    with safe_open(package, "np") as file:
        features = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        record = json.loads(file.metadata()["keepsight"])
    model, tokenizer = Model(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    image = model.config["image_token_id"]
    picture = tokenizer.id_to_token(image) * record["tokens"]
    text = PROMPT.format(picture=picture, question=question)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids)
    merge = model.config["vision_config"]["spatial_merge_size"]
    _, height, width = record["grid"]["image_grid_thw"][0]
    positions = positions_of(ids, image, (height // merge, width // merge))
    # Prefill in two chunks: up to the picture's end, and the question.
    cut = int(np.flatnonzero(ids == image)[-1]) + 1
    model.step(ids[:cut], positions[:, :cut], features)
    found = [model.step(ids[cut:], positions[:, cut:])]
    generation = json.loads((folder / "generation_config.json").read_text())
    ends = np.atleast_1d(generation["eos_token_id"])
    after = positions[:, -1:]  # each token of the answer stands one behind the last
    while found[-1] not in ends and len(found) < MOST:
        after = after + 1
        found.append(model.step(np.array(found[-1:]), after))
    return found


if __name__ == "__main__":
    home = Path(sys.argv[1])
    said = answer(home, Path(sys.argv[2]), sys.argv[3])
    print(Tokenizer.from_file(str(home / "tokenizer.json")).decode(said))
