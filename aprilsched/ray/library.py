"""Ray itself, for the modules of this package. Ray has no complete types."""

from __future__ import annotations

from typing import Any

from aprilsched.extras import extra

with extra("ray"):
    import ray as _ray
    from ray import exceptions as _exceptions

__all__ = ["exceptions", "ray"]

ray: Any = _ray
exceptions: Any = _exceptions
