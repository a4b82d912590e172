"""Stores, which keep partial rollouts through a crash."""

from aprilsched.store.in_memory import MemoryStore, Store
from aprilsched.store.sqlite import SqliteStore

__all__ = ["MemoryStore", "SqliteStore", "Store"]
