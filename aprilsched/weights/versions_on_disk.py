"""A directory of versions that the trainer writes and the engines read.

- An engine never sees an incomplete version: it is written to a temporary directory, synced to
  the disk, and then renamed.
- Versions are deleted by age and not by number, because a restored trainer counts again from a
  lower one. A version that the caller declares in use is never deleted.
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
        if keep < 1:
            raise ConfigError(f"keep is {keep}; the engines need at least the version they load.")
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
