"""Runs one seed: a fleet, a store and a trainer that outlive several schedulers."""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from aprilsched import MemoryStore, SqliteStore
from aprilsched.errors import EpisodeError
from aprilsched.kernel.store.in_memory import Store
from tests.campaign.callers import Callers
from tests.campaign.calls import Hang
from tests.campaign.checks import Records
from tests.campaign.clockwork import VirtualThreads
from tests.campaign.fleet import ChaosFleet
from tests.campaign.history import History, Outcome, recorded
from tests.campaign.life import Life
from tests.campaign.mix import Mix


def run(mix: Mix) -> Outcome:
    """Run a seed. Complaints are in the outcome; nothing is raised."""
    outcome = Outcome(mix.seed, kinds=sorted(mix.kinds), settings=mix.described())
    history = History()
    random.seed(mix.seed)
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(mix, outcome, history, Path(folder))
        return recorded(outcome, history, trial.execute())


class Trial:
    """The run of one seed, over all its lives."""

    def __init__(self, mix: Mix, outcome: Outcome, history: History, folder: Path) -> None:
        self.mix = mix
        self.outcome = outcome
        self.history = history
        self.folder = folder
        self.records = Records()
        self.callers = Callers(mix)
        self.broken: set[int] = set()
        """Indices of prompts at which the source has raised."""
        self.inner: Store | None = None
        self.checkpoints: list[tuple[Path, Records]] = []
        self.figures: Counter[str] = Counter()
        self.threads = VirtualThreads(self._thread_seconds)
        self._thread_draw = mix.draw("threads")
        self.fleet: ChaosFleet
        self.batches = 0
        """Number of batches that the trainer took in all lives."""

    def complain(self, text: str) -> None:
        if len(self.outcome.complaints) < 20:
            self.history.note(f"COMPLAINT {text}")
            self.outcome.complaints.append(text)

    async def execute(self) -> None:
        mix, loop = self.mix, asyncio.get_running_loop()
        loop.set_exception_handler(self._unhandled)
        self.threads.install(loop)
        if mix.store == "memory":
            self.inner = MemoryStore()
        elif mix.store == "sqlite":
            self.inner = SqliteStore(self.folder / "store", inline=mix.inline_store)
        self.fleet = ChaosFleet(mix, self.history)
        for number in range(mix.lives):
            of_life = mix if number == 0 else mix.of_next_life(number)
            life = Life(self, of_life, number, last=number == mix.lives - 1)
            self.history.note(f"LIFE {number} starts: {of_life}")
            try:
                ended = await life.live()
            except Hang as error:
                self.complain(f"{error}\n{life.in_flight()}")
                self.outcome.ending.append("hangs")
                break
            self.outcome.ending.append(ended)
            self.history.note(f"LIFE {number} ended: {ended}")
            if self.inner is None or ended in ("exhausted", "done"):
                break
        self.outcome.seconds = loop.time()
        self.outcome.figures = dict(self.figures)
        del loop
        gc.collect()

    def _thread_seconds(self, name: str) -> float:
        draw = self._thread_draw
        if "store" in name:
            if self.mix.has("slow_store"):
                return draw.choice([0.05, 0.4, 2.0]) * draw.random()
            return 0.01 * draw.random()
        return draw.choice([0.0, 0.01, 0.5]) * draw.random()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        own = error is not None and id(error) in self.callers.raised
        if own or isinstance(error, EpisodeError):
            where = context.get("message", "")
            if "never retrieved" in where:
                return  # a task of the caller
        self.complain(f"the event loop reports: {context.get('message')} {error!r}")
