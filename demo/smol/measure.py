# ruff: noqa: E501  lists of phrases
"""How well does `demo-smol` see and speak? Greedy answers to held-out pictures, right to the letter.

    python -m demo.smol.measure ASSETS    # the folder of `demo.smol.assets`; ten minutes of one core

Writes `results.json`, and the table of it into `README.md`. The pictures have words, and one font,
that were never trained on.
"""

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

import keepsight as ks
from demo.smol.ask import Asker, Turn
from demo.smol.draw import Painter, Picture
from keepsight.models import demo_smol as smol
from keepsight.models import loading

HERE = Path(__file__).parent
Case = tuple[list[Picture], str, str]
Ask = Callable[[Picture, str], Turn | None]
PLAIN = (
    "What is the capital of Italy?", "How many days are in a week?", "What color is the sky on a clear day?", "Who wrote Hamlet?",
    "What is two plus two?", "Name a fruit that is yellow.", "What do bees make?", "What is the opposite of hot?", "Which planet do we live on?",
    "What is ice made of?", "How many legs does a spider have?", "What is the largest ocean?", "What language is spoken in Brazil?",
    "What is the boiling point of water in Celsius?", "Give me a word that rhymes with cat.", "What is the first month of the year?",
    "How do I make a cup of tea?", "What is a synonym for happy?", "Who was the first person on the moon?", "What is the square root of nine?",
    "Translate hello into Spanish.", "What do plants need to grow?", "How can I sleep better at night?", "What is a noun?",
    "Why do leaves change color in autumn?", "What is the currency of Japan?", "How far is the moon from the earth?",
    "Write one sentence about a dog.", "What is a good name for a cat?", "How do airplanes fly?", "What is the fastest land animal?",
    "Suggest a title for a book about pirates.", "What should I pack for a day at the beach?", "How do I say no politely?",
    "What is the difference between a frog and a toad?", "Can you help me with my homework?", "What is your name?", "Hello, how are you?",
    "Thank you for your help.", "Tell me a joke.", "What is the meaning of the word brave?", "Which season comes after spring?",
    "How many minutes are in an hour?", "What is the tallest mountain in the world?", "Why is the sea salty?",
    "Give me an idea for dinner.", "What is a prime number?", "Who painted the Mona Lisa?", "What does a doctor do?", "How do I boil an egg?",
)  # fmt: skip


class Questions:
    """Draws pictures and asks about them, one kind of question at a time."""

    def __init__(self, assets: Path, seed: int) -> None:
        self.painter = Painter(assets, seed, test=True)
        self.r = self.painter.r
        self.asker = Asker(self.painter.emoji_names, self.r, self.painter.words)

    def about(self, pictures: list[Picture], asks: list[Ask]) -> Case | None:
        """A question about one of the pictures; none if it cannot be asked there."""
        k = self.r.randrange(len(pictures))
        turn = self.r.choice(asks)(pictures[k], self.asker.name(k, len(pictures)))
        return (pictures, self.asker.manner(turn[0]), turn[1]) if turn else None

    def scenes(self, count: int, each: int) -> Iterator[tuple[str, Case]]:
        """`each` questions of four kinds about the same `count` pictures."""
        a = self.asker
        pictures = [self.painter.shapes() for _ in range(count)]
        for name, asks in (
            ("attributes", [a.color_of, a.shape_of, a.size_of, a.background]),
            ("counts", [a.count_all, a.count_some]),
            ("places", [a.where, a.at_place]),
            ("comparisons", [a.compare, a.extreme]),
        ):
            for case in several(lambda asks=asks: self.about(pictures, asks), each):  # type: ignore[misc]
                yield f"{name}, {'1 picture' if count == 1 else '2 to 4 pictures'}", case

    def which(self, each: int) -> Iterator[Case]:
        pictures = [self.painter.any() for _ in range(4)]

        def one() -> Case | None:
            turn = self.asker.several(pictures)
            if turn is None or "more shapes" in turn[0]:
                return None
            asked = re.match(r"(Which|In which) (of the )?(picture|image)", turn[0])
            return (pictures, *turn) if asked else None

        return several(one, each)

    def line(self, sort: str) -> Case | None:
        picture = self.painter.texts()
        item, many = picture.items[0], len(picture.items)
        if many > 1 or item.name != sort or (sort == "word" and not 3 <= len(item.text) <= 8):
            return None
        return [picture], "What is written in the picture? Only the text.", item.text

    def emoji(self) -> Case | None:
        self.painter.start(calm=True)
        self.painter.put_emoji(self.r.randrange(len(self.painter.emoji)), [], 100, 220)
        return self.about([self.painter.done("things")], [self.asker.emoji_what])

    def bars(self) -> Iterator[tuple[str, Case]]:
        """Which bar is the tallest, and the value of one."""
        while True:
            picture = self.painter.bars()
            values = sorted(item.value for item in picture.items)
            if 3 <= len(values) <= 5 and values[-1] - values[-2] > picture.about["top"] * 0.03:
                break
        best = max(picture.items, key=lambda item: item.value)
        item = self.r.choice(picture.items)
        ask = f"What is the value of {item.text} in the picture? Answer with a number."
        yield (
            "bars: tallest",
            ([picture], "Which bar is the tallest? Answer in one word.", best.text),
        )
        yield "bars: value within 10 %", ([picture], ask, f"{item.value:g}")

    def decision(self) -> Case | None:
        picture = self.r.choice([self.painter.shapes, self.painter.emojis])()
        case = self.about([picture], [self.asker.is_there])
        return case if case and case[2] in ("Yes", "No") else None


def several(make: Callable[[], Case | None], count: int) -> Iterator[Case]:
    """So many different questions, or fewer where there are no more to ask."""
    asked: set[str] = set()
    for _ in range(200):
        case = make()
        if case and (len(case[0]) == 1 or case[1] not in asked):
            asked.add(case[1])
            yield case
            count -= 1
        if not count:
            return


def cases(q: Questions, each: int) -> Iterator[tuple[str, Case]]:
    for i in range(each):
        yield from q.scenes(1, 2)
        yield from (
            ("words of 3 to 8 letters", case) for case in several(lambda: q.line("word"), 1)
        )
        yield from (("emoji", case) for case in several(q.emoji, 3))
        yield from q.bars()
        if i % 2:
            yield from (("prices", case) for case in several(lambda: q.line("price"), 1))
            yield from q.scenes(2 + i // 2 % 3, 2)
            yield from (("which of four", case) for case in q.which(4))


def messages(pictures: list[Picture], question: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": p.image} for p in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def right(name: str, wanted: str, got: str) -> bool:
    if "value within" not in name:
        return got == wanted
    number = re.search(r"-?\d+(\.\d+)?", got)
    return number is not None and abs(float(number[0]) - float(wanted)) <= 0.1 * float(wanted)


def seen(vlm: ks.VLM, assets: Path, each: int, seed: int) -> Iterator[dict[str, Any]]:
    """What was found so far, after each answer."""
    found: dict[str, Any] = {}
    for name, (pictures, question, wanted) in cases(Questions(assets, seed), each):
        here = found.setdefault(name, {"right": 0, "of": 0, "share": 0.0, "wrong": []})
        got = vlm.chat(messages(pictures, question), max_new_tokens=40).text.strip()
        hit = right(name, wanted, got)
        here["right"] += hit
        here["of"] += 1
        here["share"] = round(here["right"] / here["of"], 3)
        if not hit:
            here["wrong"].append({"question": question, "wanted": wanted, "answer": got})
        yield found


@torch.inference_mode()
def decisions(vlm: ks.VLM, assets: Path, count: int, seed: int) -> dict[str, Any]:
    """Yes or no, by the probabilities of the two words; is what is 80 % sure right in 80 %?"""
    q = Questions(assets, seed)
    ids = [vlm.processor.tokenizer.encode(w, add_special_tokens=False)[0] for w in ("Yes", "No")]
    sure, hits = [], []
    for pictures, question, wanted in several(q.decision, count):
        said = messages(pictures, question)
        prompt = vlm.processor.apply_chat_template(said, add_generation_prompt=True)
        images = [p.image for p in pictures]
        inputs = vlm.processor(text=prompt, images=images, return_tensors="pt")
        yes = float(vlm.model(**inputs).logits[0, -1, ids].softmax(-1)[0])
        sure.append(max(yes, 1 - yes))
        hits.append((yes > 0.5) == (wanted == "Yes"))
    error = 0.0
    for low in range(5, 10):
        some = [
            i for i, s in enumerate(sure) if low / 10 <= s < (low + 1) / 10 or (low == 9 and s == 1)
        ]
        if some:
            gap = sum(hits[i] for i in some) / len(some) - sum(sure[i] for i in some) / len(some)
            error += abs(gap) * len(some) / count
    print(f"decisions: {sum(hits)} of {count}, calibration error {error:.3f}", flush=True)
    return {
        "right": sum(hits), "of": count, "share": round(sum(hits) / count, 3),
        "calibration_error": round(error, 3),
    }  # fmt: skip


def first_tokens(vlm: ks.VLM) -> dict[str, Any]:
    """Seconds to the first token of a first and a second question about one picture."""
    first, second = [], []
    for i in range(5):
        image = Image.new("RGB", (448, 448), "white")
        ImageDraw.Draw(image).ellipse((100 + i, 100, 300, 300), fill="red")
        picture = Picture(image, "shapes", [], "white", None)
        for seconds, question in (
            (first, "What color is the circle?"),
            (second, "Where is the circle?"),
        ):
            start = time.perf_counter()
            next(iter(vlm.stream(messages([picture], question), max_new_tokens=8)))
            seconds.append(time.perf_counter() - start)
    ratio = statistics.median(a / b for a, b in zip(first[1:], second[1:], strict=True))
    return {
        "first_s": round(statistics.median(first[1:]), 3), "second_s": round(statistics.median(second[1:]), 3),
        "ratio": round(ratio, 2),
    }  # fmt: skip


def plain(vlm: ks.VLM, tokens: int) -> dict[str, Any]:
    """Fifty questions without a picture, beside SmolLM2 without adapter and eyes."""
    model, processor = vlm.model, vlm.processor
    prompts = [
        processor.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True)
        for q in PLAIN
    ]
    inputs = processor.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")

    def answers() -> list[str]:
        out = model.generate(**inputs, max_new_tokens=tokens)
        rows = out[:, inputs["input_ids"].shape[1] :]
        found: list[str] = processor.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return found

    ours = answers()
    weights = smol.text_weights(smol.installed())
    rows = weights.pop("model.embed_tokens.weight")
    text = model.model.text_model
    text.load_state_dict({n.removeprefix("model."): w for n, w in weights.items()}, strict=False)
    with torch.no_grad():
        text.embed_tokens.weight[: len(rows)] = rows
    theirs = answers()
    pairs = list(zip(PLAIN, ours, theirs, strict=True))

    def overlap(a: str, b: str) -> float:
        x, y = a.split(), b.split()
        same = next(
            (i for i, (s, t) in enumerate(zip(x, y, strict=False)) if s != t), min(len(x), len(y))
        )
        return same / max(1, len(x), len(y))

    equal = sum(a == b for _, a, b in pairs)
    print(f"plain questions: {equal} of {len(PLAIN)} equal", flush=True)
    return {
        "equal": equal, "of": len(PLAIN), "tokens": tokens,
        "same_beginning": round(statistics.mean(overlap(a, b) for _, a, b in pairs), 3),
        "answers": [{"question": q, "demo-smol": a, "SmolLM2": b} for q, a, b in pairs],
    }  # fmt: skip


WANTED = {
    "attributes": 0.95, "counts": 0.95, "places": 0.95, "comparisons": 0.95, "which of four": 0.95,
    "words of 3 to 8 letters": 0.9, "prices": 0.9, "emoji": 0.9, "bars: tallest": 0.9,
    "bars: value within 10 %": 0.9,
}  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """What the README shows of `results.json`, also of a run that was stopped."""
    rows = ["| held out | wanted | reached | missed by |", "|---|---|---|---|"]

    def row(name: str, wanted: float, found: dict[str, Any]) -> str:
        gap = max(0.0, wanted - found["share"])
        reached = f"{found['share']:.1%} ({found['right']} of {found['of']})"
        return f"| {name} | {wanted:.0%} | {reached} | {f'{gap * 100:.0f} points' if gap else 'reached'} |"

    for name, found in results["seen"].items():
        rows.append(row(name, WANTED[name.split(",")[0]], found))
    speed = results["first_tokens"]
    times = f"{speed['ratio']:.1f}x ({speed['first_s']:.2f} s, then {speed['second_s']:.2f} s)"
    behind = "reached" if speed["ratio"] >= 5 else f"{5 - speed['ratio']:.1f}x"
    rows.append(f"| first token of a second question, sooner by | 5x | {times} | {behind} |")
    if decided := results.get("decisions"):
        rows.append(row("decisions, yes or no", 0.95, decided))
        error = decided["calibration_error"]
        off = f"{error - 0.1:.2f}" if error > 0.1 else "reached"
        rows.append(f"| their expected calibration error | 0.1 | {error:.2f} | {off} |")
    if said := results.get("plain"):
        what = f"plain questions, the first {said['tokens']} tokens those of SmolLM2"
        rows.append(f"| {what} | as good | {said['equal']} of {said['of']} | |")
    return "\n".join(rows)


def into_readme(results: dict[str, Any]) -> None:
    page = HERE / "README.md"
    before, mark, rest = page.read_text().partition("<!-- measured -->")
    after = rest.partition("<!-- /measured -->")[2]
    page.write_text(f"{before}{mark}\n{table(results)}\n<!-- /measured -->{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--each", type=int, default=8, help="Rounds of questions.")
    parser.add_argument("--seed", type=int, default=1000)
    args = parser.parse_args()
    random.seed(0)
    with ks.load(loading.DEMO_SMOL) as vlm:
        results: dict[str, Any] = {"seed": args.seed, "first_tokens": first_tokens(vlm), "seen": {}}
        for found in seen(vlm, args.assets, args.each, args.seed):
            results["seen"] = found
            save(results)
        results["decisions"] = decisions(vlm, args.assets, 3 * args.each, args.seed + 1)
        save(results)
        results["plain"] = plain(vlm, 16)
        save(results)
    into_readme(results)


def save(results: dict[str, Any]) -> None:
    """After each answer, so that a run that is stopped has not been for nothing."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    (HERE / "results.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
