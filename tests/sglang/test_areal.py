"""AReaL's own trainer on a real server: updates from disk and by its broadcasts, and evaluations.

`make test-areal` runs it, in the environment of AReaL's tests.
"""

# pyright: basic, reportMissingImports=false
# The package has no complete types.
from __future__ import annotations

import argparse
import importlib
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import SchedulerConfig
from aprilsched.trainers.areal import RolloutEngine
from tests.sglang.server import CpuServer, free_port
from tests.support.areal_parts import why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    # Its packages warn of much.
    pytest.mark.filterwarnings("ignore"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "areal_grpo.py"
STEPS = 6
TOLERANCE = 1e-4


@pytest.fixture
def model(models: tuple[Path, Path], tmp_path: Path) -> Path:
    """The server's model, with a tokenizer."""
    from tests.support.trl_on_cpu import tokenizer

    folder = Path(shutil.copytree(models[0], tmp_path / "model"))
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The program, in a process group of one process."""
    torch = pytest.importorskip("torch")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "AREAL_SPMD_MODE": "1"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # AReaL calls reward functions in other processes, which import them by name.
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    yield importlib.import_module(EXAMPLE.stem)
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Recording:
    """Keeps every batch, and the weights of every version, of a trainer of the example."""

    def __init__(self, trainer: Any) -> None:
        self.batches: list[tuple[int, list[dict[str, Any]]]] = []
        self.weights: dict[int, dict[str, Any]] = {0: self._weights(trainer)}
        prepare, update = trainer.actor.prepare_batch, trainer.actor.update_weights

        def prepared(*given: Any, **named: Any) -> Any:
            batch = prepare(*given, **named)
            kept = [{name: tensor.clone() for name, tensor in each.items()} for each in batch]
            self.batches.append((trainer.engine.get_version(), kept))
            return batch

        def updated(meta: Any) -> None:
            update(meta)
            self.weights[meta.version] = self._weights(trainer)

        trainer.actor.prepare_batch, trainer.actor.update_weights = prepared, updated

    @staticmethod
    def _weights(trainer: Any) -> dict[str, Any]:
        state = trainer.actor.model.state_dict()
        return {
            name: getattr(each, "full_tensor", lambda each=each: each)().clone()
            for name, each in state.items()
        }


@pytest.mark.shows(
    "abort",
    "retract",
    "weights from disk",
    "weights by broadcast",
    "single samples",
    engine="SGLang",
    adapter="AReaL",
)
@pytest.mark.parametrize(
    ("weights", "delivery"), [("disk", "groups"), ("xccl", "groups"), ("disk", "samples")]
)
def test_the_trainers_versions_are_those_that_sampled(
    example: Any,
    clean_server: CpuServer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: str,
    delivery: str,
):
    """A wrong version would show in the log-probabilities."""
    options = argparse.Namespace(
        engine=[clean_server.url],
        model=str(model),
        weights=weights,
        steps=STEPS,
        out=str(tmp_path / "run"),
    )
    config = example.configuration(options)
    example.name_resolve.reconfigure(config.cluster.name_resolve)
    config.actor.optimizer.lr = 1e-2
    config.actor.optimizer.warmup_steps_proportion = 0.0
    size = config.train_dataset.batch_size
    if delivery == "samples":
        config.actor.reward_norm = None
        size *= config.gconfig.n_samples
        monkeypatch.setattr(
            example, "SchedulerConfig", partial(SchedulerConfig, delivery="samples")
        )
        monkeypatch.setattr(example, "RolloutEngine", partial(RolloutEngine, trainer=config))
    workflow = {
        "reward_fn": example.right,
        "gconfig": config.gconfig.new(ignore_eos=True),
        "tokenizer": options.model,
    }
    data = example.sums()
    with example.Trainer(config, urls=options.engine, train_dataset=data) as trainer:
        recorded = Recording(trainer)
        trainer.train(workflow="areal.workflow.rlvr.RLVRWorkflow", workflow_kwargs=workflow)
        evaluation = {**workflow, "gconfig": config.gconfig.new(greedy=True, max_new_tokens=20)}
        for item in list(data)[:3]:
            trainer.engine.submit(
                item, "areal.workflow.rlvr.RLVRWorkflow", evaluation, is_eval=True
            )
        evaluated = trainer.engine.wait(3)
        counters = trainer.engine.scheduler.state.in_flight.counters
        assert trainer.engine.scheduler.state.in_flight.ledger.total == 0
    assert counters.updates == STEPS
    assert len(recorded.batches) == STEPS
    assert [version for version, _ in recorded.batches] == list(range(STEPS))
    bound = config.rollout.max_head_offpolicyness
    sampled: set[int] = set()
    for version, batch in recorded.batches:
        assert len(batch) == size
        assert all(("values" in trajectory) == (delivery == "samples") for trajectory in batch)
        for trajectory in batch:
            counted = trajectory["versions"][trajectory["loss_mask"].bool()]
            assert version - bound <= int(counted.min())
            assert int(counted.max()) <= version
            sampled |= set(counted.tolist())
    # How many groups are of several versions depends on how fast the server is.
    assert len(sampled) > 1
    every = [trajectory for _, batch in recorded.batches for trajectory in batch]
    check_versions(model, recorded, every)
    assert {int(each["versions"].max()) for each in evaluated if each is not None} == {STEPS}
    check_versions(model, recorded, [each for each in evaluated if each is not None])


def check_versions(model: Path, recorded: Recording, trajectories: list[dict[str, Any]]) -> None:
    """Each token's logprob is that of transformers with the weights of the token's version."""
    import torch
    from transformers import AutoModelForCausalLM

    scorer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for version, weights in recorded.weights.items():
        scorer.load_state_dict(weights)
        for trajectory in trajectories:
            of_it = trajectory["versions"] == version
            for row in of_it.any(-1).nonzero()[:, 0].tolist():
                length = int(trajectory["attention_mask"][row].sum())
                ids = trajectory["input_ids"][row, :length].long()
                with torch.no_grad():
                    scores = scorer(ids[None]).logits[0, :-1].log_softmax(-1)
                right = scores.gather(1, ids[1:, None])[:, 0]
                off = (right - trajectory["logprobs"][row, 1:length]).abs()
                assert float(off[of_it[row, 1:length]].max()) < TOLERANCE
    found = np.concatenate([t["versions"][t["loss_mask"].bool()].numpy() for t in trajectories])
    assert set(found.tolist()) <= set(recorded.weights)


def test_the_example_trains(
    clean_server: CpuServer,
    example: Any,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    options = ["--engine", clean_server.url, "--model", str(model), "--steps", "2"]
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), *options, "--out", str(tmp_path / "run")])
    engine = example.main()
    assert engine.get_version() == 2
    assert not engine.initialized
    assert os.path.isdir(tmp_path / "run")
