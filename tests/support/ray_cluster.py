"""A Ray cluster of this machine for tests, without a network."""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["local_cluster", "pid_of"]


@contextmanager
def local_cluster(num_cpus: int = 2) -> Generator[Any]:
    """Ray, with a cluster that ends with the block."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        # Ray would write a token into the home folder.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
        try:
            yield ray
        finally:
            ray.shutdown()


def pid_of(actor: Any) -> int:
    """The process of an actor."""
    from ray._private.state import actors

    return actors(actor_id=actor._actor_id.hex())["Pid"]
