"""Files: what is written is read, and nothing else ever is.

A file that breaks off, is flipped or lies gets a named error; no other exception, and never data
that nobody wrote. Law 11: a writer that is killed leaves no file that loads and is not whole.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.common import bits
from support.hostile import (
    bounded,
    ended_well,
    entry,
    flipped,
    in_child,
    lines_until_killed,
    metadata,
    raw,
    sealed,
    start,
    truncated,
)

from keepsight.errors import (
    DamagedFile,
    FileError,
    InputError,
    NotKeepsightFile,
    WrongFormatVersion,
)
from keepsight.formats import tensorfile
from keepsight.system import digests

DTYPES = [getattr(torch, name) for name in tensorfile._DTYPES.values()]
Tensors = dict[str, torch.Tensor]


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


tensors_of = st.dictionaries(
    st.text(max_size=5).filter(lambda name: name != "__metadata__"),
    st.builds(
        random_tensor,
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=3),
        st.integers(0, 999),
    ),
    max_size=5,
)
records = st.dictionaries(
    st.sampled_from(["a", "é", "list"]), st.none() | st.integers() | st.text() | st.lists(st.text())
)


# -- what is written is read -------------------------------------------------------------------


@bounded(60)
@given(tensors_of, records)
def test_what_is_written_is_read(tmp_path: Path, tensors: Tensors, record: dict[str, Any]) -> None:
    path = tmp_path / "x.keep"
    tensorfile.save(path, "test", 1, tensors, record)
    read, got = tensorfile.read(path, "test", 1)
    assert bits(tensors) == bits(read)
    assert {name: got[name] for name in record} == record
    assert tensorfile.read_record(path) == got


@bounded(30)
@given(tensors_of)
def test_any_safetensors_reader_opens_it(tmp_path: Path, tensors: Tensors) -> None:
    path = tmp_path / "x.sight"
    tensorfile.save(path, "test", 1, tensors, {"a": "é"})
    with safe_open(path, "pt") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert bits(tensors) == bits(read)
        assert set(file.metadata()) == {"format", "keepsight", "digest"}


def test_one_content_has_one_spelling(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3), "a": torch.ones(2, dtype=torch.int8), "c": torch.zeros(2)}
    spellings = set()
    for order in (list(tensors), list(tensors)[::-1]):
        path = tmp_path / "x.sight"
        tensorfile.save(path, "test", 1, {name: tensors[name] for name in order}, {"x": 1})
        spellings.add(path.read_bytes())
    assert len(spellings) == 1


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"all": base, "turned": base.t(), "row": base[1], "again": base}
    tensorfile.save(tmp_path / "x.sight", "test", 1, tensors, {})
    read, _ = tensorfile.read(tmp_path / "x.sight", "test", 1)
    assert all(torch.equal(tensor, read[name]) for name, tensor in tensors.items())


def test_what_cannot_be_read_is_not_written(tmp_path: Path) -> None:
    for tensors in ({"a": torch.zeros(1, dtype=torch.complex64)}, {"__metadata__": torch.zeros(1)}):
        with pytest.raises(InputError, match="no such name or dtype"):
            tensorfile.save(tmp_path / "x.sight", "test", 1, tensors, {})
    assert list(tmp_path.iterdir()) == []


# -- hostile files -----------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.sight"
    tensors = {"a": torch.tensor([1.5, -2.0]), "b": torch.tensor([[True], [False]])}
    tensorfile.save(path, "test", 1, tensors, {"n": 1})
    return path


def test_truncation_at_every_byte(small: Path) -> None:
    data = small.read_bytes()
    for _ in truncated(small):
        with pytest.raises(FileError):
            tensorfile.read(small, "test", 1)
    small.write_bytes(data + b"\0")
    with pytest.raises(DamagedFile, match="the file holds"):
        tensorfile.read(small, "test", 1)


def test_every_flipped_bit_is_found_or_changes_nothing(small: Path) -> None:
    data = small.read_bytes()
    wanted = tensorfile.read(small, "test", 1)
    harmless = set()
    for spot in flipped(small):
        try:
            found = tensorfile.read(small, "test", 1)
        except FileError:
            continue
        assert bits(found[0]) == bits(wanted[0]) and found[1] == wanted[1]
        harmless.add(spot)
    assert small.read_bytes() == data
    idle = data.index(b'"format":"pt"')  # for other readers; nothing of ours depends on it
    assert harmless <= set(range(idle, idle + len(b'"format":"pt"')))


NONE, HUGE = b"", 2**62
SIZE, GAP, WORDS = "lies about its shape", "leave a gap or overlap", "not described properly"
REST, PLACE = "the file holds", "cannot be laid out"
LIES: dict[str, tuple[dict[str, Any], bytes, str]] = {
    "longer than the file": ({"a": entry("F32", [2**40], 0, 2**42)}, b"1234", REST),
    "shape and size disagree": ({"a": entry("F32", [2], 0, 4)}, b"1234", SIZE),
    "negative shape": ({"a": entry("F32", [-1, -1], 0, 4)}, b"1234", WORDS),
    "negative offsets": ({"a": entry("F32", [1], -4, 0)}, b"1234", WORDS),
    "offsets backwards": ({"a": entry("F32", [1], 4, 0)}, b"1234", SIZE),
    "overlap": ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, b"123456", GAP),
    "the same bytes": ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, b"1234", GAP),
    "gap": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"123", GAP),
    "gap at the start": ({"a": entry("U8", [1], 1, 2)}, b"12", GAP),
    "rest at the end": ({"a": entry("U8", [1], 0, 1)}, b"12", REST),
    "not aligned": ({"a": entry("U8", [1], 0, 1), "b": entry("F32", [1], 1, 5)}, b"12345", PLACE),
    "unknown dtype": ({"a": entry("F31", [1], 0, 4)}, b"1234", WORDS),
    "dtype is a list": ({"a": entry(["F32"], [1], 0, 4)}, b"1234", WORDS),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"1234", WORDS),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", WORDS),
    "three offsets": (
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}},
        b"1234",
        WORDS,
    ),
    "shape is text": ({"a": entry("F32", "1", 0, 4)}, b"1234", WORDS),
    "shape is a number": ({"a": entry("F32", 1, 0, 4)}, b"1234", WORDS),
    "shape of floats": ({"a": entry("F32", [1.0], 0, 4)}, b"1234", WORDS),
    "shape of truth": ({"a": entry("F32", [True], 0, 4)}, b"1234", WORDS),
    "infinite shape": ({"a": entry("F32", [float("inf")], 0, 4)}, b"1234", WORDS),
    "no number": ({"a": entry("F32", [float("nan")], 0, 4)}, b"1234", WORDS),
    "empty but beyond 64 bits": ({"a": entry("F32", [0, 10**30], 0, 0)}, NONE, WORDS),
    "strides beyond 64 bits": ({"a": entry("F32", [0, HUGE, HUGE], 0, 0)}, NONE, PLACE),
    "more dimensions than sense": ({"a": entry("F32", [1] * 100_000, 0, 4)}, b"1234", WORDS),
    "a product that takes hours": ({"a": entry("F32", [10**4000] * 1000, 0, 4)}, b"1234", WORDS),
    "not an object": ({"a": [1, 2]}, NONE, WORDS),
    "nothing": ({"a": None}, NONE, WORDS),
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie_under_seals_that_hold(tmp_path: Path, lie: str) -> None:
    entries, data, reason = LIES[lie]
    path = sealed(tmp_path / "x.sight", entries, data)
    began = time.process_time()
    with pytest.raises(DamagedFile, match=reason):
        tensorfile.read(path, "test", 1)
    assert time.process_time() - began < 5


def test_a_sealed_file_without_a_lie_is_read(tmp_path: Path) -> None:
    """The control: what `sealed` writes is refused for its lie and for nothing else."""
    tensor = torch.tensor([7.0])
    data = tensor.numpy().tobytes()
    path = sealed(tmp_path / "x", {"a": entry("F32", [1], 0, 4)}, data, {"a": tensor})
    assert torch.equal(tensorfile.read(path, "test", 1)[0]["a"], tensor)


def test_records_that_do_not_name_the_tensors(tmp_path: Path) -> None:
    entries, data = {"a": entry("U8", [1], 0, 1)}, b"\x07"
    tensor = torch.tensor([7], dtype=torch.uint8)
    for tensors in ({"b": tensor}, {"a": tensor, "b": tensor}, {"a": tensor + 1}):
        path = sealed(tmp_path / "x", entries, data, tensors)
        with pytest.raises(DamagedFile):
            tensorfile.read(path, "test", 1)
    for names in (None, [], "x", {"a": None}):
        record = {"kind": "test", "format": 1, "tensors": names}
        path = raw(tmp_path / "x", {"__metadata__": metadata(record), **entries}, data)
        with pytest.raises(DamagedFile):
            tensorfile.read(path, "test", 1)


def test_a_tensor_named_twice_is_no_way_in(tmp_path: Path) -> None:
    """JSON lets the last one win; what wins must still be what the record names."""
    first, second = torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)
    record = {
        "kind": "test",
        "format": 1,
        "tensors": {"a": digests.digest("tensor", first)},
    }
    seal = json.dumps(metadata(record))
    one, two = (json.dumps(entry("U8", [1], spot, spot + 1)) for spot in (0, 1))
    text = f'{{"__metadata__":{seal},"a":{one},"a":{two}}}'.encode()
    path = raw(tmp_path / "x", text, bytes([int(first), int(second)]))
    with pytest.raises(DamagedFile):
        tensorfile.read(path, "test", 1)


NOT_OURS: dict[str, tuple[Any, int | None]] = {
    "an empty header": (b"", None),
    "not JSON": (b"{]" * 8, None),
    "not text": (b"\xff\xfe" * 8, None),
    "a list": ([1, 2, 3], None),
    "a number": (b"12345678", None),
    "nested deeply": (b"[" * 1_000_000, None),
    "objects nested deeply": (b'{"a":' * 300_000, None),
    "no metadata": ({"a": entry("F32", [0], 0, 0)}, None),
    "metadata is a list": ({"__metadata__": []}, None),
    "metadata of someone else": ({"__metadata__": {"format": "pt"}}, None),
    "a record that is no text": ({"__metadata__": {"keepsight": {}}}, None),
    "a header beyond all bounds": ({}, 2**64 - 1),
    "a header just beyond the bound": ({}, tensorfile.MAX_HEADER + 1),
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_what_is_not_ours(tmp_path: Path, what: str) -> None:
    header, length = NOT_OURS[what]
    path = raw(tmp_path / "x.sight", header, length=length)
    for read in (lambda: tensorfile.read(path, "test", 1), lambda: tensorfile.read_record(path)):
        with pytest.raises(NotKeepsightFile):
            read()


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match="the header says"):
        tensorfile.read(raw(tmp_path / "x", {}, length=1000), "test", 1)


def test_records_that_are_no_records(tmp_path: Path) -> None:
    texts = ["", "{", "[]", "null", '"x"', "{}", '{"kind": 1}', "[" * 100_000, "\ud800"]
    for text in texts:
        path = raw(tmp_path / "x", {"__metadata__": metadata(text)})
        with pytest.raises(DamagedFile):
            tensorfile.read(path, "test", 1)
    for digest in (None, "", 7, "0" * 64):
        path = raw(tmp_path / "x", {"__metadata__": {"keepsight": "{}", "digest": digest}})
        with pytest.raises(DamagedFile, match="does not match its digest"):
            tensorfile.read(path, "test", 1)


def test_other_kinds_and_versions_are_named(small: Path, tmp_path: Path) -> None:
    with pytest.raises(NotKeepsightFile, match="'test' file, expected 'package'"):
        tensorfile.read(small, "package", 1)
    with pytest.raises(WrongFormatVersion, match="format 1, this Keepsight reads format 2"):
        tensorfile.read(small, "test", 2)
    for version in (None, 0, 2, "1", [1]):
        with pytest.raises(WrongFormatVersion):
            tensorfile.read(sealed(tmp_path / "x", {}, format=version), "test", 1)
    assert tensorfile.read_record(small)["kind"] == "test"


@bounded(80)
@given(st.binary(max_size=60))
def test_noise_is_never_read(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "noise"
    path.write_bytes(noise)
    with pytest.raises(FileError):
        tensorfile.read(path, "test", 1)


def test_what_is_no_file_is_an_os_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError, match=r"No such file|Is a directory"):
            tensorfile.read(path, "test", 1)


# -- crashes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(
    small: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = small.read_bytes()
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        tensorfile.save(small, "test", 1, {"a": torch.zeros(9)}, {})
    assert small.read_bytes() == before
    assert [path.name for path in small.parent.iterdir()] == [small.name]


def test_a_disk_that_takes_no_more_says_why(tmp_path: Path) -> None:
    """For real, by a limit on the size of files, so that the writer's own error is seen."""

    def work() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            tensorfile.save(tmp_path / "x.sight", "test", 1, {"a": torch.zeros(100_000)}, {})
        except OSError as error:
            return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG
        return False

    assert ended_well(in_child(work))
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys, torch
from pathlib import Path
from keepsight.formats import tensorfile
folder, n = Path(sys.argv[1]), 0
while True:
    n += 1
    tensors = {"features": torch.full((40_000,), float(n)), "more": torch.full((9,), n)}
    tensorfile.save(folder / f"{n % 7}.sight", "test", 1, tensors, {"n": n})
    print(n, flush=True)
"""


def test_a_killed_writer_leaves_no_half_file(tmp_path: Path) -> None:
    said = lines_until_killed(start(WRITER, tmp_path), 20)
    latest = {int(n) % 7: int(n) for n in said}
    loaded = 0
    for path in tmp_path.iterdir():
        hidden = path.name.startswith(".part-")  # what it was at when it was killed
        try:
            tensors, record = tensorfile.read(path, "test", 1)
        except FileError:
            assert hidden
            continue
        assert (tensors["features"] == record["n"]).all() and (tensors["more"] == record["n"]).all()
        assert hidden or record["n"] >= latest.get(int(path.stem), 0)
        loaded += not hidden
    assert loaded >= len(latest) > 0
