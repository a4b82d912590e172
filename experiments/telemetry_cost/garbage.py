"""Measures the time of Python's garbage collector separately from the calls in which it runs."""

from __future__ import annotations

import gc
import time
from typing import Any, Self

__all__ = ["Garbage"]


class Garbage:
    """Counts while its block lasts."""

    def __init__(self) -> None:
        self.ns = 0
        """CPU, of all threads that collected."""
        self.collections = 0
        self._began = 0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._told)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._told)

    def _told(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.thread_time_ns()
        else:
            self.ns += time.thread_time_ns() - self._began
            self.collections += 1
