"""The folder of a run, which contains everything that the run writes.

Its files are config.toml, events.jsonl, summary.json, store.sqlite, and samples.jsonl if engines or
GPUs are sampled.

Invariant: only a process that resumes a run writes into a folder that is not empty. A refused run
leaves nothing behind.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from shutil import rmtree
from typing import Any, Self

import msgspec

from aprilsched.errors import RunFolderError
from aprilsched.kernel.values.extras import extra
from aprilsched.kernel.values.files import PRIVATE_FOLDER, SHARED, read_text, written_whole
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.log.tail import read_tail

CONFIG = "config.toml"
EVENTS = "events.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
SAMPLES = "samples.jsonl"
STORE = "store.sqlite"
TRACE = "trace.json"
RUNS = Path("runs")
TRACKED = ("tensorboard", "wandb")
"""Names of the folders of experiment trackers."""


class RunFolder:
    """The folder of one run at `path`.

    Raises:
        RunFolderError: if `path` is taken.
    """

    def __init__(self, path: Path, *, resumed: bool = False) -> None:
        (_refuse_other if resumed else _refuse_taken)(path)
        self.path = path
        self.created = False
        self._made: list[Path] | None = None
        """The folders created by :meth:`reserve`; None before its call."""
        self.resumed = resumed
        """Whether the folder contains a prior run, which this process resumes."""

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Open the folder of a run to resume it.

        Raises:
            RunFolderError: if it is not a run folder, or if its event log is damaged.
        """
        return cls(path, resumed=True)

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @property
    def samples(self) -> Path:
        """Path of the samples of engines and GPUs."""
        return self.path / SAMPLES

    @property
    def ended(self) -> bool:
        """Whether the run in the folder ended by itself or by Ctrl-C; False if it was killed."""
        return (self.path / SUMMARY).exists()

    @property
    def store(self) -> Path:
        """Path of the store, which lets the run survive a crash."""
        return self.path / STORE

    def reserve(self) -> None:
        """Create the folder for the store, which is opened before the run can be checked.

        Raises:
            RunFolderError: if the folder cannot be created.
        """
        if self.resumed or self._made is not None:
            return
        try:
            self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
            self.path.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            _refuse_taken(self.path)  # another run may have taken it since the first check
        except OSError as error:
            raise _unusable(self.path, error) from error

    def discard(self) -> None:
        """Remove everything that was created for a refused run."""
        if self.resumed or self.created:
            return
        with suppress(OSError):
            for file in self.path.glob(f"{STORE}*"):
                file.unlink()
            for name in TRACKED:
                rmtree(self.path / name, ignore_errors=True)
            for folder in self._made or ():
                folder.rmdir()

    def create(self, config: Mapping[str, Any]) -> None:
        """Write the resolved configuration of the run.

        Remove the summary and the trace of a prior run, which are outdated.

        Raises:
            RunFolderError: if the files cannot be written or removed.
        """
        with extra("cli"):
            from tomli_w import dumps
        self.reserve()
        try:
            with written_whole(self.path / CONFIG) as file:
                file.write(dumps(config).encode())
            for name in (SUMMARY, TRACE):
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(self.path, error) from error
        self.created = True

    def write_summary(self, summary: RunSummary) -> None:
        """Write summary.json as a whole or not at all.

        Raises:
            RunFolderError: if it cannot be written.
        """
        write_json(self.path / SUMMARY, summary)


def config_in(folder: Path) -> dict[str, Any]:
    """Return the settings in config.toml; none for a folder with only the log of a training loop.

    Raises:
        OSError, ValueError: if the file cannot be read.
    """
    path = folder / CONFIG
    return tomllib.loads(read_text(path)) if path.exists() else {}


def default_path(seed: int, runs: Path = RUNS, now: datetime | None = None) -> Path:
    """Return ``runs/<UTC time>-<seed>``, numbered if another run started in that second."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    name = f"{stamp}-{seed}"
    if not (runs / name).exists():
        return runs / name
    return next(path for n in count(2) if not (path := runs / f"{name}-{n}").exists())


def write_json(path: Path, content: object) -> None:
    """Write `content`, indented for people, whole or not at all.

    Raises:
        RunFolderError: if it cannot be written.
    """
    encoded = msgspec.json.format(msgspec.json.encode(content), indent=2)
    write_whole(path, encoded + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write `content`, whole or not at all.

    Raises:
        RunFolderError: if it cannot be written.
    """
    try:
        with written_whole(path, mode=SHARED) as file:
            file.write(content)
    except OSError as error:
        raise _unusable(path, error) from error


def _refuse_taken(path: Path) -> None:
    try:
        if not path.exists():
            return
        if not path.is_dir():
            raise RunFolderError(f"{path} is a file; name a folder for the run.")
        if any(path.iterdir()):
            raise RunFolderError(
                f"The run folder {path} is not empty; name another one, or remove it."
            )
    except OSError as error:
        raise _unusable(path, error) from error


def _refuse_other(path: Path) -> None:
    """Raise RunFolderError unless the folder contains a run that can be resumed."""
    try:
        for name in (CONFIG, EVENTS):
            if not (path / name).is_file():
                raise RunFolderError(
                    f"{path} has no run that can be resumed (it has no {name}); name the folder of "
                    "an interrupted run."
                )
        if (path / EVENTS).is_symlink():
            raise RunFolderError(
                f"{path / EVENTS} must be no link, because the resumed run writes into it; name "
                "the folder that has the file."
            )
        read_tail(path / EVENTS)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"{path} cannot be used ({error.strerror or error}); name a folder that can be written."
    )
