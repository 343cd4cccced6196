"""`/v1/systemone` and `/v1/decisions`: typed questions about one input, answered by probabilities;
`/v1/score` and `/v1/rerank`: how well documents fit a query, asked as such a question.

All become requests of System One, whose prompts are Transformers' own. What the questions of a
request share is read once.
"""

from __future__ import annotations

import functools
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag

from keepsight.core.sequence import Sequence as Answer
from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.questions.decide import Decisions
from keepsight.report import GroupReport, Report
from keepsight.server.access import Visit, posts
from keepsight.server.chat import counts
from keepsight.server.errors import ApiError, invalid, missing
from keepsight.server.media import MessageReader
from keepsight.server.schema import (
    BY_FORM,
    PARTS,
    RECORD,
    TEXT,
    Body,
    ChatMessage,
    ImagePart,
    Inner,
    KeepsightOptions,
    Label,
    Name,
    Part,
    RefusalPart,
    Salt,
    Text,
    TextPart,
    Where,
    kind_of,
)

if TYPE_CHECKING:
    from keepsight.server.service import Service

T = TypeVar("T")
MOST_QUESTIONS = 400  # as in OpenAI's API
MOST_DOCUMENTS = 1000
_FIELD = re.compile(r"(state|questions|assets)\b(?:\[[^\]]*\])?")
_NUMBERED = re.compile(r"assets\[(\d+)\](\.image_url)?")
_RELEVANT = {"relevant": {"type": "noul", "instructions": "Is the document relevant to the query?"}}


class SharedFields(Body):
    """Fields of all these bodies."""

    model: Name | None = None  # left out: the one that is served
    cache_salt: Salt | None = None
    keepsight: KeepsightOptions | None = None


# -- System One ----------------------------------------------------------------------------------


class Asset(Inner):
    type: Literal["image"] = "image"
    format: Label | None = None
    data_base64: Where


class SystemOneRequest(SharedFields):
    """The body of `/v1/systemone`: questions by name, and images by the placeholders that stand for
    them in texts."""

    state: Annotated[
        Annotated[Text, TEXT]
        | Annotated[dict[str, object], RECORD]
        | Annotated[list[object], PARTS],
        BY_FORM,
    ]
    questions: Annotated[
        dict[str, dict[str, object]], Field(min_length=1, max_length=MOST_QUESTIONS)
    ]
    assets: dict[str, Asset] = Field(default_factory=dict)


# -- OpenAI's Decisions --------------------------------------------------------------------------


class InputImage(ImagePart):
    type: Literal["input_image"]
    image_url: Where


class InputJson(Inner):
    type: Literal["input_json"]
    data: dict[str, object] | list[dict[str, object]]


InputPart = Annotated[TextPart | RefusalPart | InputImage | InputJson, Discriminator("type")]
InputContent = Annotated[Annotated[Text, TEXT] | Annotated[list[InputPart], PARTS], BY_FORM]


class InputMessage(Inner):
    type: Literal["message"] = "message"
    role: Literal["user", "developer", "system", "assistant"]
    content: InputContent


class InputCall(Inner):
    type: Literal["function_call", "custom_tool_call"]
    call_id: Name
    name: Name
    arguments: Text | None = None
    input: Text | None = None


class InputOutput(Inner):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: InputContent


def _item(value: object) -> str:
    kind = kind_of(value, "message")
    if kind in ("function_call", "custom_tool_call"):
        return "as call"
    return "as output" if str(kind).endswith("_output") else "as message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("as message")]
    | Annotated[InputCall, Tag("as call")]
    | Annotated[InputOutput, Tag("as output")],
    Discriminator(_item),
]


class Predicate(Inner):
    type: Literal["predicate"]
    name: Name | None = None
    instructions: InputContent


class ChoiceOption(Inner):
    value: str | bool
    description: Text | None = None


class Choice(Inner):
    type: Literal["choice"]
    name: Name | None = None
    instructions: InputContent
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=255)]


class ScoreLevel(Inner):
    label: Annotated[str, Field(min_length=1)]
    description: Text | None = None


class Rating(Inner):
    type: Literal["score"]
    name: Name | None = None
    instructions: InputContent
    levels: Annotated[list[ScoreLevel], Field(min_length=2, max_length=255)]


class DecisionsRequest(SharedFields):
    """The body of `/v1/decisions`."""

    IGNORED = {  # noqa: RUF012 - as in the other bodies
        "prompt_cache_options": "what was used last is kept; see /v1/prepare",
        "service_tier": "there is one tier",
    }

    input: Annotated[
        Annotated[Text, TEXT] | Annotated[list[InputItem], Field(min_length=1), PARTS], BY_FORM
    ]
    questions: Annotated[
        list[Annotated[Predicate | Choice | Rating, Discriminator("type")]],
        Field(min_length=1, max_length=MOST_QUESTIONS),
    ]
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None


# -- score and rerank ----------------------------------------------------------------------------


class ManyParts(Inner):
    content: Annotated[list[Part], Field(min_length=1)]


class PlainText(Inner):
    text: Text


def _kind_of_document(value: object) -> str:
    if isinstance(value, str):
        return "as text"
    parts = isinstance(value, ManyParts) or (isinstance(value, dict) and "content" in value)
    return "as parts" if parts else "as record"


Document = Annotated[
    Annotated[Text, TEXT] | Annotated[ManyParts, PARTS] | Annotated[PlainText, RECORD],
    Discriminator(_kind_of_document),
]
Documents = Annotated[list[Document], Field(min_length=1, max_length=MOST_DOCUMENTS)]
OneOrMany = Annotated[
    Annotated[Documents, PARTS] | Annotated[Document, TEXT],
    Discriminator(lambda value: "as parts" if isinstance(value, list) else "as text"),
]


class ScoreRequest(SharedFields):
    """The body of `/v1/score`: two texts, or one against many, or as many against as many."""

    IGNORED = {"user": "nothing is counted by it"}  # noqa: RUF012

    text_1: OneOrMany | None = None
    text_2: OneOrMany | None = None
    queries: OneOrMany | None = None
    documents: OneOrMany | None = None
    data_1: OneOrMany | None = None
    data_2: OneOrMany | None = None
    instruction: Text | None = None

    def sides(self) -> tuple[list[Document], list[Document]]:
        pairs = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
        for names in pairs:
            one, two = (getattr(self, name) for name in names)
            if one is None and two is None:
                continue
            if one is None or two is None:
                raise missing(names[0] if one is None else names[1])
            one, two = ([side] if not isinstance(side, list) else side for side in (one, two))
            if len(one) not in (1, len(two)):
                raise invalid(names[0], f"{len(one)} of {names[0]} for {len(two)} of {names[1]}")
            return one * (len(two) if len(one) == 1 else 1), two
        raise missing("text_1")


class RerankRequest(SharedFields):
    """The body of `/v1/rerank`."""

    IGNORED = {"user": "nothing is counted by it"}  # noqa: RUF012

    query: Document
    documents: Documents
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    instruction: Text | None = None


# -- routes --------------------------------------------------------------------------------------


def routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["decisions"])

    @posts(router, "/v1/systemone", SystemOneRequest, "systemone")
    async def systemone(body: SystemOneRequest, visit: Visit) -> object:
        """Typed questions (`noul`, `choice`, `score`) about a state, as in Transformers."""

        def build(reader: MessageReader) -> list[Record]:
            assets = _assets(reader, body.assets)
            return [{"state": body.state, "questions": body.questions, "assets": assets}]

        (answers,) = await _decided(service, body, visit, build)
        usage = {"input_tokens": answers.usage.prompt_tokens, "output_tokens": 0}
        made = {"model": service.model.name, "answers": dict(answers), "usage": usage}
        return made | _reported(body, answers.report)

    @posts(router, "/v1/decisions", DecisionsRequest, "decisions")
    async def decisions(body: DecisionsRequest, visit: Visit) -> object:
        """Predicates, choices and scores about an input, as in OpenAI's API."""
        asked = _Asked(body)
        (answers,) = await _decided(service, body, visit, asked.build)
        total, cached = answers.report.prompt_tokens, answers.report.cached_tokens
        usage = {
            "input_tokens": total,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total,
        }
        made = {"model": service.model.name, "answers": asked.answers(answers), "usage": usage}
        return made | _reported(body, answers.report)

    @posts(router, "/v1/score", ScoreRequest, "score")
    async def score(body: ScoreRequest, visit: Visit) -> object:
        """How well pairs of texts or pictures fit: the probability of a yes."""
        build = functools.partial(_pairs, *body.sides(), body.instruction)
        found = await _decided(service, body, visit, build)
        data = [
            {"index": i, "object": "score", "score": one["relevant"]["noul"]}
            for i, one in enumerate(found)
        ]
        more = {"object": "list", "created": int(time.time()), "data": data}
        return {**_head("score", service, found[0].report), **more} | _reported(
            body, found[0].report
        )

    async def rerank(body: RerankRequest, visit: Visit) -> object:
        """Documents by how well they fit a query, the best first."""
        queries = [body.query] * len(body.documents)
        build = functools.partial(_pairs, queries, body.documents, body.instruction)
        found = await _decided(service, body, visit, build)
        results = [
            {"index": i, "relevance_score": one["relevant"]["noul"]}
            | ({} if body.return_documents is False else {"document": _shown(document)})
            for i, (one, document) in enumerate(zip(found, body.documents, strict=True))
        ]
        results.sort(key=lambda one: -one["relevance_score"])
        more = {"results": results[: body.top_n or None]}
        return {**_head("rerank", service, found[0].report), **more} | _reported(
            body, found[0].report
        )

    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        name, shown = "rerank" + path.replace("/", "_"), path == "/v1/rerank"
        posts(router, path, RerankRequest, name, include_in_schema=shown)(rerank)
    return router


def _head(kind: str, service: Service, report: GroupReport) -> Record:
    cached = {"cached_tokens": report.cached_tokens}
    usage = counts(report.prompt_tokens, 0, prompt_tokens_details=cached)
    return {"id": f"{kind}-{uuid.uuid4().hex}", "model": service.model.name, "usage": usage}


async def _decided(
    service: Service,
    body: SharedFields,
    visit: Visit,
    build: Callable[[MessageReader], list[Record]],
) -> list[Decisions]:
    tenant = visit.who().salted(body.cache_salt)
    asked = await service.threads.wait(lambda: build(service.reader(body, visit)))

    def decide(run: Callable[[Sequence[Answer]], None]) -> list[Decisions]:
        try:
            return service.vlm.decider.decide(asked, None, tenant, run)
        except InputError as error:
            if (field := _FIELD.match(str(error))) is None:
                raise
            raise invalid(field[0], str(error)) from error

    found = await on_errand(service, visit, decide)
    usage, times = found[0].report.usage, found[0].report.milliseconds
    visit.who().spend(usage.prompt_tokens)
    visit.answered(usage, Report(milliseconds=times), "stop")
    return found


async def on_errand(
    service: Service, visit: Visit, work: Callable[[Callable[[Sequence[Answer]], None]], T]
) -> T:
    """The result of some work that runs sequences; they end when the client hangs up, or when the
    time is over."""
    errand = service.scheduler.together.errand(visit.who().account)
    try:
        async with service.time_limit():
            return await service.threads.wait(lambda: work(errand.run))
    finally:
        errand.cancel()


def _reported(body: SharedFields, report: GroupReport) -> Record:
    wanted = body.keepsight is not None and body.keepsight.report
    return {"keepsight": {"report": report.to_dict()}} if wanted else {}


# -- pictures ------------------------------------------------------------------------------------


def _assets(reader: MessageReader, given: dict[str, Asset]) -> dict[str, object]:
    """The images of System One by their placeholders; errors name them so."""
    try:
        images = _images(reader, [_data_url(asset) for asset in given.values()], "assets")
    except ApiError as problem:
        if (found := _NUMBERED.match(problem.param or "")) is not None:
            name = f"assets[{list(given)[int(found[1])]!r}]"
            problem.param = f"{name}.data_base64"
            problem.message = problem.message.replace(found[0], problem.param)
        raise
    return dict(zip(given, images, strict=True))


def _data_url(asset: Asset) -> str:
    return f"data:image/{asset.format or 'png'};base64,{asset.data_base64}"


def _images(reader: MessageReader, urls: Sequence[str], place: str) -> list[object]:
    """Pictures at addresses, within the limits of the server."""
    if not urls:
        return []
    parts: list[Part] = [ImagePart(type="image_url", image_url=url) for url in urls]
    message = ChatMessage(role="user", content=parts).called(place, place)
    (read,) = reader.messages([message], "")
    images = [part["image"] for part in read["content"] if part["type"] == "image"]
    if len(images) != len(urls):
        raise invalid(place, f"{place}: each must be one picture")
    return images


class _Pictures:
    """The pictures of a request, each with a placeholder that occurs in no text of it."""

    def __init__(self, texts: Iterator[str], place: str) -> None:
        whole, self._mark, self._place = "\0".join(texts), "picture", place
        while f"<{self._mark}-" in whole:
            self._mark += "'"
        self._names: dict[str, str] = {}  # placeholders, by addresses

    def text(self, content: str | Sequence[InputPart | Part]) -> str:
        """Some content as a text with placeholders; the same address is one picture."""
        if isinstance(content, str):
            return content
        words = []
        for part in content:
            if isinstance(part, ImagePart):
                where = part.image_url or part.image or part.url
                if where is None:
                    raise invalid(self._place, "a picture needs its image_url")
                url = where if isinstance(where, str) else where.url
                name = f"<{self._mark}-{len(self._names) + 1}>"
                words.append(self._names.setdefault(url, name))
            elif isinstance(part, InputJson):
                words.append(json.dumps(part.data, ensure_ascii=False))
            elif isinstance(part, TextPart | RefusalPart):
                words.append(part.text if isinstance(part, TextPart) else part.refusal)
            else:
                raise invalid(self._place, f"parts of the type {part.type!r} cannot be used here")
        return "\n".join(words)

    def assets(self, reader: MessageReader, place: str) -> dict[str, object]:
        images = _images(reader, [*self._names], place)
        return dict(zip(self._names.values(), images, strict=True))


def _strings(value: object) -> Iterator[str]:
    """Every text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inside in value.items():
            yield str(name)
            yield from _strings(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _strings(inside)


class _Asked:
    """A request of OpenAI's Decisions as one of System One, and its answers back."""

    def __init__(self, body: DecisionsRequest) -> None:
        self._body, self._pictures = body, _Pictures(iter(()), "input")
        self._names: list[str] = []
        self._options: list[dict[str, str | bool]] = []  # of choices, by the names they have here

    def build(self, reader: MessageReader) -> list[Record]:
        """The request, with its pictures read; in a thread."""
        body = self._body
        texts = _strings(body.model_dump(include={"input", "questions"}))
        self._pictures = _Pictures(texts, "input")
        state = self._state()
        questions = [self._question(one) for one in body.questions]
        return [
            {
                "state": state,
                "questions": dict(zip(self._names, questions, strict=True)),
                "assets": self._pictures.assets(reader, "input"),
            }
        ]

    def _state(self) -> object:
        given = self._body.input
        if isinstance(given, str):
            return given
        if len(given) == 1 and isinstance(given[0], InputMessage) and given[0].role == "user":
            return self._pictures.text(given[0].content)
        return [self._item(item) for item in given]

    def _item(self, item: InputMessage | InputCall | InputOutput) -> Record:
        if isinstance(item, InputMessage):
            return {"role": item.role, "content": self._pictures.text(item.content)}
        if isinstance(item, InputCall):
            said = item.arguments if item.arguments is not None else item.input
            return {"call": item.name, "call_id": item.call_id, "arguments": said}
        return {"call_id": item.call_id, "output": self._pictures.text(item.output)}

    def _question(self, one: Predicate | Choice | Rating) -> Record:
        number = len(self._names)
        name = one.name or f"question {number + 1}"
        self._names.append(name if name not in self._names else f"{name} ({number + 1})")
        options: dict[str, str | bool] = {}
        made: Record = {"instructions": self._pictures.text(one.instructions)}
        if isinstance(one, Predicate):
            made["type"] = "noul"
        elif isinstance(one, Rating):
            made |= {"type": "score", "criteria": [_described(level) for level in one.levels]}
        else:
            criteria: dict[str, str | None] = {}
            for place, choice in enumerate(one.choices):
                value = choice.value
                if any(value == o and type(value) is type(o) for o in options.values()):
                    where = f"questions[{number}].choices[{place}].value"
                    raise invalid(where, f"{where}: {value!r} is given twice")
                shown = value if isinstance(value, str) else json.dumps(value)
                shown = shown if shown not in options else f"{shown} ({type(value).__name__})"
                options[shown], criteria[shown] = value, choice.description
            made |= {"type": "choice", "criteria": criteria}
        self._options.append(options)
        return made

    def answers(self, found: Decisions) -> list[Record]:
        made = []
        for number, (one, name) in enumerate(zip(self._body.questions, self._names, strict=True)):
            answer = found[name]
            head: Record = {"type": one.type, "name": one.name}
            if isinstance(one, Predicate):
                made.append({**head, "probability": answer["noul"]})
                continue
            chances = answer["probabilities"]
            head["confidence"] = answer["confidence"]
            if isinstance(one, Choice):
                values = self._options[number]
                each = [{"value": values[n], "probability": p} for n, p in chances.items()]
                made.append({**head, "choice": values[answer["choice"]], "probabilities": each})
                continue
            each = [
                {"value": i, "label": level.label, "probability": chances[str(i)]}
                for i, level in enumerate(one.levels)
            ]
            made.append({**head, "score": answer["score"], "probabilities": each})
        return made


def _described(level: ScoreLevel) -> str:
    return f"{level.label}: {level.description}" if level.description else level.label


def _pairs(
    queries: Sequence[Document],
    documents: Sequence[Document],
    instruction: str | None,
    reader: MessageReader,
) -> list[Record]:
    """One question for each pair. The document stands first: its picture is remembered for the
    next query."""
    made = []
    for number, (query, document) in enumerate(zip(queries, documents, strict=True)):
        texts = [*_strings(_plain(query)), *_strings(_plain(document))]
        pictures = _Pictures(iter(texts), "documents")
        state = {"document": _said(document, pictures), "query": _said(query, pictures)}
        if instruction:
            state["instruction"] = instruction
        assets = pictures.assets(reader, f"documents[{number}]")
        made.append({"state": state, "questions": _RELEVANT, "assets": assets})
    return made


def _plain(document: Document) -> object:
    return document if isinstance(document, str) else document.model_dump()


def _said(document: Document, pictures: _Pictures) -> str:
    if isinstance(document, PlainText):
        return document.text
    return pictures.text(document if isinstance(document, str) else document.content)


def _shown(document: Document) -> Record:
    if not isinstance(document, ManyParts):
        return {"text": document if isinstance(document, str) else document.text}
    texts = [text for part in document.content if (text := getattr(part, "text", None))]
    return {"text": "\n".join(texts)}
