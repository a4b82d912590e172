"""Reads API keys from environment variables, because process lists show command lines."""

from __future__ import annotations

import os

from aprilsched.errors import ConfigError


def key_from(variable: str | None, setting: str) -> str | None:
    """Return the key in an environment variable, or None without a name.

    Surrounding white space is removed, such as the newline at the end of a key file.

    Args:
        variable: name of the variable.
        setting: the setting that contains this name, for the error.

    Raises:
        ConfigError: if the variable is not set or empty, or if no HTTP header can carry the key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        # The error omits the value: it may be the key itself, and errors end up in logs.
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
