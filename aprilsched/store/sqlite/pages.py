"""Pages of tokens as rows of a table."""

from __future__ import annotations

import sqlite3

import msgspec
import numpy as np

from aprilsched.core.state.saved import TokenPage
from aprilsched.store.codec import checksum

__all__ = ["COLUMNS", "insert_page", "page_from"]

COLUMNS = "slices, engines, token_ids, logprobs, crc"


def insert_page(connection: sqlite3.Connection, page: TokenPage) -> None:
    """Insert a page."""
    engines = msgspec.json.encode(page.engines)
    slices, ids, logprobs = page.slices.data, page.token_ids.data, page.logprobs.data
    crc = checksum(slices, engines, ids, logprobs)
    connection.execute(
        f"INSERT INTO pages ({COLUMNS}) VALUES (?, ?, ?, ?, ?)",
        (slices, engines, ids, logprobs, crc),
    )


def page_from(row: tuple[bytes, bytes, bytes, bytes, int]) -> TokenPage | None:
    """The page in a row of :data:`COLUMNS`; None if it is damaged."""
    slices, engines, ids, logprobs, crc = row
    if not all(type(part) is bytes for part in row[:4]):
        return None
    if checksum(slices, engines, ids, logprobs) != crc:
        return None
    return TokenPage(
        slices=np.frombuffer(slices, dtype=np.int32).reshape(-1, 5),
        engines=tuple(msgspec.json.decode(engines, type=list[str])),
        token_ids=np.frombuffer(ids, dtype=np.int32),
        logprobs=np.frombuffer(logprobs, dtype=np.float32),
    )
