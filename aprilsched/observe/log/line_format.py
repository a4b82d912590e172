"""The format of events.jsonl: each line is a fact of the run, with its time.

A line contains ``t`` (seconds since the start of the run, on the run's clock), ``fact`` (the name
of the fact), and the fact's fields, without those at their default. The first line of each process
that writes the log is one of the two facts defined here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Union

import msgspec

from aprilsched.errors import RunFolderError
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.messages.facts import Fact

FORMAT_VERSION = 1


class Versioned(msgspec.Struct):
    """The format version of a line or file, regardless of its other content.

    Lines name it `version`, and files with a single object name it `schema`.
    """

    version: int = 0
    schema: int = 0


def refuse_newer(path: Path, found: int, known: int) -> None:
    """Refuse a file of a format that this release does not know.

    Args:
        path: the file, for the message.
        found: the version in the file.
        known: the newest version that can be read.

    Raises:
        RunFolderError: if `found` is newer.
    """
    if found > known:
        raise RunFolderError(
            f"{path} has format {found}, and this aprilsched reads formats up to {known}; upgrade "
            "aprilsched."
        )


class LogBegun(Fact, frozen=True):
    """The first line of a log; `version` is the version of its format."""

    version: int


class LogResumed(Fact, frozen=True):
    """The first line of a process that resumes the run.

    Attributes:
        version: version of the format.
        incarnation: number of processes that have written the log, this one included.
        batches: number of batches that the process knows. Later deliveries in the log were not
            saved, and are void.
    """

    version: int
    incarnation: int
    batches: int


class LogEnded(Fact, frozen=True):
    """The last line of a log whose ``with`` block has ended. `error`: the exception that ended it,
    or None. `interrupted`: whether it was Ctrl-C or a cancellation."""

    error: str | None = None
    interrupted: bool = False


KINDS: dict[str, type[Fact]] = {
    kind.__name__: kind
    for kind in (*vars(facts).values(), LogBegun, LogResumed, LogEnded)
    if isinstance(kind, type) and issubclass(kind, Fact) and kind not in (Fact, facts.Order)
}
"""Every kind of line by its name."""

ANY_FACT: Any = Union[tuple(KINDS.values())]  # noqa: UP007 - of kinds that are listed above
"""The type that a decoder of lines takes: any kind of line."""
