# ruff: noqa: E501  lists of phrases
"""SmolLM2's own answers to plain questions: what the adapter must not unlearn.

Questions are put together from forms and subjects. The fifty questions of the evaluation are others.
"""

import itertools
import json
import random
from pathlib import Path

import torch

from demo.smol.model import read_gguf

FORMS = (
    "What is {}?", "Explain {} in simple terms.", "Tell me about {}.", "Write a short poem about {}.", "Why is {} important?",
    "Give me three facts about {}.", "Write a short story about {}.", "How would you explain {} to a child?",
    "What are the benefits of {}?", "Describe {} in one sentence.", "List five things related to {}.", "Who is known for {}?",
    "What should I know about {} before I start?", "Write an email to a friend about {}.", "What is the history of {}?",
    "Is {} difficult to learn?", "Summarize {} in two sentences.", "What is a common misunderstanding about {}?",
)  # fmt: skip
SUBJECTS = [
    "gravity",
    "the moon",
    "photosynthesis",
    "music",
    "cooking",
    "chess",
    "the Roman Empire",
    "electricity",
    "bread",
    "coffee",
    "bicycles",
    "volcanoes",
    "rain",
    "the ocean",
    "whales",
    "trees",
    "democracy",
    "money",
    "friendship",
    "sleep",
    "running",
    "swimming",
    "painting",
    "computers",
    "the internet",
    "Python",
    "machine learning",
    "mathematics",
    "algebra",
    "geometry",
    "history",
    "Shakespeare",
    "poetry",
    "gardening",
    "tea",
    "cheese",
    "the sun",
    "stars",
    "planets",
    "rockets",
    "trains",
    "bridges",
    "architecture",
    "clocks",
    "glass",
    "paper",
    "books",
    "libraries",
    "schools",
    "teachers",
    "doctors",
    "medicine",
    "vaccines",
    "the heart",
    "the brain",
    "dreams",
    "happiness",
    "honesty",
    "travel",
    "mountains",
    "rivers",
    "deserts",
    "forests",
    "cats",
    "dogs",
    "bees",
    "birds",
    "football",
    "basketball",
    "the Olympics",
    "photography",
    "film",
    "theatre",
    "dancing",
    "guitars",
    "pianos",
    "jazz",
    "salt",
    "water",
    "fire",
    "ice",
    "weather",
    "climate change",
    "recycling",
    "solar power",
    "wind power",
    "batteries",
    "magnets",
    "light",
    "sound",
    "atoms",
    "cells",
    "DNA",
    "evolution",
    "dinosaurs",
]
SHORT = (
    [f"What is {a} {o} {b}?" for a, o, b in itertools.product((2, 5, 7, 12, 15), ("+", "-", "times"), (1, 3, 4, 6))]
    + [f"What is the capital of {c}?" for c in ["Spain", "Italy", "Germany", "Japan", "China", "India", "Egypt", "Brazil", "Canada", "Mexico", "Peru", "Kenya", "Norway", "Sweden", "Poland", "Greece", "Turkey", "Cuba"]]
    + [f"What is the opposite of {w}?" for w in ["hot", "big", "fast", "old", "light", "early", "happy", "loud", "hard", "open"]]
    + [f"What does the word {w} mean?" for w in ["brave", "fragile", "ancient", "curious", "generous", "rapid", "silent", "humble"]]
    + [f"Write a Python function that {w}." for w in ("adds two numbers", "reverses a string", "sorts a list", "counts words", "checks for a prime", "prints a triangle")]
    + [f"Translate '{w}' into French." for w in ("good morning", "thank you", "the house", "a red car", "I am hungry", "see you soon")]
    + ["Hello!", "Hi, how are you?", "Who are you?", "What can you do?", "Thank you!", "Good morning", "Tell me a joke.", "What day is it?",
       "Can you help me?", "Tell me something interesting.", "Goodbye!", "What is your name?", "Who made you?", "Can you see pictures?"]
)  # fmt: skip


def prompts(count: int) -> list[str]:
    long = [form.format(subject) for form in FORMS for subject in SUBJECTS]
    both = [*SHORT, *random.Random(4).sample(long, max(0, count - len(SHORT)))]
    random.Random(5).shuffle(both)
    return both[:count]


@torch.no_grad()
def make(assets: Path, model: Path, count: int = 800, longest: int = 120, batch: int = 0) -> None:
    """Write `chats.json`: [question, answer], greedy; an answer that was cut ends in an ellipsis."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from demo.smol.data import Text

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
        rope_theta=100000.0, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    speaker = LlamaForCausalLM(config)
    missing = speaker.load_state_dict(read_gguf(model), strict=False).missing_keys
    if set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the GGUF lacks {sorted(missing)[:4]}")
    speaker.tie_weights()
    speaker = speaker.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    batch = batch or (400 if device == "cuda" else 32)
    text, asked, made = Text(assets / "tokenizer.json"), prompts(count), []
    for start in range(0, len(asked), batch):
        rows = [
            text.system + text.start + text.ids("user\n" + q) + text.assistant
            for q in asked[start : start + batch]
        ]
        wide = max(map(len, rows))
        ids = torch.tensor([[2] * (wide - len(row)) + row for row in rows], device=device)
        mask = torch.tensor(
            [[0] * (wide - len(row)) + [1] * len(row) for row in rows], device=device
        )
        out = speaker.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)[
            :, wide:
        ].tolist()
        for question, row in zip(asked[start : start + batch], out, strict=True):
            ended = 2 in row
            answer = text.tokenizer.decode(row[: row.index(2)] if ended else row)
            made.append([question, answer + ("" if ended else "…")])
        (assets / "chats.json").write_text(json.dumps(made, ensure_ascii=False))
        print(f"{len(made)} plain questions answered, last: {made[-1]}", flush=True)
