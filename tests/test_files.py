"""Files that strangers wrote, and files that are whole or not there."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from pipesim import ScheduleError
from pipesim.files import read_limited, write_atomically


def test_reads_text_and_gzip_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"0F0\r\n", b"\xef\xbb\xbf0F0\r\n"):
        for stored in (data, gzip.compress(data, mtime=0)):
            path.write_bytes(stored)
            assert read_limited(path) == "0F0\r\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\xff\xfe0\x00F\x00", "not a text file in UTF-8"),
        (b"abc\x80", r"\(byte 3\)"),
        (gzip.compress(b"0F0" * 1000, mtime=0)[:-12], "damaged gzip"),
        (gzip.compress(b"0F0" * 1000, mtime=0)[:20], "damaged gzip"),
        (b"\x1f\x8b" + b"\x00" * 30, "damaged gzip"),
        (gzip.compress(b"0F0", mtime=0)[:-8] + b"\x00" * 8, "damaged gzip"),
        (gzip.compress(b"", mtime=0), "is empty"),
    ],
)
def test_refuses(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ScheduleError, match=message):
        read_limited(path)


def test_the_limit_holds_after_decompression(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"0" * 5_000_000, mtime=0))
    assert path.stat().st_size < 10_000
    with pytest.raises(ScheduleError, match="more than 1 MiB"):
        read_limited(path, limit=1 << 20)
    path.write_bytes(b"0" * (1 << 20))
    assert len(read_limited(path, limit=1 << 20)) == 1 << 20


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would hang
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ScheduleError, match="is not a file"):
            read_limited(path)
    with pytest.raises(FileNotFoundError):
        read_limited(tmp_path / "missing")


def test_writes_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "one\n")
    write_atomically(path, b"two\n")
    assert path.read_bytes() == b"two\n"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    with pytest.raises(TypeError):
        write_atomically(path, 3)  # type: ignore[arg-type]
    assert path.read_bytes() == b"two\n"
    with pytest.raises(OSError, match="missing"):
        write_atomically(tmp_path / "missing" / "file", "x")
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(tmp_path, "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_a_link_stays_a_link_and_a_pipe_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo()
