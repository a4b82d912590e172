"""Tests that silent and slow engines are detected by their tokens and are lost."""

from __future__ import annotations

import numpy as np
import pytest

from aprilsched.config import Health
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.engine_health import EngineHealth, Window
from aprilsched.types import Prompt, SamplingParams
from tests.support.driver import Driver, config, names

LONG = SamplingParams(max_new_tokens=1_000_000)


def driver(engines: tuple[str, ...] = ("a", "b"), **changes: object) -> Driver:
    values: dict[str, object] = {"health": Health(stall_s=60), **changes}
    settings = config(batch_groups=4, sampling=LONG, **values)
    fleet = Driver(settings, engines=engines)
    fleet.feed(ev.Tick())
    return fleet


def generate(driver: Driver, seconds: int, *, each: dict[str, int]) -> list[do.Command]:
    """Let every open request of an engine get tokens at a rate, for a number of seconds."""
    commands: list[do.Command] = []
    for _ in range(seconds):
        started_at = driver.now
        for key, send in list(driver.sends.items()):
            if each.get(send.engine):
                driver.progress(key, each[send.engine])
        driver.now = started_at + 0.999  # the driver adds a thousandth to every event
        commands += driver.feed(ev.Tick())
    return commands


def causes(driver: Driver) -> list[str]:
    return [f"{loss.engine}: {loss.cause}" for loss in driver.lost]


# --- silence -------------------------------------------------------------------------------------


def test_an_engine_without_a_token_for_a_minute_is_lost_and_its_requests_go_elsewhere():
    fleet = driver()
    generate(fleet, 5, each={"a": 3, "b": 3})
    held = sum(send.engine == "b" for send in fleet.sends.values())
    generate(fleet, 58, each={"a": 1})
    assert not fleet.lost
    generate(fleet, 2, each={"a": 1})
    assert causes(fleet) == [f"b: no token for 60 s from {held} open requests"]
    assert {send.engine for send in fleet.sends.values()} == {"a"}
    moved = [send for send in fleet.sends.values() if send.attempt == 2]
    assert len(moved) == held
    assert {len(send.input_ids) for send in moved} == {2 + 15}


def test_one_token_of_one_request_is_a_sign_of_life():
    fleet = driver()
    for _ in range(4):
        generate(fleet, 50, each={"a": 1})
        fleet.progress(fleet.on("b")[0], 1)
    assert not fleet.lost


def test_a_pause_does_not_count_and_the_clock_starts_again_when_it_ends():
    fleet = driver()
    generate(fleet, 50, each={})
    fleet.feed(ev.UpdateRequested(version=1))
    fleet.settle_controls()
    generate(fleet, 500, each={})
    fleet.settle()
    assert fleet.state.weights.versions.trainer == 1
    generate(fleet, 60, each={})
    assert not fleet.lost, "16 prompts of two tokens are prefilled again"
    generate(fleet, 1, each={})
    assert len(fleet.lost) == 2


def test_an_idle_engine_is_not_silent_and_its_clock_starts_with_the_next_request():
    fleet = driver(pace="synchronous", over_provision=1.0)
    generate(fleet, 500, each={})
    fleet.request_batch()
    generate(fleet, 50, each={})
    fleet.finish_each(fleet.attempts())
    generate(fleet, 500, each={})
    fleet.request_batch()
    generate(fleet, 59, each={})
    assert fleet.sends
    assert not fleet.lost


def test_a_trainer_that_holds_the_event_loop_up_makes_no_engine_silent():
    fleet = driver()
    for _ in range(20):
        fleet.now += 100.0
        fleet.feed(ev.Tick())
    assert not fleet.lost, "each late tick counts for two seconds"


def test_a_long_prefill_does_not_count_as_silence():
    prompts = tuple(Prompt(input_ids=np.zeros(20_000, dtype=np.int32)) for _ in range(8))
    fleet = Driver(config(batch_groups=4), engines=("a",), auto_prompts=False)
    fleet.feed(ev.PromptsArrived(prompts=prompts))
    fleet.feed(ev.Tick())
    assert len(fleet.sends) == 16
    generate(fleet, 60 + 79, each={})
    assert not fleet.lost, "16 prompts of 20,000 tokens at 4,000 tokens/s take 80 s"
    generate(fleet, 1, each={})
    assert causes(fleet) == ["a: no token for 140 s from 16 open requests"]


def test_what_a_refit_flushed_is_prefilled_again_and_that_takes_its_time():
    fleet = driver(engines=("a",))
    fleet.progress_each(fleet.attempts(), 10_000)
    fleet.update()
    generate(fleet, 60 + 39, each={})
    assert not fleet.lost, "16 contexts of 10,000 tokens"
    generate(fleet, 2, each={})
    assert len(fleet.lost) == 1


# --- slowness ------------------------------------------------------------------------------------

FAST = {"a": 50, "b": 50, "c": 50}


def three(**changes: object) -> Driver:
    fleet = driver(("a", "b", "c"), **changes)
    generate(fleet, 60, each=FAST)
    assert not fleet.lost
    return fleet


def test_an_engine_that_slows_to_a_tenth_is_lost_with_the_figures():
    fleet = three()
    generate(fleet, 46, each={**FAST, "b": 5})
    assert causes(fleet) == [
        "b: slow: 5 tokens/s a request, where 50 are usual for it and 50 for the others"
    ]
    assert {send.engine for send in fleet.sends.values()} == {"a", "c"}


def test_half_the_usual_rate_is_slow_only_where_the_share_says_so():
    slower = {**FAST, "b": 20}
    fleet = three()
    generate(fleet, 100, each=slower)
    assert not fleet.lost
    fleet = three(health=Health(stall_s=60, slow_share=0.5))
    generate(fleet, 46, each=slower)
    assert [loss.engine for loss in fleet.lost] == ["b"]
    fleet = three(health=Health(stall_s=60, slow_share=0.0))
    generate(fleet, 100, each={**FAST, "b": 1})
    assert not fleet.lost


def test_a_slowness_of_all_is_none_of_one():
    fleet = three()
    commands = generate(fleet, 100, each={"a": 4, "b": 4, "c": 4})
    assert not fleet.lost
    assert "EngineSlow" not in names(commands)


def test_an_engine_that_was_always_slower_is_not_lost():
    uneven = {"a": 50, "b": 50, "c": 4}
    fleet = driver(("a", "b", "c"))
    generate(fleet, 100, each=uneven)
    assert not fleet.lost


def test_one_slow_window_is_not_enough():
    fleet = three()
    for _ in range(5):
        generate(fleet, 16, each={**FAST, "b": 2})
        generate(fleet, 31, each=FAST)
    assert not fleet.lost


def test_the_only_engine_is_warned_about_once_until_it_recovers_and_stays():
    fleet = driver(("a",), over_provision=1.0)
    generate(fleet, 60, each={"a": 50})
    commands = generate(fleet, 20, each={"a": 2})
    assert [c for c in commands if isinstance(c, facts.EngineSlow)] == [
        facts.EngineSlow(engine="a", cause="2 tokens/s a request, where 50 are usual for it")
    ]
    assert "EngineSlow" not in names(generate(fleet, 20, each={"a": 2}))
    generate(fleet, 60, each={"a": 50})
    assert "EngineSlow" in names(generate(fleet, 32, each={"a": 2}))
    assert not fleet.lost


def test_what_is_usual_outlives_the_loss_so_one_that_comes_back_slow_is_found_again():
    fleet = three()
    fleet.feed(ev.EngineLost(engine="b", cause="gone"))
    fleet.come_back("b")
    fleet.finish_each(fleet.attempts())
    fleet.request_batch()
    assert {send.engine for send in fleet.sends.values()} == {"a", "b", "c"}
    generate(fleet, 46, each={**FAST, "b": 5})
    assert [loss.engine for loss in fleet.lost] == ["b", "b"]


def test_a_lighter_load_is_not_held_against_a_heavier_one():
    health = EngineHealth()
    health.learn(Window(rate=200.0, fair=200.0, octave=1))
    assert health.usual_at(1) == 200.0
    assert health.usual_at(8) is None, "no window had a load of this octave"
    health.learn(Window(rate=30.0, fair=30.0, octave=8))
    assert health.usual_at(5) == 30.0


def test_requests_that_wait_inside_the_engine_do_not_make_it_slow():
    health = EngineHealth(max_running=10)
    health.advance(15.0, 100)
    health.tokens = 15 * 10 * 40
    window = health.window(now=15.0)
    assert window is not None
    assert window.rate == pytest.approx(40.0)


def test_work_is_counted_as_it_changes_and_not_in_pauses():
    health = EngineHealth()
    for until, requests in ((5.0, 100), (500.0, 0), (501.0, 10), (510.0, 4)):
        health.advance(until, requests)
    health.tokens = 5 * 100 + 1 * 10 + 9 * 4
    window = health.window(now=510.0)
    assert window is not None
    assert window.rate == pytest.approx(1.0)
    assert health.window(now=511.0) is None


def test_context_to_be_prefilled_is_allowed_for():
    health = EngineHealth(pending_prefill=30_000, tokens=150)
    health.advance(15.0, 1)
    window = health.window(now=15.0)
    assert window is not None
    assert window.fair == pytest.approx(20.0), "half of it went by with prefill"
    health.pending_prefill = 60_000
    health.advance(30.0, 1)
    window = health.window(now=30.0)
    assert window is not None
    assert window.fair is None
