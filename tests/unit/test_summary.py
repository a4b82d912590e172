"""Tests the figures of summary.json on cases that are small enough to compute by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from aprilsched.config import Pace
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.core.state.ledger import Counters, Entry, Ledger, Reason
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.figures.summary import Remainder, Summary, default_burn_in
from aprilsched.types import Batch, Group, Prompt, Rollout
from tests.support import facts

PROMPT = Prompt(input_ids=np.array([1, 2, 3], dtype=np.int32))


def rollout(rollout_id: int, versions: Sequence[int], *, masked: int = 0) -> Rollout:
    """A rollout whose first `masked` tokens do not count in the loss."""
    mask = np.array(versions, dtype=np.int32) >= 0
    mask[:masked] = False
    ids: dict[str, Any] = {"rollout_id": rollout_id, "group_id": 100 + rollout_id}
    return facts.response(versions, **ids, prompt_ids=PROMPT.input_ids, loss_mask=mask)


def deliver(index: int, version: int, *rollouts: Rollout) -> of.BatchDelivered:
    groups = tuple(Group(group_id=r.group_id, prompt=PROMPT, rollouts=(r,)) for r in rollouts)
    return facts.delivered(Batch(index=index, version=version, units=groups))


def send(rollout_id: int) -> list[Fact]:
    group_id = 100 + rollout_id
    return [
        facts.launched(group_id, rollout_id, prompt_tokens=3),
        facts.sent(rollout_id, group_id, tokens=3),
    ]


OPENED = facts.opened("a", "b")

Step = tuple[float, Fact | Sequence[Fact]]


def summed(
    *steps: Step,
    in_flight: Sequence[int] = (),
    open_groups: Sequence[GroupLengths] = (),
    ledger: Ledger | None = None,
    workload_mean: float | None = None,
    burn_in: int | None = None,
) -> RunSummary:
    summary = Summary(
        bound=lambda prompts, lengths: sum(prompts) + sum(lengths) / 10,
        workload_mean=workload_mean,
        burn_in=burn_in,
    )
    for now, received in steps:
        summary.on_facts([received] if isinstance(received, Fact) else received, now)
    remainder = Remainder(
        in_flight=in_flight,
        counters=Counters(),
        ledger=ledger or Ledger(),
        open_groups=open_groups,
    )
    return summary.result(remainder, clock="virtual")


def two_batches(pace: Pace = "synchronous") -> RunSummary:
    """A run that opened at 10 s, with batches at 15 and 30 s, and 2 s of update and 3 s of trainer
    between them."""
    return summed(
        (10.0, replace(OPENED, pace=pace)),
        (10.0, of.BatchRequested()),
        (15.0, deliver(0, 0, rollout(1, [0] * 10), rollout(2, [0] * 30))),
        (16.0, of.UpdateBegun(version=1)),
        (18.0, of.UpdateFinished(version=1)),
        (20.0, of.BatchRequested()),
        (30.0, deliver(1, 1, rollout(3, [0] * 20 + [1] * 40), rollout(4, [1] * 20))),
    )


def test_two_batches_by_hand():
    """The seconds of a batch leave out the trainer that is waited for."""
    summary = two_batches()
    assert [b.seconds for b in summary.per_batch] == [5.0, 12.0]
    assert [b.trainer_seconds for b in summary.per_batch] == [0.0, 3.0]
    seconds = summary.seconds
    assert (seconds.trainer, seconds.update, seconds.wall) == (3.0, 2.0, 20.0)
    assert [b.seconds for b in two_batches("asynchronous").per_batch] == [5.0, 15.0]
    assert [b.tokens for b in summary.per_batch] == [40, 80]
    assert [b.t_bound for b in summary.per_batch] == [6 + 4.0, 6 + 8.0]
    assert summary.delivered_tokens_per_s == 120 / 20
    assert summary.efficiency == pytest.approx(24 / 17)
    assert summary.off_policy_token_share == pytest.approx(20 / 120)
    assert summary.staleness_mean == pytest.approx(20 / 120)
    assert summary.staleness_max == summary.staleness_max_trained == 1
    steady = summary.steady_state
    assert (steady.burn_in, steady.batches, steady.mean_length) == (1, 1, 40)
    assert steady.delivered_tokens_per_s == pytest.approx(80 / 15)
    assert steady.efficiency == pytest.approx(14 / 12)
    assert steady.off_policy_token_share == pytest.approx(20 / 80)
    assert [default_burn_in(n) for n in (0, 1, 7, 8, 40)] == [1, 1, 1, 2, 10]


def test_masked_and_environment_tokens():
    summary = summed(
        (0.0, OPENED),
        (1.0, deliver(0, 3, rollout(1, [0, 0, -1, -1, 3, 3], masked=2))),
    )
    assert summary.per_batch[0].tokens == 4
    assert summary.per_batch[0].mean_length == 6
    assert (summary.staleness_max, summary.staleness_max_trained) == (3, 0)


def test_bias_is_held_against_what_is_known():
    own = two_batches().bias
    assert own.delivered_mean_length_by_batch == [20, 40]
    assert own.first_batch_length_bias == pytest.approx(20 / 40 - 1)
    assert own.bias_estimate == pytest.approx(30 / 40 - 1)
    assert own.bias_reference == "run_after_burn_in"
    steps = [(float(i + 1), deliver(i, 0, rollout(i, [0] * 10))) for i in range(2)]
    known = summed((0.0, OPENED), *steps, workload_mean=8.0).bias
    assert known.bias_estimate == pytest.approx(0.25)
    assert known.bias_reference == "workload_mean"


def test_a_run_without_batches_has_no_figures_and_no_errors():
    summary = summed((0.0, OPENED))
    assert summary.batches == 0
    assert summary.delivered_tokens_per_s is None
    assert summary.efficiency is None
    assert summary.off_policy_token_share is None
    assert summary.bias.first_batch_length_bias is None
    assert summary.bias.bias_reference is None
    assert summary.steady_state.efficiency is None


def test_lost_and_duplicated_come_from_ids():
    ledger = Ledger()
    ledger.add(Entry(rollout_id=3, group_id=9, reason=Reason.STALE, cause="old", tokens=1, at=0.0))
    summary = summed(
        (0.0, OPENED),
        *((0.0, send(i)) for i in (1, 2, 3, 4, 5)),
        (1.0, facts.dropped(9, 3, reason="failed", cause="HTTP 500")),
        (2.0, deliver(0, 0, rollout(1, [0]))),
        (3.0, deliver(1, 0, rollout(1, [0]))),
        in_flight=[2, 6],
        ledger=ledger,
    )
    counted = summary.rollouts
    assert counted.launched == 6, "the sixth waits to be sent"
    assert counted.delivered == 1
    assert counted.in_flight == 2
    assert counted.dropped == {"stale": 1}
    assert counted.lost == 2, "4 and 5 are nowhere"
    assert counted.duplicated == 1


def test_pause_is_a_mean_over_engines_and_ends_with_a_lost_engine():
    summary = summed(
        (0.0, OPENED),
        (1.0, facts.changed("a", "running", "pausing", "paused", pause="retract")),
        (2.0, facts.changed("b", "running", "pausing", "paused", pause="retract")),
        (3.0, facts.changed("a", "paused", "continuing", "running")),
        (6.0, facts.lost("b", "gone")),
        (7.0, facts.changed("b", "paused", "continuing", "running")),
    )
    assert summary.seconds.pause == (2.0 + 4.0) / 2


def test_an_asked_burn_in_is_kept():
    steps = [(float(i + 1), deliver(i, 0, rollout(i, [0] * (i + 1)))) for i in range(4)]
    steady = summed((0.0, OPENED), *steps, burn_in=3).steady_state
    assert (steady.batches, steady.mean_length) == (1, 4)


def test_evaluations_are_distinguished():
    rollouts = deliver(0, 0, rollout(7, [0, 0])).rollouts
    evaluated = of.EvaluationDelivered(evaluation_id=1, version=0, rollouts=rollouts)
    summary = summed((0.0, OPENED), (1.0, evaluated))
    assert summary.rollouts.evaluated == summary.rollouts.delivered == 1
    assert summary.batches == 0


# --- bias ----------------------------------------------------------------------------------------


def finish(rollout_id: int) -> list[Fact]:
    return facts.ended(rollout_id, 100 + rollout_id)


def held(launched: int, tokens: Sequence[int], finished: Sequence[bool]) -> GroupLengths:
    return GroupLengths(
        launched=launched,
        tokens=np.array(tokens, dtype=np.int64),
        finished=np.array(finished, dtype=np.bool_),
    )


def drop(rollout_id: int, tokens: int, reason: Reason = Reason.STALE) -> of.GroupDropped:
    row = of.DroppedRollout(rollout_id=rollout_id, reason=reason, tokens=tokens)
    return of.GroupDropped(group_id=100 + rollout_id, reason=reason, cause="old", rollouts=(row,))


def test_the_drawn_law_counts_what_is_in_flight():
    """Three responses ended with 10, 20 and 30 tokens, and one in flight has 15: its mass of the
    distribution goes to 20 and 30."""
    bias = summed(
        (0.0, OPENED),
        *((0.0, send(i)) for i in (1, 2, 3, 4)),
        (1.0, deliver(0, 0, rollout(1, [0] * 10), rollout(2, [0] * 20))),
        open_groups=[held(104, [30, 15], [True, False])],
    ).bias
    assert bias.drawn is not None
    assert bias.delivered is not None
    expected = (10 + 20 + 30 + 25) / 4
    assert bias.drawn.mean == pytest.approx(expected)
    assert bias.drawn.responses == 4
    assert (bias.delivered.mean, bias.delivered.p50, bias.delivered.p99) == (15, 10, 20)
    assert bias.delivered_mean_length == 15, "what was there before is there still"


def test_the_transient_is_what_is_in_flight():
    bias = summed(
        (0.0, OPENED),
        *((0.0, send(i)) for i in (1, 2, 3, 4)),
        (1.0, deliver(0, 0, rollout(1, [0] * 10), rollout(2, [0] * 20))),
        open_groups=[held(103, [30, 15], [True, False])],
        workload_mean=20.0,
    ).bias.transient
    assert bias is not None
    assert (bias.mean, bias.reference) == (20.0, "workload_mean")
    assert bias.measured == pytest.approx(15 / 20 - 1)
    assert bias.predicted == pytest.approx(-2 * (27.5 / 20 - 1) / 2)
    assert bias.measured_by_batch == [bias.measured]
    # |2 * 0.375| / (0.01 * 2) batches, and one is there.
    assert bias.further_batches_to_1_percent == 38 - 1


def test_the_transient_by_batch_knows_what_was_launched_when():
    steps: list[Step] = [(0.0, OPENED)]
    # Groups 1, 4 and 7 with one rollout each: 2, 5 and 8.
    steps += [(0.0, send(2)), (0.0, send(5))]
    steps += [(1.0, deliver(0, 0, grouped(1, 2, 10)))]
    steps += [(1.0, send(8)), (2.0, deliver(1, 0, grouped(7, 8, 20)))]
    steps += [(3.0, deliver(2, 0, grouped(4, 5, 60)))]
    bias = summed(*steps, workload_mean=30.0).bias.transient
    assert bias is not None
    assert bias.predicted_by_batch == pytest.approx([-1.0, -0.5, 0])
    assert bias.measured_by_batch == pytest.approx([-2 / 3, -0.5, 0])
    assert bias.predicted == 0


def grouped(group_id: int, rollout_id: int, tokens: int) -> Rollout:
    return replace(rollout(rollout_id, [0] * tokens), group_id=group_id)


def test_environment_tokens_have_no_staleness_and_length_0_is_valid():
    rollouts = [rollout(i, [0, -1, 1] if i % 2 else []) for i in range(10)]
    summary = summed((0.0, OPENED), (1.0, deliver(0, 1, *rollouts)))
    assert (summary.mean_length, summary.staleness_mean) == (1.5, 0.5)


def test_drops_of_long_responses_are_named_with_their_effect():
    ledger = Ledger()
    ledger.rollouts.update({Reason.STALE: 8, Reason.REJECTED: 1})
    ledger.tokens.update({Reason.STALE: 240, Reason.REJECTED: 10})
    dropped = [drop(3, 10, Reason.REJECTED), *(drop(i, 30) for i in range(4, 12))]
    bias = summed(
        (0.0, OPENED),
        *((0.0, send(i)) for i in range(1, 12)),
        *((0.5, finish(i)) for i in range(1, 11)),
        (0.6, dropped),
        (1.0, deliver(0, 0, rollout(1, [0] * 20), rollout(2, [0] * 20))),
        ledger=ledger,
    ).bias
    assert bias.dropped_tokens == {"rejected": 10, "stale": 240}
    assert bias.drawn is not None
    assert bias.drawn.mean == pytest.approx((10 + 20 + 20 + 7 * 30 + 31) / 11), "11 was unfinished"
    assert bias.censoring.policies == ["stale"]
    assert bias.censoring.effect == pytest.approx(20 / 28 - 1)
    assert bias.censoring.warning is not None
    assert summed((0.0, OPENED)).bias.censoring.policies == []


def test_a_prompt_that_was_generated_again_counts_once():
    bias = summed(
        (0.0, OPENED),
        *((0.0, send(i)) for i in (1, 2)),
        (0.5, drop(2, 90, Reason.BEGUN_AGAIN)),
        (1.0, deliver(0, 0, rollout(1, [0] * 20))),
    ).bias
    assert bias.drawn is not None
    assert (bias.drawn.mean, bias.drawn.responses) == (20, 1)


def test_an_episode_has_finished_when_it_says_so():
    start = [of.EpisodeStarted(rollout_id=i) for i in (3, 4)]
    steps = [(0.0, OPENED), (0.0, send(3)), (0.0, send(4)), (0.0, start)]
    answered = of.TurnEnded(rollout_id=4, tokens=0, finish_reason="stop")
    bias = summed(
        *steps,
        *((1.0, of.AttemptEnded(request_id=i, outcome="finished")) for i in (3, 4)),
        (1.0, answered),
        (2.0, of.RolloutFinished(rollout_id=4, group_id=104)),
        (2.5, [drop(3, 30), drop(4, 30)]),
        (3.0, deliver(0, 0, rollout(1, [0] * 10))),
    ).bias
    assert bias.drawn is not None
    assert bias.drawn.mean == pytest.approx((10 + 30 + 31) / 3)


def test_a_drop_that_was_not_saved_is_taken_back_by_the_process_that_resumes():
    lengths = of.RestoredLengths(tokens=(20,), sampled=(20,), finished=(False,))
    again = of.GroupLaunched(group_id=103, rollout_ids=(3,), prompt_tokens=3, restored=lengths)
    steps: list[Step] = [(0.0, OPENED), (0.0, send(3)), (1.0, drop(3, 30))]
    end = (2.0, deliver(0, 0, rollout(1, [0] * 10)))
    before = summed(*steps, end).bias.drawn
    assert before is not None
    assert before.responses == 2
    resumed = facts.opened("a", "b", resumed=True)
    after = summed(*steps, (1.5, [resumed, again]), end).bias.drawn
    assert after is not None
    assert after.responses == 1
