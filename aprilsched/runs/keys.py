"""Reads API keys from environment variables, because process lists show command lines."""

from __future__ import annotations

import os

from aprilsched.errors import ConfigError

__all__ = ["key_from"]


def key_from(variable: str | None) -> str | None:
    """The key in the environment variable of this name; None without a name.

    Raises:
        ConfigError: if the variable is not set, or empty.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"The environment variable {variable} is not set; export the key in it.")
    return key
