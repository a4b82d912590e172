"""Writes steps as TensorBoard event files. Needs the extra ``tensorboard``, and no torch."""

# The package has no types, and its message classes are made when it is imported.
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

__all__ = ["TensorBoardWriter"]

_FLUSH_SECONDS = 5


class TensorBoardWriter:
    """Writes into `folder`, which is made if it does not exist."""

    def __init__(self, folder: Path) -> None:
        self._events = EventFileWriter(str(folder), flush_secs=_FLUSH_SECONDS)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._events.add_event(event)

    def close(self) -> None:
        self._events.close()
