"""Tests the rules of the page on extending: they run, also from the command line by import path."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from aprilsched import LongTailWorkload, SchedulerConfig
from aprilsched.__main__ import main
from aprilsched.cli.runs.named_policies import chosen
from aprilsched.config import Behaviour
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.policies.straggler import BEHAVIOURS
from aprilsched.simulation import simulate
from tests.docs.test_examples import blocks
from tests.support.table import each_row

WORKLOAD = LongTailWorkload(median=60, cap=600)
SMALL = ["--batches", "6", "--batch-groups", "4", "--group-size", "4", "--median", "60", "--cap",
         "600", "--quiet", "--json"]  # fmt: skip
MODULE = "own_rules_of_the_page"


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page's rules as a module of the working directory."""
    programs = [block for block in blocks("extending") if "aprilsched.config" in block]
    assert len(programs) == 4
    (tmp_path / f"{MODULE}.py").write_text("\n".join(programs))
    monkeypatch.chdir(tmp_path)
    yield None
    sys.modules.pop(MODULE, None)


def test_the_rules_are_policies_on_the_command_line(
    rules: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    policies = ["--policy", f"april,{MODULE}.half_waves,{MODULE}.kept"]
    before = list(sys.path)
    assert main(["simulate", *policies, *SMALL, "--out", str(tmp_path / "out")]) == 0
    assert sys.path == before
    april, half, kept = json.loads(capsys.readouterr().out)
    assert half["delivered_tokens_per_s"] != april["delivered_tokens_per_s"]
    assert (april["reprefilled_tokens"] > 0, kept["off_policy_share"] > 0) == (True, True)
    scheduler = tomllib.loads((tmp_path / "out" / f"{MODULE}.kept" / "config.toml").read_text())[
        "scheduler"
    ]
    assert scheduler["straggler"] == "abort and keep"


def test_a_rule_is_a_line_of_the_frontier(rules: None, capsys: pytest.CaptureFixture[str]):
    """Settings reach the configuration of the user's function, and its rule stays."""
    arms = ["--arms", f"{MODULE}.half_waves@1.5|2:ready_batches=2,{MODULE}.kept:over_provision=1.5"]
    assert main(["frontier", *arms, *SMALL, "--out", "none"]) == 0
    names = [row["policy"] for row in json.loads(capsys.readouterr().out)]
    half = f"{MODULE}.half_waves"
    assert names == [f"{half}@{n} ready_batches=2" for n in ("1.5", "2")] + [f"{MODULE}.kept@1.5"]
    for policy, ratio in zip(chosen(arms[1]), (1.5, 2, 1.5), strict=True):
        config = policy.apply(SchedulerConfig(group_size=4))
        assert config.over_provision == ratio
        names = (config.policies.refill.name, config.straggler_name)
        assert names in {("half waves", "retract"), ("wave", "abort and keep")}


def test_the_stop_rule_bounds_the_tokens_of_a_step(rules: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path.cwd()))
    module = import_module(MODULE)
    stop = module.TrainingTokens(9_000)
    config = SchedulerConfig(batch_groups=4, group_size=4, stop=stop, over_provision=1.5)
    result = simulate(WORKLOAD, config, batches=8)
    for batch in range(2, 8):
        lengths = result.lengths[result.batch == batch]
        assert lengths.sum() + 500 * len(lengths) >= 9_000
        assert lengths.sum() + 500 * (len(lengths) - 4) < 9_000 + 600 * 4


@each_row(
    ("policy", "message"),
    [
        (
            "own_rules_of_the_page.missing",
            "must be the import path of a function, got AttributeErr",
        ),
        ("own_rules_of_the_page.abort_and_keep", "must be the import path of a function, got"),
        ("no_such_module.rule", "must be the import path of a function, got ModuleNotFoundError"),
        ("own_rules_of_the_page.kept:over_provison=2", "the nearest one is over_provision"),
        (
            "own_rules_of_the_page.HalfWaves",
            "HalfWaves raised TypeError: HalfWaves",
        ),
    ],
)
def test_an_import_path_that_cannot_be_used_is_named(
    rules: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, message: str
):
    out = ["--out", str(tmp_path / "out")]
    assert main(["simulate", "--policy", policy, *SMALL, *out]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@each_row(
    ("changes", "message"),
    [
        ({"kv": ()}, "kv must name"),
        ({"kv": ("keep", "drop")}, "kv must name one or more of recompute, keep, apart, got"),
        ({"kv": "keep"}, "kv is 'keep'"),
        ({"called_back": "sometimes"}, "called_back is 'sometimes'"),
        ({"called_back": "always"}, "called_back must not be"),
        ({"waits_inside": False, "waits_asleep": True}, "waits_asleep=True needs"),
    ],
)
def test_a_straggler_rule_that_contradicts_itself_is_refused(changes: Any, message: str):
    rule = Behaviour(name="own", kv=("keep",), waits_inside=True)
    with pytest.raises(ConfigError, match=message):
        replace(rule, **changes)


def test_straggler_rule_with_the_name_of_another_one_is_refused():
    rule = Behaviour(name="retract", kv=("keep",), waits_inside=True)
    with pytest.raises(ConfigError, match="straggler must have a name of its own"):
        SchedulerConfig(straggler=rule)
    assert SchedulerConfig(straggler=replace(rule, name="own")).cached_kv == "keep"
    SchedulerConfig(straggler=BEHAVIOURS["run"], pace="asynchronous", refit="rolling")
