"""RunSettings as TOML: a run's config.toml is also what ``--config`` takes.

Settings that are not set (None) are left out, since TOML has no word for them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import msgspec

from aprilsched.errors import ConfigError
from aprilsched.runs.settings import RunSettings

__all__ = ["as_toml", "read_settings"]


def as_toml(settings: RunSettings) -> dict[str, Any]:
    """The settings as nested mappings of what TOML can hold."""
    return _plain(settings)


def read_settings(path: Path) -> RunSettings:
    """The settings in the file at `path`; what it does not name has its default.

    Raises:
        ConfigError: if the file cannot be read, names something unknown or has a wrong type.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} is no TOML: {error}.") from error
    _refuse_unknown(content, RunSettings(), path, "")
    try:
        return msgspec.convert(content, RunSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The config file {path} does not fit: {error}.") from error


def _refuse_unknown(content: Mapping[str, Any], default: Any, path: Path, where: str) -> None:
    """Every key must be a field of `default`, every table one of its parts."""
    known = [field.name for field in fields(default)]
    for key, value in content.items():
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"{path} has the unknown key {where}{key}; the nearest known one is "
                f"{where}{near[0]}."
            )
        part = getattr(default, key)
        if is_dataclass(part) and isinstance(value, Mapping):
            _refuse_unknown(cast("Mapping[str, Any]", value), part, path, f"{where}{key}.")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        pairs = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: _plain(part) for name, part in pairs if part is not None and part != {}}
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in cast("list[Any]", value)]
    return value
