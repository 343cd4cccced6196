"""From logits to tokens to text, with Transformers' own processors and criteria.

Every option of `GenerationConfig` is used or refused by name. Options that need several sequences
(beams) or a second model do not fit one remembered prefix; the error says so.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from keepsight.core.decoding.stops import StopStrings, stop_strings
from keepsight.core.structured.grammars import Constraint, Grammar
from keepsight.errors import GrammarError, InputError, KeepsightError, PromptTooLong, UnknownOption
from keepsight.kinds import Options
from keepsight.models import upstream
from keepsight.prompt.lengths import context_length

# Options of GenerationConfig that this engine cannot serve, with their neutral values.
_REFUSED: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "guidance_scale": (None, 1.0, 1),
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "token_healing": (None, False),
    "constraints": (None,),
    "force_words_ids": (None,),
}
_OURS = (
    "stop",
    "seed",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "skip_special_tokens",
    "response_format",
)
_ALIASES = {"max_tokens": "max_new_tokens"}
_KEPT = 1 << 27  # bytes of random numbers that are kept for rows that are behind
DEFAULT_CHAT_TOKENS = 1024
DEFAULT_GENERATE_TOKENS = 20  # default of Transformers' `generate`


class Draws:
    """The random numbers of rows that are sampled together.

    Stock draws for all rows at each step. So it is here, whichever row takes its next token first
    and whichever has ended: what was remembered of a row changes no answer.
    """

    def __init__(self, rows: int, generator: torch.Generator | None = None) -> None:
        self._rows, self._generator = rows, generator
        self._steps = [0] * rows  # how many each has taken
        self._states: list[torch.Tensor] = []  # of the generator, before each step of several rows
        self._noise: dict[int, torch.Tensor] = {}  # of the last steps drawn

    def pick(self, row: int, probabilities: torch.Tensor) -> torch.Tensor:
        """The next token of a row, by the arithmetic of `torch.multinomial`."""
        step, self._steps[row] = self._steps[row], self._steps[row] + 1
        if step not in self._noise:
            noise = self._noise[step] = self._drawn(step, probabilities)
            while len(self._noise) > max(1, _KEPT // noise.nbytes):
                self._noise.pop(next(iter(self._noise)))
        return (probabilities / self._noise[step][row]).argmax(-1, keepdim=True)

    def _drawn(self, step: int, like: torch.Tensor) -> torch.Tensor:
        noise, generator = like.new_empty(self._rows, like.shape[-1]), self._generator
        if step < len(self._states):  # for a row that comes late
            generator = torch.Generator(like.device).set_state(self._states[step])
        elif self._rows > 1:
            self._states.append(_random_state(like.device))
        return noise.exponential_(generator=generator)


def _random_state(device: torch.device) -> torch.Tensor:
    """The state of a device's own generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


@dataclass
class Sampler:
    """Chooses the tokens of one sequence, with the checkpoint's generation_config applied."""

    ids: torch.Tensor  # of the prompt and what was chosen
    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    draws: Draws
    max_new_tokens: int
    stop: list[str]
    row: int = 0  # among those that share the draws
    skip_special_tokens: bool = True
    constraint: Constraint | None = None
    reads_all: bool = False  # the logits before every token are recorded, or changed by the caller
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    finish_reason: str = "length"
    count: int = 0
    over: bool = False

    @property
    def may_end_early(self) -> bool:
        """Whether more than an end token or the length may end the answer."""
        usual = {"EosTokenCriteria", "MaxLengthCriteria"}
        return any(type(one).__name__ not in usual for one in self.criteria)

    def forced(self) -> list[int]:
        """The tokens that have to follow, whatever the logits are."""
        left = self.max_new_tokens - self.count
        return [] if self.constraint is None else self.constraint.forced(left - 1)

    def fitting(self, guesses: list[int]) -> list[int]:
        """The first of some guesses, as far as they may follow."""
        return guesses if self.constraint is None else self.constraint.fitting(guesses)

    def take(self, logits: torch.Tensor) -> int:
        """The next token, chosen as Transformers' `_sample`; `over` says whether it is the last."""
        raw = logits.to(torch.float32, copy=True)
        scores = self.processors(self.ids, raw)
        if self.config.output_logits:
            self.logits.append(raw)
        if self.config.output_scores:
            self.scores.append(scores)
        if self.constraint is not None and self.constraint.only is not None:
            token = scores.new_full((1, 1), self.constraint.only, dtype=torch.int64)  # no choice
        elif self.config.do_sample:
            probabilities = torch.softmax(scores, dim=-1)
            if not bool(probabilities.isfinite().all()):
                raise InputError("no token can be drawn from these logits: they give no likelihood")
            token = self.draws.pick(self.row, probabilities)
        else:
            token = scores.argmax(-1, keepdim=True)
        return self._taken(token)

    def accept(self, token: int) -> int:
        """Take a token that is forced, without logits."""
        return self._taken(self.ids.new_tensor([[token]]))

    def _taken(self, token: torch.Tensor) -> int:
        self.ids, self.count = torch.cat([self.ids, token], dim=-1), self.count + 1
        if self.constraint is not None:
            self.constraint.take(int(token))
        self.over = self._ends() or self.count >= self.max_new_tokens
        return int(token)

    def _ends(self) -> bool:
        if self.constraint is not None and self.constraint.over:
            self.finish_reason = "stop"
            return True
        # A caller's criterion may answer with one bool, as stock accepts.
        kinds = [c for c in self.criteria if bool(torch.as_tensor(c(self.ids, None)).all())]
        if any(type(c).__name__ != "MaxLengthCriteria" for c in kinds):
            self.finish_reason = "stop"
        return bool(kinds)


def sampler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    ids: torch.Tensor,
    options: Options,
    default_tokens: int,
    draws: Draws | None = None,
    row: int = 0,
) -> Sampler:
    """Resolve the options of one call; refuse unknown or impossible ones by name."""
    try:
        return _resolved(model, tokenizer, ids, options, default_tokens, draws, row)
    except KeepsightError:
        raise
    except (ValueError, TypeError) as error:  # Transformers' own checks of values
        raise InputError(f"an option of decoding was refused: {error}") from error


def _resolved(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    ids: torch.Tensor,
    options: Options,
    default_tokens: int,
    draws: Draws | None,
    row: int,
) -> Sampler:
    options = {_ALIASES.get(name, name): value for name, value in options.items()}
    ours = {name: options.pop(name) for name in _OURS if name in options}
    asked = _asked_length(model, options)
    given = options.pop("generation_config", None)
    asked_stop = options.pop("stop_strings", None)
    stop = stop_strings(asked_stop if ours.get("stop") is None else ours["stop"])
    config, left = upstream.generation_config(model, given, options)
    left = {k: v for k, v in left.items() if k not in ("output_attentions", "output_hidden_states")}
    UnknownOption.refuse(left, known_options(), "generation")
    _refuse(config)
    length = ids.shape[1]
    count = _new_tokens(asked, length, default_tokens, model)
    config.max_length = length + count
    upstream.prepare_special_tokens(model, config, ids.device)
    grammar = ours.get("response_format")
    if grammar is not None and not isinstance(grammar, Grammar):
        raise GrammarError("response_format", "a call of this kind cannot give an answer a form")
    constraint = grammar.begin() if grammar is not None else None
    own = list(ours.get("logits_processor") or [])
    endings = stop or stop_strings(config.stop_strings)
    config.stop_strings = None  # ours ends at the same tokens and is cheaper
    if endings and tokenizer is None:
        raise InputError("stop strings need a tokenizer; wrap the model with its processor")
    processors = upstream.logits_processors(
        model,
        generation_config=config,
        input_ids_seq_length=length,
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=ours.get("prefix_allowed_tokens_fn"),
        logits_processor=own if constraint is None else [*own, constraint],
        device=str(ids.device),
    )
    criteria = upstream.stopping_criteria(
        model,
        generation_config=config,
        stopping_criteria=ours.get("stopping_criteria") or [],
        tokenizer=tokenizer,
    )
    if endings:
        criteria.append(StopStrings(tokenizer, endings))
    if ours.get("seed") is not None:
        draws, row = Draws(1, torch.Generator(ids.device).manual_seed(seed_of(ours["seed"]))), 0
    return Sampler(
        ids,
        config,
        processors,
        criteria,
        draws or Draws(1),
        row=row,
        max_new_tokens=count,
        stop=stop,
        skip_special_tokens=ours.get("skip_special_tokens") is not False,
        constraint=constraint,
        reads_all=bool(own or config.output_logits or config.output_scores),
    )


def seed_of(given: object, more: int = 0) -> int:
    """A seed as PyTorch takes it, and `more` seeds after it."""
    if not isinstance(given, Integral) or not -(2**63) <= int(given) < 2**64:
        raise InputError(f"seed={given!r}; expected an integer from -2**63 to 2**64 - 1")
    seed = int(given) + more
    return seed if seed < 2**64 else seed - 2**64


@functools.cache
def known_options() -> tuple[str, ...]:
    """All options that decoding understands."""
    public = [name for name in GenerationConfig().to_dict() if not name.startswith("_")]
    known = {*public, *_OURS, *_ALIASES, "generation_config"} - {"transformers_version"}
    return tuple(sorted(known))


def _asked_length(model: PreTrainedModel, options: Options) -> tuple[str, int] | None:
    """The length that is asked for: new tokens, or else of all, by whoever says so first."""
    for name in ("max_new_tokens", "max_length"):
        if (value := option_of(model, options, name)) is not None:
            return name, value
    return None


def _new_tokens(
    asked: tuple[str, int] | None, length: int, default: int, model: PreTrainedModel
) -> int:
    name, value = asked or ("max_new_tokens", default)
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InputError(f"{name}={value!r}; expected a whole number")
    count = int(value) - length if name == "max_length" else int(value)
    if count < 1:
        raise InputError(
            f"{name}={value!r} leaves no tokens to generate after {length} prompt tokens"
        )
    limit = context_length(model)
    return count if limit is None else min(count, limit - length)


def check_length(model: PreTrainedModel, length: int) -> None:
    """Refuse a prompt that leaves no room in the model's context."""
    limit = context_length(model)
    if limit is not None and length >= limit:
        raise PromptTooLong(
            f"the prompt has {length} tokens, the model's context is {limit}; shorten the "
            "conversation or send smaller images"
        )


def _refuse(config: GenerationConfig) -> None:
    for name, harmless in _REFUSED.items():
        value = getattr(config, name, None)
        if value not in harmless:
            raise InputError(
                f"{name}={value!r} is not supported: Keepsight decodes one sequence from one "
                "remembered prefix; use model.generate(**vlm.inputs(messages), ...) for that"
            )


class Detokenizer:
    """Turns tokens into text as they come, in pieces that never split a character."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: list[str], skip_special: bool = True
    ) -> None:
        self._tokenizer, self._stop, self._skip_special = tokenizer, stop, skip_special
        self._tokens: list[int] = []
        self._done = 0  # tokens whose text was returned
        self._context = 0  # start of the text before them
        self._held = ""  # text that may be the start of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that is certain with this token."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._done])
        now = self._decode(self._tokens[self._context :])
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._context, self._done = self._done, len(self._tokens)
        return self._filter(now[len(before) :])

    def rest(self) -> str:
        """Return the remaining text when no more tokens come."""
        before = self._decode(self._tokens[self._context : self._done])
        text = self._decode(self._tokens[self._context :])[len(before) :]
        self._context = self._done = len(self._tokens)
        text = self._filter(text) + self._held
        self._held = ""
        return "" if self.stopped and not text else text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def _filter(self, text: str) -> str:
        """Cut at a stop string; hold back text that may become one."""
        if not self._stop or self.stopped:
            return "" if self.stopped else text
        text = self._held + text
        cuts = [text.find(s) for s in self._stop if s in text]
        if cuts:
            self.stopped, self._held = True, ""
            return text[: min(cuts)]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` start `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0


def samples_of(model: PreTrainedModel, options: Options) -> int:
    """The number of samples per prompt, if several can be drawn."""
    count = option_of(model, options, "num_return_sequences")
    if not isinstance(count, int) or count < 2:
        return 1
    if option_of(model, options, "num_beams") not in (None, 1):
        return 1  # refused by name together with the other options
    return count if option_of(model, options, "do_sample") else 1


def pads_of(model: PreTrainedModel, options: Options) -> int | None:
    """The token that Transformers takes for padding where a prompt comes without a mask."""
    pad, ends = (option_of(model, options, name) for name in ("pad_token_id", "eos_token_id"))
    return pad if isinstance(pad, int) and pad not in np.atleast_1d(ends) else None


def option_of(model: PreTrainedModel, options: Options, name: str) -> Any:
    """What a call asks for, or else the checkpoint."""
    given = options.get("generation_config")
    if not isinstance(given, GenerationConfig | None):
        raise InputError(f"generation_config is a {type(given).__name__}, not a GenerationConfig")
    homes = (options, vars(given) if given is not None else {}, vars(model.generation_config))
    return next((home[name] for home in homes if home.get(name) is not None), None)
