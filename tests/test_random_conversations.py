"""Conversations at random, each answer compared bit for bit with a memory that has seen nothing.

Talks go on, fork, are edited inside a word, cancelled, decoded together; the process is started
again, budgets are tiny, weights change. What differs names its seed.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, picture, turn

import keepsight as ks
from keepsight.scheduler import Together

WORDS = [
    "the",
    "red",
    "cat",
    "sees",
    "a",
    "blue",
    "dog",
    "beside",
    "many",
    "small",
    "green",
    "hills",
    "and",
    "asks",
    "what",
    "colour",
    "is",
    "it",
]
QUICK = [("qwen3_vl", torch.float32, 1), ("sliding", torch.float32, 2)]
QUICK += [("qwen3_5", torch.float32, 3), ("qwen3_vl", torch.bfloat16, 4)]
KINDS = (
    "qwen2_vl",
    "llava",
    "internvl",
    "idefics3",
    "gemma3_sliding",
    "lfm2_vl",
    "qwen3_5",
    "ovis2",
)
SLOW = [(k, d, s) for k in KINDS for d in (torch.float32, torch.bfloat16) for s in (11, 12, 13)]
Messages = list[dict[str, Any]]


class Rows:
    """The logits of every step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(scores.clone())
        return scores


class Talks:
    """Up to twenty conversations with one model, whose memory is small and is opened again."""

    def __init__(self, kind: str, dtype: torch.dtype, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        model, self.processor = build(kind, dtype)
        self.model = copy.deepcopy(model)  # its weights change
        self.label, self.folder = f"{kind} {dtype} seed {seed}", folder
        self.talks: list[Messages] = []
        self.vlm = self.open(pack=True)

    def open(self, **options: Any) -> ks.VLM:
        pick = self.random.choice
        return ks.wrap(
            self.model,
            self.processor,
            cache_budget=pick(["60KiB", "300KiB", "4MiB", "1GiB"]),
            vision_budget=pick(["40KiB", "1MiB", "1GiB"]),
            store=pick([str(self.folder), str(self.folder), ""]),
            drafts=pick([True, False]),
            **{"pack": pick([True, False]), **options},
        )

    def words(self, most: int) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, most)))

    def asked(self, most: int = 40) -> dict[str, Any]:
        count = self.random.choice([0, 0, 0, 1, 2])
        return turn(self.words(most), *[picture(self.random.randint(0, 5)) for _ in range(count)])

    def options(self) -> dict[str, Any]:
        """Replies end inside a word, at a letter or where they like."""
        options: dict[str, Any] = {"max_new_tokens": self.random.randint(1, 10), "do_sample": False}
        if self.random.random() < 0.4:
            seed = self.random.randint(0, 99)
            options |= {"do_sample": True, "temperature": 1.5, "seed": seed}
        if self.random.random() < 0.2:
            options["stop"] = [self.random.choice("abcdefghij ")]
        return options

    def same(self, messages: Messages, reply: Any, rows: Rows, options: dict[str, Any]) -> None:
        fresh = Rows()
        with ks.wrap(self.model, self.processor, store="", drafts=False) as other:
            wanted = other.chat(messages, logits_processor=[fresh], **options)
        assert reply.tokens == wanted.tokens, self.label
        assert len(rows.seen) == len(fresh.seen), self.label
        assert all(map(torch.equal, rows.seen, fresh.seen)), self.label

    def ask(self, messages: Messages) -> Messages:
        rows, options = Rows(), self.options()
        reply = self.vlm.chat(messages, logits_processor=[rows], **options)
        self.same(messages, reply, rows, options)
        return [*messages, turn(reply.text, role="assistant")]

    # -- deeds -------------------------------------------------------------------------------------

    def new(self) -> None:
        self.talks = [*self.talks, self.ask([self.asked(120)])][-20:]

    def go_on(self) -> None:
        at = self.random.randrange(len(self.talks))
        self.talks[at] = self.ask([*self.talks[at], self.asked()])[-12:]

    def fork(self) -> None:
        self.talks.append(self.ask([*self.random.choice(self.talks), self.asked()]))

    def edit(self) -> None:
        messages = copy.deepcopy(self.random.choice(self.talks))
        part = self.random.choice(messages)["content"][-1]
        at = self.random.randint(0, len(part["text"]))
        part["text"] = part["text"][:at] + self.random.choice("xé ") + part["text"][at:]
        self.ask([*messages, turn("so?")])

    def cancel(self) -> None:
        messages = [*self.random.choice(self.talks), self.asked()]
        stream = self.vlm.stream(messages, max_new_tokens=20, do_sample=False)
        for _ in range(self.random.randint(0, 8)):
            next(stream, None)
        stream.close()
        self.ask(messages)

    def together(self) -> None:
        with Together(self.vlm) as group:
            asked = []
            for _ in range(self.random.randint(2, 5)):
                messages = [*self.random.choice(self.talks), self.asked()]
                rows, options = Rows(), self.options()
                job = group.submit(messages, logits_processor=[rows], **options)
                asked.append((messages, job, rows, options))
            done = [(m, job.result(), rows, options) for m, job, rows, options in asked]
        for messages, reply, rows, options in done:
            self.same(messages, reply, rows, options)

    def restart(self) -> None:
        if self.random.random() < 0.5:
            self.vlm.flush()
        self.vlm.close()
        self.vlm = self.open()

    def adapt(self) -> None:
        """Merge a low-rank change into one layer, in place."""
        layer = self.random.choice(
            [m for n, m in self.model.named_modules() if n.endswith("_proj")]
        )
        with torch.no_grad():
            down, up = torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2)
            layer.weight.add_((0.02 * up @ down).to(layer.weight.dtype))

    def run(self, deeds: int) -> None:
        names = [
            "new",
            "go_on",
            "go_on",
            "go_on",
            "fork",
            "edit",
            "cancel",
            "together",
            "restart",
            "adapt",
        ]
        try:
            assert self.vlm.stats()["engine"]["any_cut"]
            self.new()
            self.adapt()  # while the copies of the weights are sure to be there
            self.go_on()
            for name in self.random.choices(names, k=deeds):
                torch.manual_seed(self.random.randint(0, 99))
                getattr(self, name)()
                self.vlm.runtime.check()
        finally:
            self.vlm.close()


@pytest.mark.parametrize(("kind", "dtype", "seed"), QUICK)
def test_random_conversations(kind: str, dtype: torch.dtype, seed: int, tmp_path: Path) -> None:
    Talks(kind, dtype, seed, tmp_path).run(5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "seed"), SLOW)
def test_many_random_conversations(
    kind: str, dtype: torch.dtype, seed: int, tmp_path: Path
) -> None:
    Talks(kind, dtype, seed, tmp_path).run(60)


def test_edits_at_every_token_run_what_no_turn_has_seen() -> None:
    """Rows of the language model are counted, and the logits are stock's."""
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        first = vlm.processor.tokenizer("the red cat sees a dog beside hills")["input_ids"]
        seen: list[list[int]] = []
        for at in range(len(first)):
            ids = [*first[:at], 40 + at, *first[at + 1 :]]
            before, rows = vlm.stats()["engine"]["prefill_tokens"], Rows()
            vlm.generate(torch.tensor([ids]), max_new_tokens=1, logits_processor=[rows])
            shared = max((_common(ids, other) for other in seen), default=0)
            new = vlm.stats()["engine"]["prefill_tokens"] - before
            assert new == len(ids) - min(shared, len(ids) - 1), at
            seen.append(ids)
            with torch.no_grad():
                stock = model(input_ids=torch.tensor([ids])).logits[:, -1]
            torch.testing.assert_close(rows.seen[0], stock, rtol=0, atol=1e-4)


def _common(ids: list[int], other: list[int]) -> int:
    pairs = zip(ids, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(ids))
