"""The command line: a table of commands, each a thin wrapper of a plain function.

torch and Transformers are imported inside the commands, so `keepsight --help` answers at once.
Every option is honoured or refused by name. An error is one line on stderr and exit code 2; exit
code 1 means that the command ran and a check failed.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from keepsight import __version__
from keepsight.cli import batch, cache, decide, encode, export, families, plan, serve
from keepsight.cli.form import Choice, Choices, JsonObject, JsonSchema, Regex, form_of
from keepsight.cli.loading_line import loading_line
from keepsight.cli.model_names import check_model
from keepsight.cli.options import (
    DeviceMap,
    Dtype,
    Images,
    Json,
    MaxPixels,
    MaxTokens,
    MinPixels,
    Named,
    Prompt,
    Remote,
    Runtime,
    Seed,
    ShowReport,
    SomeModel,
    Store,
    Temperature,
    Tenant,
    TopP,
    Weights,
    check_how,
    check_images,
    check_shown,
    decoding,
    load,
    model_first,
    one_model,
)
from keepsight.cli.terminal import ErrorsByName, console, json_line, plain, report_table, table
from keepsight.cli.tour_page import check_page
from keepsight.errors import InputError, UnfinishedAnswer
from keepsight.kinds import Record
from keepsight.system.places import expanded

if TYPE_CHECKING:
    from PIL.Image import Image

    from keepsight.report import Report

app = typer.Typer(
    cls=ErrorsByName,
    help="Memory for vision-language models. Look once, remember.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """The `keepsight` command."""
    app(prog_name="keepsight")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"keepsight {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


# -- asking ------------------------------------------------------------------------------------


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for its files; if it has others, demo-out in it is taken.")
    ] = Path("demo-out"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the pictures.")] = 1,
    save: Annotated[
        Path | None, typer.Option(help="Also write the tour to this file, as one HTML page.")
    ] = None,
) -> None:
    """See a vision-language model remember pictures; no network, under two minutes."""
    if expanded(out).is_file():
        raise InputError(f"--out {out} cannot be written: it is a file; name a folder")
    if save is not None:
        check_page(save)
    import keepsight.cli.tour as tour

    tour.run(console(), out, seed, save)


@app.command()
def ask(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar='[MODEL] [IMAGE]... "QUESTION"', show_default=False),
    ] = None,
    model: SomeModel = None,
    image: Images = None,
    prompt: Prompt = None,
    batch_file: Annotated[
        Path | None,
        typer.Option(
            "--batch", help='Many questions: lines of {"question": ..., "images": [...]}.'
        ),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Where the answers of --batch go; resumable.")
    ] = None,
    json_schema: JsonSchema = None,
    json_object: JsonObject = False,
    choices: Choices = None,
    choice: Choice = None,
    regex: Regex = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
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
    """Ask one question about any number of images; the answer is printed as it is generated."""
    many = batch_file is not None or out_file is not None
    named, words = model_first(words or [], many or prompt is not None, model)
    model = one_model(named, model)
    options = decoding(max_tokens, temperature, top_p, seed)
    if (form := form_of(json_schema, json_object, choices, choice, regex)) is not None:
        options["response_format"] = form
    pixels = (min_pixels, max_pixels)
    how = {"runtime": runtime, "weights": weights}
    if many:
        if batch_file is None or out_file is None:
            raise InputError("--batch and --out go together: the questions, and their answers")
        if words or image or prompt is not None or report:
            raise InputError("--batch has its own questions and images; leave out all others")
        questions, answers = batch.read_questions(batch_file), expanded(out_file)
        batch.answered(answers, questions)  # before anything slow
        with load(model, dtype, device_map, store, pixels, remote, tenant, **how) as vlm:
            good, bad = batch.run(vlm, questions, answers, options, console(stderr=True))
        if as_json:
            json_line({"answered": good, "failed": bad, "out": str(out_file)})
        else:
            console().print(f"{good} answered, {bad} failed: {out_file}")
        raise typer.Exit(1 if bad else 0)
    images, question = _question(words, image or [], prompt)
    check_images(images)
    out = console()
    with load(model, dtype, device_map, store, pixels, remote, tenant, **how) as vlm:
        from keepsight.cli.typed_pictures import pictures_at  # start-up time
        from keepsight.prompt.messages import user_message
        from keepsight.report import Reply

        opened = [picture for name in images for _, picture in pictures_at(name)]
        messages = [user_message(question, opened)]
        pieces = []
        for piece in vlm.stream(messages, **options):
            pieces.append(piece)
            if not as_json:
                out.out(plain(piece.text), end="", highlight=False)
        reply = Reply.of(pieces)
        cut = form is not None and reply.finish_reason != "stop"
        if as_json:
            told: Record = {"text": reply.text, "finish_reason": reply.finish_reason}
            told |= {"parsed": reply.parsed} if form is not None and not cut else {}
            told |= {"usage": vars(reply.usage)}
            json_line(told | ({"report": reply.report.to_dict()} if report else {}))
        else:
            out.print()
            _tell_of_store(reply.report)
            if report:
                out.print(report_table(reply.report))
        if cut:
            raise UnfinishedAnswer(
                "the answer ended before its form was complete; allow more tokens with --max-tokens"
            )


def _tell_of_store(report: Report) -> None:
    """Say which pictures were not encoded, because the store has them."""
    stored = ("disk", "remote")
    media = [s for s in report.segments if s.medium is not None]
    names = dict.fromkeys(s.name for s in media if s.features in stored or s.tier in stored)
    if names:
        typer.echo(f"from the store, not encoded again: {', '.join(names)}", err=True)


def _question(words: list[str], images: list[str], prompt: str | None) -> tuple[list[str], str]:
    """The images and the question; the last word is the question unless `--prompt` gives it."""
    images = [*images, *(words if prompt is not None else words[:-1])]
    if prompt is None and not words:
        raise InputError('there is no question; write: keepsight ask IMAGE "What is it?"')
    question = words[-1] if prompt is None else prompt
    if prompt is None and (
        os.path.isfile(question) or question.startswith(("http://", "https://"))
    ):
        raise InputError(f'{question} is an image; write: keepsight ask {question} "What is it?"')
    return images, question


app.command("decide")(decide.decide)


@app.command()
def chat(
    named: Named = None,
    model: SomeModel = None,
    image: Images = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
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
    """Hold a conversation; /help lists its commands."""
    options = decoding(max_tokens, temperature, top_p, seed)
    check_images(image or [])
    name = one_model(named, model)
    folder = store if store and "://" not in store else None  # an address has no lines typed here
    history = expanded(folder) / "chat-history" if folder else None
    pixels = (min_pixels, max_pixels)
    how = {"runtime": runtime, "weights": weights}
    with load(name, dtype, device_map, store, pixels, remote, tenant, **how) as vlm:
        from keepsight.cli.chat import Shell  # start-up time: import while the line moves

        out = console(stderr=as_json)  # JSON is alone on standard output
        shell = Shell(vlm, out, options, history=history, reports=report, as_json=as_json)
        for name in image or []:
            shell.image(name)
        shell.run()


app.command("serve", cls=serve.ServeCommand)(serve.serve)


# -- packages and exports ------------------------------------------------------------------------


app.command("encode")(encode.encode)
app.command("export")(export.export)
app.command("plan")(plan.plan)


@app.command()
def show(
    file: Annotated[
        Path, typer.Argument(help="A .sight or .keep file, an exported model's folder, a store.")
    ],
    as_json: Json = False,
) -> None:
    """Describe a package, a saved session or an export, and check it for damage; for a store, print
    what `keepsight cache stats` prints."""
    if not expanded(file).exists():
        raise InputError(f"{file}: cannot be read: No such file or directory")
    if (expanded(file) / "store.json").is_file():
        cache.stats(str(file), None, as_json)
        return
    check_shown(expanded(file))
    room: ModuleType = export
    with loading_line("PyTorch"):
        from keepsight.runtimes.load import is_export

        if not is_export(expanded(file)):
            from keepsight.cli import show as room

    described = room.describe(expanded(file))
    if as_json:
        json_line(described)
    else:
        console().print(room.render(described))


@app.command()
def verify(
    named: Named = None,
    model: SomeModel = None,
    image: Images = None,
    prompt: Prompt = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    runtime: Runtime = None,
    weights: Weights = None,
    store: Store = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    as_json: Json = False,
) -> None:
    """Compare warm answers with cold ones and stock Transformers, on your own model and images."""
    check_images(image or [])
    name = one_model(named, model)
    check_how(name, runtime, weights, store)
    import random

    with loading_line("PyTorch"):
        from keepsight.cli.typed_pictures import pictures_at
        from keepsight.demo.scene import Scene
        from keepsight.stock.verify import certify

    images: list[str | Image] = [p for n in image or [] for _, p in pictures_at(n)]
    images = images or [Scene(random.Random(seed)).draw() for seed in (1, 2)]
    question = prompt or "Describe the picture."
    pixels = (min_pixels, max_pixels)
    how = {"runtime": runtime, "weights": weights}
    with load(name, dtype, device_map, store, pixels, **how) as vlm:
        found = certify(vlm.runtime, images, question)
    if as_json:
        json_line(found.to_dict())
        raise typer.Exit(0 if found else 1)
    shown = table("looked at", "holds", "largest difference", "", right=("largest difference",))
    for check in found.checks:
        holds = "yes" if check.ok else "NO"
        shown.add_row(check.what, holds, f"{check.difference:.3g}", check.note)
    console().print(shown)
    typer.echo(found.verdict)
    raise typer.Exit(0 if found else 1)


app.command("families")(families.families)


@app.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": [],
    }
)
def bench(context: typer.Context) -> None:
    """Measure against stock Transformers and against the limit; `bench --help` has its options."""
    import importlib

    room = importlib.import_module("keepsight.bench")
    raise typer.Exit(room.main(list(context.args), check_model))
