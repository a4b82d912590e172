"""On which engine a request goes: the least loaded, with a group's prefix kept on one."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["place"]


def place(loads: Mapping[str, int], *, prefer: str, avoid: str, slack: int) -> str:
    """The engine for one request.

    Args:
        loads: open requests of each engine that takes any; at least one engine.
        prefer: where the prompt's prefix is cached; taken while it has at most `slack` more
            requests than the least loaded one.
        avoid: the engine that just failed the request; taken only if it is the last.
    """
    usable = {name: load for name, load in loads.items() if name != avoid} or dict(loads)
    least = min(usable, key=lambda name: (usable[name], name))
    if prefer in usable and usable[prefer] <= usable[least] + slack:
        return prefer
    return least
