"""Stores, which keep partial rollouts through a crash."""

from aprilsched.kernel.store.in_memory import MemoryStore, Store
from aprilsched.kernel.store.sqlite import SqliteStore

__all__ = ["MemoryStore", "SqliteStore", "Store"]
