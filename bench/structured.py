"""What a form of the answer costs, and what certain tokens save.

Run `python -m bench.structured`. One model answers about a remembered picture: freely; with JSON
whose texts are as free as that; and with JSON of which much is certain. They take turns with the
same prompt. A rate is tokens of the answer over the time of the whole call, in which nothing but
the answer is computed; a ratio is that of a form over the free answer of the same repetition.

- **text**: a JSON schema of long texts, so that nearly every token is masked and none is certain.
- **record**: names of properties and choices, most of whose tokens are certain and read in passes
  of several.
- **one by one**: the same record, its certain tokens computed one by one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import keepsight as ks
from bench.frame import Record, Told, bench, model_of
from keepsight.bench.frame import interleaved, middle, now, ratio, say, spread
from keepsight.bench.workloads import Pictures, user, words
from keepsight.core.engine import Engine

FREE, TEXT, RECORD, SINGLY = "free", "text", "record", "one by one"
_LONG = {"type": "string", "minLength": 4000}
_CHOICE = {"enum": ["certainly not visible", "partially visible", "visible everywhere"]}
_NAMES = ("foreground objects", "background objects", "written characters", "human persons")
_RECORD = {"properties": dict.fromkeys(_NAMES, _CHOICE), "required": list(_NAMES)}
FORMS: Record = {
    FREE: None,
    TEXT: {"type": "object", "properties": {"text": _LONG}, "required": ["text"]},
    RECORD: {"type": "object", **_RECORD},
    SINGLY: {"type": "object", **_RECORD},
}


def add(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told."""
    parser.add_argument("--tokens", type=int, default=96, help="of each answer, at most")


def measure(options: argparse.Namespace) -> Record:
    """All forms in turn."""
    with (
        ks.load(model_of(options), dtype=options.dtype, pack=True, drafts=False) as vlm,
        TemporaryDirectory() as folder,
    ):
        asked = [user(words(7, 22), Pictures(Path(folder)).path(0, 320, 256))]

        def answer(form: str, number: int) -> tuple[ks.Reply, float]:
            """One answer, and its tokens a second."""
            say(f"repetition {number} of {options.repetitions}: {form}")
            least = options.tokens if form == FREE else 0
            vlm.chat(asked, max_new_tokens=1, response_format=FORMS[form])  # read, and compiled
            start = now()
            reply = vlm.chat(
                asked,
                response_format=FORMS[form],
                max_new_tokens=options.tokens,
                min_new_tokens=least,
                do_sample=True,
                seed=number,
            )
            return reply, 1e3 * len(reply.tokens) / (now() - start)

        def singly(number: int) -> tuple[ks.Reply, float]:
            with patch.object(Engine, "_forced", lambda *_: []):
                return answer(SINGLY, number)

        ways = {form: lambda n, form=form: answer(form, n) for form in FORMS} | {SINGLY: singly}
        rounds = interleaved(options.repetitions + 1, ways)[1:]  # the first one warms up
    answers = []
    for form in FORMS:
        pairs = [(one[form][1], one[FREE][1]) for one in rounds]
        first = rounds[0][form][0]
        row = {"name": form, "tokens": len(first.tokens), "certain": first.usage.forced_tokens}
        row |= {"rate": middle((a for a, _ in pairs), 1), "over_free": ratio(pairs)}
        answers.append({**row, "spread": spread((a / b for a, b in pairs), 3)})
    equal = all(one[RECORD][0].tokens == one[SINGLY][0].tokens for one in rounds)
    return {"answers": answers, "equal": equal}


def tables(result: Record) -> Iterator[Told]:
    """The kinds of answers."""
    heading = f"answers of up to {result['tokens']} tokens, {result['repetitions']} repetitions"
    fields = ("name", "tokens", "certain", "rate", "over_free")
    rows = [[str(row[field]) for field in fields] for row in result["answers"]]
    yield heading, ["answer", "tokens", "certain", "tokens/s", "over free"], rows


main = bench("structured", __doc__, add, measure, tables, repetitions=5)

if __name__ == "__main__":
    raise SystemExit(main())
