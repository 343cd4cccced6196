"""The record in an exported model's folder: its source weights, and the digests of all files.

An export that is half copied, changed or made by other versions must not answer at all. So the
record and all files are checked before a runtime sees any of them. The record has a seal: editing
it by hand is an error. It is written last, so without it a folder is none. Reading every byte of a
large export is slow, so a caller who knows that these files were read before may skip that part.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import NoReturn

from blake3 import blake3

from keepsight.errors import DamagedFile, NotKeepsightFile, WrongFormatVersion
from keepsight.kinds import Record
from keepsight.system import digests

NAME = "keepsight.json"
FORMAT = 2
GRAPHS = "graphs"  # the folder of graphs, as Transformers' exporters save them
RUNTIMES = {"onnx": (".onnx",), "openvino": (".xml", ".bin")}  # and the files of each graph
PARTS = ("tower", "embedding", "decoder", "head")
SETTINGS = (".json", ".jinja")  # files that Transformers reads
_LARGEST = 4 * 2**20  # largest record in bytes; a usual one takes a few thousand
_AGAIN = "copy the whole folder again, or export the model again"


@dataclass(frozen=True)
class File:
    """One file of an export."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The record of an export."""

    runtime: str
    model_type: str
    quantised: str | None
    appends: bool  # keys and values are written in place
    weights: dict[str, str]  # fingerprints of the source model
    most_patches: int | None  # patches of one picture; None if all pictures have one size
    versions: dict[str, str]
    files: dict[str, File]
    deviation: Record = field(default_factory=dict)  # deviation from the model, measured
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """The digest of everything that computes."""
        graphs = f"{GRAPHS}/"
        rows = [[n, f.digest] for n, f in sorted(self.files.items()) if n.startswith(graphs)]
        return digests.digest("export", rows)

    @property
    def bytes(self) -> int:
        """The bytes of all files except the record."""
        return sum(file.bytes for file in self.files.values())

    def save(self, folder: Path) -> None:
        """Write the record, as the last file."""
        content = asdict(self)
        text = json.dumps(content | {"seal": seal_of(content)}, indent=1)
        (folder / NAME).write_text(text + "\n", encoding="utf-8")


def seal_of(content: Record) -> str:
    """The digest of a record without its seal."""
    plain = {name: value for name, value in content.items() if name != "seal"}
    return digests.digest("export record", digests.canonical_json(plain))


def is_export(path: str | Path) -> bool:
    """Whether a folder is an exported model, even without its record."""
    folder = Path(path)
    decoders = [folder / GRAPHS / f"decoder{ends[0]}" for ends in RUNTIMES.values()]
    return (folder / NAME).is_file() or any(decoder.is_file() for decoder in decoders)


def files_in(folder: Path) -> dict[str, File]:
    """Every file below a folder except the record."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    return {
        path.relative_to(folder).as_posix(): File(path.stat().st_size, file_digest(path))
        for path in found
    }


def file_digest(path: Path) -> str:
    """The digest of all bytes of a file."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def read(folder: Path, contents: bool = True) -> Manifest:
    """Record of an export, after checking every file it names; `contents` reads them in full."""
    path = folder / NAME
    if not path.is_file():
        raise NotKeepsightFile(
            f"{folder} has no {NAME}, the record of an export made by `keepsight export`; {_AGAIN}"
        )
    content = _object(path)
    form = content.get("format")
    if type(form) is not int or form != FORMAT:
        raise WrongFormatVersion(
            f"{path} has format {str(form)[:40]}, this version reads {FORMAT}; export the model "
            "again with this version, or load it with the one that made it"
        )
    if content.pop("seal", None) != seal_of(content):
        raise DamagedFile(f"{path} was changed after the export; {_AGAIN}")
    try:
        files = {name: File(**file) for name, file in content["files"].items()}
        manifest = Manifest(**content | {"files": files})
        graphs = [f"{GRAPHS}/{part}{end}" for part in PARTS for end in RUNTIMES[manifest.runtime]]
    except (TypeError, KeyError, AttributeError) as error:
        raise DamagedFile(f"{path} is not the record of an export: {error}; {_AGAIN}") from error
    missing = sorted({"config.json", *graphs} - files.keys())
    if missing:
        raise DamagedFile(f"{path} names no {missing[0]}, which every export has; {_AGAIN}")
    for name, file in files.items():
        _check_file(folder, name, file, contents)
    _check_no_others(folder, manifest)
    kind = _object(folder / "config.json").get("model_type")
    if kind != manifest.model_type:
        raise DamagedFile(
            f"{folder / 'config.json'} is for {str(kind)[:40]}, the record for "
            f"{manifest.model_type}; {_AGAIN}"
        )
    return manifest


def _object(path: Path) -> Record:
    """A JSON object from untrusted text."""

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number in JSON")

    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        content = json.loads(data.decode("utf-8"), parse_constant=refuse)
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
        seal_of(content)  # also walks through all of it, at any depth
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}; {_AGAIN}") from error
    return content


def _check_file(folder: Path, name: str, file: File, contents: bool) -> None:
    pure, path = PurePosixPath(name), folder / name
    if pure.is_absolute() or ".." in pure.parts or "\0" in name or "\\" in name:
        raise DamagedFile(f"{folder / NAME} names a file outside its folder: {name[:200]!r}")
    if not path.is_file():
        raise DamagedFile(f"{folder} lacks {name}, which its record names; {_AGAIN}")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DamagedFile(
            f"{path} leads out of the folder; copy the export with its links followed (cp -L)"
        )
    size = path.stat().st_size
    if size != file.bytes:
        raise DamagedFile(f"{path} has {size} bytes, its record says {file.bytes}; {_AGAIN}")
    if contents and file_digest(path) != file.digest:
        raise DamagedFile(f"{path} is not the file that was exported; {_AGAIN}")


def _check_no_others(folder: Path, manifest: Manifest) -> None:
    """Refuse graphs and settings that the record does not name."""
    graphs = [path for path in (folder / GRAPHS).rglob("*") if path.is_file()]
    settings = [path for path in folder.iterdir() if path.suffix in SETTINGS and path.name != NAME]
    extra = {path.relative_to(folder).as_posix() for path in [*graphs, *settings]}
    if others := extra - manifest.files.keys():
        raise DamagedFile(f"{folder} holds {min(others)}, which is not of this export; remove it")
