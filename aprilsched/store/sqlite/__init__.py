"""The store in one SQLite file, and checkpoints in the same format."""

from aprilsched.store.sqlite.store import SqliteStore, read_checkpoint, write_checkpoint

__all__ = ["SqliteStore", "read_checkpoint", "write_checkpoint"]
