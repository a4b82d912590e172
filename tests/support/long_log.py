"""Writes a run folder with a log of any number of lines, within seconds.

A run of the embedded engine would take a minute for a million lines. These facts are artificial:
waves of groups on some engines, lengths with a long tail, a pause and a refit after each batch. The
log has every kind of line that a plain run has, in a possible order, and the real writer writes it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.events import EngineInfo
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.core.state.engine_control import Mode
from aprilsched.observe.log import EventLog
from tests.support.facts import ABLE

__all__ = ["write_long_run"]

Received: TypeAlias = tuple[float, list[Fact]]
"""Facts and their time."""

GROUPS, SIZE, ENGINES = 32, 8, 4
NAMES = tuple(f"sim-{index}" for index in range(ENGINES))
STEP = 0.005
"""Seconds a token."""
CHUNK = 8
"""Tokens a line."""
CONFIG = f"""
engine = ["sim"]
batches = 0
seed = 0
train_seconds = 0.0

[sim]
engines = {ENGINES}
max_running = 512

[workload]
median = 700.0
sigma = 0.9
cap = 6000
within_group = 0.5
prompt_tokens = 8
vocab_size = 32000

[scheduler]
batch_groups = {GROUPS}
group_size = {SIZE}
over_provision = 1.0
refill = "wave"
straggler = "retract"
pace = "synchronous"
"""


def write_long_run(folder: Path, lines: int, *, seed: int = 0) -> int:
    """Write config.toml and events.jsonl of at least `lines` lines; returns how many they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    path = folder / "events.jsonl"
    path.unlink(missing_ok=True)
    log = EventLog(path, patient=True)
    log.start()
    draws = np.random.default_rng(seed)
    engines = tuple(EngineInfo(name=name, version=0, able=ABLE) for name in NAMES)
    log.on_facts([of.RunOpened(engines=engines, version=0)], 0.0)
    written, now, batch = 2, 0.0, 0  # the first line is that of the log itself
    while written < lines:
        for at, facts in _batch(batch, now, draws):
            log.on_facts(facts, at)
            written, now = written + len(facts), at
        batch += 1
    log.close()
    return written


def _batch(batch: int, start: float, draws: np.random.Generator) -> Iterator[Received]:
    """A wave that is waited for, and its refit."""
    count = GROUPS * SIZE
    lengths = np.clip(draws.lognormal(np.log(700), 0.9, count), 1, 6000).astype(int).tolist()
    first = batch * count
    groups = [batch * GROUPS + index for index in range(GROUPS)]
    ids = {group: tuple(range(group * SIZE, (group + 1) * SIZE)) for group in groups}
    yield (
        start,
        [
            of.BatchRequested(),
            of.PromptsRequested(count=GROUPS),
            of.PromptsReceived(prompts=GROUPS),
            *(of.GroupLaunched(group_id=g, rollout_ids=ids[g], prompt_tokens=8) for g in groups),
            *(_sent(rollout, group) for group in groups for rollout in ids[group]),
        ],
    )
    ends = [_tokens(first + i, length, batch, start) for i, length in enumerate(lengths)]
    growing = dict.fromkeys(groups, SIZE)
    for at, facts in heapq.merge(*ends, key=lambda received: received[0]):
        yield at, facts
        if isinstance(facts[-1], of.RolloutScored):
            group = facts[-1].group_id
            growing[group] -= 1
            if not growing[group]:
                yield at, [of.GroupAccepted(group_id=group)]
    rows = tuple(
        of.DeliveredRollout(
            rollout_id=first + i,
            group_id=(first + i) // SIZE,
            prompt_tokens=8,
            tokens=length,
            segments=((0, length, batch, NAMES[i % ENGINES]),),
            finish_reason="stop",
        )
        for i, length in enumerate(lengths)
    )
    now = start + (max(lengths) + 1) * STEP
    offered = of.BatchOffered(batch=batch, version=batch)
    yield now, [offered, of.BatchDelivered(batch=batch, version=batch, rollouts=rows)]
    yield from _refit(batch + 1, now)


def _sent(rollout: int, group: int) -> Fact:
    return of.AttemptSent(
        engine=NAMES[rollout % ENGINES],
        request_id=rollout,
        attempt=1,
        rollout_id=rollout,
        group_id=group,
        tokens=8,
        max_new_tokens=6000,
    )


def _tokens(rollout: int, length: int, version: int, start: float) -> Iterator[Received]:
    """The chunks of a response and its end."""
    for done in range(CHUNK, length + 1, CHUNK):
        yield start + done * STEP, [of.TokensReceived(request_id=rollout, tokens=CHUNK)]
    at, group = start + length * STEP, rollout // SIZE
    if length % CHUNK:
        yield at, [of.TokensReceived(request_id=rollout, tokens=length % CHUNK)]
    spans = ((version, 0, length),)
    yield (
        at,
        [
            of.AttemptEnded(request_id=rollout, outcome="finished", spans=spans),
            of.RolloutFinished(rollout_id=rollout, group_id=group),
            of.RolloutScored(rollout_id=rollout, group_id=group),
        ],
    )


def _refit(version: int, now: float) -> Iterator[Received]:
    """A tenth of a second of pause, and a second for the weights."""
    yield now, [of.UpdateBegun(version=version), *_mode(Mode.RUNNING, Mode.PAUSING, "retract")]
    yield (
        now + 0.1,
        [
            *_mode(Mode.PAUSING, Mode.PAUSED),
            *_mode(Mode.PAUSED, Mode.FLUSHING),
            *_mode(Mode.FLUSHING, Mode.PAUSED),
            *_mode(Mode.PAUSED, Mode.REFITTING),
            of.RefitBegun(version=version, engines=NAMES),
        ],
    )
    yield (
        now + 1.1,
        [
            *(of.EngineRefitted(engine=name, version=version) for name in NAMES),
            *_mode(Mode.REFITTING, Mode.PAUSED),
            of.UpdateFinished(version=version),
            *_mode(Mode.PAUSED, Mode.CONTINUING),
            *_mode(Mode.CONTINUING, Mode.RUNNING),
        ],
    )


def _mode(start: Mode, finish: Mode, pause: str = "") -> list[Fact]:
    """Every engine changes its mode."""
    return [
        of.EngineModeChanged(engine=name, start=start, finish=finish, pause=pause) for name in NAMES
    ]
