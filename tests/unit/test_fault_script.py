"""Tests fault scripts: what is accepted, what is refused, and when each fault happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from aprilsched.engines.sim.settings import SimConfig
from aprilsched.engines.sim.sim_engine import SimEngine
from aprilsched.errors import ConfigError
from aprilsched.testing.app import app_of
from aprilsched.testing.faults import Faults, FaultScript, Fired, faults_of, parse_faults
from aprilsched.testing.faults.kinds import (
    GROUPS,
    KINDS,
    PATHS,
    STEERING,
    Delay,
    Die,
    Drop,
    Fault,
    Silence,
    Status,
)
from aprilsched.testing.served import ServedEngine

GENERATE = "/generate"
MANUAL = Path(__file__).resolve().parents[2] / "docs" / "faults.md"


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def faults(*entries: dict[str, Any], seed: int = 0) -> tuple[Faults, Clock]:
    """The faults of a script, begun on a clock of their own."""
    clock, made = Clock(), Faults(faults_of({"seed": seed, "fault": list(entries)}))
    made.begin(clock)
    return made, clock


def which(made: Faults, calls: int, route: str = GENERATE, **how: bool) -> list[int]:
    """The numbers, from 1, of the calls that a fault meets at once."""
    met = ((number, made.meet(route, **how)) for number in range(1, calls + 1))
    return [number for number, mets in met if mets and all(one.fire() for one in mets)]


# -- reading ------------------------------------------------------------------------------------


def test_a_script_is_read():
    script = parse_faults(
        """
        seed = 7
        [[fault]]
        kind = "delay"
        seconds = 2
        routes = ["/pause_generation", "updates"]
        at = 5
        until = 60.5
        after = 3
        every = 2
        probability = 0.5
        times = 4
        engines = [0, 2]
        [[fault]]
        kind = "drop"
        after_tokens = 100
        """
    )
    assert script.seed == (7,)
    assert script.faults == (
        Delay(
            seconds=2.0,
            routes=("/pause_generation", "updates"),
            at=5.0,
            until=60.5,
            after=3,
            every=2,
            probability=0.5,
            times=4,
            engines=(0, 2),
        ),
        Drop(after_tokens=100),
    )


def test_an_empty_script_has_no_faults():
    assert parse_faults("") == FaultScript()
    assert not Faults(FaultScript())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = ", "is not valid TOML"),
        ("sed = 1", "unknown key 'sed'; the nearest one is 'seed'"),
        ("seed = -1", "seed is -1; give a whole number of 0 or more"),
        ("seed = true", "seed is True"),
        ("fault = 3", "begin each fault with"),
        ("fault = [3]", "fault 1 is not a table"),
        ("[[fault]]\nat = 1", "fault 1 has no kind; give one of delay, "),
        ("[[fault]]\nkind = 'dealy'", "unknown kind 'dealy'; the nearest one is 'delay'"),
        ("[[fault]]\nkind = 3", "unknown kind 3"),
        (
            "[[fault]]\nkind = 'drop'\n[[fault]]\nkind = 'drop'\nstatus = 500",
            r"fault 2 \(drop\) has the unknown key 'status'",
        ),
        ("[[fault]]\nkind = 'delay'", r"\(delay\) does not fit: .* required field `seconds`"),
        ("[[fault]]\nkind = 'delay'\nseconds = '2'", "Expected `float`, got `str`"),
        ("[[fault]]\nkind = 'delay'\nseconds = 0", "seconds"),
        ("[[fault]]\nkind = 'delay'\nseconds = nan", "seconds"),
        ("[[fault]]\nkind = 'drop'\nafter_tokens = -1", "after_tokens"),
        ("[[fault]]\nkind = 'drop'\nprobability = 1.5", "probability"),
        ("[[fault]]\nkind = 'drop'\nprobability = 0", "probability"),
        ("[[fault]]\nkind = 'drop'\nafter = 0", "after"),
        ("[[fault]]\nkind = 'status'\nstatus = 200", "status"),
        ("[[fault]]\nkind = 'slow'\nseconds = 1\nfactor = 1", "factor"),
        ("[[fault]]\nkind = 'drop'\nat = 5\nuntil = 5", "ends .until = 5. before it begins"),
        (
            "[[fault]]\nkind = 'reset'\nroutes = ['/pause']",
            "unknown route '/pause'; the nearest one is",
        ),
        ("[[fault]]\nkind = 'drop'\nroutes = ['control']", "on /generate only; leave routes out"),
        ("[[fault]]\nkind = 'ignored-abort'\nroutes = ['all']", "on /abort_request only"),
        ("[[fault]]\nkind = 'flood-answer'\nroutes = ['all']", "for other routes than /generate"),
        (
            "[[fault]]\nkind = 'reset'\nafter_tokens = 1\nroutes = ['info']",
            "only /generate streams tokens",
        ),
        (
            "[[fault]]\nkind = 'reset'\nafter_tokens = 1\ncarried_out = true",
            "has carried_out and after_tokens",
        ),
        ("[[fault]]\nkind = 'die'\ntimes = 1", "by the clock, once, and times is about calls"),
        (
            "[[fault]]\nkind = 'hang'\nseconds = 1\nafter = 2",
            "after is about calls; give it routes",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(text: str, message: str):
    with pytest.raises(ConfigError, match=message) as refused:
        parse_faults(text, "chaos.toml")
    assert str(refused.value).startswith("chaos.toml")
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_what_it_does_and_where(kind: str):
    cls = KINDS[kind]
    assert cls.__doc__
    assert cls.__doc__ != Fault.__doc__
    assert set(cls.default_routes) <= set(PATHS)
    needed = {"seconds": 1.0} if {"delay", "hang", "slow"} & {kind} else {}
    (fault,) = faults_of({"fault": [{"kind": kind, **needed}]}).faults
    assert type(fault) is cls


def test_the_routes_are_those_of_the_server():
    app = app_of(ServedEngine(SimEngine(), SimConfig(), time_scale=1.0), admin_key=None)
    assert isinstance(app, web.Application)
    served = {route.resource.canonical for route in app.router.routes() if route.resource}
    assert set(PATHS) == served
    assert all(set(paths) <= served for paths in GROUPS.values())


def test_each_engine_has_its_own_faults_and_draws_for_itself():
    script = faults_of({"seed": 3, "fault": [{"kind": "drop"}, {"kind": "reset", "engines": [1]}]})
    assert [f.kind for f in script.of_engine(0).faults] == ["drop"]
    assert [f.kind for f in script.of_engine(1).faults] == ["drop", "reset"]
    assert script.of_engine(0).seed != script.of_engine(1).seed


# -- the manual ---------------------------------------------------------------------------------


def test_the_example_of_the_manual_is_a_script():
    (example,) = re.findall(r"```toml\n(.*?)```", MANUAL.read_text("utf-8"), flags=re.DOTALL)
    assert len(parse_faults(example).faults) == example.count("[[fault]]") == 6


def test_the_manual_has_every_kind_with_its_parameters():
    rows = re.findall(
        r"^\| `([a-z-]+)` \| (.*?) \| ", MANUAL.read_text("utf-8"), flags=re.MULTILINE
    )
    told = {kind: set(re.findall(r"`([a-z_]+)", parameters)) for kind, parameters in rows}
    common = {*Fault.__struct_fields__, "after_tokens"}
    for kind, cls in KINDS.items():
        assert set(cls.__struct_fields__) - common == told[kind] - common, kind


# -- choosing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"after": 4}, [4, 5, 6, 7, 8, 9]),
        ({"every": 3}, [1, 4, 7]),
        ({"after": 2, "every": 3}, [2, 5, 8]),
        ({"times": 2}, [1, 2]),
        ({"after": 3, "every": 2, "times": 2}, [3, 5]),
    ],
)
def test_calls_are_counted(when: dict[str, int], expected: list[int]):
    made, _ = faults({"kind": "status", **when})
    assert which(made, 9) == expected
    assert made.fired == {"status": len(expected)}


def test_only_calls_in_its_time_are_met_and_counted():
    made, clock = faults({"kind": "status", "at": 10, "until": 20, "after": 2})
    assert which(made, 3) == []
    clock.time += 10
    assert which(made, 3) == [2, 3]
    clock.time += 10
    assert which(made, 3) == []
    assert [(fired.at, fired.route) for fired in made.log] == [(10.0, GENERATE)] * 2


def test_a_fault_is_on_the_routes_of_its_kind_unless_it_has_its_own():
    made, _ = faults({"kind": "silence"}, {"kind": "status", "routes": ["/model_info", "steering"]})
    kinds = {path: [type(one.fault) for one in made.meet(path)] for path in PATHS}
    assert {path for path in PATHS if Silence in kinds[path]} == set(STEERING)
    assert {path for path in PATHS if Status in kinds[path]} == {"/model_info", *STEERING}


def test_chance_is_drawn_from_the_seed_and_for_each_fault_alone():
    half = {"kind": "status", "probability": 0.5}
    first = which(faults(half, seed=1)[0], 200)
    assert first == which(faults(half, seed=1)[0], 200)
    assert first != which(faults(half, seed=2)[0], 200)
    assert 60 < len(first) < 140
    beside, _ = faults(half, {"kind": "delay", "seconds": 1, "probability": 0.5}, seed=1)
    drawn = [[type(one.fault) for one in beside.meet(GENERATE)] for _ in range(200)]
    assert [n for n, kinds in enumerate(drawn, start=1) if Status in kinds] == first
    assert first != [n for n, kinds in enumerate(drawn, start=1) if Delay in kinds]


def test_what_was_chosen_counts_only_when_it_takes_effect():
    made, clock = faults({"kind": "drop", "times": 1})
    (first,) = made.meet(GENERATE, in_stream=True)
    (second,) = made.meet(GENERATE, in_stream=True)
    assert made.fired == {}
    clock.time += 3
    assert second.fire()
    assert not first.fire(), "it has happened once"
    assert not made.meet(GENERATE, in_stream=True)
    assert list(made.log) == [Fired(at=3.0, kind="drop", route=GENERATE)]


def test_faults_of_streams_do_not_count_other_answers():
    made, _ = faults({"kind": "drop", "after": 2}, {"kind": "reset", "after_tokens": 5})
    assert made.meet(GENERATE) == []
    assert [len(made.meet(GENERATE, in_stream=True)) for _ in range(2)] == [1, 2]


def test_faults_of_the_engine_come_by_the_clock_unless_they_have_routes():
    made, _ = faults({"kind": "die", "at": 5}, {"kind": "die", "routes": ["updates"]})
    assert [one.fault.at for one in made.by_the_clock()] == [5.0]
    assert [type(one.fault) for one in made.meet("/update_weights_from_disk")] == [Die]
    never, _ = faults({"kind": "die", "probability": 1e-9})
    assert never.by_the_clock() == []


def test_random_bytes_are_seeded_and_end_no_line():
    first, second = (faults({"kind": "garbage"}, seed=4)[0].meet(GENERATE)[0] for _ in range(2))
    noise = first.random_bytes(10_000)
    assert noise == second.random_bytes(10_000)
    assert len(noise) == 10_000
    assert b"\n" not in noise
