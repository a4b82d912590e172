"""TRL's own trainer on real servers: one run, and the checks of what it trained on."""

# pyright: basic
# The packages have no complete types.
from __future__ import annotations

import asyncio
import functools
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import DistributedPublisher, SchedulerConfig
from aprilsched.kernel.engines.base import Engine, Fleet
from aprilsched.trainers.trl import RolloutWorker, StreamedSteps
from aprilsched.types import NO_VERSION, Rollout, Sample, Unit

__all__ = [
    "CARRYING",
    "STEP",
    "TOLERANCE",
    "Run",
    "arguments",
    "check_staleness",
    "check_versions",
    "hold_one",
    "train_and_resume",
    "trainer_of",
    "trl_without_a_gpu",
    "with_tokenizer",
]

STEP = 8
"""Rollouts of one step: 2 groups of 4."""
CARRYING = SchedulerConfig(over_provision=2.0, straggler="retract", pace="asynchronous")
STALENESS = 3
TOLERANCE = 1e-4
TRIES = 3
DATA: Any = [{"prompt": [{"role": "user", "content": f"w{i + 10} w{i + 11}"}]} for i in range(12)]


@contextmanager
def trl_without_a_gpu() -> Iterator[Any]:
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


def with_tokenizer(model: Path, folder: Path) -> Path:
    """A copy of a server's model in `folder`, with a tokenizer."""
    from tests.support.trl_on_cpu import tokenizer

    shutil.copytree(model, folder)
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


def record_files(publisher: Any, kept: dict[int, dict[str, Any]]) -> None:
    """Keep what the files of each version say."""
    from safetensors.torch import load_file

    publish = publisher.publish

    async def recorded(version: int, engines: Sequence[Engine]) -> Any:
        kept[version] = {}
        for file in publisher.path(version).glob("*.safetensors"):
            kept[version] |= load_file(file)
        return await publish(version, engines)

    publisher.publish = recorded


class Run:
    """One process of the training: what the trainer was given, and every version of the weights,
    which are broadcast, or written to the folder `weights`."""

    def __init__(
        self,
        fleet: Fleet,
        model: Path,
        folder: Path,
        *,
        steps: int,
        save_steps: int = 10,
        weights: Path | None = None,
        amid: Callable[[int], None] = lambda version: None,
        streamed: bool = False,
        tools: Sequence[Callable[..., Any]] = (),
        config: SchedulerConfig = CARRYING,
        accept: Callable[[Any], Any] = lambda unit: True,
    ) -> None:
        from transformers import AutoTokenizer

        self.samples: list[Any] = []
        self.units: list[Unit] = []
        """Groups or single samples, in the order in which they were taken."""
        self.weights: dict[int, dict[str, Any]] = {}
        self.in_flight: set[int] = set()
        self.engines: list[str] = []
        """The engines that are in use at the end."""
        self.launched = 0
        args = arguments(
            folder,
            max_steps=steps,
            max_completion_length=200,
            max_tool_calling_iterations=2 if tools else None,
            max_staleness=0 if streamed else STALENESS,
            save_strategy="steps",
            save_steps=save_steps,
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.worker = RolloutWorker(
            fleet,
            args=args,
            train_dataset=DATA,
            processing_class=tokenizer,
            reward_funcs=varied,
            config=SchedulerConfig() if streamed else config,
            streamed=streamed,
            publisher=weights or functools.partial(Recorded, kept=self.weights, amid=amid),
            accept=accept,
            tools=tools,
        )
        if weights is not None:
            record_files(self.worker._publisher, self.weights)
        get, made = self.worker.get, self.worker._trl_samples
        self.worker._trl_samples = lambda unit, version: made(self._taken(unit), version)  # type: ignore[method-assign]
        self.worker.get = lambda timeout=None: self._noted(get(timeout))  # type: ignore[method-assign]
        self.worker.callback.on_train_end = self._end  # type: ignore[method-assign]

        self.trainer = trainer_of(
            self.worker,
            model,
            args=args,
            train_dataset=DATA,
            processing_class=tokenizer,
            streamed=streamed,
        )

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of :attr:`samples`, and then those that the trainer did not ask for yet."""
        return [rollout for unit in self.units for rollout in unit.rollouts]

    def _taken(self, unit: Unit) -> Unit:
        self.units.append(unit)
        return unit

    def _noted(self, sample: Any) -> Any:
        self.samples.append(sample)
        return sample

    def _end(self, *_: Any, **__: Any) -> None:
        state = self.worker.scheduler.state.in_flight
        self.in_flight, self.launched = set(state.rollouts), state.counters.launched
        self.engines = list(self.worker.scheduler.state.fleet.control.engines)


def arguments(folder: Path, **changes: Any) -> Any:
    """Arguments of TRL for 2 groups of 4 in a step, on a CPU."""
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig

    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 60,
        "token_budget": 0,
        "max_staleness": STALENESS,
        "learning_rate": 1e-3,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return AsyncGRPOConfig(**{**values, **changes})


def trainer_of(
    worker: RolloutWorker,
    model: Path,
    *,
    streamed: bool,
    callbacks: Sequence[Any] = (),
    **changes: Any,
) -> Any:
    """TRL's trainer with the rollouts of `worker`."""
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    class Streamed(StreamedSteps, AsyncGRPOTrainer):
        pass

    return (Streamed if streamed else AsyncGRPOTrainer)(
        str(model),
        rollout_worker=worker,
        weight_transfer=worker,
        callbacks=[worker.callback, *callbacks],
        **changes,
    )


async def hold_one(sample: Sample) -> bool:
    """Accept all samples but the last one of the first prompt, on which no other sample waits."""
    if (sample.prompt.key, sample.rollout.index) == (0, 3):
        await asyncio.Event().wait()
    return True


def varied(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) % 7 / 7 for ids in completion_ids]


def train_and_resume(
    torch: Any,
    model: Path,
    folder: Path,
    since: Callable[..., Run],
    *,
    saved: int,
    ended: int,
    last: int,
) -> None:
    """Train until step `ended`, resume from the checkpoint of step `saved` in another trainer until
    step `last`, and check every token against its version. In runs of 20 steps, or of a few more on
    a busy machine, an update must interrupt some response; in shorter runs it need not."""
    first = since(steps=ended, save_steps=saved)
    first.trainer.train()
    second = since(steps=last, save_steps=saved)
    second.trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{saved}"))
    assert second.trainer.state.global_step == last
    # The first step trains on tokens of the weights that it has.
    assert first.logged("ratio")[0] == pytest.approx(1, abs=TOLERANCE)
    assert max(abs(ratio - 1) for ratio in second.logged("ratio")) > TOLERANCE
    versions = check_versions(torch, model, first)
    # What the restored batch was sampled with, the first process has.
    for name, tensor in second.weights[saved + 1].items():
        assert torch.equal(tensor, first.weights[saved + 1][name])
    second.weights = first.weights | second.weights
    versions = max(versions, check_versions(torch, model, second))
    for step in range(last, last + TRIES * saved, saved):
        if versions > 1 or last < 20:
            break
        further = since(steps=step + saved, save_steps=saved)
        further.trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        further.weights = second.weights | further.weights
        versions = check_versions(torch, model, further)
    assert versions > 1 or last < 20, "no response was interrupted by an update"
    check_staleness(first, since=0)
    check_staleness(second, since=saved)
    # Nothing is lost, and nothing is trained on twice.
    before, after = first.rollouts, second.rollouts
    started, rest = saved * STEP, (last - saved) * STEP
    trained = [rollout.rollout_id for rollout in before[:started] + after[:rest]]
    ahead = {rollout.rollout_id for rollout in after[rest:]}
    assert len(set(trained)) == len(trained)
    assert len(set(trained) | ahead | second.in_flight) == second.launched
    for old, new in zip(before[started : started + STEP], after, strict=False):
        assert old.rollout_id == new.rollout_id
        assert np.array_equal(old.token_ids, new.token_ids)


def check_staleness(run: Run, *, since: int) -> None:
    """No token that counts is older than promised when the step trains on it."""
    assert not run.logged("sample/dropped_stale_total")
    for number, sample in enumerate(run.samples):
        if sample.completion_mask.sum() == 1 and sample.advantage == 0:
            continue  # All its tokens are masked, because the rest of the group took too long.
        version = since + number // STEP + 1
        assert version - oldest(run, number) <= STALENESS
        # TRL counts from 1 in every process.
        assert sample.model_version == oldest(run, number) - since


def oldest(run: Run, number: int) -> int:
    sample, rollout = run.samples[number], run.rollouts[number]
    return int(rollout.versions[sample.completion_mask[len(rollout.prompt_ids) :] == 1].min())


def check_versions(torch: Any, path: Path, run: Run) -> int:
    """Each token's logprob is that of transformers with the weights of the token's version. Returns
    the most versions that a response has.

    An engine reports the versions of a response at its end. A restored response that was in flight
    has ``versions_exact=False``, and each of its tokens is of some version.
    """
    from transformers import AutoModelForCausalLM

    scorer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ratios: dict[int, Any] = {}
    rollouts = run.rollouts
    versions: set[int] = set()
    for version, weights in run.weights.items():
        scorer.load_state_dict(weights)
        for number, sample in enumerate(run.samples):
            rollout = rollouts[number]
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
            off[rollout.versions == NO_VERSION] = 0.0  # Tool output was not sampled.
            ratios[number] = np.minimum(ratios.get(number, np.inf), off)
    assert len(ratios) == len(run.samples)
    assert max(float(off.max()) for off in ratios.values()) < TOLERANCE
    return max(versions)
