"""Sorts the arguments of `ask`: a question and pictures, in either order, by position or name.

`vlm.ask(picture, question)` and `session.ask(question, picture)` are one call. Two texts, of which
one may be a path, follow the order of the method. A call that looks reversed is refused and the
likely one is shown, because a wrong guess would answer about a wrong picture.
"""

from __future__ import annotations

import os
import re

from PIL import Image

from keepsight.errors import InputError, UnknownOption
from keepsight.kinds import Message, Options, Record
from keepsight.prompt.messages import user_message

_MEANT = {
    **dict.fromkeys(("image", "picture", "pictures", "img", "imgs", "photo", "file"), "images"),
    **dict.fromkeys(("video", "film", "clip"), "videos"),
    **dict.fromkeys(("sound", "sounds", "audios"), "audio"),
    **dict.fromkeys(("prompt", "query", "message", "content"), "question"),
}


def user_turn(given: tuple[object, ...], options: Options, picture_first: bool = False) -> Message:
    """The message of one `ask`. Takes `images=`, `videos=`, `audio=` and `question=` (or `text=`)
    out of the options."""
    if (wrong := next((name for name in options if name in _MEANT), None)) is not None:
        raise UnknownOption(f"ask has no option {wrong!r}; did you mean {_MEANT[wrong]!r}?")
    clips = [*_clips(options, "videos", "video"), *_clips(options, "audio", "audio")]
    images, question = options.pop("images", None), options.pop("question", None)
    text = options.pop("text", None)
    if text is not None and question is not None:
        raise InputError("text= and question= are two names of one option; give one of them")
    named = text if question is None else question
    if len(given) > 2:
        raise InputError(
            f"ask takes a question and pictures, got {len(given)} values; several pictures go "
            "into one list: images=[...]"
        )
    if len(given) + (images is not None) + (named is not None) > 2:
        raise InputError(
            "the question, or the pictures, were given twice: by position and by name; give "
            "each once"
        )
    if clips and len(given) == 1 and isinstance(given[0], str) and named is None:
        named, given = given[0], ()
    asked, shown = _sorted(given, images, named, picture_first)
    if asked is None:
        raise InputError('there is no question; write ask(picture, "What is it?")')
    message = user_message(asked, shown)
    return dict(message, content=[*message["content"][:-1], *clips, message["content"][-1]])


def _clips(options: Options, name: str, kind: str) -> list[Record]:
    """The message parts for `videos=` or `audio=`: one, or a list of several."""
    given = options.pop(name, None)
    if given is None:
        return []
    clips = given if isinstance(given, list | tuple) else [given]
    if any(isinstance(clip, Image.Image | float | int) for clip in clips):
        raise InputError(
            f"{name}= takes files, dicts or arrays, several of them in a list; for frames or "
            "samples write {'frames': [...], 'fps': ...} or {'array': [...], 'sampling_rate': ...}"
        )
    return [{"type": kind, kind: clip} for clip in clips]


def _sorted(
    given: tuple[object, ...], images: object, named: object, picture_first: bool
) -> tuple[object, object]:
    """The question and the pictures; the question is None if there is none."""
    if len(given) == 2:
        first, second = given
        if isinstance(first, str) and isinstance(second, str):
            return _two_texts(first, second, picture_first)
        return (first, second) if isinstance(first, str) else (second, first)
    if not given:
        return named, images
    if named is not None:
        return named, given[0]
    if picture_first and images is None and not _is_question(given[0]):
        return None, given[0]
    return given[0], images


def _two_texts(first: str, second: str, picture_first: bool) -> tuple[str, str]:
    picture, question = (first, second) if picture_first else (second, first)
    if _is_there(question) and not _is_there(picture):
        a, b = (question, picture) if picture_first else (picture, question)
        raise InputError(
            f"{question!r} is a picture and {picture!r} is not; write ask({a!r}, {b!r})"
        )
    return question, picture


def _is_question(given: object) -> bool:
    """Whether a single value must be a question: text that leads to no picture and does not look
    like a file name."""
    if not isinstance(given, str) or not given.strip() or _is_there(given):
        return False
    return bool(re.search(r"\s", given)) or not re.search(r"[/\\]|\.\w+$", given)


def _is_there(text: str) -> bool:
    """Whether a text leads to a picture: a file or a URL."""
    if re.match("(https?|data|file):", text, re.IGNORECASE):
        return True
    try:
        return os.path.isfile(os.path.expanduser(text))
    except (OSError, ValueError):
        return False
