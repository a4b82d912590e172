"""Tests the usage of an engine's time, second by second, on facts written by hand."""

from __future__ import annotations

import pytest

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.observe.figures.engine_time import (
    EngineUsage,
    Part,
)
from aprilsched.observe.figures.run_state import RunState
from tests.support import facts
from tests.support.driver import Driver, config
from tests.support.facts import ABLE, changed, ended, opened, received, refitted, sent
from tests.support.table import each_row

BATCH_ASKED = of.BatchRequested()
PAUSED = (*changed("a", "running", "pausing", pause="retract"), *changed("a", "pausing", "paused"))
CONTINUED = changed("a", "paused", "continuing", "running")


class WrittenRun:
    """A run with batches of one group of two, written step by step."""

    def __init__(self, *engines: str, batch_units: int = 1) -> None:
        self.run = RunState(batch_units=batch_units)
        self.now = 0.0
        self.tell(opened(*engines or ("a",)), BATCH_ASKED)

    def tell(self, *recorded: Fact) -> None:
        self.run.on_facts(recorded, self.now)

    def after(self, seconds: float, *recorded: Fact) -> None:
        self.now += seconds
        if recorded:
            self.tell(*recorded)

    @property
    def engines(self) -> dict[str, EngineUsage]:
        return self.run.engines

    def parts(self, engine: str = "a") -> dict[Part, float]:
        """The parts that are not zero."""
        self.run.advance(self.now)
        one = self.engines[engine]
        assert one.wall == pytest.approx(self.now)
        return {part: seconds for part, seconds in one.parts.items() if seconds > 1e-12}


def launch(group_id: int = 0, size: int = 2) -> list[Fact]:
    """A group is launched and sent; the rollouts of group g are 10 g, 10 g + 1."""
    ids = tuple(group_id * 10 + i for i in range(size))
    return [facts.launched(group_id, *ids), *(sent(i, group_id) for i in ids)]


ACCEPTED = of.GroupAccepted(group_id=0)


def delivered(size: int = 2) -> list[Fact]:
    """The first group is accepted, and delivered as a batch."""
    rows = tuple(
        of.DeliveredRollout(rollout_id=i, group_id=0, prompt_tokens=2, tokens=1, segments=())
        for i in range(size)
    )
    return [ACCEPTED, of.BatchDelivered(batch=0, version=0, rollouts=rows)]


def test_a_batch_from_prefill_to_its_tail():
    written = WrittenRun()
    written.tell(*launch())
    written.after(1, received(0), received(1))
    written.after(2, *ended(0))
    written.after(4, *ended(1), *delivered())
    assert written.parts() == {"prefill": 1, "decode": 2 + 2, "tail": 2}


def test_a_source_that_has_ended_leaves_slots_empty():
    written = WrittenRun()
    written.tell(of.PromptsRequested(count=1), of.PromptsReceived(prompts=1, last=True))
    written.tell(*launch(), received(0), received(1), *ended(0))
    written.after(2, *ended(1))
    assert written.parts() == {"decode": 1, "prompts": 1}


def test_a_batch_waits_for_rewards_only_when_nothing_else_is_missing():
    written = WrittenRun()
    written.tell(*launch())
    written.tell(received(0), received(1))
    written.tell(*ended(0), of.RewardRequested(group_id=0, rollout_id=0))
    written.after(2, *ended(1), of.RewardRequested(group_id=0, rollout_id=1))
    written.after(3, of.RolloutScored(rollout_id=0, group_id=0, reward=1.0))
    written.after(4, of.RolloutScored(rollout_id=1, group_id=0, reward=1.0), *delivered())
    assert written.parts() == {"decode": 1, "tail": 1, "rewards": 7}


@each_row("kind", ["rewards of a group", "a verdict"])
def test_groups_wait_too(kind: str):
    asked = {
        "rewards of a group": of.RewardRequested(group_id=0),
        "a verdict": of.VerdictRequested(group_id=0),
    }[kind]
    written = WrittenRun()
    written.tell(*launch(), received(0), received(1), *ended(0), *ended(1), asked)
    written.after(3, ACCEPTED)
    written.after(1)
    assert written.parts() == {"rewards": 3, "tail": 1}


def test_a_verdict_on_one_sample_does_not_hold_back_three():
    written = WrittenRun(batch_units=3)
    written.tell(*launch(1, size=3), received(10), received(11), received(12))
    written.tell(*ended(10), *ended(11), of.SampleReady(rollout_id=10, group_id=1, siblings=(11,)))
    written.tell(of.VerdictRequested(group_id=10))
    written.after(3)
    assert written.parts() == {"decode": 1, "tail": 2}


def test_a_dropped_group_is_not_waited_for():
    written = WrittenRun()
    written.tell(*launch(), received(0), received(1), *ended(0), *ended(1))
    written.tell(of.RewardRequested(group_id=0, rollout_id=0))
    written.after(1, facts.dropped(0, 0, 1, reason="stale", cause="y"))
    written.after(1)
    assert written.parts() == {"rewards": 1, "tail": 1}


def test_a_pause_a_refit_and_what_follows():
    written = WrittenRun()
    written.tell(*launch(), received(0), received(1))
    written.tell(of.UpdateBegun(version=1), PAUSED[0])
    written.after(1, PAUSED[1], of.RefitBegun(version=1, engines=("a",)))
    written.tell(*changed("a", "paused", "refitting"))
    written.after(2, *refitted("a", 1), CONTINUED[0])
    written.after(0.5, CONTINUED[1], of.UpdateFinished(version=1))
    assert written.engines["a"].version == 1
    written.after(4, received(0))
    written.after(2, received(1))
    assert written.parts() == {"pause": 1.5, "refit": 2, "re_prefill": 4 + 1, "decode": 1}


def test_kv_that_was_kept_is_not_prefilled_again():
    written = WrittenRun()
    written.tell(*launch(), received(0), received(1))
    kept = changed("a", "running", "pausing", pause="in_place")
    written.tell(*kept, PAUSED[1])
    written.after(1, *CONTINUED)
    written.after(2)
    assert written.parts() == {"pause": 1, "decode": 2}
    written.tell(*kept, PAUSED[1], *changed("a", "paused", "flushing", "paused"), *CONTINUED)
    written.after(3)
    assert written.parts() == {"pause": 1, "decode": 2, "re_prefill": 3}


def test_a_refit_whose_caller_was_cancelled_is_a_pause_until_its_last_engine_has_answered():
    driver = Driver(config())
    driver.feed(ev.UpdateRequested(version=1))
    driver.settle_controls()
    driver.feed(ev.Refitted(engine="a", version=1))
    driver.feed(ev.UpdateWithdrawn(version=1))
    driver.now += 5
    driver.feed(ev.Refitted(engine="b", version=1))
    seconds = driver.run.engines["a"].parts
    assert seconds["pause"] >= 5
    assert seconds["trainer"] == 0


def test_an_engine_that_has_nothing_waits_for_the_trainer_unpaused():
    written = WrittenRun("a", "b")
    written.tell(*launch(), *launch(group_id=1), *(received(i) for i in (0, 1, 10, 11)))
    written.tell(*ended(0), *ended(1), *delivered(), *PAUSED)
    written.after(7, BATCH_ASKED, *CONTINUED)
    written.after(1)
    assert written.parts("b") == {"trainer": 7, "tail": 1}


def test_an_adapter_is_loaded_while_requests_run():
    written = WrittenRun()
    written.tell(*launch(), received(0), received(1), of.UpdateBegun(version=1, adapter=True))
    written.tell(of.RefitBegun(version=1, engines=("a",), adapter=True))
    written.after(2, of.EngineRefitted(engine="a", version=1))
    assert written.parts() == {"decode": 2}


def test_an_engine_that_is_lost_and_comes_back():
    written = WrittenRun("a", "b")
    written.tell(*launch(), received(0), received(1))
    written.after(2, *facts.lost("a", "burnt", 0, 1))
    assert written.engines["a"].in_flight == 0
    written.after(3, of.EngineJoined(info=ev.EngineInfo(name="a", version=0, able=ABLE)))
    written.after(1, of.EngineAdmitted(engine="a", version=0))
    written.after(1, sent(0, attempt=2), sent(1, attempt=2))
    written.after(1)
    assert written.parts() == {"decode": 2, "lost": 4, "tail": 1, "re_prefill": 1}


def test_an_engine_that_joins_late_is_counted_from_then_on():
    written = WrittenRun()
    written.after(5, of.EngineJoined(info=ev.EngineInfo(name="b", version=0, able=ABLE)))
    written.after(1, of.EngineAdmitted(engine="b", version=0))
    written.after(2)
    written.parts("a")
    assert written.engines["b"].wall == pytest.approx(3)
    assert written.engines["b"].parts["lost"] == pytest.approx(1)


def test_a_late_chunk_shows_that_most_of_the_wait_was_decoding():
    """The engine takes 0.1 s a token, and streams ten at a time."""
    written = WrittenRun()
    written.tell(*launch(size=1), received(0))
    written.after(1, received(0, 10))
    written.tell(*PAUSED, *CONTINUED)
    written.after(1.5, received(0, 10))
    assert written.parts() == {"decode": 2, "re_prefill": pytest.approx(0.5)}


def test_slots_are_those_of_the_fullest_time_so_far():
    written = WrittenRun()
    written.tell(*launch(size=1), received(0))
    written.after(2, *launch(group_id=1), received(10), received(11))
    written.after(3, *ended(0), ACCEPTED)
    written.after(3)
    assert written.engines["a"].capacity == 3
    assert written.parts() == {"decode": 2 + 3 + 2, "tail": 1}


def test_a_new_process_starts_with_empty_engines():
    written = WrittenRun()
    written.tell(*launch(), received(0), received(1))
    written.after(2, opened("a", version=3, resumed=True), BATCH_ASKED)
    written.after(2)
    assert written.parts() == {"decode": 2, "tail": 2}
