"""What `encode` can be pointed at, and what it makes of files that are damaged or mean harm.

No model is needed: an item is a name and a way to open it. What is opened is compared with the
picture that was put in.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.encode_parts import (
    film,
    opened,
    pdf,
    picture,
    png,
    read,
    special,
    table,
    tar,
    written,
    zipped,
)
from support.hostile import bounded, png_that_claims

from keepsight.encode import archives, count, documents, find, parse_shard
from keepsight.encode.items import ReadOptions
from keepsight.errors import InputError
from keepsight.media import video_files
from keepsight.media.clips import open_clip
from keepsight.media.sources import open_source
from keepsight.system.suffixes import kind_of


def names(found: list[Any]) -> list[str]:
    return [Path(item.name).name for item in found]


# -- files, folders, globs ---------------------------------------------------------------------


def test_files_folders_and_globs_give_each_path_once(photos: Path) -> None:
    (photos / "notes.txt").write_text("hello")
    (photos / "data.bin").write_text("hello")
    (photos / ".hidden.png").write_bytes(b"x")
    (photos / "trip" / "UPPER.JPG").write_bytes(b"x")
    found = find([photos / "p0.png", photos, str(photos / "trip" / "*.png"), photos / "**"])
    assert [Path(p.path).name for p in found.pieces] == ["p0.png", "UPPER.JPG", "p1.png", "p2.png"]
    assert len(find([photos]).left_out) == 2  # lists are named, not found
    assert [p.path for p in find([photos / "*.bin"]).pieces] == [str(photos / "data.bin")]


def test_a_file_with_glob_characters_in_its_name_is_that_file(photos: Path) -> None:
    odd = photos / "a[1]*.png"
    shutil.copy(photos / "p0.png", odd)
    assert [p.path for p in find([odd]).pieces] == [str(odd)]


def test_a_source_that_is_not_there_is_refused_by_name(photos: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.png: there is no such file"):
        find([photos / "p0.png", photos / "missing.png"])


def test_folders_hold_everything_that_holds_images(photos: Path) -> None:
    zipped(photos / "a.zip", [("x.png", png(5))])
    tar(photos / "b.tar", [("y.png", png(6))])
    pdf(photos / "c.pdf", 1)
    table(photos / "d.parquet", {"image": [png(7)]})
    found = names(read(photos))
    wanted = ["a.zip#x.png", "b.tar#y.png", "c.pdf#page=1", "d.parquet#row=0", "p0.png"]
    assert found == [*wanted, "p1.png", "p2.png"]


def test_places_do_not_depend_on_where_a_folder_lies(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped(photos / "trip" / "a.zip", [("x.png", png(5))])
    elsewhere = tmp_path / "deep" / "down" / "copy"
    shutil.copytree(photos, elsewhere)
    places = [item.place for item in read(photos)]
    assert places == [item.place for item in read(elsewhere)]
    assert places == [item.place for item in read(f"{elsewhere}/")]
    assert [i.place for i in read(photos / "*" / "*.png")] == [
        i.place for i in read(elsewhere / "*" / "*.png")
    ]
    monkeypatch.chdir(photos / "trip")
    for named in ("p1.png", photos / "trip/p1.png", "*.png"):
        assert read(named)[0].place == "p1.png"
    assert [item.place for item in read(".")] == [item.place for item in read(photos / "trip")]


@bounded(50)
@given(st.lists(st.text(min_size=1, max_size=9), unique=True, max_size=30), st.integers(1, 9))
def test_shards_share_everything_once(places: list[str], machines: int) -> None:
    from keepsight.encode.items import At, broken

    for place in places:
        item = broken(At(place, place), "x")
        taken = [item.in_shard(parse_shard(f"{n}/{machines}")) for n in range(1, machines + 1)]
        assert sum(taken) == 1 and item.in_shard(None)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3", "²/3", ""])
def test_a_shard_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected i/n"):
        parse_shard(text)


# -- lists -------------------------------------------------------------------------------------


def test_lists_name_files_from_where_they_lie(photos: Path) -> None:
    lines = ["p0.png", "", str(photos / "trip" / "p1.png"), "missing.png", "trip"]
    (photos / "list.txt").write_text("\n".join(lines))
    found = read(photos / "list.txt")
    assert [item.place for item in found] == [f"list.txt#line={n}" for n in (1, 3, 4, 5)]
    assert [opened(item) for item in found[:2]] == ["64x64", "64x64"]
    assert "no image can be read" in opened(found[2])
    assert "name it as a source" in opened(found[3])


def test_csv_and_jsonl_have_columns(photos: Path) -> None:
    (photos / "a.csv").write_text('id,photo\n1,p0.png\n2,"trip/p1.png"\n3,\n')
    (photos / "a.jsonl").write_text('{"photo": "p0.png"}\nnot json\n{"x": 1}\n{"photo": 7}\n[]\n')
    rows = [opened(item) for item in read(photos / "a.csv", column="photo")]
    assert rows[:2] == ["64x64"] * 2 and "'photo' is '' in this line" in rows[2]
    lines = [opened(item) for item in read(photos / "a.jsonl", column="photo")]
    assert lines[0] == "64x64"
    for line, error in zip(lines[1:], ["not JSON", "only: x", "'photo' is 7", "list"], strict=True):
        assert error in line
    with pytest.raises(InputError, match="no column 'image'; name one of these.*id, photo"):
        read(photos / "a.csv")


def test_a_list_may_hold_any_names_documents_and_data(photos: Path) -> None:
    import base64

    odd = os.fsdecode(b"caf\xe9 \xf0\x9f\x91\x81 #1.png")
    shutil.copy(photos / "p0.png", photos / odd)
    pdf(photos / "scan.pdf", 2)
    data = "data:image/png;base64," + base64.b64encode(png(3)).decode()
    text = "\ufeff".encode() + b"\r\n".join([os.fsencode(odd), b"scan.pdf", data.encode()])
    (photos / "list.txt").write_bytes(text)
    found = read(photos / "list.txt", dpi=72)
    assert [opened(item) for item in found] == ["64x64", "72x96", "72x96", "64x64"]


# -- archives ----------------------------------------------------------------------------------

HOSTILE = ["../../up.png", "/etc/absolute.png", "C:\\drive.png", "a/../../b.png", "\x1b[2J.png"]


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.bz2"])
def test_archives_are_read_where_they_lie(tmp_path: Path, kind: str) -> None:
    members = [(name, png(n)) for n, name in enumerate(["cat.png", *HOSTILE])]
    members += [("cat.json", b"{}"), ("cat.png.txt", b"x"), (".hidden.png", b"x")]
    path = tmp_path / "in" / f"a.{kind}"
    path.parent.mkdir()
    if kind == "zip":
        zipped(path, members)
    else:
        tar(path, members, f"w:{kind[4:]}")
    found = read(path)
    assert [item.place for item in found] == [f"a.{kind}#{n}" for n in ["cat.png", *HOSTILE]]
    for number, item in enumerate(found):
        assert item.open().decode().tobytes() == picture(number).convert("RGB").tobytes()
        assert item.open().name == open_source(png(number)).name
    assert sorted(p.name for p in tmp_path.rglob("*")) == [f"a.{kind}", "in"]


def test_links_and_devices_in_an_archive_are_named_and_left(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png(1))
    members = [
        special("a.png", tarfile.SYMTYPE, "secret.png"),
        special("b.png", tarfile.LNKTYPE, "/etc/passwd"),
        special("c.png", tarfile.CHRTYPE),
        special("d.png", tarfile.FIFOTYPE),
        ("good.png", png(2)),
    ]
    said = [opened(item) for item in read(tar(tmp_path / "a.tar", members))]
    assert said[4] == "64x64" and all("is a link or a device" in text for text in said[:4])


def test_bombs_in_archives_are_items_that_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 100_000)
    members = [("bomb.png", bytes(1_000_000)), ("good.png", png(1))]
    for path in (
        zipped(tmp_path / "a.zip", members),
        tar(tmp_path / "a.tar", members),
        tar(tmp_path / "a.tar.gz", members, "w:gz"),
    ):
        said = [opened(item) for item in read(path)]
        assert "larger than 100000 bytes" in said[0] and said[1] == "64x64"
    claims = zipped(tmp_path / "b.zip", [("x.png", png_that_claims(100_000, 100_000))])
    assert "bomb" in opened(read(claims)[0])


def test_a_header_that_unpacks_to_a_bomb_ends_the_archive(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 100_000)
    info = tarfile.TarInfo("x" * 500_000 + ".png")  # a long name is a header of its own
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(info)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(out.getvalue()))
    (item,) = read(tmp_path / "a.tar.gz")
    assert "a header of" in opened(item)


def test_a_zip_that_lies_about_sizes_is_caught(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", [("x.png", png(1)), ("y.png", png(2))])
    data = bytearray(path.read_bytes())
    spot = data.index(b"PK\x01\x02") + 24  # the size of the first member, in the directory
    data[spot : spot + 4] = (10).to_bytes(4, "little")
    path.write_bytes(data)
    said = [opened(item) for item in read(path)]
    assert said[0] != "64x64" and said[1] == "64x64"


def test_an_encrypted_member_is_named(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", [("x.png", png(1))])
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    path.write_bytes(data)
    assert "is encrypted" in opened(read(path)[0])


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "parquet", "arrow", "pdf"])
def test_what_is_cut_off_gives_what_is_there_and_a_named_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    make(path, kind)
    whole, size = [opened(item) for item in read(path, dpi=72)], path.stat().st_size
    assert len(whole) == 4 and len(set(whole)) == 1
    data = path.read_bytes()
    for length in sorted({0, 1, 3, 100, 513, size // 3, size // 2, size - 600, size - 9}):
        path.write_bytes(data[: max(0, length)])
        said = [opened(item) for item in read(path, dpi=72)]
        broken = [text for text in said if text != whole[0]]
        if kind not in ("zip", "parquet", "arrow") and not broken:
            # Pages are found without the directory; behind the end of a tar there is padding.
            assert len(said) == 4
            continue
        assert broken and all("a." in text for text in broken), (length, said)


def make(path: Path, kind: str) -> None:
    images = [png(n) for n in range(4)]
    members = [(f"{n}.png", data) for n, data in enumerate(images)]
    if kind == "zip":
        zipped(path, members)
    elif kind == "parquet":
        table(path, {"image": images}, row_group_size=1)
    elif kind == "arrow":
        arrow(path, images)
    elif kind == "pdf":
        pdf(path, 4)
    else:
        tar(path, members, "w:gz" if kind.endswith("gz") else "w")


def test_a_tar_whose_header_is_torn_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", [(f"{n}.png", png(n)) for n in range(3)])
    with tarfile.open(path) as archive:
        second = archive.getmembers()[1].offset
    data = bytearray(path.read_bytes())
    data[second + 5] ^= 1  # its checksum no longer holds
    path.write_bytes(data)
    said = [opened(item) for item in read(path)]
    assert said[0] == "64x64" and "breaks off" in said[1] and len(said) == 2


def test_archives_in_archives_are_left_alone(tmp_path: Path) -> None:
    inner = zipped(tmp_path / "inner.zip", [("x.png", png(1))]).read_bytes()
    path = zipped(tmp_path / "a.zip", [("inner.zip", inner), ("y.png", png(2))])
    assert names(read(path)) == ["a.zip#y.png"]


# -- tables ------------------------------------------------------------------------------------


def arrow(path: Path, images: list[bytes], stream: bool = False) -> Path:
    import pyarrow

    rows = pyarrow.table({"image": images})
    make_writer = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with make_writer(path, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=1)
    return path


def test_a_column_may_hold_images_in_any_form(tmp_path: Path) -> None:
    (tmp_path / "here.png").write_bytes(png(1))
    column = [
        {"bytes": png(0), "path": "x.png"},
        {"bytes": None, "path": "here.png"},
        {"bytes": None, "path": None},
        None,
        {"bytes": b"nothing", "path": None},
    ]
    said = [opened(item) for item in read(table(tmp_path / "a.parquet", {"image": column}))]
    assert said[:2] == ["64x64"] * 2 and "empty" in said[2] and "empty" in said[3]
    assert "not an image" in said[4] and "a.parquet#row=4" in said[4]
    texts = table(tmp_path / "b.parquet", {"file": ["here.png", "gone.png"]})
    said = [opened(item) for item in read(texts, column="file")]
    assert said[0] == "64x64" and "no image can be read" in said[1]
    lists = table(tmp_path / "c.parquet", {"image": [[png(0), png(1)], []], "n": [1, 2]})
    assert names(read(lists)) == ["c.parquet#row=0#0", "c.parquet#row=0#1"]
    numbers = table(tmp_path / "d.parquet", {"image": [1.5]})
    assert "holds a float" in opened(read(numbers)[0])


def test_a_column_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", {"photo": [b""], "id": [1]})
    with pytest.raises(InputError, match="no column 'image'.*photo, id"):
        read(path)


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_files_and_streams_are_read(tmp_path: Path, stream: bool) -> None:
    path = arrow(tmp_path / "a.arrow", [png(n) for n in range(3)], stream)
    assert [opened(item) for item in read(path)] == ["64x64"] * 3


def saved(folder: Path, tables_: dict[str, list[bytes]], **state: Any) -> Path:
    """A folder as `datasets.save_to_disk` writes it."""
    folder.mkdir()
    for name, images in tables_.items():
        arrow(folder / name, images, stream=True)
    files = [{"filename": name} for name in tables_]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_saved_datasets_are_read_by_what_their_state_says(tmp_path: Path) -> None:
    split = tmp_path / "ds"
    split.mkdir()
    train = saved(split / "train", {"data-1.arrow": [png(0)], "data-0.arrow": [png(1)]})
    arrow(train / "cache-abc.arrow", [png(2)])
    saved(split / "test", {"data.arrow": [png(3)]})
    (split / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    places = [item.place for item in read(split)]
    assert places == [f"{p}.arrow#row=0" for p in ("test/data", "train/data-1", "train/data-0")]


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/x.arrow", "", ".."])
def test_a_state_that_points_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "ds", {})
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(InputError, match="outside of its folder"):
        read(folder)


def test_states_that_say_something_else_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "ds", {"a.arrow": [png(0)]}, _indices_data_files=[{"filename": "i"}])
    with pytest.raises(InputError, match="flatten_indices"):
        read(folder)
    (folder / "state.json").write_text("[]")
    with pytest.raises(InputError, match="not what datasets"):
        read(folder)


# -- documents and videos ----------------------------------------------------------------------


def test_pages_are_images_of_their_own(tmp_path: Path) -> None:
    path = pdf(tmp_path / "scan.pdf", 3)
    found = read(path, dpi=144)
    assert [item.place for item in found] == [f"scan.pdf#page={n}" for n in (1, 2, 3)]
    assert [opened(item) for item in found] == ["144x192"] * 3
    drawn = [item.open().decode() for item in found]
    assert len({image.tobytes() for image in drawn}) == 3 and drawn[0].mode == "RGB"
    sources = [item.open().name for item in found]
    assert len(set(sources)) == 3 and sources == [item.open().name for item in read(path)]
    assert sources[0] != read(path, dpi=72)[0].open().name
    assert count(find([path]).pieces, ReadOptions()) == 3


def test_a_page_is_not_drawn_to_be_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(documents.Document, "draw", None)
    assert all(item.open().name for item in read(pdf(tmp_path / "scan.pdf")))


def test_pages_without_bounds_are_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    pages = [((14_000.0, 14_000.0), ""), ((72.0, 72.0), ""), ((0.001, 72.0), "")]
    said = [opened(item) for item in read(written(tmp_path / "a.pdf", pages))]
    assert "expected 1 to" in said[0] and said[1] == "144x144"
    assert said[2] != "144x144"


def test_a_locked_pdf_is_named(tmp_path: Path) -> None:
    path = pdf(tmp_path / "a.pdf")
    secrets = f"/O({'o' * 32})/U({'u' * 32})"
    locked = f"/Encrypt<</Filter/Standard/V 1/R 2{secrets}/P -4>>/ID[(a)(b)]"
    path.write_bytes(path.read_bytes().replace(b"<</Root 1", f"<<{locked}/Root 1".encode()))
    (item,) = read(path)
    assert "encrypted" in opened(item) and "a.pdf" in opened(item)


def test_videos_are_clips_or_frames(tmp_path: Path) -> None:
    path = film(tmp_path / "film.mp4", frames=8, rate=4)
    (clip,) = read(path)
    assert clip.modality == "video" and clip.open().modality == "video"
    assert clip.open().name == open_clip(path, "video").name
    frames = read(path, fps=2)
    assert [item.place for item in frames] == [f"film.mp4#frame={n}" for n in (0, 2, 4, 6)]
    assert {opened(item) for item in frames} == {"64x64"}
    assert len(read(path, fps=100)) == 8
    (tmp_path / "bad.mp4").write_bytes(b"....ftyp")
    assert "cannot be decoded" in opened(read(tmp_path / "bad.mp4")[0])
    assert "cannot be decoded" in opened(read(tmp_path / "bad.mp4", fps=1)[0])


def test_a_video_without_end_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(video_files, "MAX_DECODED", 3 * 64 * 64 * 3)
    assert "take more than" in opened(read(film(tmp_path / "film.mp4"))[0])


@pytest.mark.parametrize("wrong", [{"dpi": 5}, {"dpi": 99_999}, {"fps": 0.0}, {"fps": -1.0}])
def test_readings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        ReadOptions(**wrong).check()


# -- missing libraries, and what cannot be known -------------------------------------------------


@pytest.mark.parametrize(
    ("library", "extra", "name"),
    [("pyarrow", "data", "a.parquet"), ("pypdfium2", "pdf", "a.pdf"), ("av", "video", "a.mp4")],
)
def test_a_missing_library_is_named_with_its_command(
    tmp_path: Path, monkeypatch: Any, library: str, extra: str, name: str
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ImportError, match=rf"extra '{extra}'\); run: pip install"):
        read(tmp_path / name)


def test_kinds_and_counts(photos: Path) -> None:
    assert [kind_of(n) for n in ("a.PNG", "b.tar.gz", "c.Pdf", "d.bin", "e")] == [
        "image",
        "tar",
        "pdf",
        None,
        None,
    ]
    zipped(photos / "a.zip", [("x.png", png(5)), ("y.txt", b"")])
    table(photos / "d.parquet", {"image": [png(7)] * 5})
    assert count(find([photos]).pieces, ReadOptions()) == 3 + 1 + 5
    tar(photos / "b.tar", [])
    assert count(find([photos]).pieces, ReadOptions()) is None


@bounded(60)
@given(st.binary(max_size=400), st.sampled_from(["zip", "tar", "pdf", "parquet", "arrow", "mp4"]))
def test_any_bytes_give_named_errors_alone(tmp_path: Path, data: bytes, kind: str) -> None:
    starts = {"zip": b"PK\x03\x04", "pdf": b"%PDF-1.4\n", "parquet": b"PAR1", "arrow": b"ARROW1"}
    path = tmp_path / f"x.{kind}"
    path.write_bytes(starts.get(kind, b"") + data)
    for item in read(path):
        assert opened(item)
