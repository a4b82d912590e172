"""Tests the figures, the log and the views of runs that deliver single samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from aprilsched import LongTailWorkload, SchedulerConfig, SimFleet
from aprilsched.__main__ import main
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.shell import RolloutScheduler
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.live import LiveView, RunFacts
from aprilsched.observe.log.lengths_of_run import known_lengths
from aprilsched.observe.log.rebuild import rebuilt_summary, written_summary
from aprilsched.observe.report.page import write_report
from aprilsched.simulation import Costs, simulate
from aprilsched.simulation.engine import run_virtual

SAMPLES = SchedulerConfig(
    batch_groups=4, group_size=8, delivery="samples", siblings=4, over_provision=2.0
)
BATCH = 32
WORKLOAD = LongTailWorkload(seed=1, group_size=8, median=100, cap=1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 batches, whose trainer leaves some groups partly delivered."""
    out = tmp_path_factory.mktemp("samples") / "run"
    arguments = "--delivery samples --siblings 4 --batch-groups 4 --over-provision 2 --batches 6"
    sizes = "--median 100 --cap 1000"
    assert main(["run", *arguments.split(), *sizes.split(), "--quiet", "--out", str(out)]) == 0
    return out


def test_the_law_counts_each_response_once(folder: Path):
    written, rebuilt = written_summary(folder), rebuilt_summary(folder)
    assert written is not None
    assert written.bias.drawn is not None
    assert written.rollouts.launched > written.rollouts.delivered == 6 * BATCH
    assert written.bias.drawn.responses == written.rollouts.launched
    assert written.bias.drawn == rebuilt.bias.drawn
    transient = written.bias.transient
    assert transient is not None
    # At the synchronous pace nothing is launched after the last batch.
    assert transient.predicted == pytest.approx(transient.predicted_by_batch[-1])


def test_a_log_has_every_length_of_partly_delivered_groups(folder: Path):
    groups, summary = known_lengths(folder), written_summary(folder)
    assert summary is not None
    assert {len(group.tokens) for group in groups} == {8}
    assert 8 * len(groups) == summary.rollouts.launched
    delivered = sum(batch.tokens for batch in summary.per_batch)
    finished = sum(int(group.tokens[group.finished].sum()) for group in groups)
    assert delivered < finished < summary.tokens.generated
    assert len({len(g.tokens[g.finished]) for g in groups}) > 1


def test_a_random_batch_has_as_many_responses(folder: Path):
    summary = written_summary(folder)
    assert summary is not None
    later = [batch.iid_length_distance or 0.0 for batch in summary.per_batch[2:]]
    # At least 0.869 / sqrt(32), as for independent responses.
    assert all(0.13 < found < 0.35 for found in later)


def test_engines_wait_for_rewards_before_the_first_batch():
    costs = Costs(reward_seconds=1000.0)
    found = simulate(WORKLOAD, replace(SAMPLES, over_provision=1.0), costs=costs, batches=1)
    assert found.usage is not None
    assert found.usage.shares["rewards"] > 0.9


@pytest.mark.parametrize("delivery", ["groups", "samples"])
def test_a_streamed_batch_is_trained_on_for_its_seconds(delivery: Literal["groups", "samples"]):
    config = replace(SAMPLES, delivery=delivery, siblings=None)
    costs = Costs(train_seconds=500.0)
    found = simulate(WORKLOAD, config, costs=costs, batches=3, streamed=True)
    assert 1300 < found.step_s.sum() < 1600


def test_the_live_view_counts_samples():
    figures = LiveFigures(batch_units=SAMPLES.batch_units, clock=None)
    console = Console(width=100, record=True, force_terminal=False)
    view = LiveView(console, RunFacts(title="run", batches=2, batch_units=BATCH), figures)
    shown: set[str] = set()

    class Looking:
        def on_facts(self, facts: Sequence[of.Fact], now: float) -> None:
            if any(isinstance(fact, of.SampleReady) for fact in facts):
                console.print(view.frame())
                shown.update(console.export_text().splitlines())

    async def program() -> None:
        async with RolloutScheduler(
            SimFleet(1),
            WORKLOAD,
            reward=lambda rollout, prompt: 1.0,
            config=SAMPLES,
            listeners=[*view.listeners, Looking()],
        ) as rollouts:
            await rollouts.next_batch()

    run_virtual(program())
    ready = [line for line in shown if "samples ready" in line]
    assert len(ready) > 3
    assert all(f"of {BATCH} samples ready" in line for line in ready)
    assert any("complete" in line for line in shown)


def test_prompts_that_end_early_are_not_a_failure(tmp_path: Path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "run"
    row = {"input_ids": [1, 2], "sampling": {"max_new_tokens": 9}}
    prompts.write_text("".join(json.dumps(row) + "\n" for _ in range(10)))
    arguments = ["--prompts", str(prompts), "--batch-groups", "4", "--batches", "4", "--quiet"]
    assert main(["run", "--delivery", "samples", *arguments, "--out", str(out)]) == 0
    summary = written_summary(out)
    assert summary is not None
    assert (summary.batches, summary.rollouts.delivered, summary.error) == (3, 80, None)


def test_a_report_names_the_delivery(folder: Path):
    page, _ = write_report(folder)
    assert "delivery = samples, siblings = 4" in page.read_text()


def test_units_of_a_configuration():
    assert SAMPLES.batch_units == BATCH
    assert replace(SAMPLES, delivery="groups", siblings=None).batch_units == 4
