"""Tests the model of the live view on facts of a run."""

from __future__ import annotations

import numpy as np
import pytest

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.observe.figures.batch_figures import BatchMeter
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.live.live_model import EngineRow, LiveModel, RunFacts, Snapshot
from aprilsched.types import Batch, Group, Prompt, Rollout
from tests.support import facts
from tests.support.facts import changed

PROMPT = Prompt(input_ids=np.zeros(10, dtype=np.int32))


def response(rollout_id: int, group_id: int, tokens: int) -> Rollout:
    own = {"rollout_id": rollout_id, "group_id": group_id, "prompt_ids": PROMPT.input_ids}
    return facts.response([0] * tokens, **own)


class Received:
    """A model of the live view, and the facts that it is told. Group g has the two rollouts 2g and
    2g + 1, with requests of the same ids, on engine a or b."""

    def __init__(self, *, batches: int = 4) -> None:
        meter = BatchMeter(trainer_waits=False, bound=lambda prompts, lengths: 6.0)
        self.now = 100.0
        figures = LiveFigures(meter=meter, batch_groups=1, clock=None)
        shown = RunFacts(title="run", batches=batches, batch_groups=1)
        self.model = LiveModel(shown, figures)
        self._listeners = (meter, figures, self.model)
        infos = [ev.EngineInfo(name=name, version=0, kv_tokens=100, max_running=1) for name in "ab"]
        self.tell(of.RunOpened(engines=tuple(infos), version=0), of.BatchRequested())

    def tell(self, *recorded: Fact, after: float = 0.0) -> None:
        self.now += after
        for listener in self._listeners:
            listener.on_facts(recorded, self.now)

    def launch(self, group: int) -> None:
        self.tell(facts.launched(group, 2 * group, 2 * group + 1, prompt_tokens=10))

    def send(self, request: int, *, attempt: int = 1, tokens: int = 10, engine: str = "") -> None:
        on = engine or "ab"[request % 2]
        self.tell(facts.sent(request, request // 2, attempt=attempt, engine=on, tokens=tokens))

    def grow(self, request: int, tokens: int, *, after: float = 0.0) -> None:
        self.tell(facts.received(request, tokens), after=after)

    def finish(self, request: int) -> None:
        self.tell(*facts.ended(request, request // 2))

    def accept(self, group: int) -> None:
        self.tell(of.GroupAccepted(group_id=group))

    def deliver(self, index: int, group: int, *, version: int = 0, tokens: int = 5) -> None:
        rollouts = tuple(response(i, group, tokens) for i in (2 * group, 2 * group + 1))
        groups = (Group(group_id=group, prompt=PROMPT, rollouts=rollouts),)
        self.accept(group)
        self.tell(facts.delivered(Batch(index=index, version=version, groups=groups)))

    @property
    def seen(self) -> Snapshot:
        return self.model.snapshot()

    def engine(self, name: str) -> EngineRow:
        return next(row for row in self.seen.engines if row.name == name)


def test_before_anything_happened():
    figures = LiveFigures(clock=None)
    seen = LiveModel(RunFacts(title="run", batches=3, batch_groups=2), figures).snapshot()
    assert (seen.elapsed, seen.left, seen.batches, seen.ready) == (0.0, None, 0, 0)
    assert seen.in_flight == {}
    assert seen.engines == seen.idle == ()
    assert seen.recent is None


def test_scoring_is_seen_until_every_answer_is_there():
    recorded = Received()
    recorded.launch(0)
    for request in (0, 1):
        recorded.send(request)
        recorded.finish(request)
    recorded.tell(of.RewardRequested(group_id=0, rollout_id=0))
    assert recorded.seen.in_flight == {"scoring": 1}
    recorded.tell(of.RewardRequested(group_id=0, rollout_id=1))
    recorded.tell(of.RolloutScored(rollout_id=0, group_id=0, reward=1.0))
    assert recorded.seen.in_flight == {"scoring": 1}
    recorded.tell(of.RolloutScored(rollout_id=1, group_id=0, reward=0.0))
    recorded.tell(of.VerdictRequested(group_id=0))
    assert (recorded.seen.in_flight, recorded.seen.ready) == ({"scoring": 2}, 0)
    recorded.accept(0)
    assert (recorded.seen.in_flight, recorded.seen.ready) == ({}, 1)
    recorded.tell(of.RewardRequested(group_id=0))
    assert recorded.seen.in_flight == {"scoring": 2}
    recorded.tell(facts.dropped(0, 0, 1, reason="reward_failed", cause="no\nmodel"))
    assert recorded.seen.in_flight == {}
    assert recorded.seen.fault == "a reward failed: no model"


def test_what_a_batch_leaves_behind_is_carried():
    recorded = Received()
    for group in (0, 1):
        recorded.launch(group)
        for request in (2 * group, 2 * group + 1):
            recorded.send(request)
            recorded.grow(request, 5, after=1.0)
    for request in (0, 1):
        recorded.finish(request)
    recorded.deliver(0, 0)
    recorded.launch(2)
    recorded.send(4)
    recorded.grow(4, 5)
    seen = recorded.seen
    assert seen.in_flight == {"decoding": 1, "decoding, carried": 2, "waiting for an engine": 1}
    recorded.tell(*changed("b", "running", "pausing", pause="retract"))
    assert recorded.seen.in_flight == {
        "decoding": 1,
        "decoding, carried": 1,
        "paused": 1,
        "waiting for an engine": 1,
    }
    recorded.tell(*changed("b", "pausing", "paused", "continuing", "running"))
    assert recorded.seen.in_flight == {
        "decoding": 1,
        "decoding, carried": 1,
        "re-prefilling": 1,
        "waiting for an engine": 1,
    }
    recorded.finish(2)
    assert "decoding, carried" not in recorded.seen.in_flight


def test_what_is_dropped_is_gone_and_counted():
    recorded = Received()
    recorded.launch(0)
    recorded.send(0)
    recorded.tell(facts.dropped(0, 0, 1, reason="stale", cause="too old"))
    recorded.tell(of.AttemptEnded(request_id=0, outcome="interrupted"))
    assert recorded.seen.in_flight == {}
    assert recorded.seen.dropped == {"stale": 2}


def test_tokens_of_contexts_are_counted_by_engine():
    recorded = Received()
    recorded.launch(0)
    recorded.send(0)
    recorded.send(1, engine="a")
    recorded.grow(0, 7)
    recorded.grow(1, 3)
    row = recorded.engine("a")
    assert (row.kv_tokens, row.kv_pool) == (30, 100)
    assert (row.running, row.queued, row.max_running) == (1, 1, 1)
    recorded.tell(of.AttemptEnded(request_id=0, outcome="interrupted"))
    recorded.send(0, attempt=2, tokens=17, engine="b")
    assert (recorded.engine("a").kv_tokens, recorded.engine("b").kv_tokens) == (13, 17)
    recorded.grow(0, 1)
    recorded.tell(*facts.lost("b", "it hangs", 0))
    assert (recorded.engine("a").kv_tokens, recorded.engine("b").kv_tokens) == (13, 0)
    assert recorded.engine("b").state == "lost"
    assert recorded.seen.engines_lost == 1
    assert recorded.seen.fault == "b lost: it hangs"
    recorded.tell(of.AttemptEnded(request_id=1, outcome="interrupted"))
    assert recorded.engine("a").kv_tokens == 0


def test_speed_and_busy_share_are_those_of_the_last_minute():
    recorded = Received()
    recorded.launch(0)
    recorded.send(0)
    for _ in range(200):
        recorded.grow(0, 10, after=1.0)
    recorded.finish(0)
    fast = recorded.engine("a")
    assert fast.tokens_per_s == pytest.approx(10.0)
    assert fast.busy == pytest.approx(1.0)
    recorded.tell(of.BatchRequested(), after=30.0)
    assert recorded.engine("a").busy == pytest.approx(0.5, abs=0.1)
    assert recorded.engine("b").busy == 0.0
    recorded.tell(of.BatchRequested(), after=1_000.0)
    assert recorded.engine("a").tokens_per_s == pytest.approx(0.0, abs=0.2)
    assert recorded.seen.utilization == pytest.approx(200 / 1230 / 2)


def test_batches_give_efficiency_staleness_and_an_estimate_of_what_is_left():
    recorded = Received(batches=4)
    assert recorded.seen.left is None
    for index in range(2):
        recorded.launch(index)
        for request in (2 * index, 2 * index + 1):
            recorded.send(request)
            recorded.finish(request)
        if index:
            recorded.tell(of.UpdateFinished(version=index))
        recorded.tell(of.BatchRequested(), after=10.0)
        recorded.deliver(index, index, version=index)
    seen = recorded.seen
    assert (seen.batches, seen.version) == (2, 1)
    assert seen.left == pytest.approx(20.0)
    assert seen.recent is not None
    assert seen.recent.efficiency == pytest.approx(0.6)
    assert (seen.recent.staleness_mean, seen.recent.staleness_max) == (0.5, 1)
    recorded.tell(of.BatchRequested(), after=4.0)
    assert recorded.seen.left == pytest.approx(16.0)
    recorded.tell(of.BatchRequested(), after=400.0)
    assert recorded.seen.left == pytest.approx(10.0)
    recorded.tell(of.UpdateFinished(version=7))
    recorded.tell(of.UpdateFinished(version=8, cause="no disk"))
    assert recorded.seen.version == 7
    assert recorded.seen.fault == "version 8 was not loaded: no disk"


def test_a_batch_that_is_handed_over_again_counts_once():
    recorded = Received()
    recorded.launch(0)
    recorded.deliver(0, 0)
    batch = Batch(index=0, version=0, groups=())
    recorded.tell(facts.delivered(batch, again=True), after=5.0)
    assert recorded.seen.batches == 1
    assert recorded.seen.left == 0.0  # of batches that took no time


def test_a_process_that_goes_on_has_what_was_saved():
    recorded = Received()
    recorded.launch(0)
    recorded.send(0)
    recorded.grow(0, 5)
    recorded.tell(facts.opened("a", resumed=True))
    assert recorded.seen.in_flight == {}
    lengths = of.RestoredLengths(tokens=(5, 9), sampled=(5, 9), finished=(False, True))
    recorded.tell(
        of.GroupLaunched(group_id=0, rollout_ids=(0, 1), prompt_tokens=10, restored=lengths)
    )
    assert recorded.seen.in_flight == {"waiting for an engine": 1}
    recorded.model.skip(3)
    assert recorded.seen.batches == 3


def test_episodes_at_their_tools_are_told_apart():
    recorded = Received()
    recorded.launch(0)
    recorded.tell(of.EpisodeStarted(rollout_id=0), of.EpisodeStarted(rollout_id=1))
    assert recorded.seen.in_flight == {"using tools": 2}
    recorded.tell(of.TurnBegun(rollout_id=0, prompt_tokens=10))
    recorded.send(0)
    recorded.grow(0, 3, after=1.0)
    assert recorded.seen.in_flight == {"decoding": 1, "using tools": 1}
    recorded.tell(of.AttemptEnded(request_id=0, outcome="finished"))
    recorded.tell(of.TurnEnded(rollout_id=0, tokens=3, finish_reason="stop"))
    assert recorded.seen.in_flight == {"using tools": 2}
    recorded.tell(of.RolloutFinished(rollout_id=0, group_id=0))
    recorded.tell(facts.dropped(0, 0, 1, reason="failed", cause="a tool"))
    assert recorded.seen.in_flight == {}
