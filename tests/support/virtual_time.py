"""Asynchronous tests on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

from aprilsched.engines.sim import run_virtual

__all__ = ["in_virtual_time"]

_P = ParamSpec("_P")


def in_virtual_time(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """The test as a function that runs it to its end, on a clock of its own that never sleeps."""

    @wraps(test)
    def run(*arguments: _P.args, **named: _P.kwargs) -> None:
        run_virtual(test(*arguments, **named))

    return run
