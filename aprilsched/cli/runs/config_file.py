"""RunSettings as TOML (a run's config.toml is also what ``--config`` takes), and the policies that
a command line names.

Settings that are not set (None) are left out, since TOML has no word for them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import msgspec

from aprilsched.cli.runs.settings import RunSettings
from aprilsched.cli.runs.settings_tables import config_of, plain, refuse_unknown, table_of
from aprilsched.errors import ConfigError
from aprilsched.kernel.values.files import read_text

T = TypeVar("T")


def as_toml(settings: RunSettings) -> dict[str, Any]:
    """Return the settings as nested mappings of TOML values, without unset ones. Sampling is
    omitted if the built-in workload defines it, and settings of the workload that have no effect
    too."""
    scheduler, table = table_of(settings.scheduler), plain(settings)
    if settings.prompts is None:
        del scheduler["sampling"]
        if settings.workload.lengths is not None:
            del table["workload"]["median"], table["workload"]["sigma"]
        if settings.simulated:
            table["workload"].setdefault("cap", settings.workload.longest)
    return {**table, "scheduler": scheduler}


def read_settings(path: Path) -> RunSettings:
    """Return the settings in the file at `path`, with defaults for all others.

    Raises:
        ConfigError: if the file cannot be read, or contains an unknown name or a wrong value.
    """
    return read_table(path, _settings)


def read_table(path: Path, made: Callable[[Mapping[str, Any]], T]) -> T:
    """Return the result of `made` for the table in the TOML file at `path`.

    Raises:
        ConfigError: if the file cannot be read, or if `made` fails.
    """
    try:
        content = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} is no TOML: {error}.") from error
    try:
        return made(content)
    except ConfigError as error:
        raise ConfigError(f"The config file {path} does not fit: {error}") from error


def value_as(hint: Any, name: str, value: Any) -> Any:
    """Return a value from a file, converted to the type of its setting.

    Raises:
        ConfigError: if it is of another type.
    """
    try:
        return msgspec.convert(value, hint, dec_hook=lambda kind, given: kind(given))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} has a wrong value: {error}.") from error


def _settings(content: Mapping[str, Any]) -> RunSettings:
    defaults, hints = RunSettings(), get_type_hints(RunSettings)
    known = [field.name for field in fields(RunSettings)]
    for part in ("scheduler", "workload", "sim"):
        inner = {field.name for field in fields(getattr(defaults, part))}
        for key in content:
            if key in inner and key not in known:
                raise ConfigError(f"{key} is a setting of {part}; write it below [{part}].")
    refuse_unknown(content, known, "")
    values: dict[str, Any] = {}
    for name, value in content.items():
        if name == "scheduler":
            if not isinstance(value, Mapping):
                raise ConfigError(f"scheduler is {value!r}; give a table of its settings.")
            values[name] = config_of(cast("Mapping[str, Any]", value), "scheduler.")
            continue
        part = getattr(defaults, name)
        if is_dataclass(part) and isinstance(value, Mapping):
            known = (field.name for field in fields(part))
            refuse_unknown(cast("Mapping[str, Any]", value), known, f"{name}.")
        values[name] = value_as(hints[name], name, value)
    settings = RunSettings(**values)
    given = content.get("scheduler", {}).get("sampling", {})
    if "max_new_tokens" in given and settings.prompts is settings.workload.cap is None:
        # Without prompts, this limit is also the longest response of the built-in workload.
        cap = settings.scheduler.sampling.max_new_tokens
        settings = replace(settings, workload=replace(settings.workload, cap=cap))
    return settings
