"""Ray itself, for the modules of this package. Ray has no complete types."""

from __future__ import annotations

from typing import Any

from aprilsched.extras import extra

with extra("ray"):
    import ray as _ray
    from ray import exceptions as _exceptions

ray: Any = _ray
exceptions: Any = _exceptions


def named(name: str, namespace: str | None) -> Any:
    """The actor of this name; None if there is none."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
