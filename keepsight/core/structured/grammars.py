"""Grammars that choose which tokens may follow, by llguidance: an optional library.

A format is compiled once, in its caller's thread, and each answer gets a copy. A `Constraint`
follows one answer: it masks what may not follow, and says which tokens are forced.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from keepsight.core.structured.formats import Format
from keepsight.core.structured.thoughts import THINK, THINK_END
from keepsight.errors import GrammarError, UnfinishedAnswer
from keepsight.kinds import Record
from keepsight.system.optional import optional

KEPT = 32  # compiled grammars
MOST_FORCED = 64  # forced tokens that are read in one pass
# A step of a hostile grammar takes at most some milliseconds, and its states some megabytes.
_LIMITS = {
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "verbose_errors": False,
}
_ANSWER = "answer"


@dataclass(frozen=True)
class Grammar:
    """A compiled format. `thought`: whether a thought may come before the answer."""

    format: Format
    thought: bool
    matcher: Any  # in its first state; never advanced

    def begin(self) -> Constraint:
        return Constraint(self.matcher.deep_copy(), self.format.place)

    def read(self, text: str, finish_reason: str) -> Any:
        if finish_reason != "stop":
            raise UnfinishedAnswer(
                f"the answer ended before its form was complete ({finish_reason}); allow more "
                "tokens with max_new_tokens"
            )
        if self.thought and THINK_END in text:
            text = text.partition(THINK_END)[2].lstrip()
        try:
            return self.format.read(text)
        except json.JSONDecodeError as error:
            raise UnfinishedAnswer(f"a stop string ended it before its form was: {error}") from None


class Grammars:
    """Compiles formats for one tokenizer. May be used from several threads."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: tuple[int, ...]
    ) -> None:
        """`vocabulary`: how many logits the model gives; `ends`: the tokens that end an answer."""
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._words: Any = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Any] = OrderedDict()  # matchers by grammar

    def compiled(self, form: Format, thinks: bool = False, opened: bool = False) -> Grammar:
        """The grammar of a format, behind the thought of a model that thinks."""
        library = optional("llguidance", "structured")
        first, *more = [self._entry(entry, form.place, library) for entry in form.grammars]
        grammars = [{"name": _ANSWER, **first}, *more]
        if thinks or opened:
            grammars.insert(0, {"lark_grammar": self._behind_a_thought(opened)})
        text = json.dumps({"grammars": grammars})
        with self._lock:
            matcher = self._kept.get(text)
            if matcher is not None:
                self._kept.move_to_end(text)
        if matcher is None:
            try:
                matcher = self._compile(text, form.place, library)
            except GrammarError:
                for part in form.parts:
                    self.compiled(part)
                raise
            with self._lock:
                self._kept[text] = matcher
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return Grammar(form, thinks or opened, matcher)

    def _compile(self, text: str, place: str, library: Any) -> Any:
        words = self._wordlist(place)
        limits = library.LLParserLimits(**_LIMITS)
        matcher = library.LLMatcher(words, text, log_level=0, limits=limits)
        refuse_errors(matcher, place)
        tried = matcher.deep_copy()
        tried.compute_bitmask()  # some that no text satisfies compile
        refuse_errors(tried, place)
        return matcher

    def _wordlist(self, place: str) -> Any:
        """The tokenizer as llguidance reads it, made once."""
        with self._lock:
            if self._words is None:
                if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
                    kind = type(self._tokenizer).__name__
                    raise GrammarError(
                        place,
                        f"the tokenizer is a {kind}, and only those of the tokenizers library "
                        "can be constrained; load it with use_fast=True",
                    )
                from_tokenizer = optional("llguidance.hf", "structured").from_tokenizer
                count = max(self._vocabulary, len(self._tokenizer))
                try:
                    self._words = from_tokenizer(
                        self._tokenizer, n_vocab=count, eos_token=list(self._ends) or None
                    )
                except Exception as error:  # of a foreign library, for a foreign tokenizer
                    why = f"the tokenizer of this model cannot be constrained: {error}"
                    raise GrammarError(place, why) from error
            return self._words

    def _entry(self, entry: Record, place: str, library: Any) -> Record:
        """One grammar as llguidance reads it."""
        if "regex" in entry:
            return {"lark_grammar": f"start: /{library.regex_to_lark(entry['regex'])}/"}
        if "choice" in entry:
            texts = [json.dumps(one, ensure_ascii=False) for one in entry["choice"]]
            return {"lark_grammar": f"start: {' | '.join(texts)}"}
        if "::=" in entry.get("lark_grammar", ""):
            from_gbnf = optional("llguidance.gbnf_to_lark", "structured").gbnf_to_lark
            try:
                return {"lark_grammar": from_gbnf(entry["lark_grammar"])}
            except (Exception, RecursionError) as error:
                raise GrammarError(place, f"this grammar cannot be read: {error}") from None
        return entry

    def _behind_a_thought(self, opened: bool) -> str:
        """The grammar of an answer behind a thought, which the prompt may have opened. A mark that
        is a token of its own is not text for llguidance, and written without quotes."""
        own = {token.content for token in self._tokenizer.added_tokens_decoder.values()}
        begin = THINK if THINK in own else json.dumps(THINK)
        if THINK_END in own:
            thought = f"thought: /(.|\\n)*/ {THINK_END}"
        else:
            thought = f"thought[lazy]: /(.|\\n)*{THINK_END.replace('/', chr(92) + '/')}/"
        start = "thought gap @answer" if opened else f"({begin} thought gap)? @answer"
        return f"start: {start}\n{thought}\ngap: /\\n*/"


class Constraint(LogitsProcessor):
    """Follows one answer. As a processor of logits it masks the tokens that may not follow."""

    def __init__(self, matcher: Any, place: str) -> None:
        self._matcher, self._place = matcher, place
        self.only: int | None = None  # the one token that may follow, after a mask

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores of the tokens that may follow; all others are impossible."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        refuse_errors(self._matcher, self._place)
        may = np.unpackbits(bits, bitorder="little")[: scores.shape[-1]].astype(bool)
        few = np.flatnonzero(may) if np.bitwise_count(bits).sum() < 2 else None
        self.only = int(few[0]) if few is not None and len(few) else None
        masked = scores.masked_fill(~torch.from_numpy(may).to(scores.device), -torch.inf)
        if self.only is None and not torch.isfinite(masked.max()):
            why = "no token is left that the other options of this call allow; leave them out"
            raise GrammarError(self._place, why)
        return masked

    def take(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            refuse_errors(self._matcher, self._place)

    @property
    def over(self) -> bool:
        return bool(self._matcher.is_stopped())

    def fitting(self, tokens: list[int]) -> list[int]:
        """The first of some guessed tokens, as far as they may follow."""
        return tokens[: self._matcher.validate_tokens(tokens)] if tokens else tokens

    def forced(self, most: int) -> list[int]:
        """The tokens that have to follow, at most so many, and not the last one of all: nothing
        is computed behind it."""
        found: list[int] = []
        while len(found) < min(most, MOST_FORCED) and not self._matcher.is_stopped():
            ahead = self._matcher.compute_ff_tokens()[:1]  # its end may change with what follows
            if not ahead or not self._matcher.consume_token(ahead[0]):
                break
            found += ahead
        refuse_errors(self._matcher, self._place)
        ends = self._matcher.is_stopped()
        if found:
            self._matcher.rollback(len(found))
        return found[:-1] if ends else found


def refuse_errors(matcher: Any, place: str) -> None:
    """Raise what went wrong in a grammar, in one sentence."""
    if matcher.is_error():
        said = matcher.get_error().partition("\n<state>")[0]
        what = " ".join(said.split())[:500]
        if what in ("", "NoExtensionBias", "NoExtension"):
            what = "no text satisfies it"
        raise GrammarError(place, f"it cannot be enforced: {what}")
