"""Train the eyes of `demo-smol`: the tower by itself, then all that speaks through it.

    python -m demo.smol.assets ASSETS TOKENIZER.json
    python -m demo.smol.train tower --assets ASSETS --out RUN --minutes 8
    python -m demo.smol.train chats --assets ASSETS --model FOLDER-OF-GGUF
    python -m demo.smol.train talk  --assets ASSETS --out RUN --minutes 15 --model FOLDER-OF-GGUF
    python -m demo.smol.train speech --assets ASSETS --out RUN --minutes 60 --model FOLDER-OF-GGUF

Each stage stops by itself when its minutes are spent, on a GPU or on a CPU, and goes on from its
checkpoint when it is started again. The learning rate follows the minutes: `--now N` ends this call
after N of them, the next call has the rest.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo.smol import chats as plain_chats
from demo.smol.data import COUNTS, Text, Units, talk_fields, tower_fields
from demo.smol.model import (
    Heads,
    Speaker,
    Tower,
    load_parts,
    pixels_of,
    random_base,
    read_gguf,
    save_parts,
    text_layer,
    tower_losses,
    vision_layer,
)

AUX = 0.3  # what the tower's own lessons weigh beside the language model's
Unit = dict[str, Tensor]


class Clock:
    """Minutes that were spent in this call and before it, and the learning rate that follows."""

    def __init__(self, minutes: float, now: float, before: float, start: float) -> None:
        self.total, self.before, self.start = minutes * 60, before, start
        self.limit = min(now * 60, self.total - before)

    def spent(self) -> float:
        return self.before + time.monotonic() - self.start

    def over(self) -> bool:
        return time.monotonic() - self.start >= self.limit

    def rate(self, step: int, warm: int) -> float:
        done = min(1.0, self.spent() / self.total)
        return min(1.0, (step + 1) / warm) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def optimizer(
    groups: list[tuple[list[nn.Parameter], float, float]], fused: bool
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [{"params": p, "lr": lr, "top": lr, "weight_decay": decay} for p, lr, decay in groups],
        betas=(0.9, 0.98), fused=fused,
    )  # fmt: skip


def step_on(loss: Tensor, opt: torch.optim.AdamW, rate: float) -> None:
    for group in opt.param_groups:
        group["lr"] = group["top"] * rate
    opt.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(
        [p for g in opt.param_groups for p in g["params"] if p.grad is not None], 1.0
    )
    opt.step()


class Run:
    """What both stages share: a device, a folder, a log, a checkpoint."""

    def __init__(self, args: argparse.Namespace, stage: str) -> None:
        self.args, self.stage = args, stage
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.parts = Path(args.parts or self.out / "parts")
        self.gpu = torch.cuda.is_available()
        self.device = "cuda" if self.gpu else "cpu"
        self.kind = torch.bfloat16 if self.gpu else torch.float32
        self.log_file = (self.out / f"{stage}.log").open("a")
        self.emoji = len(json.loads((Path(args.assets) / "emoji.json").read_text())["names"])
        self.checkpoint = self.out / f"{stage}.pt"
        self.began = time.monotonic()

    def log(self, text: str) -> None:
        line = f"[{self.stage} {time.monotonic() - self.began:6.1f} s] {text}"
        print(line, flush=True)
        self.log_file.write(line + "\n")
        self.log_file.flush()

    def save(
        self, modules: dict[str, nn.Module], opt: torch.optim.AdamW, step: int, spent: float
    ) -> None:
        state = {name: module.state_dict() for name, module in modules.items()}
        part = self.checkpoint.with_suffix(".part")
        torch.save({**state, "opt": opt.state_dict(), "step": step, "spent": spent}, part)
        part.replace(self.checkpoint)

    def load(self, modules: dict[str, nn.Module], opt: torch.optim.AdamW) -> tuple[int, float]:
        if not self.checkpoint.exists():
            return 0, 0.0
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        for name, module in modules.items():
            module.load_state_dict(state[name])
        opt.load_state_dict(state["opt"])
        self.log(f"goes on from step {state['step']}, {state['spent']:.0f} s")
        return state["step"], state["spent"]

    def units(self, fields: Any, seed: int, test: bool = False, workers: int = 0) -> Units:
        workers = workers or self.args.workers or max(1, (os.cpu_count() or 2) - 1)
        return Units(Path(self.args.assets), fields, workers, self.device, seed, test)


def steps_before(path: Path) -> int:
    """So that a run that goes on draws other pictures than it has seen."""
    return int(path.stat().st_mtime) % 100_000 if path.exists() else 1


# -- the tower -----------------------------------------------------------------------------------


def train_tower(args: argparse.Namespace) -> None:
    run = Run(args, "tower")
    per_unit = 64 if run.gpu else 8
    units = run.units(tower_fields(per_unit), steps_before(run.checkpoint))
    tests = run.units(tower_fields(per_unit), 77, test=True, workers=2 if run.gpu else 1)
    torch.manual_seed(0)
    compile_layers = run.gpu and not args.eager
    tower, heads = Tower(compile_layers).to(run.device), Heads(run.emoji).to(run.device)
    modules: dict[str, nn.Module] = {"tower": tower, "heads": heads}
    opt = optimizer(
        [(list(tower.parameters()), args.rate, 0.05), (list(heads.parameters()), args.rate, 0.01)],
        run.gpu,
    )
    step, spent = run.load(modules, opt)
    units.start()
    tests.start()
    clock = Clock(args.minutes, args.now or args.minutes, spent, run.began)
    chance = torch.Generator(run.device).manual_seed(step)
    seen: dict[str, Tensor] = {}
    while not clock.over() and step != args.steps:
        unit = units.next(args.batch // per_unit or 1)
        losses = _tower_pass(run, tower, heads, unit, chance)
        loss = sum(losses.values(), torch.zeros((), device=run.device)) + losses["read letters"]
        step_on(loss, opt, clock.rate(step, 200))
        seen = {k: seen.get(k, v.detach()) * 0.95 + v.detach() * 0.05 for k, v in losses.items()}
        step += 1
        if step % args.every == 0:
            mean = ", ".join(f"{k} {float(v):.3f}" for k, v in seen.items())
            run.log(f"step {step}, drawn {units.drawn}, used {units.used}: {mean}")
    run.save(modules, opt, step, clock.spent())
    save_parts({**tower.state_dict()}, run.parts, "tower")
    save_parts({**heads.state_dict()}, run.parts, "heads")
    run.log(f"saved at step {step}")
    test_tower(run, tower, heads, tests)
    units.close()
    tests.close()


def _tower_pass(run: Run, tower: Tower, heads: Heads, unit: Unit, chance: Any) -> dict[str, Tensor]:
    patches = tower.patches(pixels_of(unit["pixels"], chance, run.kind))
    tokens = tower.tokens(patches)
    with torch.autocast(run.device, torch.bfloat16, enabled=run.gpu):
        return tower_losses(heads, patches, tokens, unit)


@torch.no_grad()
def test_tower(run: Run, tower: Tower, heads: Heads, tests: Units) -> None:
    right: dict[str, list[float]] = {}
    tower.run = vision_layer  # nothing is compiled again for a few passes
    for _ in range(run.args.tests):
        unit = tests.next(max(1, run.args.batch // tests.fields["pixels"][0][0]), again=False)
        patches = tower.patches(pixels_of(unit["pixels"], None, run.kind))
        tokens = tower.tokens(patches)
        with torch.autocast(run.device, torch.bfloat16, enabled=run.gpu):
            kind, color, emoji, letters = (
                x.argmax(-1) for x in heads.reading(tokens, unit["boxes"])
            )
        labels = unit["labels"].long()
        for name, found, wanted in (
            ("kind", kind, labels[..., 0]),
            ("color", color, labels[..., 1]),
            ("emoji", emoji, labels[..., 2]),
        ):
            some = wanted >= 0
            right.setdefault(name, []).extend((found == wanted)[some].float().tolist())
        some = labels[..., 3] >= 0
        right.setdefault("whole texts", []).extend(
            (letters == labels[..., 3:]).all(-1)[some].float().tolist()
        )
        short = some & (labels[..., 3 + 8 :] == 0).all(-1)
        right.setdefault("texts to 8 letters", []).extend(
            (letters == labels[..., 3:]).all(-1)[short].float().tolist()
        )
    run.log(
        "held out: "
        + ", ".join(f"{k} {sum(v) / max(1, len(v)):.3f} of {len(v)}" for k, v in right.items())
    )


# -- the talk ------------------------------------------------------------------------------------


def train_talk(args: argparse.Namespace) -> None:
    run = Run(args, "talk")
    fields = talk_fields()
    units = run.units(fields, 500 + steps_before(run.checkpoint))
    tests = run.units(fields, 99, test=True, workers=2 if run.gpu else 1)
    torch.manual_seed(1)
    base = read_gguf(Path(args.model)) if args.model else random_base(args.deep)
    compile_layers = run.gpu and not args.eager
    tower, heads = Tower(compile_layers).to(run.device), Heads(run.emoji).to(run.device)
    speaker = Speaker(base, compile_layers, args.deep).to(run.device)
    modules: dict[str, nn.Module] = {"tower": tower, "heads": heads, "speaker": speaker}
    eyes = [p for n, p in tower.named_parameters() if not n.startswith("proj")]
    opt = optimizer(
        [(eyes, args.rate * 0.4, 0.02), ([tower.proj.weight], args.rate * 0.6, 0.0),
         (list(heads.parameters()), args.rate * 0.5, 0.01),
         (list(speaker.parameters()), args.rate, 0.0)],
        run.gpu,
    )  # fmt: skip
    units.start()
    tests.start()
    step, spent = run.load(modules, opt)
    if not step:
        if args.start != "none":
            begin = Path(args.start or run.out / "parts")
            tower.load_state_dict(load_parts(begin, "tower"))
            heads.load_state_dict(load_parts(begin, "heads"))
        if (
            args.start and (Path(args.start) / "adapter-0.safetensors").exists()
        ):  # another machine's, without its Adam
            speaker.load_state_dict(load_parts(Path(args.start), "adapter"))
        else:
            _equal_length(run, tower, speaker, units.next(1)["pixels"])
    clock = Clock(args.minutes, args.now or args.minutes, spent, run.began)
    chance = torch.Generator(run.device).manual_seed(step)
    seen: dict[str, Tensor] = {}
    while not clock.over() and step != args.steps:
        unit = units.next(args.batch // len(COUNTS) or 1)
        patches = tower.patches(pixels_of(unit["pixels"], chance, run.kind))
        tokens = tower.tokens(patches)
        with torch.autocast(run.device, torch.bfloat16, enabled=run.gpu):
            own = tower_losses(heads, patches, tokens, unit)
        logits, targets, _ = spoken(speaker, tokens, unit)
        say = F.cross_entropy(logits.float(), targets)
        loss = say + AUX * sum(own.values(), torch.zeros((), device=run.device))
        step_on(loss, opt, clock.rate(step, 150))
        now = {
            "say": say,
            "right": (logits.argmax(-1) == targets).float().mean(),
            "letters": own["read letters"],
        }
        seen = {k: seen.get(k, v.detach()) * 0.95 + v.detach() * 0.05 for k, v in now.items()}
        step += 1
        if step % args.every == 0:
            mean = ", ".join(f"{k} {float(v):.4f}" for k, v in seen.items())
            run.log(f"step {step}, drawn {units.drawn}, used {units.used}: {mean}")
    run.save(modules, opt, step, clock.spent())
    save_parts({**tower.state_dict()}, run.parts, "tower")
    save_parts({**heads.state_dict()}, run.parts, "heads")
    save_parts({**speaker.state_dict()}, run.parts, "adapter")
    run.log(f"saved at step {step}")
    test_talk(run, tower, speaker, tests)
    units.close()
    tests.close()


@torch.no_grad()
def _equal_length(run: Run, tower: Tower, speaker: Speaker, pixels: Tensor) -> None:
    """A token of a picture is as long as a token of text."""
    tokens = tower.tokens(tower.patches(pixels_of(pixels, None, run.kind)))
    tower.proj.weight *= float(speaker.embedding.float().std() / tokens.float().std())


def spoken(speaker: Speaker, tokens: Tensor, unit: Unit) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and turn of every token of an answer."""
    ids = unit["ids"].long()
    hidden = speaker(ids, tokens, unit["position"], unit["group"])
    learned = unit["turn"][:, 1:] > 0
    return (
        speaker.logits(hidden[:, :-1][learned]),
        ids[:, 1:][learned],
        unit["turn"][:, 1:][learned],
    )


@torch.no_grad()
def test_talk(run: Run, tower: Tower, speaker: Speaker, tests: Units) -> None:
    """Answers that greedy decoding would give word for word (each token is the likeliest)."""
    text = Text(Path(run.args.assets) / "tokenizer.json")
    counts: dict[str, list[float]] = {}
    tower.run, speaker.run = vision_layer, text_layer
    shown = 0
    for _ in range(run.args.tests):
        unit = tests.next(max(1, run.args.batch // len(COUNTS)), again=False)
        tokens = tower.tokens(tower.patches(pixels_of(unit["pixels"], None, run.kind)))
        logits, _targets, _ = spoken(speaker, tokens, unit)
        likely = torch.zeros_like(unit["ids"][:, 1:]).masked_scatter(
            unit["turn"][:, 1:] > 0, logits.argmax(-1).to(unit["ids"].dtype)
        )
        turn, ids = unit["turn"][:, 1:].cpu(), unit["ids"].cpu()
        likely, apart = likely.cpu(), unit["group"].cpu().amax(1) > 0
        pictures = [COUNTS[i % len(COUNTS)] for i in range(len(ids))]
        for row in range(len(ids)):
            for k in range(1, int(turn[row].max()) + 1):
                where = (turn[row] == k).nonzero().flatten()
                if not len(where):
                    continue
                wanted, got = ids[row, 1:][where], likely[row][where]
                name = f"{pictures[row]} pictures, {'apart' if apart[row] else 'together'}"
                counts.setdefault(name, []).append(float(wanted.equal(got)))
                if not wanted.equal(got) and pictures[row] and shown < 60:
                    shown += 1
                    first = int(where[0]) + 1
                    asked = text.tokenizer.decode(ids[row, max(0, first - 40) : first].tolist())
                    asked = (
                        asked.split("<|im_end|>")[0][-110:]
                        .replace("<image>", "")
                        .replace("\n", " ")
                    )
                    run.log(
                        f"  {asked} | {text.tokenizer.decode(wanted.tolist())} | "
                        f"{text.tokenizer.decode(got.tolist())}"
                    )
    run.log(
        "held out, exact: "
        + "; ".join(f"{k} {sum(v) / len(v):.3f} of {len(v)}" for k, v in sorted(counts.items()))
    )


def load_trained(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tower's and the adapter's tensors from the parts of a run."""
    return load_parts(folder, "tower"), load_parts(folder, "adapter")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("tower", "chats", "talk", "speech"))
    parser.add_argument("--assets", required=True)
    parser.add_argument("--out", default="build/smol")
    parser.add_argument(
        "--parts", default="", help="Folder for the weights in bfloat16; OUT/parts."
    )
    parser.add_argument(
        "--start", default="", help="Folder with such weights, to begin the talk or speech from."
    )
    parser.add_argument(
        "--model", default="", help="Folder with the GGUF; without it random weights of its shape."
    )
    parser.add_argument(
        "--minutes", type=float, default=8, help="Of the stage, all its calls together."
    )
    parser.add_argument("--now", type=float, default=0, help="Minutes of this call.")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument(
        "--every", type=int, default=100, help="Steps between two lines of the log."
    )
    parser.add_argument("--steps", type=int, default=-1, help="Stop here, for a trial.")
    parser.add_argument("--tests", type=int, default=8, help="Batches of the test at the end.")
    parser.add_argument(
        "--share", type=float, default=0.3, help="Of what speech learned, that is kept."
    )
    parser.add_argument(
        "--deep", type=int, default=30, help="Layers of the language model, for a trial."
    )
    parser.add_argument("--eager", action="store_true", help="Do not compile.")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if args.stage == "chats":
        plain_chats.make(Path(args.assets), Path(args.model))
        return
    if args.stage == "speech":
        from demo.smol import speech  # which needs this file

        speech.train(args)
        return
    gpu = torch.cuda.is_available()
    args.batch = args.batch or {"tower": 256 if gpu else 16, "talk": 64 if gpu else 16}[args.stage]
    (train_tower if args.stage == "tower" else train_talk)(args)


if __name__ == "__main__":
    main()
