"""Lists long sentences and private words in the docs: `python scripts/plain_words.py [FILE ...]`.

Code, tables and generated pages are left out. A glossary may name private words.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 30  # words of a sentence
PRIVATE = ("tower", "grain", "medium", "lane", "namespace", "boundary", "boundaries")
GENERATED = ("api.md", "errors.md", "command-line.md", "benchmarks.md")
PLAIN_ENOUGH = 0.02  # of all sentences may be longer


def sentences(text: str) -> list[str]:
    """The sentences of a page in Markdown, without code, tables and headings."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *(\||#|<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    found = []
    for paragraph in re.split(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", text, flags=re.MULTILINE):
        found += re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))
    return [sentence for sentence in found if len(sentence.split()) > 1]


def long_ones(text: str) -> list[str]:
    """Sentences of more than `MOST` words."""
    return [sentence for sentence in sentences(text) if len(sentence.split()) > MOST]


def private_words(text: str) -> list[str]:
    """Sentences with a private word."""
    pattern = re.compile(rf"\b({'|'.join(PRIVATE)})s?\b", re.IGNORECASE)
    return [sentence for sentence in sentences(text) if pattern.search(sentence)]


def pages() -> list[Path]:
    """README, CHANGELOG and the docs that people write."""
    docs = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED]
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *docs]


def main() -> int:
    """List them; 1 if too many sentences are long."""
    count = long = 0
    for page in map(Path, sys.argv[1:]) if len(sys.argv) > 1 else pages():
        text = page.read_text("utf-8")
        count += len(sentences(text))
        for kind, found in (("long", long_ones(text)), ("private", private_words(text))):
            long += len(found) if kind == "long" else 0
            for sentence in found:
                print(f"{page.name}: {kind}: {sentence}")
    print(f"{long} of {count} sentences have more than {MOST} words")
    return int(long > PLAIN_ENOUGH * count)


if __name__ == "__main__":
    sys.exit(main())
