"""The weights key of a directory: equal files are equal weights, whatever their version."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path

__all__ = ["weights_key_of_files"]

_READ_BYTES = 1 << 24


async def weights_key_of_files(path: Path) -> int | None:
    """CRC-32 over the ``*.safetensors`` files of `path` in the order of their names.

    None if there are none. Reads in blocks, so that the loop stays awake, and without a thread,
    so that runs on a virtual clock repeat exactly.

    Raises:
        OSError: a file cannot be read.
    """
    files = _weight_files(path)
    key = 0
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                key = zlib.crc32(block, key)
                await asyncio.sleep(0)
    return key if files else None


def _weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))
