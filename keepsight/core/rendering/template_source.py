"""Splits the strings in a chat template's source into written ones and searched ones.

Some strings become part of the text; others are compared with messages or searched in them. The
words around a string tell which. This may be wrong for some template, and need not be right: the
caller compares the result with the template's own output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import jinja2

from keepsight.core.rendering.control_tokens import Code, ControlTokens

# Methods and filters whose first argument is searched for, not written.
_SEARCHES = frozenset(
    {
        *("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind"),
        *("index", "count", "replace", "strip", "lstrip", "rstrip", "trim", "removeprefix"),
        "removesuffix",
    }
)
_LEXER = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as in Transformers
_PASSED_OVER = ("whitespace", "comment_begin", "comment", "comment_end")


@dataclass(frozen=True)
class _Word:
    """One word of a template's source, with the space behind it; `text` is the value of a
    string."""

    kind: str
    source: str
    text: str
    behind: str = ""

    @property
    def says(self) -> bool:
        """Whether it is text that may be written."""
        return self.kind in ("data", "string")


class TemplateSource:
    """A template's source as words, with written and searched strings told apart."""

    def __init__(self, source: str) -> None:
        self._end = "\n" if source.endswith("\n") else ""
        try:
            self.words = _words(source)
        except jinja2.TemplateSyntaxError:  # rendering will report it
            self.words = []
        self.texts = [word.text for word in self.words if word.says] or [source]
        attributes = (self._at(i + 1) for i, w in enumerate(self.words) if w.source == ".")
        self.looked_up = frozenset(self.texts).union(attributes)

    def rewritten(self, tokens: ControlTokens, code: Code) -> str:
        """The same template with its own control tokens in code."""

        def put(found: re.Match[str]) -> str:
            return code.put(found[0])

        made = []
        for i, word in enumerate(self.words):
            text = word.text
            if word.says and not self._looked_for(i):
                text = tokens.find.sub(put, text)
                text = tokens.marks.sub(put, text) if self._beside_role(i) else text
            same = text == word.text
            source = word.source if same else text if word.kind == "data" else _literal(text)
            made.append(source + word.behind)
        return "".join(made) + self._end

    def looked_for(self, tokens: ControlTokens) -> Iterator[str]:
        """The tokens that the template searches for in its input."""
        for i, word in enumerate(self.words):
            if self._looked_for(i):
                yield from tokens.find.findall(word.text)

    def gaps(self, tokens: ControlTokens) -> str:
        """Every text between two texts of the template that would complete a token."""
        longest = max(map(len, tokens.names), default=0)
        ends = {text[-n:] for text in self.texts for n in range(1, min(longest, len(text)) + 1)}
        starts = {text[:n] for text in self.texts for n in range(1, min(longest, len(text)) + 1)}
        return "\0".join(
            name[i:j]
            for name in tokens.names
            for i in range(1, len(name) - 1)
            if name[:i] in ends
            for j in range(i + 1, len(name))
            if name[j:] in starts
        )

    def _at(self, i: int) -> str:
        return self.words[i].source if 0 <= i < len(self.words) else ""

    def _looked_for(self, i: int) -> bool:
        """Whether a string is compared or searched for, not written."""
        if self.words[i].kind != "string":
            return False
        before, after = self._at(i - 1), self._at(i + 1)
        compared = before in ("in", "==", "!=") or after in ("in", "not", "==", "!=")
        return compared or (before == "(" and self._at(i - 2) in _SEARCHES)

    def _beside_role(self, i: int) -> bool:
        """Whether the role stands next to a string, so that both may form a token."""
        for step in (1, -1):
            j = i + step
            while 0 <= j < len(self.words):
                word = self.words[j]
                if word.text == "role" or (word.kind == "name" and "role" in word.source):
                    return True
                if word.says:
                    break
                j += step
        return False


def _words(source: str) -> list[_Word]:
    """The words of a template, each with the space and comments behind it."""
    words: list[_Word] = []
    for _, kind, value in _LEXER.lex(source):
        if kind in _PASSED_OVER and words:
            last = words[-1]
            words[-1] = _Word(last.kind, last.source, last.text, last.behind + value)
            continue
        text = value
        if kind == "string":  # as Jinja reads it
            text = value[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
        words.append(_Word(kind, value, text))
    return words


def _literal(text: str) -> str:
    """A text as a string literal of a template."""
    escaped = text.encode("unicode-escape").decode("ascii").replace("'", "\\'")
    return f"'{escaped}'"
