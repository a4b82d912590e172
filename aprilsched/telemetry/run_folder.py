"""The folder of a run: config.toml, events.jsonl, summary.json. Output stays inside.

Invariant: a folder that holds something is never written into, and nothing is made before the run
is known to begin, so that a refused run leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from aprilsched.errors import RunFolderError
from aprilsched.telemetry.figures import RunSummary

__all__ = ["CONFIG", "EVENTS", "RUNS", "SUMMARY", "RunFolder", "default_path", "write_json"]

CONFIG = "config.toml"
EVENTS = "events.jsonl"
SUMMARY = "summary.json"
RUNS = Path("runs")


class RunFolder:
    """The folder of one run at `path`.

    Raises:
        RunFolderError: if `path` is taken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.created = False
        _refuse_taken(path)

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    def create(self, config: Mapping[str, Any]) -> None:
        """Make the folder, with the run's resolved configuration.

        Raises:
            RunFolderError: if that cannot be done.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _refuse_taken(self.path)  # by another run, since this one looked
            (self.path / CONFIG).write_text(tomli_w.dumps(config), encoding="utf-8")
        except OSError as error:
            raise _unusable(self.path, error) from error
        self.created = True

    def write_summary(self, summary: RunSummary) -> None:
        """Write summary.json, whole or not at all.

        Raises:
            RunFolderError: if it cannot be written.
        """
        write_json(self.path / SUMMARY, summary)


def default_path(seed: int, runs: Path = RUNS, now: datetime | None = None) -> Path:
    """``runs/<UTC time>-<seed>``, with a number behind it if another run began this second."""
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
    writing = path.with_name(f".{path.name}.writing")
    try:
        writing.write_bytes(encoded + b"\n")
        os.replace(writing, path)
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


def _unusable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"{path} cannot be used ({error.strerror or error}); name a folder that can be written."
    )
