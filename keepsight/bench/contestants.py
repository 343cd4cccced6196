"""What is measured: Keepsight, stock `generate`, and the limit that cannot be beaten.

All three answer the same prompt with the same model object. Stock is what a user of Transformers
runs: open the files, run the processor on the whole conversation, `generate`. The limit is one
forward pass of the new tokens with a ready cache and ready features; for a new picture the tower is
added. Time runs from the messages to the first token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from PIL import Image
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import BaseStreamer

import keepsight
from keepsight.bench.frame import now
from keepsight.formats.package import Package
from keepsight.kinds import Generating, Inputs, Message, Record
from keepsight.models.renamed import with_cache
from keepsight.prefix.prompt import Prompt, common
from keepsight.report import Report, Usage
from keepsight.vlm import VLM

TIE = 1e-4  # logits closer than this share of their scale may swap (law 2)


@dataclass
class Answer:
    """One contestant's answer to one prompt; milliseconds since the messages were given."""

    first: float
    total: float
    tokens: list[int]
    stages: dict[str, float] = field(default_factory=dict)
    usage: Usage | None = None
    text: str = ""
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def per_token(self) -> float:
        """Milliseconds of a token after the first."""
        return (self.total - self.first) / max(1, len(self.tokens) - 1)

    @property
    def counted(self) -> Usage:
        """What Keepsight counted."""
        if self.usage is None:
            raise RuntimeError("an answer came without its usage")
        return self.usage


def decoding(count: int) -> Generating:
    """So many greedy tokens, whatever they are."""
    return {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}


class Keepsight:
    """The engine through its public API."""

    def __init__(self, vlm: VLM) -> None:
        self.vlm = vlm

    def answer(self, messages: list[Message], count: int) -> Answer:
        """Stream `count` greedy tokens."""
        start, first, tokens, text = now(), 0.0, [], ""
        report, usage = Report(), Usage()
        for piece in self.vlm.stream(messages, **decoding(count)):
            if piece.token is not None:
                first = first or now() - start
                tokens.append(piece.token)
            text += piece.text
            report, usage = piece.report or report, piece.usage or usage
        return Answer(first, now() - start, tokens, dict(report.milliseconds), usage, text)


class _FirstToken(BaseStreamer):
    """Notes the time of the first token; Transformers passes the prompt before it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(now())

    def end(self) -> None:
        """Nothing to close."""


class Stock:
    """Transformers alone, on the whole conversation, starting from files."""

    def __init__(self, vlm: VLM) -> None:
        self._model, self._processor = vlm.model, vlm.runtime.needed_processor()

    def answer(self, messages: list[Message], count: int) -> Answer:
        """`model.generate` with `count` greedy tokens."""
        start = now()
        text = self._processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        images = [Image.open(path).convert("RGB") for path in picture_paths(messages)]
        inputs = self._processor(text=[text], images=images or None, return_tensors="pt")
        inputs = inputs.to(self._model.device)
        streamer = _FirstToken()
        output = self._model.generate(
            **inputs,
            **decoding(count),
            streamer=streamer,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        first = streamer.times[1] - start
        return Answer(first, now() - start, tokens, logits=list(output.logits))


def picture_paths(messages: list[Message]) -> list[str]:
    """The files of a conversation, in order."""
    return [
        part["image"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]


def agreement(mine: list[int], stock: Answer, count: int | None = None) -> str:
    """`equal`, `tie at token i`, or `DIFFERENT at token i` with the distance of the logits; of at
    most `count` tokens."""
    theirs = stock.tokens[:count]
    if mine == theirs:
        return "equal"
    spot = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if spot is None:
        return f"DIFFERENT: {len(mine)} tokens, stock has {len(theirs)}"
    logits = stock.logits[spot][0].float()
    share = float((logits[stock.tokens[spot]] - logits[mine[spot]]) / logits.abs().max())
    if abs(share) <= TIE:
        return f"tie at token {spot}"
    return f"DIFFERENT at token {spot} (logits {share:.1e} of their scale apart)"


class Limit:
    """One forward pass of just the new tokens, through Transformers alone.

    New are all rendered tokens that no earlier prompt of this round shares with this one. The cache
    is an ordinary `DynamicCache`, filled before the clock starts.
    """

    def __init__(self, vlm: VLM) -> None:
        # A separate memory: naming a picture here must not save Keepsight the work.
        self._vlm = keepsight.wrap(vlm.model, vlm.processor)
        self._model: PreTrainedModel = vlm.model
        self._family = self._vlm.runtime.family
        ends = vlm.model.generation_config.eos_token_id
        self._ends = [ends] if isinstance(ends, int) else list(ends or [])
        self.reset()

    def reset(self) -> None:
        """Start a new round without earlier prompts."""
        self._asked: list[Prompt] = []
        self._seen: Record = {}  # features by medium
        self._cache: DynamicCache | None = None
        self._cached = 0

    def prepare(self, messages: list[Message]) -> None:
        """Everything that a perfect memory would have; not measured. Tells what is new."""
        prompt = self._prompt = self._vlm.render(messages)
        met = [common(p.ids, p.spans, prompt.ids, prompt.spans) for p in self._asked]
        self.shared = max(met, default=0)
        self.new_tokens = len(prompt) - self.shared
        goes_on = bool(met) and met[-1] == self.shared == self._cached
        if not goes_on:
            self._cache, self._cached = DynamicCache(config=self._model.config), 0
        positions = self._family.positions(prompt.ids, prompt.types, prompt.grids)
        self._positions = positions.to(self._model.device)
        new = {m.feature_id: m for m in prompt.media if m.feature_id not in self._seen}
        self.new_images = len(new)
        # A package has no pixels; workloads hold none.
        self._pixels = {n: m.recall() for n, m in new.items() if not isinstance(m.recall, Package)}
        if self.shared and not goes_on and self.new_tokens:
            self._forward(0, self.shared)
        self._asked.append(prompt)

    @torch.inference_mode()
    def answer(self, messages: list[Message], count: int) -> Answer:
        """Compute one token; without new tokens there is nothing to run and the time is zero."""
        start = now()
        for name, pixels in self._pixels.items():
            tensors, container = self._family.encode(pixels)
            self._seen[name] = SimpleNamespace(
                modality="image", tensors=tensors, container=container
            )
        tokens = [self._forward(self.shared, len(self._prompt))] if self.new_tokens else []
        total = now() - start
        return Answer(total, total, tokens)

    @torch.inference_mode()
    def _forward(self, start: int, end: int) -> int:
        """Run tokens `start` to `end` through the model; return the best next token."""
        prompt = self._prompt
        inputs: Inputs = {}
        spans = prompt.clip(start, end)
        if spans:
            parts = [(self._seen[s.feature_id], s.row, s.row + s.end - s.start) for s in spans]
            inputs["mm_encoder_outputs"] = self._family.encoder_outputs(parts)
        output = self._model(
            input_ids=torch.from_numpy(prompt.ids[start:end])[None].to(self._model.device),
            position_ids=self._positions[..., start:end],
            **with_cache(self._model, self._cache),
            use_cache=True,
            logits_to_keep=1,
            **inputs,
        )
        self._cached = end
        logits = output.logits[0, -1]
        logits[self._ends] = -torch.inf  # as `min_new_tokens` does for the others
        return int(logits.argmax())
