"""SchedulerConfig as a table, as config.toml and as flags: the same tree, and the same names."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from aprilsched import SimFleet
from aprilsched.cli.arguments import made, values_of
from aprilsched.cli.commands.run import RunCommand
from aprilsched.cli.runs.config_file import as_toml, read_settings
from aprilsched.cli.runs.named_policies import chosen
from aprilsched.cli.runs.settings import RunSettings, SimSettings
from aprilsched.cli.runs.settings_tables import changed, config_of, path_names, table_of
from aprilsched.cli.runs.setup import prepare
from aprilsched.config import (
    Dispatch,
    Health,
    LengthBuckets,
    Objective,
    Pool,
    Prices,
    Retries,
    Samples,
    SamplingParams,
    SchedulerConfig,
    Staleness,
    Timeouts,
    Tokens,
)
from aprilsched.errors import ConfigError
from tests.support.table import each_row

CONFIGS: list[dict[str, Any]] = [
    {},
    {"over_provision": "auto", "objective": Objective(staleness_scale=inf, distance_price=0.2)},
    {"over_provision": 2.5, "refill": Pool(together=2, until=0.5)},
    {"stop": Tokens(3000)},
    {"refill": LengthBuckets(store=3.0, probes=2, oldest=6), "stop": Samples(30)},
    {"refill": "pool", "stop": "samples"},
    {"max_staleness": Staleness(2, rule="finish")},
    {"max_staleness": None},
    {"max_staleness": 0, "pace": "asynchronous", "straggler": "run"},
    {
        "dispatch": Dispatch(max_in_flight=7, migrate=True),
        "retries": Retries(attempts=5, interruptions=2, failed_groups=9),
        "health": Health(stall_s=9.5, slow_share=0.0, fleet_wait_s=3),
        "timeouts": Timeouts(control_s=3, refit_s=4),
        "prices": Prices(step_seconds=1e-3),
        "sampling": SamplingParams(max_new_tokens=77, stop_token_ids=(3, 4)),
        "save_interval_s": 0.5,
        "allow_inexact_versions": True,
    },
]


def same(first: SchedulerConfig, second: SchedulerConfig) -> bool:
    """Do both schedule in the same way, whatever is a shorthand in them?"""
    assert first.policies == second.policies
    assert table_of(first) == table_of(second)
    return first.automatic == second.automatic


@each_row("values", CONFIGS, ids=lambda values: ",".join(values) or "defaults")
def test_a_config_file_gives_what_was_written(values: dict[str, Any], tmp_path: Path) -> None:
    settings = RunSettings(batches=3, prompts="file", scheduler=SchedulerConfig(**values))
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(as_toml(settings)))
    found = read_settings(path)
    assert same(found.scheduler, settings.scheduler)
    assert replace(found, scheduler=settings.scheduler) == settings
    assert as_toml(found) == as_toml(settings)


def flags(line: str, base: SchedulerConfig | None = None) -> SchedulerConfig:
    """A configuration after the flags of a command line."""
    base = base or SchedulerConfig()
    start = RunCommand(settings=RunSettings(scheduler=base))
    return made(start, values_of(RunCommand, line.split(), "run")).settings.scheduler


@each_row(
    ("line", "values"),
    [
        ("--refill pool --refill.together 2", {"refill": Pool(together=2)}),
        ("--refill buckets --refill.probes 0", {"refill": LengthBuckets(probes=0)}),
        ("--stop tokens --stop.amount 500", {"stop": Tokens(500)}),
        ("--stop samples", {"stop": Samples(256)}),
        ("--over-provision 2", {"over_provision": 2.0}),
        (
            "--max-staleness 2 --max-staleness.rule evict",
            {"max_staleness": Staleness(2, rule="evict")},
        ),
        ("--max-staleness none", {"max_staleness": None}),
        ("--max-staleness.rule evict", {"max_staleness": Staleness(4, rule="evict")}),
        (
            "--dispatch.max-in-flight 5 --dispatch.migrate",
            {"dispatch": Dispatch(max_in_flight=5, migrate=True)},
        ),
        ("--retries.attempts 1", {"retries": Retries(attempts=1)}),
        ("--sampling.temperature 0", {"sampling": SamplingParams(temperature=0)}),
    ],
)
def test_a_flag_is_the_path_of_its_setting(line: str, values: dict[str, Any]) -> None:
    assert same(flags(line), SchedulerConfig(**values))


def test_flags_override_a_file_and_keep_what_belongs_to_the_same_policy() -> None:
    base = SchedulerConfig(
        refill=Pool(together=2, until=0.5), max_staleness=Staleness(1, rule="evict")
    )
    assert flags("--refill.until 0.25", base).refill == Pool(together=2, until=0.25)
    assert flags("--refill pool", base).refill == Pool(together=2, until=0.5)
    assert flags("--refill wave", base).refill == "wave"
    assert flags("--refill buckets", base).policies.refill == LengthBuckets()
    assert flags("--max-staleness 3", base).max_staleness == Staleness(3, rule="evict")
    assert flags("--max-staleness none", base).max_staleness is None
    unbounded = SchedulerConfig(max_staleness=None)
    assert flags("--max-staleness 3", unbounded).policies.staleness == Staleness(3)


def test_every_setting_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    shorthands = {"max_staleness.bound"}
    with pytest.raises(SystemExit):
        flags("--help")
    shown = capsys.readouterr().out.replace(",", " ")
    for path in set(path_names()) - shorthands:
        assert f"--{path.replace('_', '-')} " in shown, path
    assert "--refill.until" in shown


@each_row(
    ("table", "message"),
    [
        ({"refil": "pool"}, "unknown key refil; the nearest known one is refill."),
        (
            {"refill": {"rule": "pool", "toghether": 2}},
            "unknown key refill.toghether; the nearest known one is refill.together.",
        ),
        (
            {"refill": {"rule": "wave", "together": 2}},
            'refill.together is a setting of pool, and refill is "wave"; set refill too.',
        ),
        (
            {"refill": {"together": 2}},
            "refill.rule is missing; choose one of wave, pool, buckets, tail.",
        ),
        (
            {"refill": {"rule": "rounds", "store": 2}},
            "refill.rule is 'rounds'; choose one of wave, pool, buckets, tail.",
        ),
        (
            {"over_provision": {"ratio": 1.5}},
            "over_provision is {'ratio': 1.5}; choose one of auto, a ratio from 1",
        ),
        ({"refill": {"rule": "pool", "until": 1.4}}, "refill.until is 1.4; give a share above 0"),
        ({"retries": {"attempts": 0}}, "retries.attempts is 0; give 1 or more."),
        ({"retries": 3}, "retries is 3; give a table of its settings."),
        (
            {"refill": {"rule": ["pool"], "together": 2}},
            "refill.rule is ['pool']; choose one of wave, pool, buckets, tail.",
        ),
        ({"refill": ["pool"]}, "refill is ['pool']; choose one of wave, pool, buckets, tail"),
        ({"refill": {}}, "refill.rule is missing; choose one of wave, pool, buckets, tail."),
        ({"max_staleness": {"bound": "two"}}, "max_staleness.bound is 'two'; choose one of"),
    ],
)
def test_a_wrong_table_is_refused_in_one_sentence(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(table)
    assert str(refused.value).startswith(message)


def test_a_file_whose_scheduler_is_not_a_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("scheduler = 3")
    with pytest.raises(ConfigError, match="scheduler is 3; give a table of its settings"):
        read_settings(path)


def test_another_rule_has_its_own_defaults() -> None:
    table = table_of(SchedulerConfig(refill=Pool(together=2)))
    assert config_of(changed(table, {"refill": "buckets"})).policies.refill == LengthBuckets()
    both = {"refill.store": 3.0, "refill": "buckets"}
    assert config_of(changed(table, both)).policies.refill == LengthBuckets(store=3.0)


def test_a_policy_by_name_takes_settings_by_their_paths() -> None:
    one, other = chosen("pool:refill.until=0.25|0.5:dispatch.placement=spread")
    assert one.name == "pool refill.until=0.25 dispatch.placement=spread"
    for policy, until in ((one, 0.25), (other, 0.5)):
        config = policy.apply(SchedulerConfig(max_staleness=1))
        assert config.refill == Pool(together=4, until=until)
        assert config.dispatch == Dispatch(placement="spread")
        assert config.policies.staleness == Staleness(1)


def test_the_embedded_engines_of_a_run_have_its_settings():
    sim = SimSettings(max_running=3, kv_tokens=4_000, stream_interval=5, prefix_cache=True)
    fleet = prepare(RunSettings(sim=sim)).fleet
    assert isinstance(fleet, SimFleet)
    for name in ("max_running", "kv_tokens", "stream_interval", "prefix_cache"):
        assert getattr(fleet.config, name) == getattr(sim, name)
