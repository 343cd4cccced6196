"""Measure the demo models: how many answers in fresh conversations are exactly right?

Plain stock Transformers, greedy decoding, one conversation at a time. Two controls tell whether
the answers come from the pictures: with every picture blanked, and with the pictures of a
conversation in the opposite order, the share of right answers must drop.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from questions import Message, conversation
from tiny import HERE, KINDS, MODELS
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from keepsight.demo.scene import Scene

MOST_PICTURES = 4
IMAGE = "<|image_pad|>"
Pictures = list[Image.Image]

# A question is told by the first of these words in it.
SIGNS = {
    "compare": ("Compare", "What is different"),
    "which": ("Which picture",),
    "list": ("List",),
    "count": ("How many",),
    "size": ("How big",),
    "color": ("What color", "Which color"),
    "shape": ("What shape", "Which shape"),
    "where": ("Where",),
    "background": ("What is the background",),
    "talk": ("Hello", "Hi", "What can you", "Who are"),
    "describe": ("Describe", "What is in", "What do you see"),
}


class Reader:
    """A model with its tokenizer and its picture processor."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
        self.words = AutoTokenizer.from_pretrained(folder)
        self.images = AutoImageProcessor.from_pretrained(folder, backend="pil")

    @torch.inference_mode()
    def reply(self, messages: list[dict[str, Any]], pictures: Pictures) -> str:
        """What the model says next."""
        text = self.words.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        seen = self.images(images=pictures, return_tensors="pt") if pictures else {}
        counts = [int(grid.prod()) // 4 for grid in seen.get("image_grid_thw", ())]
        first, *rest = text.split(IMAGE)
        text = first + "".join(IMAGE * n + part for n, part in zip(counts, rest, strict=True))
        inputs = self.words(text, return_tensors="pt", add_special_tokens=False)
        if pictures:
            is_image = inputs["input_ids"] == self.model.config.image_token_id
            inputs["mm_token_type_ids"] = is_image.int()
        out = self.model.generate(**inputs, **seen, max_new_tokens=80, do_sample=False)
        answer = out[0, inputs["input_ids"].shape[1] :]
        return self.words.decode(answer, skip_special_tokens=True).strip()


def kind_of(question: str) -> str:
    """What kind of question it is, told by how it starts."""
    for kind, signs in SIGNS.items():
        if question.startswith(signs):
            return kind
    raise ValueError(f"no such question: {question}")


def turns(messages: list[Message]) -> Iterator[tuple[list[dict[str, Any]], list[Scene], str, str]]:
    """Every point of a conversation where the model must speak.

    Gives the chat so far, its pictures, the question and the right answer. Earlier answers in the
    chat are the right ones, so that one mistake is counted once.
    """
    chat: list[dict[str, Any]] = []
    scenes: list[Scene] = []
    question = ""
    for role, content in messages:
        texts = [part for part in content if isinstance(part, str)]
        if role == "assistant":
            yield chat, scenes, question, texts[0]
        else:
            question = texts[0]
        scenes = scenes + [part for part in content if isinstance(part, Scene)]
        chat = [*chat, {"role": role, "content": [_part(part) for part in content]}]


def ask(
    reader: Reader,
    chats: list[list[Message]],
    show: Callable[[list[Scene]], Pictures],
    mistakes: int = 0,
) -> tuple[Counter[str], Counter[str]]:
    """Put every question to the model; count by kind what was asked and what was right."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for messages in chats:
        for chat, scenes, question, answer in turns(messages):
            kind = kind_of(question)
            said = reader.reply(chat, show(scenes))
            asked[kind] += 1
            right[kind] += said == answer
            if said != answer and asked.total() - right.total() <= mistakes:
                print(f"  {kind}: {question} | right: {answer} | said: {said}", flush=True)
    return asked, right


def drawn(scenes: list[Scene]) -> Pictures:
    """The pictures as they are."""
    return [scene.draw() for scene in scenes]


def blanked(scenes: list[Scene]) -> Pictures:
    """Control: plain gray in place of every picture."""
    return [Image.new("RGB", (scene.width, scene.height), (128, 128, 128)) for scene in scenes]


def swapped(scenes: list[Scene]) -> Pictures:
    """Control: the pictures in the opposite order."""
    return drawn(scenes[::-1])


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of one model in one number format."""
    reader = Reader(folder, getattr(torch, options.dtype))
    rng = random.Random(options.seed)
    chats = [conversation(rng, MOST_PICTURES) for _ in range(options.conversations)]
    start = time.monotonic()
    asked, right = ask(reader, chats, drawn, options.mistakes)
    seconds = time.monotonic() - start
    some = chats[: options.controls]
    return {
        "conversations": len(chats),
        "seed": options.seed,
        "answers": asked.total(),
        "exact": right.total(),
        "share": round(right.total() / asked.total(), 4),
        "kinds": {kind: [right[kind], asked[kind]] for kind in SIGNS if asked[kind]},
        "controls": {
            "conversations": len(some),
            "blanked": _share(reader, some, blanked),
            "swapped": _share(reader, some, swapped),
        },
        "seconds": round(seconds),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def table(results: dict[str, Any]) -> str:
    """The results as a table of Markdown, one column for each model and number format."""
    runs = {f"{name} {dtype}": run for name, by in results.items() for dtype, run in by.items()}
    lines = ["| right answers | " + " | ".join(runs) + " |", "|---" * (len(runs) + 1) + "|"]
    for kind in SIGNS:
        cells = (run["kinds"].get(kind, [0, 0]) for run in runs.values())
        lines.append(f"| {kind} | " + " | ".join(f"{a} of {b}" for a, b in cells) + " |")
    cells = (f"{run['exact']} of {run['answers']}" for run in runs.values())
    lines.append("| all | " + " | ".join(cells) + " |")
    lines.append("| share | " + " | ".join(f"{r['share']:.1%}" for r in runs.values()) + " |")
    for name in ("blanked", "swapped"):
        shares = (f"{run['controls'][name]:.1%}" for run in runs.values())
        lines.append(f"| share, pictures {name} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def with_table(text: str, new: str) -> str:
    """A page with the table between its two marks replaced, so that no number in it is typed."""
    start, end = "<!-- measured -->\n", "\n<!-- /measured -->"
    before, _, rest = text.partition(start)
    _, found, after = rest.partition(end)
    return before + start + new + end + after if found else text


def main() -> None:
    """Measure, print a table and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="folder or name; default: both")
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--controls", type=int, default=60, help="conversations for the controls")
    parser.add_argument("--seed", type=int, default=20_260)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--mistakes", type=int, default=10, help="how many wrong answers to show")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    for model in options.model or KINDS:
        folder = MODELS / model if model in KINDS else Path(model)
        found = measure(folder, options)
        _print(folder.name, options.dtype, found)
        _keep(options.results, folder.name, options.dtype, found)


def _part(part: "str | Scene") -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def _share(
    reader: Reader, chats: list[list[Message]], show: Callable[[list[Scene]], Pictures]
) -> float:
    asked, right = ask(reader, chats, show)
    return round(right.total() / max(1, asked.total()), 4)


def _print(name: str, dtype: str, found: dict[str, Any]) -> None:
    print(f"{name} in {dtype}, {found['conversations']} conversations")
    for kind, (right, asked) in found["kinds"].items():
        print(f"  {kind:<12}{right:>5} of {asked:<5}{right / asked:8.1%}")
    print(f"  {'all':<12}{found['exact']:>5} of {found['answers']:<5}{found['share']:8.1%}")
    for control in ("blanked", "swapped"):
        print(f"  pictures {control}: {found['controls'][control]:.1%}", flush=True)


def _keep(path: Path, name: str, dtype: str, found: dict[str, Any]) -> None:
    results = json.loads(path.read_text()) if path.exists() else {}
    results.setdefault(name, {})[dtype] = found
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    readme = path.with_name("README.md")
    if readme.exists():
        readme.write_text(with_table(readme.read_text(), table(results)))


if __name__ == "__main__":
    main()
