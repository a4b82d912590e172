"""Reads and writes a step-time model as TOML: a table ``timing`` with the model's fields.

Invariant: a model that was written is read back equal, to the last bit.
"""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, cast

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.bounds import check_settings
from aprilsched.kernel.values.files import read_text
from aprilsched.planning.step_times.model import StepTimeModel


def model_toml(model: StepTimeModel, comments: tuple[str, ...] = ()) -> str:
    """Return the text of the file; each of the `comments` is a line at its beginning."""
    lines = [f"# {comment}" for comment in comments]
    settings = {field.name: getattr(model, field.name) for field in fields(model)}
    settings["tokens_per_step"] = [list(pair) for pair in model.tokens_per_step]
    values = [f"{name} = {value!r}" for name, value in settings.items()]
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
        content: dict[str, object] = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a model.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    table = content.get("timing")
    if not isinstance(table, dict):
        raise ConfigError(f"{path} has no table [timing]; write a model with calibrate --out.")
    given = cast(dict[str, Any], table)
    known = [field.name for field in fields(StepTimeModel)]
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(f"{path} has {unknown[0]!r}, which is not a field of a model; remove it.")
    needed = [field.name for field in fields(StepTimeModel) if field.default is MISSING]
    if missing := [name for name in needed if name not in given]:
        raise ConfigError(f"{path} has no {missing[0]}; add it.")
    model = StepTimeModel(**given)
    check_settings(model, f"{path}: ")
    return model
