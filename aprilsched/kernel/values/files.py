"""Reads regular files only, and writes files that no link planted by another user redirects.

A folder may come from another user, or be writable by others. A FIFO or an endless device in it
must not block a command, and a link in it must not lead a write out of it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
"""Mode of files with prompts, responses or keys: readable by their owner alone."""
SHARED = 0o666
"""Mode of files that the process's umask decides about."""
PRIVATE_FOLDER = 0o700
"""Mode of the folder of a run."""


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file to read it.

    Raises:
        OSError: if it cannot be opened, or is anything else than a regular file.
    """
    # Without O_NONBLOCK, opening a FIFO waits for its writer.
    return os.fdopen(_regular(path, os.O_RDONLY | os.O_NONBLOCK, 0), "rb")


def read_regular(path: Path | str) -> bytes:
    """Return the content of a regular file; see :func:`open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path | str) -> str:
    """Return the text of a regular file in UTF-8, without the mark that Windows tools put first.

    Raises:
        OSError: see :func:`open_regular`.
        UnicodeDecodeError: if it is not UTF-8.
    """
    return read_regular(path).decode("utf-8-sig")


def open_private(path: Path | str, flags: int) -> int:
    """Open a file to write it, as the `opener` of :func:`open`: a new one is for its owner alone.

    Raises:
        OSError: if it cannot be opened, or is a link or not a regular file.
    """
    return _regular(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, PRIVATE)


def cut_off(path: Path, size: int) -> None:
    """Shorten a file to `size` bytes; see :func:`open_private`."""
    with open(path, "r+b", opener=open_private) as file:
        file.truncate(size)


@contextmanager
def written_whole(path: Path, *, mode: int = PRIVATE) -> Generator[BinaryIO]:
    """Open a new file that replaces `path` when the block ends; if it raises, `path` stays.

    The content is on the disk before `path` has it.

    Raises:
        OSError: if it cannot be written.
    """
    writing = unused_name(path)
    # The file must be new, so that no link of its name can have been planted.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(os.open(writing, flags, mode), "wb")
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(writing, path)
    except BaseException:
        with suppress(OSError):
            writing.unlink()
        raise


def unused_name(path: Path) -> Path:
    """Return a name in the folder of `path` that cannot be guessed."""
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.writing")


def _regular(path: Path | str, flags: int, mode: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it must be a regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
