"""Weights through a directory that the trainer writes and the engines read.

- An engine never sees half a checkpoint: a version is written beside its place, brought to
  the disk, and then renamed.
- The version that the engines were last given is never deleted.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from aprilsched.engines.base import Engine
from aprilsched.engines.refit import RefitFromDisk
from aprilsched.errors import ConfigError

__all__ = ["DiskPublisher"]

P = ParamSpec("P")
T = TypeVar("T")

_VERSION_DIRECTORY = re.compile(r"version-(\d{8,})")
_WRITING = ".writing-"


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
        if keep < 1:
            raise ConfigError(f"keep is {keep}; the engines need at least the version they load.")
        # Absolute, because a server resolves a path against its own working directory.
        self._directory = Path(os.path.abspath(directory))
        self._save = save
        self._keep = keep

    def path(self, version: int) -> Path:
        """Where `version` is, or will be."""
        if self._save is None:
            return self._directory
        return self._directory / f"version-{version:08d}"

    async def prepare(self, version: int) -> None:
        """Write `version` while the engines still generate.

        Raises:
            ConfigError: if what is to be published is no checkpoint.
        """
        if self._save is None:
            await _in_thread(_check, self._directory)
            return
        writing = await _in_thread(self._begin)
        try:
            pending = await _in_thread(self._save, writing)
            if inspect.isawaitable(pending):
                await pending
            await _in_thread(self._commit, writing, self.path(version))
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Let every engine load `version`, in parallel.

        Raises:
            ConfigError: if `version` was not prepared.
        """
        path = self.path(version)
        await _in_thread(_check, path)
        outcomes = await asyncio.gather(*(_update(engine, path, version) for engine in engines))
        if self._save is not None and not any(outcomes):
            await _in_thread(self._forget, path)
        return {engine.name: outcome for engine, outcome in zip(engines, outcomes, strict=True)}

    def _begin(self) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        for left_over in self._directory.glob(f"{_WRITING}*"):  # by a trainer that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        writing = Path(tempfile.mkdtemp(prefix=_WRITING, dir=self._directory))
        writing.chmod(0o755)  # mkdtemp's 0700 would hide it from a server of another user
        return writing

    def _commit(self, writing: Path, final: Path) -> None:
        _check(writing)
        for path in (*(path for path in writing.rglob("*") if path.is_file()), writing):
            _sync(path)
        if final.exists():  # the same version, prepared again after a failed refit
            shutil.rmtree(final)
        writing.rename(final)
        _sync(self._directory)

    def _forget(self, published: Path) -> None:
        """Delete the oldest versions; by age, since a restored trainer counts from lower."""
        others = [
            path
            for path in self._directory.iterdir()
            if _VERSION_DIRECTORY.fullmatch(path.name) and path != published
        ]
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in others[self._keep - 1 :]:
            shutil.rmtree(path, ignore_errors=True)


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


async def _in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a thread. A thread cannot be stopped: when cancelled, wait for its end."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _check(path: Path) -> None:
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{path} holds no checkpoint; it needs a config.json and at least one *.safetensors."
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
