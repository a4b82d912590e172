"""Smoke tests of experiments/: tables follow from the result files, and scripts still run."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprilsched.__main__ import main
from aprilsched.cli.commands.frontier import DEFAULT_ARMS
from aprilsched.cli.runs.named_policies import chosen
from aprilsched.planning.step_times.model import H200_QWEN3_4B
from aprilsched.types import Sibling
from experiments.ground_truth.schedules import pool, waves

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
GRPO = EXPERIMENTS.parent / "examples" / "grpo"


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Forget the modules of an experiment afterwards: others have modules of these names."""
    known = set(sys.modules)
    yield monkeypatch
    for name in set(sys.modules) - known:
        if "." not in name and is_of_an_experiment(sys.modules[name]):
            del sys.modules[name]


def is_of_an_experiment(module: ModuleType) -> bool:
    return Path(getattr(module, "__file__", None) or "").is_relative_to(EXPERIMENTS)


def tables(module: Any, found: Any) -> list[str]:
    return module.markdown(found).split("\n\n")


def test_the_tables_of_h200_follow_from_its_result(paths: pytest.MonkeyPatch):
    folder = EXPERIMENTS / "h200"
    paths.syspath_prepend(str(folder))
    analysis = importlib.import_module("analysis")
    assert analysis.markdown(*analysis.loaded()) in (folder / "README.md").read_text()
    admission = importlib.import_module("admission")
    found = json.loads((folder / "admission.json").read_text())
    assert admission.rows_table(found) in (folder / "admission.md").read_text()


def test_the_table_of_deltas_follows_from_its_rows():
    pytest.importorskip("torch")
    folder = EXPERIMENTS / "refit"
    module = importlib.import_module("experiments.refit.delta")
    assert module.table(folder) in (folder / "README.md").read_text()


def test_stop_tokens_end_responses_of_h200_with_their_group_mean(paths: pytest.MonkeyPatch):
    paths.syspath_prepend(str(EXPERIMENTS / "h200"))
    schedules = importlib.import_module("schedules")
    prompts = schedules.Cell.of("wave@2.0:s0").workload()
    samplings = [next(prompts).sampling[0] for _ in range(2000)]
    means = np.array([schedules.VOCABULARY / len(each.stop_token_ids) for each in samplings])
    expected = schedules.SCALE * 800 * np.exp(0.7**2 / 2)
    assert means.mean() == pytest.approx(expected, rel=0.05)
    assert np.log(means).std() == pytest.approx(0.7, rel=0.1)
    assert {each.max_new_tokens for each in samplings} == {schedules.CAP}


def test_draws_of_h200_differ_in_which_tokens_stop(paths: pytest.MonkeyPatch):
    paths.syspath_prepend(str(EXPERIMENTS / "h200"))
    schedules = importlib.import_module("schedules")
    cell = schedules.Cell.of("wave@2.0:s0")
    first, second = cell.workload(), replace(cell, draw=1).workload()
    for _ in range(20):
        one, other = (next(prompts).sampling[0].stop_token_ids for prompts in (first, second))
        assert len(one) == len(other)
        assert one != other


def test_engines_of_h200_have_the_same_share_of_a_batch(paths: pytest.MonkeyPatch):
    paths.syspath_prepend(str(EXPERIMENTS / "h200"))
    schedules = importlib.import_module("schedules")
    for gpus in (1, 2, 4):
        *alone, together = schedules.fleets(gpus)
        each = schedules.engines_of_a_gpu(gpus)
        assert {schedules.Cell.of(name).engines for names in alone for name in names} == {each}
        cells = [schedules.Cell.of(name) for name in together]
        assert {cell.engines for cell in cells} == {each * gpus}
        shares = [cell.groups / cell.engines for cell in cells]
        # Strong scaling gives all engines the batch of one GPU's.
        assert sorted({*shares}) == sorted({16, 16 / gpus})
        assert all(cell.config.batch_groups == cell.groups for cell in cells)


def test_the_trainer_pads_sequences_of_about_equal_length(paths: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for path in (GRPO, EXPERIMENTS / "h200"):
        paths.syspath_prepend(str(path))
    trainer = importlib.import_module("trainer")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**trainer.TINY)
    padded = trainer.Trainer.__new__(trainer.Trainer)
    padded.device, padded.model = "cpu", transformers.Qwen3ForCausalLM(config)
    paths.setattr(trainer, "PADDED_TOKENS", 40)
    lengths = [9, 1, 30, 2, 41, 7]
    assert trainer.rows_of(lengths) == [[1, 3, 5, 0], [2], [4]]
    ids = torch.randint(padded.model.config.vocab_size, (sum(lengths),))
    positions = torch.cat([torch.arange(length) for length in lengths])
    first = positions == 0  # What follows from the token of another sequence counts nowhere.
    ways: list[list[Any]] = []
    for logprobs in (trainer.Trainer.logprobs, trainer.train.Trainer.logprobs):
        padded.model.zero_grad()
        found = logprobs(padded, ids, positions)[~first]
        found.sum().backward()
        ways.append([found, *(each.grad.clone() for each in padded.model.parameters())])
    assert all(torch.allclose(*each, atol=1e-4) for each in zip(*ways, strict=True))


def test_tables_of_groups_against_samples_follow_from_the_raw_data(paths: pytest.MonkeyPatch):
    paths.syspath_prepend(str(EXPERIMENTS / "learning"))
    tables_of_samples = importlib.import_module("samples_tables")
    found = tables_of_samples.result()
    assert found == json.loads((EXPERIMENTS / "learning" / "samples.json").read_text())
    readme = (EXPERIMENTS / "learning" / "README.md").read_text()
    assert tables_of_samples.markdown(found) in readme
    bias = {row["baseline"]: row["error"] for row in found["gradients"]}
    assert abs(bias["the first 4 others to complete"]) < 0.01
    assert bias["all others that are complete at delivery, at least 4"] < -0.05


def test_the_control_counts_all_others_known_at_delivery(paths: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    for path in (GRPO, EXPERIMENTS / "learning"):
        paths.syspath_prepend(str(path))
    samples = importlib.import_module("samples")
    siblings = tuple(Sibling(rollout_id=n, index=n, reward=1.0) for n in (1, 2))
    sample = SimpleNamespace(
        group_id=7, reward=1.0, siblings=siblings, rollout=SimpleNamespace(rollout_id=0)
    )
    assert samples.naive_advantage(sample, {}) == 0.0
    assert samples.naive_advantage(sample, {7: {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0}}) == 1 - 2 / 3


@pytest.mark.parametrize(
    ("folder", "module"), [("learning", "analysis"), ("learning_moe", "tables")]
)
def test_the_tables_of_learning_follow_from_its_raw_data(
    paths: pytest.MonkeyPatch, folder: str, module: str
):
    for path in (GRPO, EXPERIMENTS / "learning", EXPERIMENTS / folder):
        paths.syspath_prepend(str(path))
    analysis = importlib.import_module(module)
    found = analysis.result()
    assert found == json.loads((EXPERIMENTS / folder / "result.json").read_text())
    readme = (EXPERIMENTS / folder / "README.md").read_text()
    assert all(table in readme for table in tables(analysis, found))
    assert found["wrong"] == []


def test_auto_is_as_fast_as_its_result_claims(paths: pytest.MonkeyPatch):
    folder = EXPERIMENTS / "auto_regret"
    paths.syspath_prepend(str(folder))
    script = importlib.import_module("workloads")
    (workload,) = (each for each in script.workloads() if each.name == "constant")
    results = json.loads((folder / "workloads.json").read_text())
    assert results.keys() == {each.name for each in script.workloads()}
    configs = dict(script.policies(workload))
    assert configs.keys() <= results["constant"].keys()
    found = script.run(workload, configs["sync"])
    assert found["step_s"] == pytest.approx(results["constant"]["sync"]["step_s"], rel=0.02)


def test_the_simulated_engine_takes_what_an_h200_took():
    """The lengths are another draw of one distribution, so means over seeds are compared."""
    runs = np.array([waves(seed, 6, H200_QWEN3_4B) for seed in range(4)])
    seconds, rate, _, _ = runs[:, 1:].mean(axis=(0, 1))
    assert seconds == pytest.approx(np.mean([21.9, 22.1, 22.9]), rel=0.10)
    assert rate == pytest.approx(np.mean([12_193, 12_070, 10_789]), rel=0.10)
    runs = np.array([pool(seed, 5, 320, H200_QWEN3_4B) for seed in range(4)])
    seconds, rate, _, _ = runs[:, 1:].mean(axis=(0, 1))
    assert seconds == pytest.approx(np.mean([23.0, 21.2, 19.6, 25.9]), rel=0.10)
    assert rate == pytest.approx(np.mean([12_758, 12_181, 11_926, 11_453]), rel=0.10)


def test_the_frontier_has_the_arms_of_its_result(capsys: pytest.CaptureFixture[str]):
    """Half of the batches of one seed are near the committed figures."""
    folder = EXPERIMENTS / "frontier"
    rows = {row["policy"]: row for row in json.loads((folder / "result.json").read_text())}
    assert list(rows) == [policy.name for policy in chosen(DEFAULT_ARMS)]
    arms = ["wave@2", "samples:4@2"]
    command = ["--model", str(folder / "moe.toml"), "--kv", "keep", "--sim.kv-tokens", "500000"]
    more = ["--arms", *arms, "--batches", "30", "--out", "none", "--json", "--quiet"]
    assert main(["frontier", *command, *more]) == 0
    for found in json.loads(capsys.readouterr().out):
        wanted = rows[found["policy"]]
        for name, rel in (("delivered_tokens_per_s", 0.04), ("staleness_mean", 0.06)):
            assert found[name] == pytest.approx(wanted[name], rel=rel)


def test_the_frontier_meets_what_was_measured_elsewhere():
    """Tokens/s and staleness of an independent wave engine, where the KV pool is not full."""
    rows = json.loads((EXPERIMENTS / "frontier" / "result.json").read_text())
    points = {row["policy"]: (row["delivered_tokens_per_s"], row["staleness_mean"]) for row in rows}
    expected = {"wave@2": (6989, 1.32), "samples:4@1.5": (7627, 0.81)}
    for arm, wanted in expected.items():
        assert points[arm] == pytest.approx(wanted, rel=0.02)


def test_the_tables_of_the_frontier_follow_from_its_results():
    folder = EXPERIMENTS / "frontier"
    readme = (folder / "README.md").read_text()
    for name in ("result", "clip", "dense_kept", "dense"):
        rows: list[str] = []
        for row in json.loads((folder / f"{name}.json").read_text()):
            least, most = row["delivered_tokens_per_s_range"]
            rows.append(
                f"| {row['policy']} | {row['delivered_tokens_per_s']:,.0f} "
                f"| {least:,.0f} to {most:,.0f} | {row['staleness_mean']:.2f} "
                f"| {row['staleness_max']} | {row['off_policy_share']:.2f} "
                f"| {row['efficiency']:.2f} |\n"
            )
        assert f"|---|\n{''.join(rows)}\n" in readme


def test_the_tables_of_samples_at_equal_age_follow_from_their_result():
    readme = (EXPERIMENTS / "frontier" / "README.md").read_text()
    docs = (EXPERIMENTS.parent / "docs" / "scheduling.md").read_text()
    parts = json.loads((EXPERIMENTS / "frontier" / "samples.json").read_text())
    points = {
        tuple(row[key] for key in ("name", "delivery", "refill", "ratio")): row
        for row in parts["kv_kept"]
    }
    rows: list[str] = []
    for (name, delivery, refill, ratio), row in points.items():
        if delivery == "groups" and name != "moe without prefill":
            words = "`auto`" if ratio == "auto" else f"{refill} of {ratio:g}"
            samples = points[name, "samples", refill, ratio]
            rate, age = row["generated_per_s"], row["staleness"]
            rows.append(
                f"| {name} | {words} | {rate:,.0f} | {age:.2f} "
                f"| {samples['generated_per_s']:,.0f} | {samples['staleness']:.2f} "
                f"| {samples['generated_per_s'] / rate:.3f} | {samples['staleness'] / age:.2f} |"
            )
    pool = points["moe", "samples", "pool", 1.75]
    waves = [row for row in parts["presets"] if row["name"] == "samples" and row["ratio"] <= 2.5]
    ages: list[float] = [row["staleness"] for row in waves]
    rates: list[float] = [row["generated_per_s"] for row in waves]
    for row in parts["presets"]:
        if row["name"] != "samples":
            rate: float = row["generated_per_s"]
            age: float = row["staleness"]
            older = age >= pool["staleness"]
            best = pool["generated_per_s"] if older else float(np.interp(age, ages, rates))
            rows.append(f"| {row['name']} | {rate:,.0f} | {age:.2f} | {best:,.0f} |")
            assert rows[-1].replace(row["name"], f"`{row['name']}`") in docs
            rows[-1] += f" {best / rate:.2f} |"
    assert len(rows) == 11
    assert [row for row in rows if row not in readme] == []
