"""Control tokens that a caller types are text; only what the chat template itself writes counts.

Transformers encodes a control token as text where its markers stand around it
(`apply_chat_template(..., sanitize_control_tokens=True)`). It marks whole tokens in values. Here
tokens are also found that are pieced together, by several strings or by the template's own text,
and in the names of fields: a break, which is no part of any token, is put around each character of
a caller's that a token could begin or end with. A token without a break in the rendered text is the
template's; the others are marked for Transformers, and the breaks are taken out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jinja2
import transformers
from jinja2 import nodes
from transformers import PreTrainedTokenizerBase

from keepsight.kinds import Message, Record
from keepsight.models import upstream

BREAK = "\U000e01ef"  # the last variation selector: no script uses it, and no tool escapes it
START, END = "\U000f0000", "\U000f0001"  # Transformers' markers
_OURS = re.compile(f"[{BREAK}{START}{END}]")
MARKED = re.compile(f"{START}(.*?){END}", re.DOTALL)
# The role. Templates may build tokens from it, as Phi's does: '<|' + message.role + '|>'.
_ROLES = frozenset(
    {
        *("system", "user", "assistant", "tool", "developer", "function", "model", "observation"),
        *("ipython", "environment", "System", "User", "Assistant", "human", "gpt", "bot"),
    }
)
_ANSWERS = ("assistant", "model")
# Methods whose first argument is searched for, not written.
_SEARCHES = frozenset(
    {
        *("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind"),
        *("index", "count", "replace", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"),
    }
)


class ControlTokens:
    """The control tokens under one template; `more` are texts that count as such."""

    def __init__(
        self, source: str, tokenizer: PreTrainedTokenizerBase, more: Iterable[str] = ()
    ) -> None:
        try:
            tree = upstream.parsed_template(source)
        except jinja2.TemplateSyntaxError:  # rendering will report it
            tree = nodes.Template([])
        texts = {*(n.data for n in tree.find_all(nodes.TemplateData)), *_constants(tree)}
        listed = set(getattr(tokenizer, "chat_control_tokens", None) or ())
        written = "\0".join(texts)
        added = tokenizer.added_tokens_decoder.values()
        found = {t.content for t in added if t.special or t.content in listed}
        found |= {t.content for t in added if t.content in written}
        found |= {*tokenizer.all_special_tokens, *more}
        # A single character occurs in ordinary text, even if a tokenizer calls it special.
        names = sorted(n for n in found if len(n) > 1 and not n.isspace())
        self.find = re.compile(any_of(names) or "(?!)")
        ids = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
        self.ids = {n: i for n, i in ids.items() if i not in (None, tokenizer.unk_token_id)}
        edges = {c for n in names for c in (n[0], n[-1]) if not c.isalnum()}
        marks = any_of({*edges, *(n for n in names if not edges & {n[0], n[-1]})}) or "(?!)"
        # Thoughts that a template looks for in an answer are found there, as in stock.
        sought = {n for text in _sought(tree) for n in self.find.findall(text)}
        sought -= {*tokenizer.all_special_tokens, *more}
        self._put = partial(self._text, re.compile(marks))
        self._put_in_answers = partial(
            self._text, re.compile(f"({any_of(sought) or '(?!)'})|{marks}")
        )
        self._gaps = _gaps(names, texts)
        self._known = texts | {n.attr for n in tree.find_all(nodes.Getattr)}

    def broken(self, messages: list[Message], options: Mapping[str, Any]) -> tuple[Any, Any]:
        """Messages and options with breaks in everything that a caller gives."""
        if isinstance(tools := options.get("tools"), list | tuple):
            schema = transformers.utils.get_json_schema
            options = {**options, "tools": [schema(t) if callable(t) else t for t in tools]}
        made = []
        for message in messages:
            answers = message["role"] in _ANSWERS
            new: Record = {}
            for name, value in message.items():
                if name == "role" and value in _ROLES:
                    new[name] = value
                else:
                    in_answer = answers and name == "content"
                    new[self._put(name)] = _each(
                        self._put_in_answers if in_answer else self._put, value
                    )
            made.append(new)
        return made, {name: _each(self._put, value) for name, value in options.items()}

    def _text(self, pattern: re.Pattern[str], text: str) -> str:
        if not text.isascii():
            text = _OURS.sub("", text)
        inner = text.strip() if self._gaps else ""
        if inner and inner in self._gaps and text not in self._known:
            text = text.replace(inner, BREAK + inner, 1)  # the template would complete it
        return pattern.sub(_with_breaks, text)

    def marked(self, text: str) -> str:
        """A rendered text without breaks; tokens that the template did not write are marked."""
        if BREAK not in text:
            return text
        made, cursor = [], 0
        for start, end in [*(m.span() for m in self.find.finditer(text)), (len(text), len(text))]:
            plain = text[cursor:start].replace(BREAK, "")
            made += [self.find.sub(f"{START}\\g<0>{END}", plain), text[start:end]]
            cursor = end
        return "".join(made)


def any_of(words: Iterable[str]) -> str:
    """A pattern for the longest of some words; its run time does not grow with their number."""
    rests: dict[str, list[str]] = {}
    ends = False
    for word in words:
        ends = ends or not word
        if word:
            rests.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(first) + any_of(rest) for first, rest in sorted(rests.items())]
    if len(branches) > 1 or (branches and ends):
        return f"(?:{'|'.join(branches)})" + ("?" if ends else "")
    return branches[0] if branches else ""


def _with_breaks(found: re.Match[str]) -> str:
    if found.lastindex:
        return found[0]
    return f"{BREAK}{found[0][0]}{BREAK}{found[0][1:]}"


def _each(change: Callable[[str], str], value: Any) -> Any:
    """Data with every string changed, names of fields too."""
    if isinstance(value, str):
        return change(value)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {_each(change, name): _each(change, inside) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_each(change, inside) for inside in value]
    return _each(change, upstream.plain_data(value))


def _constants(tree: nodes.Node) -> Iterator[str]:
    """Every string of a template's expressions."""
    return (n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str))


def _sought(tree: nodes.Template) -> Iterator[str]:
    """Strings that a template compares or searches for."""
    for compared in tree.find_all(nodes.Compare):
        yield from _constants(compared)
    for called in tree.find_all(nodes.Call):
        if isinstance(called.node, nodes.Getattr) and called.node.attr in _SEARCHES:
            yield from (text for one in called.args for text in _constants(nodes.List([one])))


def _gaps(names: list[str], texts: set[str]) -> str:
    """Every text between two texts of the template that would complete a token."""
    longest = max(map(len, names), default=0)
    ends = {text[-n:] for text in texts for n in range(1, min(longest, len(text)) + 1)}
    starts = {text[:n] for text in texts for n in range(1, min(longest, len(text)) + 1)}
    return "\0".join(
        name[i:j]
        for name in names
        for i in range(1, len(name) - 1)
        if name[:i] in ends
        for j in range(i + 1, len(name))
        if name[j:] in starts
    )
