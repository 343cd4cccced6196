"""Tables: a column of a Parquet or Arrow file, and folders written by `datasets.save_to_disk`.

Rows are read in small batches, and only that column. For a truncated table the error names the row;
earlier rows stay valid.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from keepsight.encode.items import At, Item, broken, of_value
from keepsight.errors import InputError
from keepsight.system.optional import optional

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_ROWS = 64  # rows at a time
MAX_ROW_GROUP = 16 << 30


def _arrow() -> ModuleType:
    return optional("pyarrow", "data")


def table_items(at: At, kind: str, column: str) -> Iterator[Item]:
    """The images in a column of a Parquet or Arrow file, row by row."""
    torn = (_arrow().ArrowException, OSError, UnicodeDecodeError)
    row, folder = 0, os.path.dirname(at.name)
    try:
        for batch in (_parquet_rows if kind == "parquet" else _arrow_rows)(at.name, column):
            # Arrow's buffers are shared, but Python values are copies.
            for value in batch.column(0).to_pylist():
                yield from of_value(value, folder, at.spot(f"row={row}"))
                row += 1
    except torn as error:
        why = f"{at.name} cannot be read from row {row} on: {' '.join(str(error).split())}"
        yield broken(at.spot(f"row={row}") if row else at, why)


def row_count(path: str) -> int | None:
    """The number of rows in a Parquet file's metadata."""
    torn = (_arrow().ArrowException, OSError)
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except torn:
        return None


def _parquet_rows(path: str, column: str) -> Iterator[RecordBatch]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        check_column(path, column, file.schema_arrow.names)
        for number in range(file.num_row_groups):
            if file.metadata.row_group(number).total_byte_size > MAX_ROW_GROUP:
                raise OSError(f"row group {number} unpacks to more than {MAX_ROW_GROUP} bytes")
        # Without Arrow's threads: the caller bounds what is read ahead.
        yield from file.iter_batches(batch_size=_ROWS, columns=[column], use_threads=False)


def _arrow_rows(path: str, column: str) -> Iterator[RecordBatch]:
    """Batches of an Arrow file, in the file or stream format."""
    import pyarrow.ipc

    with pyarrow.memory_map(path) as file:
        try:
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            file.seek(0)
            batches = reader = pyarrow.ipc.open_stream(file)
        check_column(path, column, reader.schema.names)
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):
                yield batch.select([column]).slice(start, _ROWS)


def check_column(path: str, column: str, names: list[str]) -> None:
    """Refuse a column that a table does not have."""
    if column not in names:
        raise InputError(
            f"{path} has no column {column!r}; name one of these with --column: {', '.join(names)}"
        )


def saved_tables(folder: str) -> list[str] | None:
    """The Arrow files of a folder written by `save_to_disk`, or None if it is no such folder."""
    state = Path(folder, "state.json")
    if not state.is_file() or not Path(folder, "dataset_info.json").is_file():
        return None
    try:
        saved = json.loads(state.read_bytes())
        names = [str(entry["filename"]) for entry in saved["_data_files"]]
        reordered = saved.get("_indices_data_files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{state} is not what datasets.save_to_disk writes: {error}") from None
    if reordered:
        raise InputError(
            f"{folder} has an indices mapping, so its rows are in another order; save it again "
            "after flatten_indices()"
        )
    for name in names:
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise InputError(f"{state} names a table outside of its folder: {name!r}")
    return [os.path.join(folder, name) for name in names]
