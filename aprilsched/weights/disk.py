"""Publishes weights through a directory that the trainer writes and the engines read.

- An engine never sees an incomplete checkpoint.
- The version that the engines got last is never deleted, nor one that an engine still loads.
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


class DiskPublisher:
    """Publishes checkpoints in the Hugging Face layout (safetensors).

    Args:
        directory: directory on storage that the trainer and every engine see under the same path.
            Each version becomes ``directory/version-00000007``. Without `save` the directory is
            itself the checkpoint, and is published as it is.
        save: function that writes the trainer's current weights and config.json into the empty
            directory that it is given. A plain function runs in a thread; a coroutine function
            is awaited. It is called once for each ``update_weights()`` call whose version is
            accepted, so it may be a collective in which every rank takes part.
        keep: number of versions that stay on the disk, including the published one.

    Raises:
        ConfigError: if `keep` is below 1.
    """

    loads_whole = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save: Callable[[Path], object] | None = None,
        *,
        keep: int = 2,
    ) -> None:
        self._versions = VersionsOnDisk(directory, check=_check, keep=keep)
        self._save = save
        self._loading: list[int] = []
        """The versions that engines load at the moment. With rolling refits one engine may still
        load a version when the next one is there."""
        self._newest = 0
        """The version that was prepared last."""

    def path(self, version: int) -> Path:
        """The path of `version`, which may not exist yet."""
        return self._versions.directory if self._save is None else self._versions.path(version)

    def holds(self, version: int) -> bool:
        """Whether `version` is still on the disk; False without `save`, when it is unknown."""
        return self._save is not None and self.path(version).is_dir()

    async def prepare(self, version: int) -> None:
        """Write `version` while the engines still generate.

        Raises:
            ConfigError: if the directory to publish holds no checkpoint.
        """
        if self._save is None:
            await self._versions.check(self.path(version))
        else:
            await self._versions.write(version, self._save)
            self._newest = version

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Let every engine load `version`, in parallel.

        Raises:
            ConfigError: if `version` was not prepared.
        """
        path = self.path(version)
        await self._versions.check(path)
        self._loading.append(version)
        try:
            outcomes = await asyncio.gather(*(_update(engine, path, version) for engine in engines))
        finally:
            self._loading.remove(version)
        if self._save is not None and not any(outcomes):
            await self._versions.forget(version, in_use=(*self._loading, self._newest))
        return {engine.name: outcome for engine, outcome in zip(engines, outcomes, strict=True)}


async def _update(engine: Engine, path: Path, version: int) -> Exception | None:
    if not isinstance(engine, RefitFromDisk):
        return ConfigError(
            f"{engine.name} does not load weights from a disk; use another publisher for it."
        )
    try:
        await engine.update_from_disk(path, version)
    except Exception as error:  # One engine's failure must not hide the others' results.
        return error
    return None


def _check(path: Path) -> None:
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{path} holds no checkpoint; it needs a config.json and at least one *.safetensors."
        )
