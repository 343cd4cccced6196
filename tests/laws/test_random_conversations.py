"""Conversations at random, each answer compared bit for bit with a memory that has seen nothing.

Twenty sessions go on, fork, are edited inside a word, cancelled, decoded together; the process is
started again, another one shares the store, budgets are tiny, weights and adapters change. What
differs names its seed.
"""

from __future__ import annotations

import copy
import multiprocessing
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import Catch
from support.models import build, picture, turn

import keepsight as ks
from keepsight import Together
from keepsight.errors import NotStored
from keepsight.models.identity import settle

WORDS = "the red cat sees a blue dog beside many small green hills and asks what colour is it"
QUICK = [("qwen3_vl", torch.float32, 1), ("sliding", torch.float32, 2)]
QUICK += [("qwen3_5", torch.float32, 3), ("qwen3_vl", torch.bfloat16, 4)]
QUICK += [("gemma3_sliding", torch.float32, 5)]
KINDS = ("qwen2_vl", "llava", "internvl", "idefics3", "gemma3_sliding", "lfm2_vl", "qwen3_5")
KINDS += ("ovis2",)
SLOW = [(k, d, s) for k in KINDS for d in (torch.float32, torch.bfloat16) for s in (11, 12, 13)]
DEEDS = {"new": 2, "go_on": 4, "fork": 2, "edit": 3, "again": 1, "cancel": 2, "together": 2}
DEEDS |= {"restart": 2, "merge": 1, "adapter": 3}
GREEDY: dict[str, Any] = {"do_sample": False}
Messages = list[dict[str, Any]]
Asked = list[tuple[Messages, dict[str, Any]]]
Changes = list[tuple[str, int]]
Answers = list[tuple[list[int], list[torch.Tensor]]]


def flushed(vlm: ks.VLM) -> None:
    """Written is all but what is larger than the whole store, and named as such."""
    try:
        vlm.flush()
    except NotStored as lost:
        tiny = "bytes are more than the budget of the store, 204,800"
        if lost.broken is not None or not all(why.endswith(tiny) for why in lost.reasons.values()):
            raise


def answers(model: Any, processor: Any, asked: Asked, **options: Any) -> Answers:
    """What one wrap answers, question by question: tokens and logits."""
    with ks.wrap(model, processor, **options) as vlm:
        found = []
        for messages, how in asked:
            rows = Catch()
            reply = vlm.chat(messages, logits_processor=[rows], **how)
            found.append((list(reply.tokens), rows.rows))
        vlm.flush()
    return found


def answers_elsewhere(
    kind: str, dtype: torch.dtype, changes: Changes, asked: Asked, options: dict[str, Any]
) -> Answers:
    """The same in a new process, whose model went through the same changes."""
    model, processor = build(kind, dtype)
    for change in changes:
        changed(model, *change)
    return answers(model, processor, asked, **options)


def changed(model: Any, deed: str, seed: int) -> None:
    """Change one layer in place, or attach, switch, mute, merge and take back adapters.

    Towers stay as they are: a session whose pictures were named under other weights is refused."""
    peft = pytest.importorskip("peft")
    chosen, decoder = random.Random(seed), model.get_decoder()
    torch.manual_seed(seed)
    adapted = [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    names = sorted({name for layer in adapted for name in layer.lora_A})
    if deed == "merge":
        layers = [m for m in decoder.modules() if type(m) is torch.nn.Linear and m.in_features > 9]
        layer = chosen.choice(layers)
        down, up = torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2)
        with torch.no_grad():
            layer.weight.add_((0.02 * up @ down).to(layer.weight.dtype))
    elif not names or (deed == "attach" and len(names) < 3):
        rank, where = chosen.randint(1, 9), chosen.choice(["q_proj", "v_proj", "up_proj", "w1"])
        below = [id(layer) for layer in decoder.modules()]
        layers = [n for n, m in model.named_modules() if id(m) in below and n.endswith("_proj")]
        there = [n for n in layers if n.endswith(where)] or layers
        config = peft.LoraConfig(r=rank, target_modules=there, init_lora_weights=False)
        model.add_adapter(config, adapter_name=f"number{len(names)}")
    elif deed in ("attach", "switch"):
        model.set_adapter(chosen.choice(names))
    elif deed in ("off", "on"):
        getattr(model, {"off": "disable_adapters", "on": "enable_adapters"}[deed])()
    else:
        for layer in adapted:
            if layer.merged != (deed == "fold"):
                {"fold": layer.merge, "unfold": layer.unmerge}[deed]()
    settle(model)  # as the next pass would: a process that only repeats the changes has none
    model.eval()


class Talk:
    """A session, and beside it its messages as they were said."""

    def __init__(self, session: ks.Session, messages: Messages) -> None:
        self.session, self.messages = session, messages


class Talks:
    """Twenty sessions with one model, whose memory is small and is opened again."""

    def __init__(self, kind: str, dtype: torch.dtype, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.model, self.processor = build(kind, dtype)
        self.built, self.label, self.folder = (kind, dtype), f"{kind} {dtype} seed {seed}", folder
        self.changes: Changes = []
        self.talks: list[Talk] = []
        self.vlm = self.open(pack=True)

    def open(self, **options: Any) -> ks.VLM:
        pick = self.random.choice
        options = {"pack": pick([True, False])} | options
        self.pack = options["pack"]  # which gives other bits on some processors
        if self.random.random() < 0.7:
            budget = pick(["200KiB", "2MiB", "1GiB"])
            options |= {"store": str(self.folder / "store"), "store_budget": budget}
        return ks.wrap(
            self.model,
            self.processor,
            cache_budget=pick(["60KiB", "300KiB", "4MiB", "1GiB"]),
            vision_budget=pick(["40KiB", "1MiB", "1GiB"]),
            drafts=pick([True, False]),
            **options,
        )

    def words(self, most: int) -> str:
        return " ".join(self.random.choices(WORDS.split(), k=self.random.randint(1, most)))

    def asked(self, most: int = 40) -> dict[str, Any]:
        count = self.random.choice([0, 0, 0, 1, 2])
        return turn(self.words(most), *[picture(self.random.randint(0, 5)) for _ in range(count)])

    def options(self) -> dict[str, Any]:
        """Replies end inside a word, at a letter or where they like."""
        options: dict[str, Any] = {"max_new_tokens": self.random.randint(1, 10), **GREEDY}
        if self.random.random() < 0.4:
            seed = self.random.randint(0, 99)
            options |= {"do_sample": True, "temperature": 1.5, "seed": seed}
        if self.random.random() < 0.2:
            options["stop"] = [self.random.choice("abcdefghij ")]
        return options

    def same(self, asked: Asked, found: Answers) -> None:
        """Each answer is that of a wrap of its own, which computes the prompt in one pass."""
        for one, (tokens, rows) in zip(asked, found, strict=True):
            own: dict[str, Any] = {"store": "", "drafts": False, "pack": self.pack}
            [(wanted, fresh)] = answers(self.model, self.processor, [one], **own)
            assert tokens == wanted, self.label
            assert len(rows) == len(fresh), self.label
            assert all(map(torch.equal, rows, fresh)), self.label

    def answer(self, talk: Talk, messages: Messages, ask: Any, *given: Any, **more: Any) -> None:
        """Ask by `ask`, a way of the session's, what `messages` ask."""
        rows, options = Catch(), self.options()
        reply = ask(*given, **more, logits_processor=[rows], **options)
        self.same([(messages, options)], [(list(reply.tokens), rows.rows)])
        talk.messages = [*messages, turn(reply.text, role="assistant")]

    # -- deeds -------------------------------------------------------------------------------------

    def some(self) -> Talk:
        return self.random.choice(self.talks)

    def go_on(self, talk: Talk | None = None, most: int = 40) -> None:
        talk, said = talk or self.some(), self.asked(most)
        if len(talk.messages) > 10:
            talk = Talk(self.vlm.session(), [])
        images = [part["image"] for part in said["content"][:-1]]
        text = said["content"][-1]["text"]
        self.answer(talk, [*talk.messages, said], talk.session.ask, text, images=images)
        self.talks = [*[t for t in self.talks if t is not talk][-19:], talk]

    def new(self) -> None:
        self.go_on(Talk(self.vlm.session(), []), 120)

    def fork(self) -> None:
        old = self.some()
        self.go_on(Talk(old.session.fork(), old.messages))

    def edit(self) -> None:
        talk = self.some()
        at = self.random.randrange(len(talk.messages) // 2)
        messages = copy.copy(talk.messages[: 2 * at + 1])
        *shown, said = messages[-1]["content"]
        spot = self.random.randint(0, len(said["text"]))
        text = said["text"][:spot] + self.random.choice("xé ") + said["text"][spot:]
        messages[-1] = turn(text, *[part["image"] for part in shown])
        self.answer(talk, messages, talk.session.edit, at, text)

    def again(self) -> None:
        talk = self.some()
        self.answer(talk, talk.messages[:-1], talk.session.regenerate)

    def cancel(self) -> None:
        talk = self.some()
        said = self.words(40)
        stream = talk.session.stream(said, max_new_tokens=20, **GREEDY)
        for _ in range(self.random.randint(0, 8)):
            next(stream, None)
        stream.close()
        # An answer that had ended before it was cancelled stays in the session.
        ended = len(talk.session.messages) > len(talk.messages)
        asked = [*talk.messages, turn(said)] if ended else talk.messages[:-1]
        self.answer(talk, asked, talk.session.regenerate)

    def together(self) -> None:
        """Several at once; some are given up on the way, others come when some have gone."""
        asked: Asked = []
        with Together(self.vlm) as group:
            jobs = []
            for _ in range(self.random.randint(2, 6)):
                messages = [*self.some().messages, self.asked()]
                rows, options = Catch(), self.options()
                job = group.submit(messages, logits_processor=[rows], **options)
                if self.random.random() < 0.2:
                    job.cancel()
                    continue
                asked.append((messages, options))
                jobs.append((job, rows))
                if self.random.random() < 0.3:
                    job.result()
            found = [(list(job.result().tokens), rows.rows) for job, rows in jobs]
        self.same(asked, found)

    def restart(self) -> None:
        """Sessions go on from their files, or from their words alone."""
        whole = self.random.random() < 0.5
        files = [talk.session.save(self.folder / f"{i}.keep") for i, talk in enumerate(self.talks)]
        if self.random.random() < 0.5:
            flushed(self.vlm)
        self.vlm.close()
        self.vlm = self.open()
        for talk, file in zip(self.talks, files, strict=True):
            said, talk.session = talk.session.messages, self.vlm.session()
            if whole:
                talk.session = self.vlm.resume(file)
            else:
                talk.session.messages = said

    def merge(self) -> None:
        self.change("merge")

    def adapter(self) -> None:
        self.change(self.random.choice(["attach", "switch", "off", "on", "fold", "unfold"]))

    def change(self, deed: str) -> None:
        change = (deed, self.random.randint(0, 999))
        self.changes.append(change)
        changed(self.model, *change)

    def elsewhere(self) -> None:
        """A new process answers from the same store, while this one holds it."""
        asked = [([*self.some().messages, self.asked()], self.options()) for _ in range(4)]
        options = {"store": str(self.folder / "store"), "drafts": False, "pack": self.pack}
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(answers_elsewhere, (*self.built, self.changes, asked, options))
        self.same(asked, found)
        self.same(asked, answers(self.model, self.processor, asked, **options))

    def run(self, deeds: int, *sure: str) -> None:
        names = self.random.choices(list(DEEDS), list(DEEDS.values()), k=deeds)
        for spot, name in enumerate(sure):
            names.insert(deeds * (spot + 1) // len(sure), name)
        try:
            assert self.vlm.stats()["engine"]["exactness"] == "bits"
            self.new()
            self.merge()  # while the copies of the weights are sure to be there
            for name in ["go_on", *names]:
                torch.manual_seed(self.random.randint(0, 99))
                getattr(self, name)()
                self.vlm.runtime.check()
        finally:
            self.vlm.close()


@pytest.mark.parametrize(("kind", "dtype", "seed"), QUICK)
def test_random_conversations(kind: str, dtype: torch.dtype, seed: int, tmp_path: Path) -> None:
    elsewhere = ["elsewhere"] if seed == 1 else []
    Talks(kind, dtype, seed, tmp_path).run(5, "adapter", *elsewhere)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "seed"), SLOW)
def test_many_random_conversations(
    kind: str, dtype: torch.dtype, seed: int, tmp_path: Path
) -> None:
    Talks(kind, dtype, seed, tmp_path).run(40, "elsewhere", "elsewhere")


def test_no_other_loss_is_taken_for_a_tiny_store(tmp_path: Path) -> None:
    model, processor = build("qwen3_vl")
    long = [turn("word " * 500)]
    for budget, accepted in (("200KiB", True), ("199KiB", False)):
        with ks.wrap(model, processor, store=tmp_path / budget, store_budget=budget) as vlm:
            vlm.chat(long, max_new_tokens=1)
            if accepted:
                flushed(vlm)
            else:
                with pytest.raises(NotStored, match="203,776"):
                    flushed(vlm)


def test_edits_at_every_token_run_what_no_turn_has_seen() -> None:
    """Rows of the language model are counted, and the logits are stock's."""
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        first = vlm.processor.tokenizer("the red cat sees a dog beside hills")["input_ids"]
        seen: list[list[int]] = []
        for at in range(len(first)):
            ids = [*first[:at], 40 + at, *first[at + 1 :]]
            before, rows = vlm.stats()["engine"]["prefill_tokens"], Catch()
            vlm.generate(torch.tensor([ids]), max_new_tokens=1, logits_processor=[rows])
            shared = max((_common(ids, other) for other in seen), default=0)
            new = vlm.stats()["engine"]["prefill_tokens"] - before
            assert new == len(ids) - min(shared, len(ids) - 1), at
            seen.append(ids)
            with torch.no_grad():
                stock = model(input_ids=torch.tensor([ids])).logits[:, -1]
            torch.testing.assert_close(rows.rows[0], stock, rtol=0, atol=1e-4)


def _common(ids: list[int], other: list[int]) -> int:
    pairs = zip(ids, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(ids))
