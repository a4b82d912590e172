"""Ray itself, which has no complete types."""

from __future__ import annotations

from typing import Any

from aprilsched.kernel.values.extras import extra

with extra("ray"):
    import ray as _ray
    from ray import exceptions as _exceptions

ray: Any = _ray
exceptions: Any = _exceptions


def named(name: str, namespace: str | None) -> Any:
    """Return the actor of this name, or None."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def last_line(error: Exception) -> str:
    """Return the last line of an error of Ray, whose texts end with the cause."""
    return str(error).strip().splitlines()[-1].strip()
