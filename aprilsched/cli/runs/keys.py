"""Reads API keys from environment variables, because process lists show command lines."""

from __future__ import annotations

import os

from aprilsched.errors import ConfigError


def key_from(variable: str | None, setting: str) -> str | None:
    """The key in the environment variable of this name, without white space around it, which a
    file that the variable was read from may end with; None without a name.

    Args:
        variable: the name that was given.
        setting: the setting that it was given as, for the error.

    Raises:
        ConfigError: if the variable is not set or empty, or if no HTTP header can carry the key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        # What was given is not repeated: it may be the key itself, and errors end up in logs.
        raise ConfigError(
            f"The environment variable that {setting} names is not set; export the key in a "
            "variable, and give the variable's name."
        )
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"The key in the environment variable that {setting} names must be printable ASCII "
            "without spaces; export the key alone."
        )
    return key
