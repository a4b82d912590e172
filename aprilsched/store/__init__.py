"""Stores, which keep partial rollouts through a crash."""

from aprilsched.store.base import Store
from aprilsched.store.memory import MemoryStore
from aprilsched.store.sqlite import SqliteStore

__all__ = ["MemoryStore", "SqliteStore", "Store"]
