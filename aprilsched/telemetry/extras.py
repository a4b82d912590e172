"""Packages that only some listeners need: whoever lacks one is told which extra brings it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from aprilsched.errors import ConfigError

__all__ = ["extra"]


@contextmanager
def extra(name: str) -> Generator[None]:
    """Around the imports of what the extra `name` brings.

    Raises:
        ConfigError: if something of it is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{error.name or error} is not installed; pip install 'aprilsched[{name}]'."
        ) from error
