"""A directory of versions: the trainer writes them, the engines read them.

- An engine never sees half a version: it is written beside its place, brought to the disk, and
  then renamed.
- Versions go by age, since a restored trainer counts again from a lower one. One that the caller
  says is in use is never deleted.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from aprilsched.errors import ConfigError
from aprilsched.weights.threads import in_thread

__all__ = ["VersionsOnDisk"]

_VERSION_DIRECTORY = re.compile(r"version-(\d{8,})")
_WRITING = ".writing-"


class VersionsOnDisk:
    """``directory/version-00000007`` and its neighbours.

    Args:
        directory: on storage that the trainer and every engine see under the same path.
        check: raises ConfigError if what is in a path is no version.
        keep: how many versions stay on the disk, the newest included.

    Raises:
        ConfigError: if `keep` is below 1.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, check: Callable[[Path], None], keep: int
    ) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}; the engines need at least the version they load.")
        # Absolute, because a server resolves a path against its own working directory.
        self.directory = Path(os.path.abspath(directory))
        self._check = check
        self._keep = keep

    def path(self, version: int) -> Path:
        """Where `version` is, or will be."""
        return self.directory / f"version-{version:08d}"

    async def write(self, version: int, save: Callable[[Path], object]) -> None:
        """Let `save` fill an empty directory, and make it `version`.

        A plain function runs in a thread; a coroutine function is awaited.

        Raises:
            ConfigError: if what it wrote is no version.
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
        """Refuse a `path` that holds no version.

        Raises:
            ConfigError: then.
        """
        await in_thread(self._check, path)

    async def forget(self, newest: int, in_use: Collection[int] = ()) -> None:
        """Delete the oldest versions beyond `keep`, but neither `newest` nor one `in_use`."""
        await in_thread(self._forget, self.path(newest), {self.path(v) for v in in_use})

    def _begin(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        for left_over in self.directory.glob(f"{_WRITING}*"):  # by a trainer that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        writing = Path(tempfile.mkdtemp(prefix=_WRITING, dir=self.directory))
        writing.chmod(0o755)  # mkdtemp's 0700 would hide it from a server of another user
        return writing

    def _commit(self, writing: Path, final: Path) -> None:
        self._check(writing)
        for path in (*(path for path in writing.rglob("*") if path.is_file()), writing):
            _sync(path)
        if final.exists():  # the same version, prepared again after a failed refit
            shutil.rmtree(final)
        writing.rename(final)
        _sync(self.directory)

    def _forget(self, newest: Path, in_use: Collection[Path]) -> None:
        others = [
            path
            for path in self.directory.iterdir()
            if _VERSION_DIRECTORY.fullmatch(path.name) and path != newest
        ]
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in others[self._keep - 1 :]:
            if path not in in_use:
                shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
