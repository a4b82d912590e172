"""Prints what happened in a run, as lines for people."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import numpy as np

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.types import Batch

__all__ = ["History"]

_KEPT = 4000
_SHORT = 160


class History:
    """A listener that writes everything down, and the campaign's own notes between."""

    def __init__(self, *, aloud: bool = False) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._aloud = aloud

    def note(self, text: str) -> None:
        try:
            now = asyncio.get_running_loop().time()
        except RuntimeError:
            now = 0.0
        line = f"{now:10.3f}  {text}"
        self._lines.append(line)
        if self._aloud:
            print(line, flush=True)

    def last(self, count: int) -> list[str]:
        return list(self._lines)[-count:]

    def on_event(self, event: ev.Event, now: float) -> None:
        self.note(f"  {_told(event)}")

    def on_command(self, command: do.Command, now: float) -> None:
        self.note(f"    -> {_told(command)}")


def _told(message: Any) -> str:
    names = getattr(message, "__struct_fields__", None) or message.__dataclass_fields__
    fields = ((name, getattr(message, name)) for name in names)
    return f"{type(message).__name__}({', '.join(f'{n}={_value(v)}' for n, v in fields)})"


def _value(value: Any) -> str:
    match value:
        case np.ndarray():
            return f"[{len(value)}]"
        case Batch():
            keys = [group.prompt.key for group in value.groups]
            return f"batch {value.index} v{value.version} keys {keys}"
        case _ if hasattr(value, "group_id") and hasattr(value, "rollouts"):
            return f"group {value.group_id}"
        case _ if hasattr(value, "rollout_id"):
            return f"rollout {value.rollout_id}"
        case _ if hasattr(value, "input_ids"):
            return f"prompt {value.key}"
        case _ if hasattr(value, "max_new_tokens"):
            return f"at most {value.max_new_tokens}"
        case tuple():
            inner = [_value(item) for item in value[:6]]
            return f"({', '.join(inner)}{', …' if len(value) > 6 else ''})"
        case _:
            text = repr(value)
            return text if len(text) <= _SHORT else text[:_SHORT] + "…"
