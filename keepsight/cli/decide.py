"""`keepsight decide`: typed questions about pictures, answered by probabilities.

The questions come from a file: some by their names, or a whole request as `vlm.decide` takes it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from keepsight.cli.options import (
    DeviceMap,
    Dtype,
    Images,
    Json,
    MaxPixels,
    MinPixels,
    Remote,
    Runtime,
    ShowReport,
    SomeModel,
    Store,
    Tenant,
    Weights,
    check_images,
    load,
    model_first,
    one_model,
)
from keepsight.cli.terminal import console, json_line, plain, table
from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.system.places import expanded


def decide(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL] [IMAGE]...", show_default=False)
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option("--questions", "-q", help="JSON: questions by name, or a whole request."),
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="What is shown besides the pictures; text or JSON.")
    ] = None,
    decision_config: Annotated[
        str | None, typer.Option(help="decision.json, or a folder with one.")
    ] = None,
    model: SomeModel = None,
    image: Images = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    runtime: Runtime = None,
    weights: Weights = None,
    store: Store = None,
    remote: Remote = None,
    tenant: Tenant = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    as_json: Json = False,
    report: ShowReport = False,
) -> None:
    """Decide typed questions (noul, choice, score) about pictures; the questions come from a file.

    A picture stands where a text has its placeholder <picture-1>, <picture-2>, ...; without any,
    the pictures stand before the state.
    """
    if questions is None:
        raise InputError("there are no questions; write: keepsight decide IMAGE --questions FILE")
    named, words = model_first(words or [], True, model)
    model = one_model(named, model)
    images = [*(image or []), *words]
    check_images(images)
    request = _request(_read(questions), state, images, expanded(questions).parent)
    pixels = (min_pixels, max_pixels)
    how = {"runtime": runtime, "weights": weights}
    with load(model, dtype, device_map, store, pixels, remote, tenant, **how) as vlm:
        found = vlm.decide(request, decision_config=decision_config)
        if as_json:
            made: Record = {"answers": found, "usage": vars(found.usage)}  # type: ignore[union-attr]
            json_line(made | ({"report": found.report.to_dict()} if report else {}))  # type: ignore[union-attr]
            return
        out = console()
        shown = table("question", "answer", "confidence", "probabilities", right=("confidence",))
        for name, answer in found.items():  # type: ignore[union-attr]
            shown.add_row(plain(name), *_row(answer))
        out.print(shown)
        if report:
            out.print(plain(str(found.report)))  # type: ignore[union-attr]


def _row(answer: Record) -> tuple[str, str, str]:
    if answer["type"] == "noul":
        return ("yes" if answer["noul"] >= 0.5 else "no", "", f"{answer['noul']:.3f}")
    value = answer["choice"] if answer["type"] == "choice" else f"{answer['score']:.2f}"
    each = ", ".join(f"{name} {chance:.3f}" for name, chance in answer["probabilities"].items())
    return plain(str(value)), f"{answer['confidence']:.2f}", plain(each)


def _read(path: Path) -> Record:
    try:
        data = json.loads(expanded(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--questions {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"--questions {path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"--questions {path}: expected questions by name, as in {{...}}")
    return data


def _request(data: Record, state: str | None, images: list[str], folder: Path) -> Record:
    """The request of a file and the command line."""
    whole = isinstance(data.get("questions"), dict) and "type" not in data["questions"]
    request: Record = dict(data) if whole else {"questions": data}
    assets = {name: _at(asset, folder) for name, asset in (request.get("assets") or {}).items()}
    names = [f"<picture-{number + 1}>" for number in range(len(images))]
    assets |= dict(zip(names, images, strict=True))
    if state is not None:
        request["state"] = _state(state)
    texts = json.dumps([request.get("state"), request["questions"]], ensure_ascii=False)
    if not any(name in texts for name in names):
        before, said = "\n".join(names), request.get("state")
        if said is None or isinstance(said, str):
            request["state"] = "\n".join(filter(None, (before, said)))
        else:
            request["state"] = {"pictures": before, "state": said} if before else said
    return {**request, "state": request.get("state", ""), "assets": assets}


def _state(text: str) -> Any:
    """JSON, or the text itself."""
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _at(asset: object, folder: Path) -> object:
    """An image of a file: a path in it begins where the file lies."""
    plain_path = isinstance(asset, str) and "://" not in asset and not asset.startswith("data:")
    return os.fspath(folder / str(asset)) if plain_path else asset
