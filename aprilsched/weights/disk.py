"""Weights through a directory that the trainer writes and the engines read.

- An engine never sees half a checkpoint.
- The version that the engines were last given is never deleted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from aprilsched.engines.base import Engine
from aprilsched.engines.refit import RefitFromDisk
from aprilsched.errors import ConfigError
from aprilsched.weights.versions_on_disk import VersionsOnDisk

__all__ = ["DiskPublisher"]


class DiskPublisher:
    """Publishes checkpoints in the Hugging Face layout (safetensors).

    Args:
        directory: on storage that the trainer and every engine see under the same path. Each
            version becomes ``directory/version-00000007``. Without `save` it is itself the
            checkpoint, and is published as it is.
        save: writes the trainer's current weights and config.json into the path it is given,
            which exists and is empty. A plain function runs in a thread; a coroutine function
            is awaited.
        keep: how many versions stay on the disk, the published one included.

    Raises:
        ConfigError: if `keep` is below 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save: Callable[[Path], object] | None = None,
        *,
        keep: int = 2,
    ) -> None:
        self._versions = VersionsOnDisk(directory, check=_check, keep=keep)
        self._save = save

    def path(self, version: int) -> Path:
        """Where `version` is, or will be."""
        return self._versions.directory if self._save is None else self._versions.path(version)

    def holds(self, version: int) -> bool:
        """Whether `version` is still on the disk; without `save` nobody knows what is there."""
        return self._save is not None and self.path(version).is_dir()

    async def prepare(self, version: int) -> None:
        """Write `version` while the engines still generate.

        Raises:
            ConfigError: if what is to be published is no checkpoint.
        """
        if self._save is None:
            await self._versions.check(self.path(version))
        else:
            await self._versions.write(version, self._save)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Let every engine load `version`, in parallel.

        Raises:
            ConfigError: if `version` was not prepared.
        """
        path = self.path(version)
        await self._versions.check(path)
        outcomes = await asyncio.gather(*(_update(engine, path, version) for engine in engines))
        if self._save is not None and not any(outcomes):
            await self._versions.forget(version)
        return {engine.name: outcome for engine, outcome in zip(engines, outcomes, strict=True)}


async def _update(engine: Engine, path: Path, version: int) -> Exception | None:
    if not isinstance(engine, RefitFromDisk):
        return ConfigError(
            f"{engine.name} does not load weights from a disk; use another publisher for it."
        )
    try:
        await engine.update_from_disk(path, version)
    except Exception as error:  # one engine's failure must not hide what the others did
        return error
    return None


def _check(path: Path) -> None:
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{path} holds no checkpoint; it needs a config.json and at least one *.safetensors."
        )
