"""The prompts of decisions, as Transformers builds them, with pictures that are only named.

Questions, texts and labels are Transformers' own (`transformers.decision`). Here each picture of a
request is named once, prompts are rendered by our renderer, and the marks of a decision template
become places in the prompt.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from transformers import AddedToken, DecisionConfig

from keepsight.core.call import Call
from keepsight.core.order import Order
from keepsight.core.runtime import Runtime
from keepsight.errors import ImageError, InputError, ModelKeepsChanging
from keepsight.kinds import Record
from keepsight.media.medium import Medium
from keepsight.models import upstream
from keepsight.prefix.prompt import Prompt
from keepsight.prompt.render import Renderer
from keepsight.questions.group import named

_PHANTOM = {"type": "noul", "instructions": "?"}  # asks what no other question begins with


@dataclass
class DecisionPrompt:
    """One prompt: the questions it asks, and the numbers of tokens before its marks."""

    prompt: Prompt
    marks: list[int]
    questions: list[Any]  # Transformers' `Question`
    current: Callable[[], Prompt]


class DecisionPrompts:
    """Builds prompts for one model and one decision config."""

    def __init__(self, runtime: Runtime, config: DecisionConfig) -> None:
        own = runtime.renderer
        if own is None:
            raise InputError("this model was wrapped without a processor: decisions need one")
        self._runtime, self.config, self._own = runtime, config, own
        processor = copy.copy(runtime.needed_processor())
        # Transformers adds its sentinels to the tokenizer of the user; here to a copy.
        self.tokenizer = copy.deepcopy(processor.tokenizer)
        made = upstream.decisions()
        sentinels = [made.MARK, made.SPLIT]
        missing = [name for name in sentinels if name not in self.tokenizer.get_vocab()]
        self.tokenizer.add_tokens(
            [AddedToken(name, special=True, normalized=False) for name in missing]
        )
        processor.tokenizer = self.tokenizer  # type: ignore[misc]
        self._mark, self._split = self.tokenizer.convert_tokens_to_ids(sentinels)
        self._renderer = Renderer(
            runtime.family, processor, config.chat_template, config.sanitize_control_tokens
        )
        self._reads = upstream.template_variables(config.chat_template or made.DECISION_PROMPT)
        in_chat = upstream.template_variables(own.template)
        self._template: Record = {"enable_thinking": False} if "enable_thinking" in in_chat else {}

    def serves(self, runtime: Runtime, config: DecisionConfig) -> bool:
        """Whether it is for the tokenizer and the template as they are now."""
        return runtime.renderer is self._own and config == self.config

    def of(self, request: object, tenant: str) -> tuple[list[DecisionPrompt], Prompt]:
        """The prompts of a request; and one of a question that nobody asked, which parts from them
        where any other question would."""
        state, given, assets = self._parts(request)
        questions = _parsed(given, self.config)
        named = _Assets(self._runtime, assets, tenant)
        groups = [questions] if "questions" in self._reads else [[one] for one in questions]
        prompts = [self._prompt(state, group, named, tenant) for group in groups]
        named.check_used()
        phantom = _parsed({"?": _PHANTOM}, self.config)
        return prompts, self._prompt(state, phantom, named, tenant).prompt

    def _parts(self, request: object) -> tuple[object, object, Mapping[str, object]]:
        if isinstance(request, str):
            try:
                request = json.loads(request)
            except ValueError as error:
                raise InputError(f"the request is not JSON: {error}") from error
        if not isinstance(request, Mapping) or not {"state", "questions"} <= request.keys():
            raise InputError('a request is {"state": ..., "questions": {name: question, ...}}')
        unknown = sorted(map(str, request.keys() - {"state", "questions", "assets"}))
        if unknown:
            raise InputError(f"{unknown[0]}: a request has state, questions and assets only")
        assets = request.get("assets") or {}
        if not isinstance(assets, Mapping):
            raise InputError(f"assets is a {type(assets).__name__}; expected images by placeholder")
        state, questions = request["state"], request["questions"]
        _check_plain(state, "state")
        if not self.config.sanitize_control_tokens:  # as Transformers: templates escape the rest
            made = upstream.decisions()
            plain = json.dumps([state, questions], ensure_ascii=False)
            plain = plain.replace(made.MARK, "").replace(made.SPLIT, "")
            state, questions = json.loads(plain)
        return state, questions, assets

    def _prompt(
        self, state: object, group: list[Any], assets: _Assets, tenant: str
    ) -> DecisionPrompt:
        template, beside = dict(self._template), list[Medium]()
        content: object = ""
        if self.config.chat_template is None:
            text = upstream.decision_text(state, group[0])
            content = upstream.split_at_placeholders(text, assets.given, assets.load)
        else:
            asked = [asdict(one) for one in group]
            inputs = {"state": state, "question": asked[0], "questions": asked}
            inputs = {name: value for name, value in inputs.items() if name in self._reads}
            if assets.given:
                inputs, images = upstream.insert_images(inputs, assets.given, assets.load)
                inputs = _without_media(inputs)
                beside = [image for image in images if isinstance(image, Medium)]
            template |= inputs
        messages = [{"role": "user", "content": content}]
        call = Call(tenant, template, {})
        order = Order(self._runtime, messages, call, True, self._renderer, beside).rendered()
        prompt, marks = self._read_marks(order.prompt)

        def current() -> Prompt:
            now, _ = self._read_marks(order.current())
            if not np.array_equal(now.ids, prompt.ids):
                raise ModelKeepsChanging(
                    "settings of the processor changed between a question and its turn; ask again"
                )
            return now

        return DecisionPrompt(prompt, marks, group, current)

    def _read_marks(self, prompt: Prompt) -> tuple[Prompt, list[int]]:
        """The prompt without its sentinels, and how many tokens stand before each mark."""
        ids = prompt.ids
        keep = (ids != self._mark) & (ids != self._split)
        if keep.all():
            return prompt, [len(ids)]
        before = np.concatenate([[0], np.cumsum(keep)])
        ranges = tuple(
            tuple((int(before[start]), int(before[end])) for start, end in each)
            for each in prompt.ranges
        )
        marks = before[np.flatnonzero(ids == self._mark)].tolist()
        whole = Prompt(ids[keep], prompt.media, ranges, prompt.text)
        return whole, marks or [len(whole)]


class _Assets:
    """The images of a request, each named once."""

    def __init__(self, runtime: Runtime, given: Mapping[str, object], tenant: str) -> None:
        self.given = dict(given)
        self._media: dict[str, Medium] = {}
        self._used: set[str] = set()
        for name, asset in self.given.items():
            if not isinstance(name, str) or not name:
                raise InputError(f"assets has the key {name!r}; expected a placeholder's text")
            try:
                self._media[name] = named(runtime, _image_of(asset, name), tenant)
            except ImageError as error:
                raise ImageError(f"assets[{name!r}]: {error}") from error

    def load(self, name: str) -> Medium:
        """The image that stands where this placeholder is."""
        self._used.add(name)
        return self._media[name]

    def check_used(self) -> None:
        """Refuse an image that nobody would see."""
        if unused := sorted(self.given.keys() - self._used):
            raise InputError(
                f"assets[{unused[0]!r}] is shown nowhere: no text of the state, the instructions "
                "or the criteria has this placeholder"
            )


def _image_of(asset: object, name: str) -> object:
    """The image in an asset of System One, or the image itself."""
    if not isinstance(asset, Mapping):
        return asset
    data = asset.get("data_base64")
    if asset.get("type", "image") != "image" or not isinstance(data, str):
        raise InputError(
            f"assets[{name!r}]: expected an image, or "
            '{"type": "image", "format": "png", "data_base64": ...}'
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"assets[{name!r}].data_base64 is not base64: {error}") from error


def _parsed(questions: object, config: DecisionConfig) -> list[Any]:
    try:
        found: list[Any] = upstream.decisions().parse_questions(questions, config)
    except (ValueError, TypeError) as error:
        raise InputError(f"questions: {error}") from error
    return found


def _check_plain(value: object, where: str) -> None:
    """Refuse a state that is not JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where} is not plain data: {error}; give pictures as assets") from error


def _without_media(value: Any) -> Any:
    """Template inputs in which image parts have lost their images: those go beside."""
    if isinstance(value, dict):
        if value.get("type") == "image" and isinstance(value.get("image"), Medium):
            return {"type": "image"}
        return {key: _without_media(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_media(item) for item in value]
    return value
