"""Publishes weights or LoRA adapters by a directory that the trainer writes and the engines read.

- An engine never sees an incomplete version: it is written to a temporary directory, synced to
  the disk, and then renamed.
- Versions are deleted by age and not by number, because a restored trainer counts again from a
  lower one. A version that the engines got last is never deleted, nor one that an engine still
  loads.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import RefitFromDisk
from aprilsched.kernel.values.bounds import AT_LEAST_1, check_range
from aprilsched.kernel.weights.threads import Takers, in_thread

# A directory of versions that the trainer writes and the engines read.
#
# - An engine never sees an incomplete version: it is written to a temporary directory, synced to
#   the disk, and then renamed.
# - Versions are deleted by age and not by number, because a restored trainer counts again from a
#   lower one. A version that the caller declares in use is never deleted.

_VERSION_DIRECTORY = re.compile(r"version-(\d{8,})")
_WRITING = ".writing-"


class VersionsOnDisk:
    """The versions in a directory, such as ``directory/version-00000007``.

    Args:
        directory: directory on storage that the trainer and every engine see under the same path.
        check: function that raises ConfigError if its path does not hold a version.
        keep: number of versions that stay on the disk, including the newest.

    Raises:
        ConfigError: if `keep` is below 1.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, check: Callable[[Path], None], keep: int
    ) -> None:
        check_range(AT_LEAST_1, keep=keep)
        # The path is absolute, because a server resolves it in its own working directory.
        self.directory = Path(os.path.abspath(directory))
        self._check = check
        self._keep = keep

    def path(self, version: int) -> Path:
        """The path of `version`, which may not exist yet."""
        return self.directory / f"version-{version:08d}"

    async def write(self, version: int, save: Callable[[Path], object]) -> None:
        """Let `save` fill an empty directory, and turn that into `version`.

        A plain function runs in a thread; a coroutine function is awaited.

        Raises:
            ConfigError: if what `save` wrote is not a version.
        """
        writing = await in_thread(self._begin)
        try:
            pending = await in_thread(save, writing)
            if inspect.isawaitable(pending):
                await pending
            await in_thread(self._commit, writing, self.path(version))
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise

    async def check(self, path: Path) -> None:
        """Check that `path` holds a version.

        Raises:
            ConfigError: if it does not.
        """
        await in_thread(self._check, path)

    async def forget(self, newest: int, in_use: Collection[int] = ()) -> None:
        """Delete the oldest versions beyond `keep`, but neither `newest` nor one `in_use`."""
        await in_thread(self._forget, self.path(newest), {self.path(v) for v in in_use})

    def _begin(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        for left_over in self.directory.glob(f"{_WRITING}*"):  # A killed trainer left it.
            shutil.rmtree(left_over, ignore_errors=True)
        writing = Path(tempfile.mkdtemp(prefix=_WRITING, dir=self.directory))
        writing.chmod(0o755)  # mkdtemp's 0700 would hide it from a server of another user.
        return writing

    def _commit(self, writing: Path, final: Path) -> None:
        self._check(writing)
        for path in (*(path for path in writing.rglob("*") if path.is_file()), writing):
            _sync(path)
        if final.exists():  # The same version is prepared again after a failed refit.
            shutil.rmtree(final)
        # A save that copies has left the times of what it copied, and a new version that looked old
        # was deleted.
        os.utime(writing)
        writing.rename(final)
        _sync(self.directory)

    def _forget(self, newest: Path, in_use: Collection[Path]) -> None:
        others = [
            path
            for path in self.directory.iterdir()
            if _VERSION_DIRECTORY.fullmatch(path.name) and path != newest
        ]
        others.sort(key=_written_at, reverse=True)
        for path in others[self._keep - 1 :]:
            if path not in in_use:
                shutil.rmtree(path, ignore_errors=True)


def _written_at(path: Path) -> int:
    """When a version was written, in nanoseconds; 0 if it is gone. With rolling refits two engines
    may end their loads at once, and each lets old versions be deleted: one that found what the
    other had deleted counted as not refitted."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DiskEngine(Engine, RefitFromDisk, Protocol):
    """An engine to which this publisher can publish."""


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
        self._versions = VersionsOnDisk(directory, check=_check_checkpoint, keep=keep)
        self._save = save
        self._in_use: list[int] = []
        """The versions that are written or loaded at the moment. With rolling refits one engine may
        still load a version when the next one is there."""
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
            return
        # From now on: an engine may end its load of another version before the write has returned.
        self._in_use.append(version)
        try:
            await self._versions.write(version, self._save)
            self._newest = version
        finally:
            self._in_use.remove(version)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Let every engine load `version`, in parallel.

        Raises:
            ConfigError: if `version` was not prepared.
        """
        path = self.path(version)
        # Before the check, which takes a thread: another engine may finish its load, and
        # a checkpoint that no engine loads is deleted.
        self._in_use.append(version)
        try:
            await self._versions.check(path)
            takers: Takers[DiskEngine] = Takers(engines, RefitFromDisk, "load weights from a disk")
            await takers.each(lambda engine: engine.update_from_disk(path, version))
        finally:
            self._in_use.remove(version)
        if self._save is not None and not any(takers.outcomes.values()):
            await self._versions.forget(version, in_use=(*self._in_use, self._newest))
        return takers.outcomes


def _check_checkpoint(path: Path) -> None:
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{path} holds no checkpoint; it needs a config.json and at least one *.safetensors."
        )
