"""Writes steps to Weights & Biases. Needs the extra ``wandb``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from aprilsched.errors import ConfigError

__all__ = ["WandbWriter"]


class WandbWriter:
    """Begins a run. The account, server and mode are those of wandb's own settings.

    Args:
        folder: where wandb keeps its files.
        config: the settings of the run.

    Raises:
        ConfigError: if wandb refuses to begin.
    """

    def __init__(
        self, folder: Path, *, project: str, name: str, config: Mapping[str, Any] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project, name=name, dir=str(folder), config=dict(config or {})
            )
        except wandb.Error as error:
            raise ConfigError(
                f"wandb cannot begin ({error}); log in with wandb login, or set WANDB_MODE=offline."
            ) from error

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()
