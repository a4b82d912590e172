"""Reads and writes a step-time model as TOML: a table ``timing`` with the model's fields.

Invariant: a model that was written is read back equal, to the last bit.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import cast

from aprilsched.errors import ConfigError
from aprilsched.timing.model import StepTimeModel

__all__ = ["load_model", "model_toml", "save_model"]

_WHOLE = ("prefill_chunk", "wide_from")
_POSITIVE = ("prefill_rate", "prefill_chunk")
_NEEDED = ("t0", "t1", "t2", "prefill_pass", "prefill_rate")


def model_toml(model: StepTimeModel, comments: tuple[str, ...] = ()) -> str:
    """The text of the file; each of the `comments` is a line at its beginning."""
    lines = [f"# {comment}" for comment in comments]
    values = [f"{field.name} = {getattr(model, field.name)!r}" for field in fields(model)]
    return "\n".join([*lines, "[timing]", *values]) + "\n"


def save_model(model: StepTimeModel, path: Path, comments: tuple[str, ...] = ()) -> None:
    """Write the text of :func:`model_toml`.

    Raises:
        ConfigError: if the file cannot be written.
    """
    try:
        path.write_text(model_toml(model, comments), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}).") from None


def load_model(path: Path) -> StepTimeModel:
    """Read the model in a file, which may leave out the fields beyond the linear ones.

    Raises:
        ConfigError: if the file cannot be read, or its fields or values are not those of a model.
    """
    try:
        content: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a model.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    table = content.get("timing")
    if not isinstance(table, dict):
        raise ConfigError(f"{path} has no table [timing]; write a model with calibrate --out.")
    return _model(path, cast(dict[str, object], table))


def _model(path: Path, table: Mapping[str, object]) -> StepTimeModel:
    known = [field.name for field in fields(StepTimeModel)]
    if unknown := [name for name in table if name not in known]:
        raise ConfigError(f"{path} has {unknown[0]!r}, which is not a field of a model; remove it.")
    if missing := [name for name in _NEEDED if name not in table]:
        raise ConfigError(f"{path} has no {missing[0]}; add it.")
    return StepTimeModel(**{name: _value(path, name, value) for name, value in table.items()})  # type: ignore[arg-type]


def _value(path: Path, name: str, value: object) -> float | int:
    whole = name in _WHOLE
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "whole number" if whole else "number"
        raise ConfigError(f"{path} has {name} = {value!r}; give a {kind}.")
    if not math.isfinite(value) or value < 0 or (name in _POSITIVE and value == 0):
        least = "above 0" if name in _POSITIVE else "of 0 or more"
        raise ConfigError(f"{path} has {name} = {value!r}; give a number {least}.")
    return value if whole else float(value)
