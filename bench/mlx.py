"""Keepsight with `runtime="mlx"` beside mlx-vlm itself, on the conversation of the peers.

Run `python -m bench.mlx` after `make test-mlx`, with `PYTHONPATH=build/mlx:.`. Both have the same
checkpoint in one process and answer each prompt in turn; each repetition begins with empty
memories. mlx-vlm has all three of its own: the state of the conversation, the automatic prefix
cache (whose memory gives no prefix that has pictures in it) and the cache of features. Time to the
first token runs from the messages, with file names in them; the towers' passes are counted by
picture. Tokens must be equal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keepsight
from bench.frame import Record, Told, bench, model_of
from keepsight.bench.contestants import Answer, Keepsight, picture_paths
from keepsight.bench.frame import interleaved, middle, now, ratio, say
from keepsight.bench.options import SCALES
from keepsight.bench.workloads import Pictures, peers
from keepsight.kinds import Message
from keepsight.report import Usage

OURS, THEIRS = "keepsight", "mlx-vlm"
COUNTED = {"prompt_tokens": "prompt_tokens", "cached_tokens": "cached_tokens"}
COUNTED |= {"encoded": "images_encoded"}


def add(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told."""
    parser.add_argument("--scale", choices=SCALES, default="quick", help="of the pictures")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")


def measure(options: argparse.Namespace) -> Record:
    """Both in turn, prompt by prompt."""
    model, scale = model_of(options), SCALES[options.scale]
    theirs = MlxVlm(Path(model))  # its processors come with its first model
    with TemporaryDirectory() as folder, keepsight.load(model, runtime="mlx") as vlm:
        steps = peers(Pictures(Path(folder)), scale).steps
        ways = {OURS: Keepsight(vlm), THEIRS: theirs}
        rounds = []
        for number in range(options.repetitions):
            say(f"repetition {number + 1} of {options.repetitions}")
            vlm.clear()
            theirs.forget()
            met = []
            for i, step in enumerate(steps):
                asked = {
                    name: lambda _, way=way, said=step.messages: way.answer(said, options.tokens)
                    for name, way in ways.items()
                }
                met += interleaved(number + i + 1, asked, number + i)
            rounds.append(met)
        about = {"runtime": str(vlm.model.exported.environment["runtime"]), "dtype": "float32"}
    about["picture"] = f"{scale.peers}x{scale.peers}"
    return {**about, **sums([step.name for step in steps], rounds)}


class MlxVlm:
    """mlx-vlm alone: its own processor, template, loop and caches."""

    def __init__(self, folder: Path) -> None:
        from keepsight.runtimes.mlx_library import as_mlx_reads_it, own_names

        library, caches = (import_module(f"mlx_vlm{name}") for name in ("", ".vision_cache"))
        self._stream, self._new_chat = library.stream_generate, library.PromptCacheState
        self._new_features, self._new_prefixes = caches.VisionFeatureCache, library.apc.APCManager
        with as_mlx_reads_it(folder) as readable, own_names():
            self._model, self._processor = library.load(str(readable))
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        self._unending = dict.fromkeys(ends, -1e9)  # as `min_new_tokens` does
        known = self._processor.detokenizer.tokenmap
        # Ids that no tokenizer has, and random weights say.
        known += ["-"] * (self._model.config.text_config.vocab_size - len(known))
        self.forget()

    def forget(self) -> None:
        """Begin with empty memories."""
        self._prefixes, self._features = self._new_prefixes(), self._new_features()
        self._chat, self._before = self._new_chat(), list[Message]()

    def answer(self, messages: list[Message], count: int) -> Answer:
        """Stream greedy tokens, from the messages on."""
        start, first, tokens, usage = now(), 0.0, [], Usage()
        if messages[: len(self._before)] != self._before:
            self._chat = self._new_chat()  # another conversation has another state
        self._before = messages
        prompt = self._processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        with _pictures_seen(self._model.vision_tower) as seen:
            for piece in self._stream(
                self._model,
                self._processor,
                prompt,
                picture_paths(messages),
                max_tokens=count,
                temperature=0.0,
                logit_bias=self._unending,
                prompt_cache_state=self._chat,
                apc_manager=self._prefixes,
                vision_cache=self._features,
            ):
                first = first or now() - start
                if piece.token_ids is None:  # the last piece repeats the last token
                    tokens.append(int(piece.token))
                usage.prompt_tokens, usage.cached_tokens = piece.prompt_tokens, piece.cached_tokens
            usage.images_encoded = len(seen)
        return Answer(first, now() - start, tokens, usage=usage)


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


def sums(names: list[str], rounds: list[list[dict[str, Answer]]]) -> Record:
    """Medians by prompt, ratios within a repetition, and whether all tokens are equal."""
    steps = []
    for name, met in zip(names, zip(*rounds, strict=True), strict=True):
        told: Record = {"name": name}
        for who in (OURS, THEIRS):
            last = met[-1][who].counted  # the first repetition met a process that is not warm
            told[who] = {field: getattr(last, counted) for field, counted in COUNTED.items()}
            told[who]["first_ms"] = middle(one[who].first for one in met)
            told[who]["decode_ms"] = middle(one[who].per_token for one in met)
        told["first_ratio"] = ratio((one[THEIRS].first, one[OURS].first) for one in met)
        told["decode_ratio"] = ratio((one[THEIRS].per_token, one[OURS].per_token) for one in met)
        wanted = met[0][OURS].tokens
        told["equal"] = all(answer.tokens == wanted for one in met for answer in one.values())
        steps.append(told)
    return {"steps": steps, "equal": all(step["equal"] for step in steps)}


def tables(result: Record) -> Iterator[Told]:
    """One row for each prompt."""
    columns = ["prompt", "tokens", "reused, keepsight", "reused, mlx-vlm"]
    columns += ["pictures encoded, keepsight", "pictures encoded, mlx-vlm"]
    columns += ["first token, keepsight, ms", "first token, mlx-vlm, ms", "times sooner"]
    columns += ["decoding, times as fast", "same tokens"]
    rows = []
    for step in result["steps"]:
        both = [step[who] for who in (OURS, THEIRS)]
        row = [step["name"], str(both[0]["prompt_tokens"])]
        row += [str(one[field]) for field in ("cached_tokens", "encoded") for one in both]
        row += [f"{one['first_ms']:.0f}" for one in both]
        row += [f"{step[field]:.2f}" for field in ("first_ratio", "decode_ratio")]
        rows.append([*row, "yes" if step["equal"] else "NO"])
    heading = (
        f"pictures of {result['picture']}, answers of {result['tokens']} tokens, "
        f"{result['repetitions']} repetitions, {result['runtime']}"
    )
    yield heading, columns, rows


main = bench("mlx", __doc__, add, measure, tables)

if __name__ == "__main__":
    raise SystemExit(main())
