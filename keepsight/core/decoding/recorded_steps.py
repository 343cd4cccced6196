"""Decodes without the model's Python code: a step is recorded once and run again as a list.

A small model spends a third of a decoded token between torch operations. So after some steps of one
size, a step is recorded over a scratch lane, and again over another that claims to be far longer.
Only if both did the same operations does the list depend on nothing but its inputs. The first steps
of the list are run by the model too, and every logit, key and value must be equal. If anything
differs, the model's own code continues, as it does with hooks and replaced methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from keepsight.core.decoding import recorded_layers
from keepsight.core.decoding.recorded_layers import IDS, POSITIONS, Decoded, Scratch, Tokens
from keepsight.core.kernels.grouped import grouped_queries
from keepsight.core.kernels.linear import hooks_on_all
from keepsight.core.kernels.passes import Kernels, running
from keepsight.core.kernels.recording import CannotRecord, Recording, record
from keepsight.core.kernels.script import RecordedStep, can_script, scripted
from keepsight.kinds import Inputs
from keepsight.models.families import Family
from keepsight.models.fingerprint.difference import is_silent
from keepsight.models.renamed import with_cache
from keepsight.system.memory import without_collecting

logger = logging.getLogger(__name__)

_AFTER = 16  # steps of one size before recording pays
_THEN = 4  # the same for a further size of one sequence
_LONG = 0.15  # seconds; in longer steps Python's share is small
_CHECKED = 2  # steps that both list and model run
SETTLED = 2 + _CHECKED  # steps of one size while warming up: timed, recorded, checked
_MOST = 16  # sizes of steps that are recorded
_SCRATCH = ((5, 5), (700, 1_000_003))  # start of scratch lanes, and the length they claim


def decode(
    model: PreTrainedModel,
    family: Family,
    kernels: Kernels | None,
    runs: Sequence[Decoded],
    tokens: Tokens,
    cache: DynamicCache,
    extra: Inputs,
) -> torch.Tensor:
    """Run tokens of each sequence, equally many for each, through the model; return the logits. The
    lanes hold the tokens afterwards; `cache` gives the model their layers."""

    def by_model() -> torch.Tensor:
        device, count = model.device, len(tokens[0])
        positions = torch.cat([run.next_positions for run in runs], dim=-2)
        with grouped_queries(device), running(kernels):
            output = model(
                **extra,
                input_ids=torch.tensor(tokens, device=device),
                position_ids=positions + torch.arange(count, device=positions.device),
                **with_cache(model, cache),
                use_cache=True,
                logits_to_keep=count,
            )
        logits: torch.Tensor = output.logits[:, -count:]
        return logits

    if kernels is None or kernels.in_graphs or extra:
        return by_model()
    return _step(model, family, kernels, runs, tokens, by_model)


def _step(
    model: PreTrainedModel,
    family: Family,
    kernels: Kernels,
    runs: Sequence[Decoded],
    tokens: Tokens,
    by_model: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Run one step, by a recorded list or by the model's own code."""
    count = len(tokens[0])
    block = recorded_layers.open_block(runs, count)
    if block is None:
        return by_model()
    known = kernels.steps.setdefault((len(runs), count, block), RecordedStep())
    known.seen += 1
    if known.run is None:
        by_model = known.timed(by_model)
    if known.given_up or (known.run is None and not _is_time(known, kernels, runs, count)):
        return by_model()
    try:
        if known.run is None:
            _refuse_watchers(model, family)
            _record(model, kernels, runs, count, known)
            return by_model()
        looked_at = known.agreed < _CHECKED
        given = recorded_layers.step_inputs(runs, tokens, known.names, copied=looked_at)
        found = known.run(given)
    except Exception as error:  # a foreign model may raise anything
        known.give_up(str(error))
        logger.info("steps run by the model's own code: %s", error)
        return by_model()
    if looked_at:
        return _compared(known, found, runs, given, count, by_model)
    recorded_layers.advance(runs, given, count)
    known.ran += 1
    return found


def _is_time(step: RecordedStep, kernels: Kernels, runs: Sequence[Decoded], count: int) -> bool:
    """Whether to record a step: it was timed, and enough steps of its size were run. All sequences
    of a step wait for the recording, as they wait for the model's slower code. A rule has one list
    for each of its blocks."""
    if kernels.warming_up:
        return step.seconds <= _LONG  # on a busy machine not yet
    known, rows = list(kernels.steps.items()), len(runs)
    enough = _AFTER * recorded_layers.blocks_of(runs[0].lane)
    if rows == 1 and any(one.run is not None for _, one in known):
        enough = min(_THEN, _AFTER)
    return sum(one.seen for size, one in known if size[:2] == (rows, count)) >= enough


def _compared(
    known: RecordedStep,
    found: torch.Tensor,
    runs: Sequence[Decoded],
    given: recorded_layers.Given,
    count: int,
    by_model: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Let the model compute the step too, and compare logits, keys, values and states."""
    ours = recorded_layers.written(runs, given, count)
    wanted = by_model()
    theirs = recorded_layers.written(runs, None, count)
    same = all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    if same and torch.equal(found, wanted):
        known.agreed += 1
    else:
        known.give_up("a recorded step gave other bits than the model")
        logger.warning("%s; steps run by the model's own code", known.given_up)
    return wanted


# -- recording -------------------------------------------------------------------------------------


def _record(
    model: PreTrainedModel,
    kernels: Kernels,
    runs: Sequence[Decoded],
    count: int,
    known: RecordedStep,
) -> None:
    """Record a step of this size and make a function of it."""
    if _LONG < known.seconds < torch.inf:
        raise CannotRecord("a step takes so long that Python's share is small")
    if len([one for one in kernels.steps.values() if one.run is not None]) >= _MOST:
        raise CannotRecord(f"{_MOST} sizes of steps are already recorded")
    if not can_script():
        raise CannotRecord("this torch cannot make a function from a list of operations")
    with without_collecting():
        one, other = (_run_over(model, kernels, runs, count, *how) for how in _SCRATCH)
        if not one.equals(other):
            raise CannotRecord("what the model does depends on how many tokens there are")
        known.run, known.names = scripted(one), frozenset(one.given)


def _refuse_watchers(model: PreTrainedModel, family: Family) -> None:
    """Refuse a model with hooks or replaced methods: their owners expect a call at each step."""
    run = {id(module) for part in family.text_modules() for module in part.modules()}
    for name, module in model.named_modules():
        if run.isdisjoint(map(id, module.modules())):
            continue  # a tower, which decoded tokens do not enter
        forward = type(module).forward
        homes = {base.__module__ for base in type(module).__mro__}
        foreign = "forward" in vars(module) or getattr(forward, "__module__", None) not in homes
        hooks = [*module._forward_hooks.items(), *module._forward_pre_hooks.items()]
        if foreign or not all(is_silent(*hook) for hook in hooks):
            raise CannotRecord(f"{name or 'the model'} has a hook or a replaced method")
    if hooks_on_all():
        raise CannotRecord("all modules have a hook")


def _run_over(
    model: PreTrainedModel,
    kernels: Kernels,
    runs: Sequence[Decoded],
    count: int,
    place: int,
    claimed: int,
) -> Recording:
    """Record a step over scratch lanes."""
    scratch = Scratch(runs, count, kernels.query_rows, place, claimed)
    cache = DynamicCache(config=model.config)
    cache.layers = list(scratch.layers)

    def run() -> torch.Tensor:
        with grouped_queries(model.device), running(kernels, scratch.attending):
            output = model(
                input_ids=scratch.given[IDS],
                position_ids=scratch.given[POSITIONS],
                **with_cache(model, cache),
                use_cache=True,
                logits_to_keep=count,
            )
        logits: torch.Tensor = output.logits[:, -count:]
        return logits

    return record(run, scratch.given)
