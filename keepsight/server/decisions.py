"""`/v1/systemone` and `/v1/decisions`: typed questions about one input, answered by probabilities;
`/v1/score` and `/v1/rerank`: how well documents fit a query, asked as such a question.

All become requests of System One, whose prompts are Transformers' own. What the questions of a
request share is read once.
"""

from __future__ import annotations

import json
import re
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter

from keepsight.core.sequence import Sequence as Answer
from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.questions.decide import Decisions
from keepsight.report import GroupReport, Report
from keepsight.server import schema
from keepsight.server.access import Visit, posts
from keepsight.server.chat import counts
from keepsight.server.errors import from_error, invalid, missing
from keepsight.server.media import MessageReader
from keepsight.server.responses import counted

if TYPE_CHECKING:
    from keepsight.server.service import Service

_FIELD = re.compile(r"(?:state|questions|assets)\b(?:\[[^\]]*\])?")
_PLACED = re.compile(r"assets\['<\w+ (\S+)>'\]")  # a picture of `_Pictures`
_RELEVANT = {"relevant": {"type": "noul", "instructions": "Is the document relevant to the query?"}}


# -- routes --------------------------------------------------------------------------------------

Build = Callable[[MessageReader], list[Record]]  # the requests of System One that a body becomes
Made = Callable[[list[Decisions]], Record]


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["decisions"])

    async def decided(
        body: schema.SharedFields, visit: Visit, build: Build, made: Made, kind: str = ""
    ) -> Record:
        """Ask what `build` makes of a body; the response that `made` makes of the answers."""
        tenant = visit.who().salted(body.cache_salt)
        asked = await service.threads.wait(lambda: build(service.reader(body, visit)))

        def decide(run: Callable[[Sequence[Answer]], None]) -> tuple[GroupReport, Record]:
            try:
                found = service.vlm.decider.decide(asked, None, tenant, run)
            except InputError as error:
                raise _named(error) from error
            report = found[0].report
            answer = {"model": service.model.name, **made(found)}
            if kind:
                cached = {"cached_tokens": report.cached_tokens}
                usage = counts(report.prompt_tokens, 0, prompt_tokens_details=cached)
                answer |= {"id": f"{kind}-{uuid.uuid4().hex}", "usage": usage}
            if body.keepsight is not None and body.keepsight.report:
                answer["keepsight"] = {"report": report.to_dict()}
            return report, answer

        report, answer = await service.on_errand(visit, decide)
        visit.who().spend(report.usage.prompt_tokens)
        visit.answered(report.usage, Report(milliseconds=report.milliseconds), "stop")
        return answer

    @posts(router, "/v1/systemone", schema.SystemOneRequest, "systemone")
    async def systemone(body: schema.SystemOneRequest, visit: Visit) -> object:
        """Typed questions (`noul`, `choice`, `score`) about a state, as in Transformers."""

        def build(reader: MessageReader) -> list[Record]:
            assets = {name: _asset(reader, name, one) for name, one in body.assets.items()}
            return [{"state": body.state, "questions": body.questions, "assets": assets}]

        if not isinstance(body.state, str | dict | list):
            raise invalid("state", "state: expected a text, a record or a list")

        def made(found: list[Decisions]) -> Record:
            usage = {"input_tokens": found[0].usage.prompt_tokens, "output_tokens": 0}
            return {"answers": dict(found[0]), "usage": usage}

        return await decided(body, visit, build, made)

    @posts(router, "/v1/decisions", schema.DecisionsRequest, "decisions")
    async def decisions(body: schema.DecisionsRequest, visit: Visit) -> object:
        """Predicates, choices and scores about an input, as in OpenAI's API."""
        asked = _Asked(body)
        return await decided(body, visit, asked.build, asked.made)

    @posts(router, "/v1/score", schema.ScoreRequest, "score")
    async def score(body: schema.ScoreRequest, visit: Visit) -> object:
        """How well pairs of texts or pictures fit: the probability of a yes."""

        def made(found: list[Decisions]) -> Record:
            scores = [one["relevant"]["noul"] for one in found]
            data = [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)]
            return {"object": "list", "created": int(time.time()), "data": data}

        build = _pairs(*body.sides(), body.instruction)
        return await decided(body, visit, build, made, "score")

    async def rerank(body: schema.RerankRequest, visit: Visit) -> object:
        """Documents by how well they fit a query, the best first."""

        def made(found: list[Decisions]) -> Record:
            results = [
                {"index": i, "relevance_score": one["relevant"]["noul"]}
                for i, one in enumerate(found)
            ]
            if body.return_documents is not False:
                for result, document in zip(results, body.documents, strict=True):
                    result["document"] = _shown(document)
            results.sort(key=lambda one: -one["relevance_score"])
            return {"results": results[: body.top_n or None]}

        several = [(one, f"documents[{number}]") for number, one in enumerate(body.documents)]
        build = _pairs([(body.query, "query")] * len(several), several, body.instruction)
        return await decided(body, visit, build, made, "rerank")

    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        name, shown = "rerank" + path.replace("/", "_"), path == "/v1/rerank"
        posts(router, path, schema.RerankRequest, name, include_in_schema=shown)(rerank)
    return router


# -- pictures ------------------------------------------------------------------------------------


def _named(error: InputError) -> Exception:
    """The refusal for an error about a field, by the client's name for it."""
    text = _PLACED.sub(r"\1", str(error), count=1)
    field = _PLACED.match(str(error)) or _FIELD.match(text)
    problem = from_error(error)
    if problem is None or field is None:
        return error
    problem.param, problem.message = field[field.lastindex or 0], text
    return problem


def _image(reader: MessageReader, url: str, place: str, inside: str) -> object:
    """The one picture at an address. `place`, `inside`: what errors call it, and its address."""
    match reader.picture(url, "image_url", place, inside):
        case [{"type": "image", "image": image}]:
            return image
    raise invalid(place, f"{place}: it must be one picture")


def _asset(reader: MessageReader, name: str, given: schema.Asset) -> object:
    url = f"data:image/{given.format or 'png'};base64,{given.data_base64}"
    where = f"assets[{name!r}].data_base64"
    return _image(reader, url, where, where)


class _Pictures:
    """The pictures of a request, each with a placeholder that nobody can guess, and that holds the
    place of the picture."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._names: dict[str, str] = {}  # placeholders, by addresses

    def text(self, content: str | Sequence[schema.Part], place: str) -> str:
        """Some content as a text with placeholders; the same address is one picture."""
        if isinstance(content, str):
            return content
        words = []
        for number, part in enumerate(content):
            here = f"{place}[{number}]"
            if isinstance(part, schema.TextPart):
                words.append(part.text)
            elif isinstance(part, schema.RefusalPart):
                words.append(part.refusal)
            elif isinstance(part, schema.JsonPart):
                words.append(json.dumps(part.data, ensure_ascii=False))
            elif isinstance(part, schema.MediaPart) and "image" in part.type:
                where = part.image_url or part.image or part.url
                url = where.url if isinstance(where, schema.Address) else where
                if url is None:
                    raise missing(f"{here}.image_url")
                words.append(self._names.setdefault(url, f"<{self._mark} {here}>"))
            else:
                raise invalid(here, f"{here}: parts of the type {part.type!r} cannot be used here")
        return "\n".join(words)

    def assets(self, reader: MessageReader) -> dict[str, object]:
        found = {}
        for url, name in self._names.items():
            place = name[1:-1].partition(" ")[2]
            found[name] = _image(reader, url, place, f"{place}.image_url")
        return found


class _Asked:
    """A request of OpenAI's Decisions as one of System One, and its answers back."""

    def __init__(self, body: schema.DecisionsRequest) -> None:
        self._body = body
        self._names: list[str] = []
        self._options: list[dict[str, str | bool]] = []  # of choices, by the names they have here

    def build(self, reader: MessageReader) -> list[Record]:
        """The request, with its pictures read; in a thread."""
        body = self._body
        pictures = _Pictures()
        given, state = body.input, list[object]()
        for number, item in enumerate(given if not isinstance(given, str) else ()):
            place = f"input[{number}]"
            if isinstance(item, schema.MessageItem):
                content = pictures.text(item.content, f"{place}.content")
                state.append({"role": item.role, "content": content})
            elif isinstance(item, schema.InputCall):
                said = item.arguments if item.arguments is not None else item.input
                state.append({"call": item.name, "call_id": item.call_id, "arguments": said})
            else:
                output = pictures.text(item.output, f"{place}.output")
                state.append({"call_id": item.call_id, "output": output})
        alone = state[0] if len(state) == 1 else {}
        if isinstance(alone, dict) and alone.get("role") == "user":
            shown: object = alone["content"]
        else:
            shown = given if isinstance(given, str) else state
        questions: Record = {}
        for number, one in enumerate(body.questions):
            name = one.name or f"question {number + 1}"
            self._names.append(name if name not in questions else f"{name} ({number + 1})")
            questions[self._names[-1]] = self._question(one, f"questions[{number}]", pictures)
        assets = pictures.assets(reader)
        return [{"state": shown, "questions": questions, "assets": assets}]

    def _question(
        self, one: schema.Predicate | schema.Choice | schema.Rating, place: str, pictures: _Pictures
    ) -> Record:
        options: dict[str, str | bool] = {}
        self._options.append(options)
        made: Record = {"instructions": pictures.text(one.instructions, f"{place}.instructions")}
        if isinstance(one, schema.Predicate):
            return {**made, "type": "noul"}
        if isinstance(one, schema.Rating):
            levels = [": ".join(filter(None, (lv.label, lv.description))) for lv in one.levels]
            return {**made, "type": "score", "criteria": levels}
        criteria: dict[str, str | None] = {}
        for number, choice in enumerate(one.choices):
            value = choice.value
            if any(value == o and type(value) is type(o) for o in options.values()):
                where = f"{place}.choices[{number}].value"
                raise invalid(where, f"{where}: {value!r} is given twice")
            shown = value if isinstance(value, str) else json.dumps(value)
            shown = shown if shown not in options else f"{shown} ({type(value).__name__})"
            options[shown], criteria[shown] = value, choice.description
        return {**made, "type": "choice", "criteria": criteria}

    def made(self, found: list[Decisions]) -> Record:
        report = found[0].report
        cached = {"cached_tokens": report.cached_tokens, "cache_write_tokens": 0}
        usage = counted(report.prompt_tokens, cached)
        return {"answers": self._answers(found[0]), "usage": usage}

    def _answers(self, found: Decisions) -> list[Record]:
        made = []
        for one, name, values in zip(self._body.questions, self._names, self._options, strict=True):
            answer = found[name]
            told: Record = {"type": one.type, "name": one.name}
            if isinstance(one, schema.Predicate):
                told["probability"] = answer["noul"]
            else:
                told["confidence"], chances = answer["confidence"], answer["probabilities"]
            if isinstance(one, schema.Choice):
                each = [{"value": values[n], "probability": p} for n, p in chances.items()]
                told |= {"choice": values[answer["choice"]], "probabilities": each}
            elif isinstance(one, schema.Rating):
                each = [
                    {"value": i, "label": level.label, "probability": chances[str(i)]}
                    for i, level in enumerate(one.levels)
                ]
                told |= {"score": answer["score"], "probabilities": each}
            made.append(told)
        return made


def _pairs(
    queries: Sequence[schema.Placed],
    documents: Sequence[schema.Placed],
    instruction: str | None,
) -> Build:
    """One question for each pair. The document stands first: its picture is remembered for the
    next query."""

    def build(reader: MessageReader) -> list[Record]:
        made = []
        for query, document in zip(queries, documents, strict=True):
            pictures = _Pictures()
            state = {"document": _said(*document, pictures)}
            state["query"] = _said(*query, pictures)
            if instruction:
                state["instruction"] = instruction
            assets = pictures.assets(reader)
            made.append({"state": state, "questions": _RELEVANT, "assets": assets})
        return made

    return build


def _said(document: schema.Document, place: str, pictures: _Pictures) -> str:
    if isinstance(document, str):
        return document
    if document.content is None and document.text is None:
        raise missing(f"{place}.text")
    return pictures.text(document.content or document.text or "", f"{place}.content")


def _shown(document: schema.Document) -> Record:
    if isinstance(document, str):
        return {"text": document}
    texts = [part.text for part in document.content or () if isinstance(part, schema.TextPart)]
    return {"text": "\n".join(texts) if document.content else document.text}
