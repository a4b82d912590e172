"""Ray itself, which has no complete types."""

from __future__ import annotations

from typing import Any

from aprilsched.kernel.values.extras import extra

with extra("ray"):
    import ray as _ray
    from ray import exceptions as _exceptions

ray: Any = _ray
exceptions: Any = _exceptions


def named(name: str) -> Any:
    """Return the actor of this name, or None."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None
