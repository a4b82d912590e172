"""Tests that the scheduler in 100 lines, which opens core/README.md, does what the core does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from aprilsched.config import SchedulerConfig
from aprilsched.kernel.core import scheduler as core_module
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from tests.support.driver import Driver

README = Path(core_module.__file__).with_name("README.md")
BATCH_GROUPS, GROUP_SIZE, OVER_PROVISION = 2, 2, 2.0


def small_scheduler() -> Any:
    """The class that the first code block of the README defines."""
    block = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    code = [line for line in block[1].splitlines() if line.strip()]
    assert len(code) <= 100
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(block[1], namespace)  # noqa: S102 - our own page
    return namespace["Scheduler"]


class Recorder(Driver):
    """Remembers the launches, and the calls of each engine."""

    def __post_init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.groups: list[facts.GroupLaunched] = []
        self.hears = self._note_groups
        super().__post_init__()

    def _note_groups(self, part: Sequence[facts.Fact]) -> None:
        self.groups += [fact for fact in part if isinstance(fact, facts.GroupLaunched)]

    def place_of(self, send: do.Send) -> tuple[int, int]:
        """The number of the request's group, in the order of launches, and its place in it."""
        ids = [group.group_id for group in self.groups]
        number = ids.index(send.group_id)
        return number, list(self.groups[number].rollout_ids).index(send.rollout_id)

    def _note(self, command: do.Command) -> None:
        super()._note(command)
        if isinstance(command, do.Pause | do.Flush | do.Continue):
            self.calls.append((type(command).__name__.lower(), command.engine))
        elif isinstance(command, facts.RefitBegun):
            self.calls += [("refit", name) for name in command.engines]


class Pair:
    """Both schedulers, which get the same events."""

    def __init__(self) -> None:
        config = SchedulerConfig(
            batch_groups=BATCH_GROUPS,
            group_size=GROUP_SIZE,
            over_provision=OVER_PROVISION,
            max_staleness=None,
        )
        self.core = Recorder(config)
        self.small = small_scheduler()(self.core.engines, BATCH_GROUPS, GROUP_SIZE, OVER_PROVISION)
        self.version = 0
        self.groups: list[Any] = []
        self.compare()

    def compare(self) -> None:
        known = {id(group) for group in self.groups}
        self.groups += [group for group in self.small.open if id(group) not in known]
        numbers = {id(group): number for number, group in enumerate(self.groups)}
        assert len(self.groups) == len(self.core.groups)
        ids = [group.group_id for group in self.core.groups]
        for name in self.core.engines:
            calls = [[c for c, e in side.calls if e == name] for side in (self.small, self.core)]
            assert calls[0] == calls[1]
        assert len(self.small.batches) == len(self.core.batches)
        for small, batch in zip(self.small.batches, self.core.batches, strict=True):
            assert [ids[numbers[id(group)]] for group in small] == [
                group.group_id for group in batch.groups
            ]
            for group, delivered in zip(small, batch.groups, strict=True):
                versions = [rollout.versions.tolist() for rollout in delivered.rollouts]
                assert [rollout.versions for rollout in group] == versions
        sent = {
            (numbers[id(rollout.group)], rollout.group.index(rollout)): engine.name
            for engine in self.small.engines
            for rollout in engine.requests
        }
        sends = self.core.sends.values()
        assert sent == {self.core.place_of(send): send.engine for send in sends}

    # --- events ---

    def requests(self) -> list[tuple[Any, Any]]:
        """The requests that an engine may generate now: the rollout and the core's attempt."""
        found: list[tuple[Any, Any]] = []
        for key, send in self.core.sends.items():
            number, place = self.core.place_of(send)
            rollout = self.groups[number][place]
            if rollout.engine.mode in ("running", "pause"):
                found.append((rollout, key))
        return found

    def step(self, choice: int, count: int) -> None:
        """Do one of the things that may happen now."""
        possible: list[Any] = []
        for rollout, key in self.requests():
            possible += [(self.tokens, rollout, key), (self.finish, rollout, key)]
        possible += [(self.answer, name) for name in self.core.engines if self.waiting(name)]
        if not self.small.wanted:
            possible.append((self.request,))
            if not self.small.update:
                possible.append((self.update,))
        do_it, *subject = possible[choice % len(possible)]
        do_it(*subject, *([count] if do_it in (self.tokens, self.finish) else []))
        self.compare()

    def waiting(self, name: str) -> bool:
        engine = next(e for e in self.small.engines if e.name == name)
        return engine.mode not in ("running", "paused")

    def tokens(self, rollout: Any, key: Any, count: int) -> None:
        self.small.tokens_arrived(rollout, count)
        self.core.progress(key, count)

    def finish(self, rollout: Any, key: Any, count: int) -> None:
        self.small.tokens_arrived(rollout, count)
        self.small.response_finished(rollout)
        self.core.finish(key, count)

    def answer(self, name: str) -> None:
        engine = next(e for e in self.small.engines if e.name == name)
        mode = engine.mode
        self.small.engine_answered(engine)
        if mode == "refit":
            self.core.feed(ev.Refitted(engine=name, version=self.version))
        else:
            self.core.controls = [c for c in self.core.controls if c.engine != name]
            self.core.feed(ANSWERS[mode](engine=name))

    def request(self) -> None:
        self.small.batch_requested()
        self.core.feed(ev.BatchRequested())

    def update(self) -> None:
        self.version += 1
        self.small.update_requested(self.version)
        self.core.feed(ev.UpdateRequested(version=self.version))


ANSWERS = {"pause": ev.Paused, "flush": ev.Flushed, "continue": ev.Continued}


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 4)), max_size=120))
def test_the_scheduler_in_100_lines_does_what_the_core_does(steps: list[tuple[int, int]]):
    pair = Pair()
    for choice, count in steps:
        pair.step(choice, count)


def test_the_pair_reaches_batches_and_updates():
    """The random steps above would prove nothing if they never came to an update."""
    pair, random = Pair(), Random(1)
    for _ in range(400):
        pair.step(random.randrange(1_000), 2)
    assert len(pair.core.batches) > 3
    assert pair.version > 2
