"""Keepsight with `runtime="mlx"` beside mlx-vlm itself, on the conversation of the peers.

Run `python -m bench.mlx` after `make test-mlx`, with `PYTHONPATH=build/mlx:.`. Both have the same
checkpoint in one process and answer each prompt in turn, in an order that changes; each
repetition begins with empty memories. mlx-vlm has all three of its own: the state of the
conversation, the automatic prefix cache (whose memory gives no prefix that has pictures in it) and
the cache of features. Time to the first token runs from the messages,
with file names in them; the towers' passes are counted by picture. Tokens must be equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

import keepsight
from bench.restart import pairs
from keepsight.bench import machine
from keepsight.bench.checkpoints import checkpoint
from keepsight.bench.contestants import Keepsight, now, picture_paths
from keepsight.bench.options import SCALES, SHAPES, SIZES
from keepsight.bench.workloads import Pictures, Step, peers_conversation
from keepsight.cli.terminal import table
from keepsight.kinds import Message
from keepsight.runtimes.mlx_library import as_mlx_reads_it, own_names

FORMAT = 1
OURS, THEIRS = "keepsight", "mlx-vlm"
Met = dict[str, dict[str, Any]]  # one prompt in one repetition, by contestant
Answer = Callable[[list[Message]], dict[str, Any]]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 when an answer differed."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    folder = checkpoint(options.shape, options.size, options.folder)
    with TemporaryDirectory() as pictures:
        scale = SCALES[options.scale]
        steps = peers_conversation(Pictures(Path(pictures)), scale.peers, scale).steps
        rounds, versions = _measure(folder, steps, options)
    told = [word for pair in pairs(argv) if pair[0] not in ("--out", "--folder") for word in pair]
    result = {
        "benchmark": "keepsight mlx",
        "format": FORMAT,
        "command": " ".join(["python -m bench.mlx", *told]),
        "machine": machine.describe(),
        "runtime": versions,
        "shape": options.shape,
        "size": options.size,
        "dtype": "float32",
        "picture": f"{scale.peers}x{scale.peers}",
        **{name: getattr(options, name) for name in ("tokens", "repetitions")},
        **sums([step.name for step in steps], rounds),
    }
    shown = table(*COLUMNS)
    for row in rows(result):
        shown.add_row(*row)
    Console().print(shown)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0 if result["equal"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.mlx", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_vl")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--scale", choices=SCALES, default="quick", help="of the pictures")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("bench/checkpoints"))
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


# -- measuring -----------------------------------------------------------------------------------


def _measure(
    folder: Path, steps: list[Step], options: argparse.Namespace
) -> tuple[list[list[Met]], str]:
    rounds, theirs = [], MlxVlm(folder, options.tokens)  # its processors come with its first model
    with keepsight.load(folder, runtime="mlx") as vlm:
        ours = Keepsight(vlm)
        ways: dict[str, Answer] = {
            OURS: lambda messages: _ours(ours, messages, options.tokens),
            THEIRS: theirs.answer,
        }
        for number in range(options.repetitions):
            print(f"repetition {number + 1} of {options.repetitions}", file=sys.stderr, flush=True)
            vlm.clear()
            theirs.forget()
            met = []
            for i, step in enumerate(steps):
                order = list(ways)[:: -1 if (number + i) % 2 else 1]
                met.append({name: ways[name](step.messages) for name in order})
            rounds.append(met)
        return rounds, str(vlm.model.exported.environment["runtime"])


def _ours(contestant: Keepsight, messages: list[Message], count: int) -> dict[str, Any]:
    answer = contestant.answer(messages, count)
    usage = answer.usage
    if usage is None:
        raise RuntimeError("an answer came without its usage")
    return _told(
        answer.first,
        answer.total,
        answer.tokens,
        (usage.prompt_tokens, usage.cached_tokens, usage.images_encoded),
    )


def _told(
    first: float, total: float, tokens: list[int], counted: tuple[int, int, int]
) -> dict[str, Any]:
    named = dict(zip(("prompt_tokens", "cached_tokens", "encoded"), counted, strict=True))
    decode = (total - first) / max(1, len(tokens) - 1)
    return {"first": first, "decode": decode, "tokens": tokens, **named}


class MlxVlm:
    """mlx-vlm alone: its own processor, template, loop and caches."""

    def __init__(self, folder: Path, count: int) -> None:
        library, caches = (import_module(f"mlx_vlm{name}") for name in ("", ".vision_cache"))
        self._stream, self._count = library.stream_generate, count
        self._state, self._vision = library.PromptCacheState, caches.VisionFeatureCache
        self._apc = library.apc.APCManager
        with as_mlx_reads_it(folder) as readable, own_names():
            self._model, self._processor = library.load(str(readable))
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        self._unending = dict.fromkeys(ends, -1e9)  # as `min_new_tokens` does
        names, known = (
            self._model.config.text_config.vocab_size,
            self._processor.detokenizer.tokenmap,
        )
        known += ["-"] * (names - len(known))  # ids that no tokenizer has, and random weights say
        self.forget()

    def forget(self) -> None:
        """Begin with empty memories."""
        self._prefixes, self._features, self._chat = self._apc(), self._vision(), self._state()
        self._before: list[Message] = []

    def _begin(self, messages: list[Message]) -> None:
        """Another conversation has another state."""
        if messages[: len(self._before)] != self._before:
            self._chat = self._state()
        self._before = messages

    def answer(self, messages: list[Message]) -> dict[str, Any]:
        """Stream greedy tokens, from the messages on."""
        start, first, tokens = now(), 0.0, []
        self._begin(messages)
        prompt = self._processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        with _pictures_seen(self._model.vision_tower) as seen:
            for piece in self._stream(
                self._model,
                self._processor,
                prompt,
                picture_paths(messages),
                max_tokens=self._count,
                temperature=0.0,
                logit_bias=self._unending,
                prompt_cache_state=self._chat,
                apc_manager=self._prefixes,
                vision_cache=self._features,
            ):
                first = first or now() - start
                if piece.token_ids is None:  # the last piece repeats the last token
                    tokens.append(int(piece.token))
                counted = (piece.prompt_tokens, piece.cached_tokens, len(seen))
        return _told(first, now() - start, tokens, counted)


@contextmanager
def _pictures_seen(tower: Any) -> Iterator[list[object]]:
    """The pictures that a tower looks at."""
    seen: list[object] = []
    stock = type(tower)

    class Counted(stock):  # type: ignore[misc, valid-type]
        def __call__(self, pixels: Any, grid: Any, *more: Any, **options: Any) -> Any:
            seen.extend(grid.tolist())
            return super().__call__(pixels, grid, *more, **options)

    tower.__class__ = Counted
    try:
        yield seen
    finally:
        tower.__class__ = stock


# -- telling -------------------------------------------------------------------------------------


def sums(names: list[str], rounds: list[list[Met]]) -> dict[str, Any]:
    """Medians by prompt, ratios within a repetition, and whether all tokens are equal."""
    steps = []
    for number, name in enumerate(names):
        met = [one[number] for one in rounds]
        told: dict[str, Any] = {"name": name}
        for who in (OURS, THEIRS):
            last = met[-1][who]  # those of the first repetition met a process that is not warm
            counts = {field: last[field] for field in ("prompt_tokens", "cached_tokens", "encoded")}
            for field in ("first", "decode"):
                counts[f"{field}_ms"] = round(median(one[who][field] for one in met), 2)
            told[who] = counts
        for field in ("first", "decode"):
            ratios = [one[THEIRS][field] / one[OURS][field] for one in met]
            told[f"{field}_ratio"] = round(median(ratios), 3)
        wanted = met[0][OURS]["tokens"]
        told["equal"] = all(one[who]["tokens"] == wanted for one in met for who in one)
        steps.append(told)
    return {"steps": steps, "equal": all(step["equal"] for step in steps)}


COLUMNS = [
    "prompt",
    "tokens",
    "reused, keepsight",
    "reused, mlx-vlm",
    "pictures encoded, keepsight",
    "pictures encoded, mlx-vlm",
    "first token, keepsight, ms",
    "first token, mlx-vlm, ms",
    "times sooner",
    "decoding, times as fast",
    "same tokens",
]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The prompts as cells."""
    made = []
    for step in result["steps"]:
        both = [step[who] for who in (OURS, THEIRS)]
        counted = [str(one[field]) for field in ("cached_tokens", "encoded") for one in both]
        first = [f"{one['first_ms']:.0f}" for one in both]
        ratios = [f"{step[field]:.2f}" for field in ("first_ratio", "decode_ratio")]
        same = "yes" if step["equal"] else "NO"
        made.append([step["name"], str(both[0]["prompt_tokens"]), *counted, *first, *ratios, same])
    return made


if __name__ == "__main__":
    raise SystemExit(main())
