"""Typed questions about one input, answered by probabilities: no text is written.

Requests and answers have the shapes of Transformers' `DecisionPipeline`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import DecisionConfig

from keepsight.core.runtime import Runtime
from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.models import upstream
from keepsight.models.deciding import DecisionHead
from keepsight.prefix.prompt import Prompt
from keepsight.questions.group import Reading, Run, read_together
from keepsight.questions.prompts import DecisionPrompt, DecisionPrompts
from keepsight.report import GroupReport, Usage

Config: TypeAlias = DecisionConfig | str | os.PathLike[str] | None


class Decisions(dict[str, Record]):
    """Answers by the names of their questions, with what they cost."""

    def __init__(self, answers: Record, report: GroupReport) -> None:
        super().__init__(answers)
        self.report = report

    @property
    def usage(self) -> Usage:
        """Counts of the whole call."""
        return self.report.usage


class Decider:
    """Decides with one model; what it builds for a decision config is kept."""

    def __init__(self, runtime: Runtime, head: DecisionHead | None = None) -> None:
        self._runtime, self._head = runtime, head
        self.config: Config = None  # for calls that name none; the repository's if this does not
        self._read: tuple[str, DecisionConfig] | None = None  # the latest that was read
        self._prompts: DecisionPrompts | None = None

    def decide(
        self, requests: Sequence[object], config: Config, tenant: str, run: Run | None = None
    ) -> list[Decisions]:
        """The answers of each request; all prompts are read together."""
        runtime = self._runtime
        runtime.require_answers()
        with runtime.lock:
            runtime.refresh(tenant)
        prompts = self._prompts_for(config)
        readings, beginnings = list[Reading](), list[Prompt]()
        found: list[list[_Answers]] = []
        with runtime.lock.beside():
            for request in requests:
                asked, phantom = prompts.of(request, tenant)
                found.append([_Answers(one, prompts, self._head) for one in asked])
                readings += [one.reading() for one in found[-1]]
                beginnings.append(phantom)
        report = read_together(runtime, readings, beginnings, tenant, run)
        return [
            Decisions(
                {name: answer for one in each for name, answer in one.answers().items()}, report
            )
            for each in found
        ]

    def _prompts_for(self, given: Config) -> DecisionPrompts:
        config = self._config(given)
        if self._prompts is None or not self._prompts.serves(self._runtime, config):
            self._prompts = DecisionPrompts(self._runtime, config)
        return self._prompts

    def _config(self, given: Config) -> DecisionConfig:
        given = self.config if given is None else given
        if given is None and self._head is not None:
            return self._head.config
        if isinstance(given, DecisionConfig):
            return given
        if not isinstance(given, str | os.PathLike | None):
            kind = type(given).__name__
            raise InputError(f"decision_config is a {kind}; expected a DecisionConfig or its place")
        where = self._runtime.model.name_or_path if given is None else os.fspath(given)
        if self._read is not None and self._read[0] == where and not os.path.exists(where):
            return self._read[1]  # a hub is not asked twice
        try:
            if where.endswith(".json") and Path(where).is_file():
                config = DecisionConfig.from_file(where)
            else:
                config = DecisionConfig.from_pretrained(where)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"decision_config {where!r} cannot be used: {error}") from error
        self._read = where, config
        return config


class _Answers:
    """The scores of the questions of one prompt, as they come."""

    def __init__(
        self, asked: DecisionPrompt, prompts: DecisionPrompts, head: DecisionHead | None
    ) -> None:
        self._asked, self._config, self._head = asked, prompts.config, head
        self._labels = [] if head else [_label_ids(prompts, one) for one in asked.questions]
        if len(asked.marks) != len(asked.questions):
            raise InputError(
                f"the decision template set {len(asked.marks)} marks for "
                f"{len(asked.questions)} questions; this model reads one before each answer"
            )
        self._scores: dict[int, torch.Tensor] = {}  # by place

    def reading(self) -> Reading:
        """What has to be read for it."""
        asked = self._asked
        places = sorted({mark - 1 for mark in asked.marks})
        if places[0] < 0:
            raise InputError("the decision template begins with a mark; nothing stands before it")
        runs = [(place, place + 1) for place in places]
        return Reading(asked.prompt, runs, self._take, asked.current)

    def _take(self, place: int, rows: torch.Tensor) -> None:
        for number, row in enumerate(rows, place):
            wanted = [i for i, mark in enumerate(self._asked.marks) if mark - 1 == number]
            for i in wanted:
                self._scores[i] = self._of(i, row).float().cpu()

    def _of(self, number: int, row: torch.Tensor) -> torch.Tensor:
        """The scores of one question's options among all that a place has."""
        if self._head is None:
            return row[self._labels[number]]
        question = self._asked.questions[number]
        return self._head.options(row, question.type, len(question.options))

    def answers(self) -> Record:
        """The answers, read from the scores as Transformers reads them."""
        asked = self._asked
        ids = torch.from_numpy(asked.prompt.ids)[None]
        marks = torch.tensor(asked.marks)
        scores = [self._scores[i] for i in range(len(asked.questions))]
        process = upstream.decision_models().process_scores
        scores = process(self._config, ids, marks, asked.questions, scores)
        return {
            question.name: question.answer(score.softmax(-1).tolist())
            for question, score in zip(asked.questions, scores, strict=True)
        }


def _label_ids(prompts: DecisionPrompts, question: Any) -> list[int]:
    try:
        found: list[int] = upstream.decisions().label_token_ids(
            prompts.tokenizer, tuple(question.labels)
        )
    except ValueError as error:
        raise InputError(
            f"questions[{question.name!r}]: {error} Name others in the decision config: "
            f"DecisionConfig(labels={{{question.type!r}: [...]}})"
        ) from error
    return found
