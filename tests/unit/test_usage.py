"""Tests the usage of an engine's time, second by second, on events written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.telemetry.run_state import RunState
from aprilsched.telemetry.usage.engine_usage import EngineUsage
from aprilsched.telemetry.usage.parts import PARTS, Part, Stretch, seconds_by_part
from aprilsched.types import Batch, Group, Prompt, Rollout, SamplingParams, Score
from tests.support.driver import Driver, config
from tests.support.told import Told

PROMPT = Prompt(input_ids=np.array([1, 2], dtype=np.int32))
SAMPLING = SamplingParams(max_new_tokens=100)


class WrittenRun:
    """A run of one engine with batches of one group of two, written step by step."""

    def __init__(self, *engines: str) -> None:
        self.run = RunState(batch_groups=1)
        self._told = Told(self.run)
        self.now = 0.0
        infos = tuple(ev.EngineInfo(name=name, version=0) for name in engines or ("a",))
        self.tell(ev.Opened(engines=infos), ev.BatchRequested())

    def tell(self, *things: Event | Command) -> None:
        for thing in things:
            self._told.tell(thing, self.now)

    def after(self, seconds: float, *things: Event | Command) -> None:
        self.now += seconds
        self.tell(*things)

    @property
    def engines(self) -> dict[str, EngineUsage]:
        self._told.flush()
        return self.run.engine_usage

    def parts(self, engine: str = "a") -> dict[Part, float]:
        """The parts that are not zero."""
        self._told.flush()
        self.run.advance(self.now)
        one = self.engines[engine]
        assert one.wall == pytest.approx(self.now)
        return {part: seconds for part, seconds in one.seconds.items() if seconds > 1e-12}


def launch(group_id: int = 0, size: int = 2) -> list[Command]:
    ids = tuple(group_id * 10 + i for i in range(size))
    return [
        do.Launch(group_id=group_id, rollout_ids=ids, prompt=PROMPT),
        *(send(i, group_id=group_id) for i in ids),
    ]


def send(request: int, *, group_id: int = 0, attempt: int = 1, engine: str = "a") -> do.Send:
    return do.Send(
        engine=engine,
        request_id=request,
        attempt=attempt,
        rollout_id=request,
        group_id=group_id,
        input_ids=PROMPT.input_ids,
        sampling=SAMPLING,
    )


def chunk(request: int, tokens: int = 1, attempt: int = 1) -> ev.Progress:
    return ev.Progress(
        request_id=request,
        attempt=attempt,
        token_ids=np.zeros(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, dtype=np.float32),
    )


def finished(request: int) -> ev.Finished:
    return ev.Finished(request_id=request, attempt=1, reason="stop")


def rollout(rollout_id: int, *, group_id: int = 0, index: int = 0) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        index=index,
        prompt_ids=PROMPT.input_ids,
        token_ids=np.zeros(0, dtype=np.int32),
        logprobs=np.zeros(0, dtype=np.float32),
        versions=np.zeros(0, dtype=np.int32),
        loss_mask=np.zeros(0, dtype=np.bool_),
        segments=(),
        versions_exact=True,
        finish_reason="stop",
        reward=None,
    )


def delivered(group_id: int = 0, size: int = 2) -> do.Deliver:
    rollouts = tuple(rollout(group_id * 10 + i, group_id=group_id, index=i) for i in range(size))
    group = Group(group_id=group_id, prompt=PROMPT, rollouts=rollouts)
    return do.Deliver(batch=Batch(index=0, version=0, groups=(group,)))


def test_a_batch_from_prefill_to_its_tail():
    written = WrittenRun()
    written.tell(*launch())
    written.after(1, chunk(0), chunk(1))
    written.after(2, finished(0))
    written.after(4, finished(1), delivered())
    assert written.parts() == {"prefill": 1, "decode": 2 + 2, "tail": 2}


def test_a_ready_batch_waits_for_the_trainer():
    written = WrittenRun()
    written.tell(*launch())
    written.after(1, chunk(0), chunk(1), finished(0), finished(1), delivered())
    written.after(5, ev.BatchRequested())
    assert written.parts() == {"prefill": 1, "trainer": 5}


def test_a_batch_waits_for_prompts():
    written = WrittenRun()
    written.tell(do.FetchPrompts(count=1))
    written.after(3, ev.PromptsArrived(prompts=(PROMPT,)), *launch(size=1))
    written.after(1, chunk(0))
    assert written.parts() == {"prompts": 3, "prefill": 1}


def test_a_source_that_has_ended_leaves_slots_empty():
    written = WrittenRun()
    written.tell(do.FetchPrompts(count=1), ev.PromptsArrived(prompts=(PROMPT,), last=True))
    written.tell(*launch(), chunk(0), chunk(1), finished(0))
    written.after(2, finished(1))
    assert written.parts() == {"decode": 1, "prompts": 1}


def test_a_batch_waits_for_rewards_only_when_nothing_else_is_missing():
    written = WrittenRun()
    written.tell(*launch())
    written.tell(chunk(0), chunk(1))
    written.tell(finished(0), do.ScoreRollout(rollout=rollout(0), prompt=PROMPT))
    written.after(2, finished(1), do.ScoreRollout(rollout=rollout(1, index=1), prompt=PROMPT))
    written.after(3, ev.Rewarded(rollout_id=0, score=Score(reward=1.0)))
    written.after(4, ev.Rewarded(rollout_id=1, score=Score(reward=1.0)), delivered())
    assert written.parts() == {"decode": 1, "tail": 1, "rewards": 7}


@pytest.mark.parametrize("kind", ["rewards of a group", "a verdict"])
def test_groups_wait_too(kind: str):
    group = Group(group_id=0, prompt=PROMPT, rollouts=())
    asked, answer = {
        "rewards of a group": (
            do.ScoreGroup(group=group),
            ev.GroupRewarded(group_id=0, scores=(Score(reward=1.0),) * 2),
        ),
        "a verdict": (do.Filter(group=group), ev.Filtered(group_id=0, accepted=True)),
    }[kind]
    written = WrittenRun()
    written.tell(*launch(), chunk(0), chunk(1), finished(0), finished(1), asked)
    written.after(3, answer)
    written.after(1)
    assert written.parts() == {"rewards": 3, "tail": 1}


def test_a_dropped_group_is_not_waited_for():
    written = WrittenRun()
    written.tell(*launch(), chunk(0), chunk(1), finished(0), finished(1))
    written.tell(do.ScoreRollout(rollout=rollout(0), prompt=PROMPT))
    written.after(1, do.CancelWork(group_id=0, rollout_ids=(0, 1), reason="stale", cause="y"))
    written.after(1)
    assert written.parts() == {"rewards": 1, "tail": 1}


def test_a_pause_a_refit_and_what_follows():
    written = WrittenRun()
    written.tell(*launch(), chunk(0), chunk(1))
    written.tell(ev.UpdateRequested(version=1), do.Pause(engine="a", mode="retract"))
    written.after(1, ev.Paused(engine="a"), do.Refit(version=1, engines=("a",)))
    written.after(2, ev.Refitted(engine="a", version=1), do.Continue(engine="a"))
    written.after(0.5, ev.Continued(engine="a"), do.FinishUpdate(version=1))
    assert written.engines["a"].version == 1
    written.after(4, chunk(0))
    written.after(2, chunk(1))
    assert written.parts() == {"pause": 1.5, "refit": 2, "re_prefill": 4 + 1, "decode": 1}


def test_kv_that_was_kept_is_not_prefilled_again():
    written = WrittenRun()
    written.tell(*launch(), chunk(0), chunk(1))
    written.tell(do.Pause(engine="a", mode="in_place"))
    written.after(1, ev.Continued(engine="a"))
    written.after(2)
    assert written.parts() == {"pause": 1, "decode": 2}
    written.tell(do.Pause(engine="a", mode="in_place"), do.Flush(engine="a"))
    written.tell(ev.Continued(engine="a"))
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
    for run in (driver.run, driver.retold):
        seconds = run.engine_usage["a"].seconds
        assert seconds["pause"] >= 5
        assert seconds["trainer"] == 0


def test_an_engine_paused_between_batches_waits_for_the_trainer():
    written = WrittenRun()
    written.tell(*launch(), chunk(0), chunk(1), finished(0), finished(1), delivered())
    written.tell(do.Pause(engine="a", mode="retract"), ev.Paused(engine="a"))
    written.after(7, ev.BatchRequested(), do.Continue(engine="a"))
    written.after(1, ev.Continued(engine="a"))
    assert written.parts() == {"trainer": 7, "pause": 1}


def test_an_engine_that_has_nothing_waits_for_the_trainer_unpaused():
    written = WrittenRun("a", "b")
    written.tell(*launch(), *launch(group_id=1), *(chunk(i) for i in (0, 1, 10, 11)))
    written.tell(finished(0), finished(1), delivered(), do.Pause(engine="a", mode="retract"))
    written.after(7, ev.BatchRequested(), ev.Continued(engine="a"))
    written.after(1)
    assert written.parts("b") == {"trainer": 7, "tail": 1}


def test_an_asynchronous_pace_has_tails_while_the_trainer_trains():
    written = WrittenRun()
    written.tell(*launch(), chunk(0), chunk(1), finished(0), finished(1), delivered())
    # What is begun before anybody asks shows which pace it is.
    written.tell(*launch(group_id=1), chunk(10), chunk(11), finished(10))
    written.after(2, finished(11))
    written.after(3)
    assert written.parts() == {"decode": 1, "tail": 1, "trainer": 3}


def test_an_adapter_is_loaded_while_requests_run():
    written = WrittenRun()
    written.tell(*launch(), chunk(0), chunk(1), ev.UpdateRequested(version=1, adapter=True))
    written.tell(do.Refit(version=1, engines=("a",), adapter=True))
    written.after(2, ev.Refitted(engine="a", version=1))
    assert written.parts() == {"decode": 2}


def test_an_engine_asleep():
    written = WrittenRun()
    written.tell(do.Pause(engine="a", mode="retract"), ev.Paused(engine="a"))
    written.tell(do.Release(engine="a", tags=("kv_cache", "weights")))
    written.after(
        5, do.Wake(engine="a", tags=("weights",)), ev.Woken(engine="a", tags=("weights",))
    )
    written.after(1, ev.Woken(engine="a", tags=("kv_cache",)))
    written.after(0.5, ev.Continued(engine="a"))
    written.after(1)
    assert written.parts() == {"asleep": 6, "pause": 0.5, "tail": 1}


def test_an_engine_that_is_lost_and_comes_back():
    written = WrittenRun("a", "b")
    written.tell(*launch(), chunk(0), chunk(1))
    written.after(2, do.LoseEngine(engine="a", cause="burnt", last=False))
    assert written.engines["a"].in_flight == 0
    written.after(3, ev.EngineJoined(info=ev.EngineInfo(name="a", version=0)))
    written.after(1, do.AdmitEngine(engine="a", version=0))
    written.after(1, send(0, attempt=2), send(1, attempt=2))
    written.after(1)
    assert written.parts() == {"decode": 2, "lost": 4, "tail": 1, "re_prefill": 1}


def test_an_engine_that_joins_late_is_counted_from_then_on():
    written = WrittenRun()
    written.after(5, ev.EngineJoined(info=ev.EngineInfo(name="b", version=0)))
    written.after(1, do.AdmitEngine(engine="b", version=0))
    written.after(2)
    written.parts("a")
    assert written.engines["b"].wall == pytest.approx(3)
    assert written.engines["b"].seconds["lost"] == pytest.approx(1)


def test_episodes_that_are_with_their_tools():
    written = WrittenRun()
    written.tell(do.Launch(group_id=0, rollout_ids=(0, 1), prompt=PROMPT))
    for i in (0, 1):
        written.tell(
            do.StartEpisode(rollout_id=i, index=i, prompt=PROMPT, sampling=SAMPLING),
            ev.TurnRequested(rollout_id=i, input_ids=PROMPT.input_ids),
            send(i),
            chunk(i),
        )
    resolved = do.ResolveTurn(
        rollout_id=0,
        token_ids=np.zeros(1, dtype=np.int32),
        logprobs=np.zeros(1, dtype=np.float32),
        versions=np.zeros(1, dtype=np.int32),
        finish_reason="stop",
    )
    written.after(2, finished(0), resolved)
    written.after(4, ev.TurnRequested(rollout_id=0, input_ids=PROMPT.input_ids), send(7))
    written.after(1, chunk(7))
    assert written.parts() == {
        "decode": 2 + 2 + 0.5,
        "environment": 2,
        "prefill": 0.5,
    }


def test_a_late_chunk_shows_that_most_of_the_wait_was_decoding():
    """The engine takes 0.1 s a token, and streams ten at a time."""
    written = WrittenRun()
    written.tell(*launch(size=1), chunk(0))
    written.after(1, chunk(0, tokens=10))
    written.tell(do.Pause(engine="a", mode="retract"), ev.Continued(engine="a"))
    written.after(1.5, chunk(0, tokens=10))
    assert written.parts() == {"decode": 2, "re_prefill": pytest.approx(0.5)}


def test_slots_are_those_of_the_fullest_time_so_far():
    written = WrittenRun()
    written.tell(*launch(size=1), chunk(0))
    written.after(2, *launch(group_id=1), chunk(10), chunk(11))
    written.after(3, finished(0))
    written.after(3)
    assert written.engines["a"].capacity == 3
    assert written.parts() == {"decode": 2 + 3 + 2, "tail": 1}


def test_a_new_process_begins_with_empty_engines():
    written = WrittenRun()
    written.tell(*launch(), chunk(0), chunk(1))
    written.after(2, ev.Opened(engines=(ev.EngineInfo(name="a", version=3),)), ev.BatchRequested())
    written.after(2)
    assert written.parts() == {"decode": 2, "tail": 2}


@pytest.mark.parametrize("state", ["generating", "paused", "refitting", "asleep", "lost"])
@pytest.mark.parametrize("counts", [(0, 0, 0), (3, 1, 2), (9, 4, 4)])
@pytest.mark.parametrize("environment", [0.0, 1.5, 99.0])
def test_the_parts_of_a_stretch_add_up(state: str, counts: Sequence[int], environment: float):
    decode, prefill, re_prefill = counts
    stretch = Stretch(
        engine="a",
        start=2.0,
        end=5.5,
        state=state,  # type: ignore[arg-type]
        idle="tail" if state == "generating" else "pause",
        decode=decode,
        prefill=prefill,
        re_prefill=re_prefill,
        environment=environment,
    )
    seconds = seconds_by_part(stretch, 8)
    assert len(seconds) == len(PARTS)
    assert min(seconds) >= 0
    assert sum(seconds) == pytest.approx(3.5)
