"""Tests the forecasts of automatic scheduling in the figures of batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.policies.schedule import Forecast
from aprilsched.observe.figures.batch_figures import BatchMeter
from aprilsched.observe.figures.figures import Figures, Measured

FORECAST = Forecast(
    step_seconds=5.0,
    efficiency=0.8,
    off_policy_share=0.25,
    token_seconds=0.01,
    read_seconds=1e-5,
)


def delivered(batch: int, tokens: int = 200) -> of.BatchDelivered:
    """Return one rollout with half of its tokens one version old."""
    half = tokens // 2
    rollout = of.DeliveredRollout(
        rollout_id=batch,
        group_id=batch,
        prompt_tokens=100,
        tokens=tokens,
        segments=((0, half, batch - 1, "sim"), (half, tokens, batch, "sim")),
    )
    return of.BatchDelivered(batch=batch, version=batch, rollouts=(rollout,))


def measured(meter: BatchMeter, at: float, fact: of.Fact) -> Measured | None:
    meter.on_facts([fact], at)
    return meter.latest


def test_a_batch_has_the_forecast_in_force_at_its_start() -> None:
    meter = BatchMeter()
    meter.on_facts([of.RunOpened(engines=(), version=0), of.BatchRequested()], 0.0)
    changed = of.ScheduleChanged(schedule="a wave: good", forecast=FORECAST, refill="wave")
    meter.on_facts([of.BatchRequested()], 1.0)
    meter.on_facts([changed], 2.0)
    first = measured(meter, 4.0, delivered(1))
    assert first is not None
    assert first.forecast is None, "the forecast came too late"
    better = replace(FORECAST, efficiency=0.9)
    meter.on_facts([of.BatchRequested()], 4.0)
    meter.on_facts([of.ScheduleChanged(schedule="a pool", forecast=better)], 7.0)
    second = measured(meter, 10.0, delivered(2))
    assert second is not None
    found = second.forecast
    assert found is not None
    assert (found.schedule, found.efficiency_forecast) == ("a wave: good", 0.8)
    assert (found.seconds, found.seconds_forecast) == (6.0, 5.0)
    assert found.efficiency == pytest.approx((0.01 * 200 + 1e-5 * 200 * (100 + 100)) / 6)
    assert (found.off_policy_token_share, found.off_policy_token_share_forecast) == (0.5, 0.25)
    assert second.figures.efficiency is None, "no model was given"
    meter.on_facts([of.BatchRequested()], 10.0)
    third = measured(meter, 12.0, delivered(3))
    assert third is not None
    assert third.forecast is not None
    assert third.forecast.efficiency_forecast == 0.9
    together = Figures.over([first, second, third]).forecast
    assert together is not None
    assert together.batches == 2
    assert together.seconds == 4.0
    assert together.efficiency == pytest.approx(2 * (2 + 0.4) / 8)
    assert together.efficiency_forecast == pytest.approx(0.85)
    assert Figures.over([first]).forecast is None


def test_a_forecast_does_not_outlive_its_process() -> None:
    meter = BatchMeter()
    meter.on_facts([of.RunOpened(engines=(), version=0)], 0.0)
    meter.on_facts([of.ScheduleChanged(schedule="a wave", forecast=FORECAST)], 0.0)
    meter.on_facts([of.RunOpened(engines=(), version=0, resumed=True)], 100.0)
    batch = measured(meter, 104.0, delivered(1))
    assert batch is not None
    assert batch.forecast is None
