"""Reading files that strangers wrote, and writing files that are whole or not there."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pipesim.errors import ScheduleError

__all__ = ["READ_LIMIT", "read_limited", "whole_or_nothing", "write_atomically"]

READ_LIMIT = 1 << 30  # bytes after decompression; a schedule of ten million ops has about 80 MB


def read_limited(path: str | os.PathLike[str], limit: int = READ_LIMIT) -> str:
    """Returns the text of a file, decompressed if it is gzip, and refuses what is too large, no regular file or no UTF-8.

    Raises:
        ScheduleError: The file is empty, larger than *limit*, not a regular file (a pipe would hang), or no text.
        OSError: It cannot be opened.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ScheduleError(f"{path} is not a file")
    with open(path, "rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            data = (gzip.GzipFile(fileobj=raw) if compressed else raw).read(limit + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ScheduleError(f"{path} is a damaged gzip file ({error})") from None
    if len(data) > limit:
        raise ScheduleError(f"{path} holds more than {limit >> 20} MiB, which is more than pipesim reads")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path} is not a text file in UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise ScheduleError(f"{path} is empty")
    return text


def write_atomically(target: str | os.PathLike[str], data: str | bytes) -> None:
    """Writes to a temporary name in the same folder, then renames: nobody ever sees half a file.

    Raises:
        OSError: The folder does not exist or cannot be written.
    """
    with whole_or_nothing(target) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def whole_or_nothing(target: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file under a temporary name in the same folder, renamed when it is complete.

    A symbolic link is followed, so that it stays one.

    Raises:
        OSError: The folder does not exist or cannot be written, or the target is a device, a pipe or a folder.
    """
    target = Path(os.path.realpath(target))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(target.parent))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "this is not a regular file, so nothing is written to it", str(target))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes private files; this one is for others too
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
