"""Rows of results in a file that only grows, so that a run that was killed at any moment can be continued.

``name.csv``      a line per row, appended as the rows come; a last line that is only half there is dropped
``name.parquet``  a folder of parts, each written under another name and then renamed; pandas, polars and DuckDB read the
                  folder as one table

Whoever opens the file says which columns and which rows belong in it; a file of anything else is refused, and left as it is.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from pipesim.errors import ScheduleError
from pipesim.files import write_atomically

__all__ = ["Columns", "RowFile", "open_rows"]

Columns = Mapping[str, type]  # name to int, float, bool or str; the first is the row's key, a str
Row = dict[str, Any]

_FORMATS = {".csv": "CSV", ".parquet": "Parquet"}


class RowFile(Protocol):
    """An open file of rows.

    Attributes:
        rows: Key to row, of what was there when it was opened.
    """

    rows: dict[str, Row]

    def append(self, rows: Sequence[Row]) -> None:
        """Adds rows; they are the operating system's when this returns."""
        ...

    def close(self) -> None:
        """Closes the file, and lets others have it."""
        ...


def open_rows(path: str | os.PathLike[str], columns: Columns, keys: Collection[str]) -> RowFile:
    """Opens a file of rows, a new one if there is none.

    Args:
        path: A name that ends in ``.csv`` or ``.parquet``.
        columns: Column to its type.
        keys: The keys that rows may have.

    Raises:
        ScheduleError: The name ends in something else, the file holds other columns or rows, is damaged, or is in use.
        OSError: It cannot be read or written.
    """
    path = Path(path)
    form = path.suffix.lower()
    if form not in _FORMATS:
        raise ScheduleError(f"{path}: results are written as {' or '.join(f'{name} ({suffix})' for suffix, name in _FORMATS.items())}")
    return _CsvRows(path, columns, keys) if form == ".csv" else _ParquetRows(path, columns, keys)


class _CsvRows:
    def __init__(self, path: Path, columns: Columns, keys: Collection[str]) -> None:
        self._path, self._columns = path, columns
        self.rows: dict[str, Row] = {}
        if path.exists() and not path.is_file():  # opening a pipe would hang
            raise ScheduleError(f"{path} is not a file")
        self._file = open(path, "ab+")  # noqa: SIM115  closed by close()
        try:
            _lock(self._file, path)
            self._read(keys)
        except BaseException:
            self.close()
            raise

    def _read(self, keys: Collection[str]) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        header = self._line(self._columns)
        if not whole and not header.startswith(data):
            raise ScheduleError(f"{self._path} holds no results of a sweep; give another name, or delete it")
        if whole:
            try:
                lines = list(csv.reader(data[:whole].decode("utf-8-sig").splitlines(), strict=True))
            except (UnicodeDecodeError, csv.Error) as error:
                raise ScheduleError(f"{self._path} is damaged or no CSV file: {error}") from None
            _check_columns(self._path, lines[0] if lines else [], self._columns)
            for number, values in enumerate(lines[1:], start=2):
                row = self._row(number, values)
                _add(self.rows, row, row[next(iter(self._columns))], keys, self._path)
        # only now is it known that the file is ours to change
        if whole < len(data):
            self._file.truncate(whole)
        if not whole:
            self._write(header)

    def _row(self, number: int, values: Sequence[str]) -> Row:
        if len(values) != len(self._columns):
            raise ScheduleError(f"{self._path}, line {number} has {len(values)} values and the header {len(self._columns)}; delete the line")
        try:
            return {name: _parsed(text, kind) for text, (name, kind) in zip(values, self._columns.items(), strict=True)}
        except ValueError as error:
            raise ScheduleError(f"{self._path}, line {number} is damaged ({error}); delete the line") from None

    def _line(self, values: Collection[Any]) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(values)
        return text.getvalue().encode()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()

    def append(self, rows: Sequence[Row]) -> None:
        self._write(b"".join(self._line([row.get(name) for name in self._columns]) for row in rows))

    def close(self) -> None:
        self._file.close()


class _ParquetRows:
    def __init__(self, folder: Path, columns: Columns, keys: Collection[str]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._folder = folder
        self.rows: dict[str, Row] = {}
        if folder.exists() and not folder.is_dir():
            raise ScheduleError(f"{folder} is a file; results of a sweep are a folder of Parquet files")
        folder.mkdir(exist_ok=True)
        self._file = open(folder / ".lock", "ab")  # noqa: SIM115  closed by close()
        types = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
        self._schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
        try:
            _lock(self._file, folder)
            self._parts = 0
            for part in sorted(folder.glob("*.parquet")):
                try:
                    table = pq.read_table(part, partitioning=None)
                except (pa.ArrowException, OSError) as error:
                    raise ScheduleError(f"{part} is damaged or no Parquet file: {error}") from None
                _check_columns(part, table.column_names, columns)
                if table.schema != self._schema:
                    types_there = [f"{field.name} is {table.schema.field(field.name).type}" for field in self._schema if field not in table.schema]
                    raise ScheduleError(f"{part} holds another sweep: there {', '.join(types_there)}; give another name, or delete it")
                for row in table.to_pylist():
                    _add(self.rows, row, row[next(iter(columns))], keys, folder)
                self._parts += 1
            for leftover in folder.glob(".part-*"):  # of a run that was killed while it wrote
                leftover.unlink()
        except BaseException:
            self.close()
            raise

    def append(self, rows: Sequence[Row]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        buffer = io.BytesIO()
        table = {name: [row.get(name) for row in rows] for name in self._schema.names}
        pq.write_table(pa.table(table, schema=self._schema), buffer)
        while (part := self._folder / f"part-{self._parts:06}.parquet").exists():
            self._parts += 1
        write_atomically(part, buffer.getvalue())

    def close(self) -> None:
        self._file.close()


def _check_columns(path: Path, there: Sequence[str], columns: Columns) -> None:
    if list(there) != list(columns):
        odd = sorted(set(there) ^ set(columns))
        what = f"they differ in {', '.join(odd)}" if odd else "in another order"
        raise ScheduleError(f"{path} holds other columns than this sweep ({what:.200}); give another name, or delete it")


def _add(rows: dict[str, Row], row: Row, key: str, keys: Collection[str], path: Path) -> None:
    if key not in keys:
        about = ", ".join(f"{name} {value}" for name, value in list(row.items())[1:4] if value is not None)
        raise ScheduleError(f"{path} holds results of another sweep, such as {about} (id {key}); give another name, or delete it")
    rows.setdefault(key, row)


def _parsed(text: str, kind: type) -> Any:
    if not text:
        return None
    if kind is bool:
        if text not in ("True", "False"):
            raise ValueError(f"{text!r:.40} is neither True nor False")
        return text == "True"
    return kind(text)


def _lock(file: IO[bytes], path: Path) -> None:
    """Keeps other processes out. The lock is gone with this process, however it ends, and is no child's."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ScheduleError(f"another sweep is writing {path}; wait for it, or give another name") from None
    except OSError:  # a file system without locks
        return
