"""The third stage: the adapter learns to speak again as SmolLM2 does. Tower and connector stay.

In plain talk the model learns the probabilities that SmolLM2 itself has for its own answers. In
talk about pictures, and where a picture is asked for and there is none, it learns the right
answers, as in the stage before. It goes on from what ships in the package, or from `--start`. Of
the way that it goes, a share is kept (`--share`): all of it costs answers about pictures. The
result lies in OUT/spoken, so that a run that goes on still has what it began with.

It runs on the processor, also beside a GPU, and is written for fast products of bfloat16: every
pass has as many rows of as many tokens, a layer is compiled, and matrices that read the same input
are joined.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from demo.smol import chats as plain_chats
from demo.smol.data import COUNTS, LENGTH, Conversations, Text, talk_fields
from demo.smol.measure import PLAIN
from demo.smol.model import (
    IMAGE_ID,
    PROJECTIONS,
    TEXT_DEEP,
    TEXT_HEADS,
    TEXT_KV,
    Tower,
    _flat,
    _norm,
    _turn,
    compiled,
    pixels_of,
    read_gguf,
    save_parts,
)
from demo.smol.train import Clock, Run, load_trained, optimizer, step_on
from keepsight.models.demo_smol import PARTS, SHIPPED, unpacked

ROWS = 2  # of each kind of talk, in a pass
MOST = 448  # tokens of plain answers that a pass learns
BEGIN = 16  # tokens of an answer that count as its beginning
FIELDS = ("ids", "position", "group", "turn")
JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
Unit = dict[str, Tensor]
Answer = tuple[list[int], list[int]]  # the prompt, and the tokens after it


def layer(
    x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, norms: list[Tensor], base: list[Tensor],
    down: list[Tensor], up: list[Tensor],
) -> Tensor:  # fmt: skip
    """One layer of Llama; what the adapter adds to a matrix is computed beside it."""
    n, length, wide = x.shape

    def of(rows: Tensor, i: int) -> Tensor:
        return F.linear(rows, base[i]) + F.linear(F.linear(rows, down[i]), up[i])

    narrow = wide // TEXT_HEADS * TEXT_KV
    q, k, v = (
        one.view(n, length, -1, wide // TEXT_HEADS).transpose(1, 2)
        for one in of(_norm(x, norms[0]), 0).split((wide, narrow, narrow), -1)
    )
    q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    k, v = (one.repeat_interleave(TEXT_HEADS // TEXT_KV, 1) for one in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5 + mask
    x = x + of((scores.softmax(-1).to(x.dtype) @ v).transpose(1, 2).reshape(n, length, wide), 1)
    gate, value = of(_norm(x, norms[1]), 2).chunk(2, -1)
    return x + of(F.silu(gate) * value, 3)


class Learner(nn.Module):
    """SmolLM2, frozen and in bfloat16, and the adapter that learns."""

    def __init__(self, base: dict[str, Tensor], adapter: dict[str, Tensor], on: bool) -> None:
        super().__init__()
        self.run = compiled(layer, on)
        self.table = torch.cat([base["model.embed_tokens.weight"], adapter["extra"]]).bfloat16()
        self.last_norm = base["model.norm.weight"].bfloat16()
        named = [f"model.layers.{i}" for i in range(TEXT_DEEP)]
        kinds = ("input_layernorm", "post_attention_layernorm")
        self.norms = [[base[f"{at}.{kind}.weight"].bfloat16() for kind in kinds] for at in named]
        self.base = [
            [
                torch.cat([base[f"{at}.{name}.weight"] for name in group]).bfloat16()
                for group in JOINED
            ]
            for at in named
        ]
        names = [_flat(i, name) for i in range(TEXT_DEEP) for name in PROJECTIONS]
        self.a, self.b = (
            nn.ParameterDict({n: nn.Parameter(adapter[f"{part}.{n}"].clone()) for n in names})
            for part in "ab"
        )
        self.extra = adapter["extra"]  # the rows of the new tokens stay

    def _matrices(self, i: int, adapted: bool) -> tuple[list[Tensor], list[Tensor]]:
        down, up = [], []
        for group in JOINED:
            a = [self.a[_flat(i, name)] for name in group]
            b = [self.b[_flat(i, name)] for name in group]
            if not adapted:
                b = [torch.zeros_like(one) for one in b]
            down.append(torch.cat(a).bfloat16())
            up.append(torch.block_diag(*b).bfloat16())
        return down, up

    def forward(self, unit: Unit, images: Tensor | None = None, adapted: bool = True) -> Tensor:
        """Hidden states; `adapted=False` for those of SmolLM2 itself."""
        x = F.embedding(unit["ids"], self.table)
        if images is not None:
            x = x.masked_scatter((unit["ids"] == IMAGE_ID)[..., None], images.to(x.dtype))
        angle = unit["position"][..., None].float() / 100000.0 ** (torch.arange(0, 64, 2) / 64)
        angle = torch.cat([angle, angle], -1)[:, None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        group, length = unit["group"], x.shape[1]
        seen = (group[:, None, :] == 0) | (group[:, None, :] == group[:, :, None])
        seen &= torch.ones(length, length, dtype=torch.bool).tril()
        mask = torch.zeros(seen.shape).masked_fill(~seen, -1e9)[:, None]
        run = self.run if length == LENGTH else layer
        for i in range(TEXT_DEEP):
            x = run(x, cos, sin, mask, self.norms[i], self.base[i], *self._matrices(i, adapted))
        return _norm(x, self.last_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.table).float()


def shipped() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tower's and the adapter's tensors as they ship, from eight bits."""
    eyes, adapter = (unpacked(load_file(SHIPPED / name)) for name in PARTS)
    tower = Tower()
    own = dict(zip(tower.named_for_transformers(), tower.state_dict().items(), strict=True))
    return {own[name][0]: v.view_as(own[name][1]) for name, v in eyes.items()}, adapter


# -- lessons -------------------------------------------------------------------------------------


def plain_rows(text: Text, chats: list[list[str]]) -> Unit:
    """Rows of plain chats that do not see each other, each behind the same system message."""
    rows: list[dict[str, list[int]]] = []
    head = len(text.system)
    for question, answer in chats:
        ask = text.start + text.ids("user\n" + question) + text.assistant
        say = text.answer(answer.removesuffix("…"))
        say = say[:-1] if answer.endswith("…") else say  # it was cut: its end is not learned
        new = len(ask) + len(say)
        if not rows or len(rows[-1]["ids"]) + new > LENGTH:
            zeros = [0] * head
            begun = {
                "ids": text.system,
                "position": list(range(head)),
                "group": zeros,
                "turn": zeros,
            }
            rows.append({name: list(values) for name, values in begun.items()})
        row = rows[-1]
        number = max(row["group"]) + 1
        row["ids"] += ask + say
        row["position"] += range(head, head + new)
        row["group"] += [number] * new
        row["turn"] += [0] * len(ask) + [number] * len(say)
    return {
        name: torch.tensor([(row[name] + [0] * LENGTH)[:LENGTH] for row in rows]) for name in FIELDS
    }


class Seen:
    """Rows of talk about pictures, drawn anew; of a unit that is drawn, half of the rows."""

    def __init__(self, assets: Path, tower: Tower, seed: int) -> None:
        self.maker = Conversations(assets, seed, test=False)
        self.maker.chats = []  # without pictures, only the question for one is asked
        self.tower, self.r, self.left = tower, random.Random(seed), list[tuple[Unit, Tensor]]()
        self.chance = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def next(self, count: int) -> tuple[Unit, Tensor]:
        while len(self.left) < count:
            arrays = {n: np.zeros(shape, kind) for n, (shape, kind) in talk_fields().items()}
            self.maker.fill(arrays)
            pixels = pixels_of(torch.from_numpy(arrays["pixels"]), self.chance, torch.bfloat16)
            tokens = torch.cat([self.tower.tokens(self.tower.patches(x)) for x in pixels.split(7)])
            ends = np.cumsum([0, *COUNTS])
            for i in self.r.sample(range(len(COUNTS)), len(COUNTS) // 2):
                row = {n: torch.from_numpy(arrays[n][i : i + 1]).long() for n in FIELDS}
                self.left.append((row, tokens[ends[i] : ends[i + 1]]))
        some = [self.left.pop(self.r.randrange(len(self.left))) for _ in range(count)]
        unit = {name: torch.cat([row[name] for row, _ in some]) for name in FIELDS}
        return unit, torch.cat([tokens for _, tokens in some])


def said(unit: Unit, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden state before each token of an answer, and the token."""
    learned = unit["turn"][:, 1:] > 0
    return hidden[:, :-1][learned], unit["ids"][:, 1:][learned]


# -- the stage -----------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    run = Run(args, "speech")
    assets = Path(args.assets)
    eyes, adapter = load_trained(Path(args.start)) if args.start else shipped()
    tower = Tower()
    tower.load_state_dict(eyes)
    learner = Learner(read_gguf(Path(args.model)), adapter, not args.eager)
    opt = optimizer([(list(learner.parameters()), args.rate, 0.0)], fused=False)
    step, spent = run.load({"learner": learner}, opt)
    text = Text(assets / "tokenizer.json")
    chats: list[list[str]] = json.loads((assets / "chats.json").read_text())
    chats = [chat for chat in chats if not plain_chats.near(chat[0])]
    r, seen = random.Random(5 + step), Seen(assets, tower, 500 + step)
    r.shuffle(chats)
    plain, theirs = plain_rows(text, chats), dict[int, Tensor]()
    fifty = answers_of(learner, text, PLAIN)
    run.log(f"{len(chats)} chats; {begun(learner, fifty)}")
    clock, order = Clock(args.minutes, args.now or args.minutes, spent, run.began), list[int]()
    mean: dict[str, float] = {}
    while not clock.over() and step != args.steps:
        while len(order) < ROWS:
            order += r.sample(range(len(plain["ids"])), len(plain["ids"]))
        rows = [order.pop() for _ in range(ROWS)]
        hidden = torch.cat([_of_smollm2(learner, plain, row, theirs) for row in rows])
        losses = lesson(learner, {n: plain[n][rows] for n in FIELDS}, hidden, *seen.next(ROWS))
        step_on(losses["plain"] + losses["say"], opt, clock.rate(step, 50))
        now = {n: float(v.detach()) for n, v in losses.items()}
        mean = {n: mean.get(n, v) * 0.95 + v * 0.05 for n, v in now.items()}
        step += 1
        if step % args.every == 0:
            run.log(f"step {step}: " + ", ".join(f"{n} {value:.3f}" for n, value in mean.items()))
    run.save({"learner": learner}, opt, step, clock.spent())
    parts = run.out / "spoken"
    save_parts({**tower.state_dict()}, parts, "tower")
    with torch.no_grad():
        for name, value in learner.state_dict().items():
            value.copy_(torch.lerp(adapter[name], value, args.share))
    save_parts({**learner.state_dict(), "extra": learner.extra}, parts, "adapter")
    run.log(f"saved at step {step}, {args.share} of the way; {begun(learner, fifty)}")


def lesson(
    learner: Learner, plain: Unit, theirs: Tensor, seen: Unit, images: Tensor
) -> dict[str, Tensor]:
    """How far the model is from SmolLM2 in plain talk, and from the right answers elsewhere."""
    hidden = learner({name: torch.cat([plain[name], seen[name]]) for name in FIELDS}, images)
    ours, _ = said(plain, hidden[:ROWS])
    some = torch.randperm(len(ours))[:MOST]
    with torch.no_grad():
        wanted = learner.logits(theirs[some]).log_softmax(-1)
    found = learner.logits(ours[some]).log_softmax(-1)
    off = (wanted.exp() * (wanted - found)).sum(-1).mean()
    states, tokens = said(seen, hidden[ROWS:])
    logits = learner.logits(states)
    return {
        "plain": off,
        "agree": (found.argmax(-1) == wanted.argmax(-1)).float().mean(),
        "say": F.cross_entropy(logits, tokens),
        "right": (logits.argmax(-1) == tokens).float().mean(),
    }


@torch.no_grad()
def _of_smollm2(learner: Learner, plain: Unit, row: int, known: dict[int, Tensor]) -> Tensor:
    """SmolLM2's hidden states for a row of plain talk, computed once and with some others."""
    if row not in known:
        new = [i for i in range(len(plain["ids"])) if i not in known and i != row]
        rows = [*(new + [row] * 2 * ROWS)[: 2 * ROWS - 1], row]
        unit = {name: plain[name][rows] for name in FIELDS}
        hidden = learner(unit, adapted=False)
        for i, number in enumerate(rows):
            one = {name: unit[name][i : i + 1] for name in FIELDS}
            known[number] = said(one, hidden[i : i + 1])[0]
    return known[row]


# -- what it reaches -----------------------------------------------------------------------------


def _rows_of(some: list[Answer]) -> Unit:
    """Questions with what was answered so far."""
    length = max(len(ask) + len(say) for ask, say in some)
    ids = torch.tensor([(ask + say + [0] * length)[:length] for ask, say in some])
    zeros, places = torch.zeros_like(ids), torch.arange(length).expand_as(ids)
    return {"ids": ids, "position": places, "group": zeros, "turn": zeros}


@torch.no_grad()
def answers_of(learner: Learner, text: Text, questions: tuple[str, ...]) -> list[Answer]:
    """How SmolLM2 begins its answers, greedy."""
    found: list[Answer] = [
        (text.system + text.start + text.ids("user\n" + question) + text.assistant, [])
        for question in questions
    ]
    for _ in range(BEGIN):
        hidden = learner(_rows_of(found), adapted=False)
        for (ask, say), row in zip(found, hidden, strict=True):
            if say[-1:] != text.end:
                say.append(int(learner.logits(row[len(ask) + len(say) - 1]).argmax()))
    return found


@torch.no_grad()
def begun(learner: Learner, answers: list[Answer]) -> str:
    """How many of the answers would begin so."""
    same, right, count = 0, 0, 0
    for (ask, say), row in zip(answers, learner(_rows_of(answers)), strict=True):
        told = learner.logits(row[len(ask) - 1 : len(ask) + len(say) - 1]).argmax(-1).tolist()
        hits = [one == other for one, other in zip(told, say, strict=True)]
        same, right, count = same + all(hits), right + sum(hits), count + len(hits)
    share = right / count
    return f"of {len(answers)} plain answers {same} begin as SmolLM2's, {share:.3f} of tokens"
