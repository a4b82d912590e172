"""The store in one SQLite file, and checkpoints in the same format."""

from aprilsched.store.sqlite.checkpoint import read_checkpoint, write_checkpoint
from aprilsched.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore", "read_checkpoint", "write_checkpoint"]
