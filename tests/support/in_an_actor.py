"""Schedulers that the tests of :mod:`aprilsched.fronts.ray` have in an actor.

They are functions of a module, because the actor imports them.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from aprilsched import (
    DiskPublisher,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
    SqliteStore,
)
from aprilsched.kernel.engines.base import Engine

__all__ = [
    "LONG",
    "FatalPublisher",
    "endless",
    "fatal_store",
    "few",
    "restoring",
    "served",
    "unmade",
]

LONG = 20_000
"""Tokens of a prompt with which a batch goes through the object store."""


def endless(tokens: int = 3) -> Iterator[Prompt]:
    for key in itertools.count():
        ids = np.full(tokens, key % 100 + 5, dtype=np.int32)
        yield Prompt(input_ids=ids, key=key)


def few() -> Iterator[Prompt]:
    """Prompts of an evaluation."""
    return itertools.islice(endless(), 2)


def served(
    url: str,
    store: Path | None = None,
    *,
    tokens: int = 3,
    pace: str = "synchronous",
    max_new_tokens: int = 40,
    groups: int = 2,
) -> RolloutScheduler:
    """It generates on a server with a small vocabulary."""
    config = SchedulerConfig(
        batch_groups=groups,
        group_size=2,
        over_provision=2.0,
        pace=pace,  # pyright: ignore[reportArgumentType]
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
    )
    return RolloutScheduler(
        SGLangFleet([url]),
        endless(tokens),
        config=config,
        store=None if store is None else SqliteStore(store),
    )


def restoring(url: str, store: Path, checkpoint: Path) -> RolloutScheduler:
    made = served(url, store)
    made.restore(checkpoint)
    return made


def unmade() -> RolloutScheduler:
    raise FileNotFoundError(2, "No such file", "prompts.jsonl")


class FatalPublisher(DiskPublisher):
    """Kills the process that it publishes in, once for each file of `fuses`, when the engines are
    paused or when they have the weights."""

    def __init__(self, folder: Path, fuses: Sequence[Path], *, late: bool) -> None:
        super().__init__(folder)
        self._fuses = fuses
        self._late = late

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        if not self._late:
            self._burn()
        outcomes = await super().publish(version, engines)
        self._burn()
        return outcomes

    def _burn(self) -> None:
        for fuse in self._fuses:
            if fuse.exists():
                fuse.unlink()
                os.kill(os.getpid(), signal.SIGKILL)


class FatalStore(SqliteStore):
    """Kills its process when it saves a batch, or what else must be durable, once for each file of
    `fuses`, before or after."""

    fuses: Sequence[Path] = ()
    late = False

    def save(self, snapshot: object, *, durable: bool) -> None:
        burnt = next((fuse for fuse in self.fuses if durable and fuse.exists()), None)
        if burnt is not None:
            burnt.unlink()
        if burnt is None or self.late:
            super().save(snapshot, durable=durable)  # pyright: ignore[reportArgumentType]
        if burnt is not None:
            os.kill(os.getpid(), signal.SIGKILL)


def fatal_store(url: str, path: Path, fuses: Sequence[Path], *, late: bool) -> RolloutScheduler:
    """The actor dies while a batch is on its way to the trainer."""
    made = served(url, path)
    store = FatalStore(path)
    store.fuses, store.late = fuses, late
    return RolloutScheduler(SGLangFleet([url]), endless(), config=made.config, store=store)
