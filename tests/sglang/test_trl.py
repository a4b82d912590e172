"""TRL's own trainer on a real server: broadcasts, versions, staleness, and a resumed run."""

# pyright: basic
# The packages have no complete types.
from __future__ import annotations

import asyncio
import functools
import importlib.util
import itertools
import runpy
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import DistributedPublisher, Group, SchedulerConfig, SGLangFleet
from aprilsched.engines.base import Engine
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.integrations.trl import RolloutWorker, StreamedSteps
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.server import CpuServer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="could not import 'trl'"
)

STEP = 8
"""Rollouts of one step: 2 groups of 4."""
STALENESS = 3
TOLERANCE = 1e-4
DATA: Any = [{"prompt": [{"role": "user", "content": f"w{i + 10} w{i + 11}"}]} for i in range(12)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_async_grpo.py"


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    """torch in one thread, and TRL without its GPU calls."""
    torch = pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Their imports warn of experimental and of deprecated modules.
        warnings.simplefilter("ignore")
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        import trl.experimental.async_grpo.async_grpo_trainer  # noqa: F401

        from tests.support.trl_on_cpu import on_cpu

        on_cpu(patch)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield torch
        torch.set_num_threads(threads)


@pytest.fixture
def model(torch: Any, models: tuple[Path, Path], tmp_path: Path) -> Path:
    """The server's model, with a tokenizer."""
    from tests.support.trl_on_cpu import tokenizer

    folder = Path(shutil.copytree(models[0], tmp_path / "model"))
    tokenizer().save_pretrained(folder)
    return folder


class Recorded(DistributedPublisher):
    """Broadcasts over gloo, and keeps a copy of every version."""

    def __init__(
        self,
        weights: Any,
        kept: dict[int, dict[str, Any]],
        amid: Callable[[int], None] = lambda version: None,
    ) -> None:
        super().__init__(self._copied, backend="gloo", bucket_bytes=200_000)
        self._from_trainer = weights
        self._kept = kept
        self._amid = amid
        """Called in the middle of each version, with the number of those before."""
        self._latest: dict[str, Any] = {}

    def _copied(self) -> Iterator[tuple[str, Any]]:
        self._latest = {}
        for index, (name, tensor) in enumerate(self._from_trainer()):
            if index == 12:
                self._amid(len(self._kept))
            self._latest[name] = tensor.clone()
            yield name, tensor

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        outcomes = await super().publish(version, engines)
        self._kept[version] = self._latest
        return outcomes


class Run:
    """One process of the training: what the trainer was given, and every version of the weights."""

    def __init__(
        self,
        urls: Sequence[str],
        model: Path,
        folder: Path,
        *,
        steps: int,
        amid: Callable[[int], None] = lambda version: None,
        streamed: bool = False,
    ) -> None:
        from transformers import AutoTokenizer
        from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
        from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

        self.samples: list[Any] = []
        self.groups: dict[int, Group] = {}
        self.weights: dict[int, dict[str, Any]] = {}
        self.in_flight: set[int] = set()
        self.engines: list[str] = []
        """The engines that are in use at the end."""
        self.launched = 0
        args = AsyncGRPOConfig(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=200,
            token_budget=0,
            max_staleness=0 if streamed else STALENESS,
            learning_rate=1e-3,
            save_strategy="steps",
            save_steps=10,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
        )
        config = SchedulerConfig(over_provision=2.0, straggler="retract", pace="asynchronous")
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.worker = RolloutWorker(
            SGLangFleet(urls, admin_key=ADMIN_KEY),
            args=args,
            train_dataset=DATA,
            processing_class=tokenizer,
            reward_funcs=varied,
            config=SchedulerConfig() if streamed else config,
            streamed=streamed,
            publisher=functools.partial(Recorded, kept=self.weights, amid=amid),
            accept=self._accept,
        )
        get = self.worker.get
        self.worker.get = lambda timeout=None: self._noted(get(timeout))  # type: ignore[method-assign]
        self.worker.callback.on_train_end = self._end  # type: ignore[method-assign]

        class Streamed(StreamedSteps, AsyncGRPOTrainer):
            pass

        self.trainer = (Streamed if streamed else AsyncGRPOTrainer)(
            str(model),
            args=args,
            train_dataset=DATA,
            processing_class=tokenizer,
            rollout_worker=self.worker,
            weight_transfer=self.worker,
            callbacks=[self.worker.callback],
        )

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]

    def _accept(self, group: Group) -> bool:
        self.groups[group.group_id] = group
        return True

    def _noted(self, sample: Any) -> Any:
        self.samples.append(sample)
        return sample

    def _end(self, *_: Any, **__: Any) -> None:
        state = self.worker.scheduler.state.in_flight
        self.in_flight, self.launched = set(state.groups), state.counters.launched // 4
        self.engines = list(self.worker.scheduler.state.fleet.control.engines)


def varied(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) % 7 / 7 for ids in completion_ids]


def test_twenty_steps_on_a_real_server_with_a_resume_between(
    torch: Any, clean_server: CpuServer, model: Path, tmp_path: Path
) -> None:
    """The first trainer ends after step 12, and the second one goes on from the checkpoint of
    step 10."""
    first = Run([clean_server.url], model, tmp_path / "run", steps=12)
    first.trainer.train()
    second = Run([clean_server.url], model, tmp_path / "run", steps=20)
    second.trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-10"))
    assert second.trainer.state.global_step == 20
    # The first step trains on tokens of the weights that it has.
    assert first.logged("ratio")[0] == pytest.approx(1, abs=TOLERANCE)
    assert max(abs(ratio - 1) for ratio in second.logged("ratio")) > TOLERANCE
    check_versions(torch, model, first)
    # What the restored batch was sampled with, the first process has.
    for name, tensor in second.weights[11].items():
        assert torch.equal(tensor, first.weights[11][name])
    second.groups = first.groups | second.groups
    second.weights = first.weights | second.weights
    check_versions(torch, model, second)
    check_staleness(first, begin=0)
    check_staleness(second, begin=10)
    # Nothing is lost, and nothing is trained on twice.
    trained = [s.group_id for s in first.samples[: 10 * STEP] + second.samples[: 10 * STEP]]
    ahead = {s.group_id for s in [*second.samples[10 * STEP :], *second.worker._samples]}
    assert len(set(trained)) == len(trained) / 4
    assert len(set(trained) | ahead | second.in_flight) == second.launched
    for before, after in zip(first.samples[10 * STEP :], second.samples, strict=False):
        if before.group_id == after.group_id == first.samples[10 * STEP].group_id:
            assert np.array_equal(before.input_ids, after.input_ids)


@pytest.mark.long
def test_a_server_that_dies_in_a_broadcast_does_not_end_the_training(
    torch: Any, clean_pair: tuple[CpuServer, CpuServer], model: Path, tmp_path: Path
) -> None:
    """The other one gets the same weights once more."""
    stays, victim = clean_pair
    killed: list[int] = []

    def kill(version: int) -> None:
        if version == 3 and not killed:
            victim.kill()
            killed.append(version)

    run = Run([s.url for s in clean_pair], model, tmp_path / "run", steps=8, amid=kill)
    try:
        run.trainer.train()
    finally:
        if killed:
            victim.start()
            victim.wait_ready()
    assert killed
    assert run.trainer.state.global_step == 8
    assert run.engines == [stays.url.removeprefix("http://")]
    check_versions(torch, model, run)
    check_staleness(run, begin=0)
    seen = {sample.group_id for sample in [*run.samples, *run.worker._samples]}
    assert len(seen | run.in_flight) == run.launched


def test_a_streamed_trainer_begins_while_the_last_response_of_its_batch_is_to_come(
    torch: Any,
    clean_server: CpuServer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last response of every batch is generated after the trainer's first forward of the step,
    and all are of the weights that are trained: the ratio is 1 at every step."""
    steps = 3
    changed = threading.Condition()
    events: list[str] = []
    numbers = itertools.count()
    generate = SGLangEngine.generate

    def note(event: str) -> None:
        with changed:
            events.append(event)
            changed.notify_all()

    def await_forward(step: int) -> None:
        with changed:
            # A step has two micro-batches.
            assert changed.wait_for(lambda: events.count("forward") > 2 * step, 120)

    async def held(engine: Any, request: Any) -> Any:
        step, place = divmod(next(numbers), STEP)
        if place == STEP - 1:
            await asyncio.to_thread(await_forward, step)
            note("sent")
        async for chunk in generate(engine, request):
            if place == STEP - 1 and chunk.finish is not None:
                note("ended")
            yield chunk

    monkeypatch.setattr(SGLangEngine, "generate", held)
    run = Run([clean_server.url], model, tmp_path / "run", steps=steps, streamed=True)
    assert run.trainer.model is not None
    run.trainer.model.register_forward_pre_hook(lambda *_: note("forward"))
    run.trainer.train()
    assert run.trainer.state.global_step == steps
    assert events == ["forward", "sent", "ended", "forward"] * steps
    ratios = run.logged("ratio")
    assert len(ratios) == steps
    assert max(abs(ratio - 1) for ratio in ratios) < TOLERANCE
    assert len(run.samples) == steps * STEP
    for number, sample in enumerate(run.samples):
        versions = run.groups[sample.group_id].rollouts[number % 4].versions
        assert set(versions.tolist()) == {number // STEP + 1}
    # The weights change at every step, or the ratio would say nothing.
    for before, after in pairwise(run.weights.values()):
        assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())


def check_staleness(run: Run, *, begin: int) -> None:
    """No token that counts is older than promised when the step trains on it."""
    assert not run.logged("sample/dropped_stale_total")
    for number, sample in enumerate(run.samples):
        if sample.completion_mask.sum() == 1 and sample.advantage == 0:
            continue  # All its tokens are masked, because the rest of the group took too long.
        version = begin + number // STEP + 1
        assert version - oldest(run, number) <= STALENESS
        # TRL counts from 1 in every process.
        assert sample.model_version == oldest(run, number) - begin


def oldest(run: Run, number: int) -> int:
    sample = run.samples[number]
    rollout = run.groups[sample.group_id].rollouts[number % 4]
    return int(rollout.versions[sample.completion_mask[len(rollout.prompt_ids) :] == 1].min())


def check_versions(torch: Any, path: Path, run: Run) -> None:
    """Each token's logprob is that of transformers with the weights of the token's version.

    An engine reports the versions of a response at its end. A restored response that was in flight
    has ``versions_exact=False``, and each of its tokens is of some version.
    """
    from transformers import AutoModelForCausalLM

    scorer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ratios: dict[tuple[int, int], Any] = {}
    versions: set[int] = set()
    for version, weights in run.weights.items():
        scorer.load_state_dict(weights)
        for number, sample in enumerate(run.samples):
            rollout = run.groups[sample.group_id].rollouts[number % 4]
            versions.add(len(set(rollout.versions.tolist())))
            of_it = (rollout.versions == version) | (not rollout.versions_exact)
            if not of_it.any():
                continue
            ids = torch.from_numpy(sample.input_ids)
            with torch.no_grad():
                scores = scorer(ids[None]).logits[0, :-1].log_softmax(-1)
            right = scores.gather(1, ids[1:, None])[:, 0].numpy()
            ratio = np.exp(right - sample.old_log_probs[1:])[-len(rollout) :]
            off = np.where(of_it, np.abs(ratio - 1), np.inf)
            key = (sample.group_id, number % 4)
            ratios[key] = np.minimum(ratios.get(key, np.inf), off)
    assert len(ratios) == len(run.samples)
    assert max(float(off.max()) for off in ratios.values()) < TOLERANCE
    assert max(versions) > 1, "no response was interrupted by an update"


def test_the_example_trains(
    torch: Any,
    clean_server: CpuServer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--engine", clean_server.url, "--model", str(model), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options, "--out", str(tmp_path / "run")])
    names = runpy.run_path(str(EXAMPLE), run_name="example")
    assert names["main"]().state.global_step == 2
    assert (tmp_path / "run" / "checkpoint-2" / "aprilsched.checkpoint").is_file()
