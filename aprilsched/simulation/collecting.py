"""Fewer runs of the garbage collector while a simulation owns the process.

A fleet of thousands has millions of records alive, and by default the collector walks through
them again and again: a third of the time at 64 engines. What a run lets go of is freed without
it, but for rollouts that were dropped, so it may come seldom.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["rare_collections"]

_THRESHOLDS = (50_000, 20, 20)


@contextmanager
def rare_collections() -> Generator[None]:
    """Within, what is there already is never looked at, and what comes seldom.

    For a process that does nothing else: the setting is the whole interpreter's.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
