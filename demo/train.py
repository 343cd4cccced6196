"""Stage 2: teach a language model to answer questions about what the frozen tower sees."""

import argparse
import math
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import delta
import tiny
import torch
import torch.nn.functional as F
from features import Bank
from lessons import SEARCHES, Batch, batches
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForImageTextToText, PreTrainedModel

MUON_RATE, ADAM_RATE = 3e-3, 2e-3
WARM_UP = 40
SAVE_EVERY = 300.0
# Without instructions for it, a product in bfloat16 takes two to ten times as long as in float32.
QUICK_BFLOAT16 = torch.cpu._is_avx512_bf16_supported()


class Training:
    """A model that learns until a given time is over."""

    def __init__(self, model: PreTrainedModel, bank: Bank, minutes: float, rate: float) -> None:
        self.model, self.bank = model, bank
        self.seconds, self.rate = minutes * 60, rate
        self.optimizers = optimizers(model)
        self.steps = 0

    def run(self, stream: Iterator[Batch]) -> Iterator[float]:
        """Take steps; after each, tell how many seconds it has been.

        Seconds of the processor are counted, not of the clock: a run that must share its machine,
        or is halted for a while, takes as many steps as any other.
        """
        start = time.process_time()
        recent: deque[float] = deque(maxlen=50)
        while (passed := time.process_time() - start) < self.seconds:
            self.set_rate(passed / self.seconds)
            loss, right = self.step(next(stream))
            recent.append(right)
            if self.steps % 50 == 0:
                share = sum(recent) / len(recent)
                print(f"{self.steps} {passed:.0f}s loss {loss:.4f} tokens {share:.5f}", flush=True)
            self.steps += 1
            yield passed

    def set_rate(self, done: float) -> None:
        """Warm up, then fall along a cosine to nearly nothing when the time is over."""
        warm = min(1.0, (self.steps + 1) / WARM_UP)
        share = self.rate * warm * (0.49 * (1 + math.cos(math.pi * done)) + 0.02)
        for optimizer, full in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = full * share

    def step(self, batch: Batch) -> tuple[float, float]:
        """Learn from one batch: its loss and the share of its tokens that were right."""
        seen = self.bank.tokens[batch.pictures].float()
        with torch.autocast("cpu", torch.bfloat16, enabled=QUICK_BFLOAT16):
            logits, target, weights = answers(self.model, batch, seen)
        losses = F.cross_entropy(logits.float(), target, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.model.language_model.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
        return loss.item(), (logits.argmax(-1) == target).float().mean().item()


def answers(model: PreTrainedModel, batch: Batch, seen: Tensor) -> tuple[Tensor, ...]:
    """The logits at every learned token, the token that is right there and its weight.

    Padding is on the right and attention is causal, so no mask is needed: what is padded comes
    after everything that counts.
    """
    text = model.model.language_model
    where = batch.ids == model.config.image_token_id
    embedded = text.embed_tokens(batch.ids)
    last, *deepstack = seen.split(embedded.shape[-1], dim=-1)
    embedded = embedded.masked_scatter(where[..., None], last)
    deep = {}
    if model.config.model_type == "qwen3_vl":
        deep = {"visual_pos_masks": where, "deepstack_visual_embeds": deepstack}
    out = text(inputs_embeds=embedded, position_ids=batch.positions, use_cache=False, **deep)
    target, weights = batch.ids[:, 1:], batch.weights[:, 1:]
    learned = weights > 0
    logits = model.lm_head(out.last_hidden_state[:, :-1][learned])
    return logits, target[learned], weights[learned]


def optimizers(model: PreTrainedModel) -> list[tuple[Optimizer, float]]:
    """Muon for the matrices inside the layers, AdamW for everything else that learns."""
    named = list(model.model.language_model.named_parameters())
    inner = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    taken = {id(p) for p in inner}
    rest = [p for _, p in named if id(p) not in taken]
    muon = torch.optim.Muon(
        inner, lr=MUON_RATE, momentum=0.95, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    return [(muon, MUON_RATE), (adam, ADAM_RATE)]


def orthogonal(
    gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Muon's direction, found in float32: torch finds it in bfloat16 whatever the machine."""
    a, b, c = coefficients
    wide = gradient.shape[0] <= gradient.shape[1]
    x = gradient if wide else gradient.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.T


def starting(options: argparse.Namespace) -> PreTrainedModel:
    """The model to teach: an earlier one, or a new one that gets the tower of stage 1."""
    if options.start:
        model = AutoModelForImageTextToText.from_pretrained(options.start, dtype=torch.float32)
        layers = tiny.fresh(options.kind).config.text_config.num_hidden_layers
        if len(model.model.language_model.layers) < layers:
            model = tiny.grown(model)
        model.model.visual.requires_grad_(False)
        return model
    return tiny.with_tower(tiny.fresh(options.kind), options.tower)


def main() -> None:
    """Train one model and write its folder; every few minutes, one beside it, to lose little."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=tiny.KINDS)
    parser.add_argument("--tower", type=Path, required=True, help="what pretrain.py wrote")
    parser.add_argument("--bank", type=Path, required=True, help="what features.py wrote")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="go on from this model folder")
    parser.add_argument("--minutes", type=float, default=90, help="of processor time")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--searches", type=float, default=SEARCHES, help="share of such lessons")
    parser.add_argument("--rate", type=float, default=0.85)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    delta.install()
    if not QUICK_BFLOAT16:
        torch.optim._muon._zeropower_via_newtonschulz = orthogonal
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer, bank = Tokenizer.from_file(str(options.tokenizer)), Bank.load(options.bank)
    training = Training(starting(options), bank, options.minutes, options.rate)
    saved, unfinished = 0.0, options.out.with_name(f"{options.out.name}.part")
    lessons = batches(tokenizer, bank, options.batch, options.seed, options.searches)
    for passed in training.run(lessons):
        if passed - saved > SAVE_EVERY:
            saved = passed
            tiny.save(training.model, tokenizer, unfinished)
    tiny.save(training.model, tokenizer, options.out)


if __name__ == "__main__":
    main()
