"""Rollouts for slime and for miles, a fork of it, from their own SGLang engines.

:func:`generate_rollout` is loaded by ``--rollout-function-path``, and miles also takes
:class:`RolloutFn`. :class:`DataSource` is loaded by ``--data-source-path`` and keeps what is in
flight in the trainer's checkpoints. It is written for slime 624b824 and miles 31f1ca9.

- The RolloutManager's process has one scheduler, which the first call opens. It never pauses an
  engine: when a batch is full, it aborts the unfinished responses, keeps their tokens, and resumes
  them in the next call. So no request is in flight when the trainer releases memory, pauses the
  engines or loads weights.
- The trainer loads weights between two calls without notifying the scheduler. So each call first
  reads the engines' weight label. The labels restart at 1 when training is resumed, so versions
  continue from the checkpoint's (`first_version` of the fleet).
- A group of the data source becomes a prompt whose key is a number. The group's samples stay here
  under this number, because reward functions and hooks may attach arbitrary objects to them.
- Reward functions run on the trainer's own event loop, so a blocking one does not stall a stream.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from aprilsched.agents.chat.tokenizer import wrapped_tokenizer
from aprilsched.errors import ConfigError, EngineError
from aprilsched.fronts.blocking import RolloutScheduler
from aprilsched.kernel.engines.address import ServerAddress
from aprilsched.kernel.engines.sglang.http_engine import SGLangFleet
from aprilsched.kernel.shell.prompts import check_media
from aprilsched.kernel.store import MemoryStore
from aprilsched.kernel.values.files import written_whole
from aprilsched.kernel.weights.external import ExternalWeights
from aprilsched.trainers.adapter import (
    images_of,
    one_placeholder_each,
    routed_experts,
    staleness,
    trained_advantages,
    untrained_groups,
)
from aprilsched.trainers.by_session import BySession
from aprilsched.trainers.slime_functions import GenerateFunctions, uses_functions
from aprilsched.trainers.slime_settings import (
    engine_addresses,
    sampling_of,
    scheduler_config,
    settings_table,
    takes_advantages,
)
from aprilsched.trainers.slime_trainer import TrainerParts, check_sample, check_trainer
from aprilsched.types import (
    NO_VERSION,
    Batch,
    Group,
    Media,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    Unit,
)

log = logging.getLogger("aprilsched")

T = TypeVar("T")

_DRY_SECONDS = 1.0
"""Interval at which a data source is polled after it returned no group."""
_LOOK_SECONDS = 0.005
"""Interval at which it is looked whether called back requests have ended."""
_JOIN_SECONDS = 10.0
"""Longest wait for engines that were added; they join later if their checks take longer."""
_PROCESSED = ("input_ids", "attention_mask", "mm_token_type_ids")
"""What a processor makes of a prompt that is not for the training on its images."""
_AHEAD = 1
"""Number of batches that train_async.py takes ahead of the one that it trains on."""
_ADVANTAGE = "aprilsched_advantage"
"""Entry of a sample's metadata for :func:`sibling_advantages`."""
_SAMPLES = ".samples"
"""Suffix of the file with the samples of a checkpoint."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Generate the samples of one training step, or of an evaluation.

    Args:
        args: the trainer's arguments. A mapping `aprilsched` in the file of
            ``--custom-config-path`` has settings of the scheduler.
        rollout_id: number of the rollout.
        data_source: gives groups of samples; the samples are copied.
        evaluation: whether the evaluation datasets are answered instead.

    Returns:
        The trainer's RolloutFnTrainOutput or RolloutFnEvalOutput.

    Raises:
        ConfigError: if the arguments or the samples require an unsupported feature, or if the
            engines do not have the weights that the trainer reports.
    """
    rollouts = _rollouts(args, data_source)
    return rollouts.evaluate() if evaluation else rollouts.generate(rollout_id)


def sibling_advantages(args: Any, samples: Sequence[Any]) -> tuple[list[Any], list[float]]:
    """Return the rewards of samples, and their advantages (:func:`aprilsched.advantages`).

    It is the function for ``--custom-reward-post-process-path`` with ``delivery="samples"``. The
    trainer's own would subtract the mean of those members of a group that are in the batch.
    """
    rewards = [sample.get_reward_value(args) for sample in samples]
    return rewards, [sample.metadata[_ADVANTAGE] for sample in samples]


class RolloutFn:
    """:func:`generate_rollout` as a class, for miles, which passes a RolloutFnConstructorInput.

    miles passes the version of the training weights, so each call also checks that every engine
    has this version.
    """

    def __init__(self, input: Any) -> None:
        self._args = input.args
        self._data_source = input.data_source

    def __call__(self, input: Any) -> Any:
        """Run the rollout that a RolloutFnTrainInput or a RolloutFnEvalInput requests.

        Raises:
            ConfigError: as :func:`generate_rollout`, and for an evaluation of a checkpoint.
        """
        rollouts = _rollouts(self._args, self._data_source)
        if not input.evaluation:
            return rollouts.generate(input.rollout_id, label=input.weight_version)
        if input.generate_state is not None or input.hf_dir is not None:
            raise ConfigError(
                "the evaluation is one of a checkpoint on engines of its own; set "
                "--eval-function-path to the function of miles for it."
            )
        return rollouts.evaluate()


class DataSource:
    """The trainer's data source, whose checkpoints also have everything that is in flight.

    It wraps the data source that `data_source_path` of the mapping `aprilsched` names, by default
    the trainer's RolloutDataSourceWithBuffer, and behaves like it in everything else.
    """

    def __init__(self, args: Any) -> None:
        trainer = TrainerParts()
        path = settings_table(args).get("data_source_path")
        made = trainer.load(
            path or f"{trainer.name}.rollout.data_source.RolloutDataSourceWithBuffer"
        )
        self.wrapped: Any = made(args)
        self.args = args
        self.restored: Path | None = None
        """Where the scheduler that is opened next finds its state."""

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Give `num_samples` groups, or fewer."""
        return self.wrapped.get_samples(num_samples)

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Add groups that are given again."""
        self.wrapped.add_samples(samples)

    def save(self, rollout_id: int) -> None:
        """Save the prompt position and the groups in flight, after training on `rollout_id`.

        Batches up to `rollout_id` count as trained on. A later one that train_async.py has already
        taken is delivered again after :meth:`load`.
        """
        current = _current
        if current is not None and current.data_source is self:
            current.save(rollout_id, _checkpoint(self.args.save, rollout_id))
        else:
            self.wrapped.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Restore what :meth:`save` wrote; without a checkpoint, nothing is in flight."""
        current = _current
        if current is not None and current.data_source is self:
            close()
        self.wrapped.load(rollout_id)
        self.restored = None
        if self.args.load is not None:
            path = _checkpoint(self.args.load, rollout_id)
            # The samples are written last, so a process that died in between has left none.
            if path.exists() and path.with_suffix(_SAMPLES).exists():
                self.restored = path
            else:
                log.info("%s does not exist, so no rollout is in flight at the beginning", path)

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # It is not made yet.
            raise AttributeError(name)
        return getattr(self.wrapped, name)


def _checkpoint(folder: str, rollout_id: int | None) -> Path:
    return Path(folder) / "rollout" / f"aprilsched_{rollout_id}.checkpoint"


def close() -> None:
    """Close the scheduler of this process, if there is one; the next call opens another."""
    global _current
    current, _current = _current, None
    if current is not None:
        current.close()


_current: _Rollouts | None = None
"""The scheduler of this process."""

atexit.register(close)


def _rollouts(args: Any, data_source: Any) -> _Rollouts:
    global _current
    if _current is None or _current.data_source is not data_source:
        close()
        _current = _Rollouts(args, data_source)
    return _current


class _LabelledRollouts(RolloutScheduler):
    """A scheduler on engines whose weights slime has loaded and labelled before it generates."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._here.trust_weights()


class _Rollouts:
    """The scheduler of a RolloutManager, and the samples of the groups that it has."""

    def __init__(self, args: Any, data_source: Any) -> None:
        self.data_source = data_source
        self._args = args
        self._trainer = trainer = TrainerParts()
        check_trainer(args, trainer)
        self._config = scheduler_config(args, trainer)
        self._tokenizer = trainer.tokenizer(args)
        self._reading = threading.Lock()
        """A tokenizer of Hugging Face may raise "Already borrowed" when two threads use it."""
        self._samples: dict[int | str, list[Any]] = {}
        """The samples of each group by its prompt's key: a number for training, a text for an
        evaluation. A sample is replaced when it is scored."""
        self._next = 0
        """Number of the next group of the data source. Groups have the numbers that the scheduler
        counts prompts by."""
        self._lock = threading.Lock()
        """Held while groups are taken from the data source, and while they are saved."""
        self._calls = threading.Lock()
        """Held by generate() and evaluate(), which miles may call from two threads."""
        self._untrained: dict[int, Batch] = {}
        """The batches that are not acknowledged, by the number of their rollout."""
        self._filter: Any = trainer.load(args.dynamic_sampling_filter_path)
        self._dropped: Any = trainer.filters.MetricGatherer()
        self._rejected: list[list[Any]] = []
        self._refused: set[int] = set()
        """Ids of units that the dynamic filter has dropped, as long as they are in flight."""
        self._evaluated: dict[str, Any] = {}
        """The datasets of the evaluation."""
        self._numbers = itertools.count()
        self._has_saves = isinstance(data_source, DataSource)
        self._functions: GenerateFunctions | None = None
        self._episode: BySession | None = None
        if uses_functions(args):
            self._functions = GenerateFunctions(args, trainer, self._samples, self._tokenizer)
            # Threads of this process use the other tokenizer.
            own = wrapped_tokenizer(trainer.tokenizer(args), Path(args.hf_checkpoint))
            settings: dict[str, Any] = settings_table(args).get("sessions") or {}
            self._episode = BySession(self._functions.harness, own, settings, trainer.name)
        self._warned = False
        self._first_version = 0
        self._fleet: SGLangFleet | None = None
        self._prompts = _Prompts(self._pull, self._starved)
        self._open: RolloutScheduler | None = None

    def close(self) -> None:
        """Close the scheduler."""
        rollouts, self._open = self._open, None
        if rollouts is not None:
            rollouts.close()

    @property
    def _scheduler(self) -> RolloutScheduler:
        if self._open is None:
            self._open = self._opened()
        return self._open

    def _opened(self) -> RolloutScheduler:
        args = self._args
        restored = self.data_source.restored if self._has_saves else None
        if restored is not None:
            # They hold whatever reward functions put into them, so they are pickled, as slime does.
            saved = self._trainer.torch.load(restored.with_suffix(_SAMPLES), weights_only=False)
            self._samples.update(saved["samples"])
            self._first_version = saved["version"]
            if self._functions is not None:
                self._functions.made.update(saved["made"])
        elif not self._has_saves and getattr(args, "save", None) is not None:
            log.warning(
                "checkpoints of the trainer lack the responses in flight; set --data-source-path "
                "to aprilsched.trainers.slime.DataSource."
            )
        self._fleet = SGLangFleet(
            engine_addresses(args),
            admin_key=getattr(args, "sglang_admin_api_key", None),
            api_key=getattr(args, "sglang_api_key", None),
            first_version=self._first_version,
        )

        async def accept(unit: Unit) -> bool:
            # The scheduler calls it while it is opened or closed, when it is not the open one.
            return await self._accept(unit, rollouts)

        listeners: Any = self._trainer.load(settings_table(args).get("listeners_path"))
        rollouts = _LabelledRollouts(
            self._fleet,
            self._prompts,
            reward=self._score_group if args.group_rm else self._score,
            reward_scope="group" if args.group_rm else "rollout",
            accept=accept if self._filter is not None else None,
            episode=self._episode,
            config=self._config,
            listeners=[] if listeners is None else listeners(args),
            # It keeps the batches that are taken and not trained on, for a checkpoint.
            store=MemoryStore(),
        )
        if restored is not None:
            rollouts.restore(restored)
        rollouts.__enter__()
        self._next = rollouts.state.prompts.cursor
        return rollouts

    def generate(self, rollout_id: int, *, label: int | None = None) -> Any:
        """Return the samples of one training step; `label` is the version that the engines have."""
        with self._calls:
            rollouts = self._scheduler
            self._follow(label)
            self._trained(lambda number: number < rollout_id - _AHEAD)
            with self._prompts_flow(rollouts):
                batch = rollouts.next_batch()
            rollouts.on_loop(self._calm)
            rollouts.on_loop(self._let_lost_engines_go)
            self._trained(lambda number: number == rollout_id)
            self._untrained[rollout_id] = batch
            output = self._output(batch)
            self._forget()
            return output

    def _trained(self, which: Callable[[int], bool]) -> None:
        """Acknowledge the batches of some rollouts."""
        # miles may save in another thread while it generates.
        for number in [number for number in list(self._untrained) if which(number)]:
            if (batch := self._untrained.pop(number, None)) is not None:
                batch.acknowledge()

    def _follow(self, label: int | None) -> None:
        """Adopt the engines that the trainer has now, at their version."""
        rollouts = self._scheduler
        self._change_fleet()
        if label is not None:
            version = self._first_version + label
        else:
            shown = Counter(rollouts.on_loop(self._versions))
            if not shown:
                return  # No engine answers; the wait for the batch reports which and why.
            version = max(shown, key=lambda each: (shown[each], each))
        if version < rollouts.version:
            raise ConfigError(
                f"the engines show weights of version {version}, and version {rollouts.version} "
                "was in use before; let the trainer update their weights before it generates."
            )
        if version > rollouts.version:
            # The trainer has labelled all engines already, so none is waited for. The batches
            # before are acknowledged by their numbers and not by the update.
            moved = ExternalWeights(timeout_s=0)
            rollouts.update_weights(moved, version=version, acknowledge=False)

    async def _versions(self) -> list[int]:
        async def one(engine: Any) -> int | None:
            try:
                return await engine.version()
            except EngineError:
                return None

        fleet = cast(SGLangFleet, self._fleet)
        found = await asyncio.gather(*(one(engine) for engine in fleet.engines))
        return [version for version in found if version is not None]

    def _change_fleet(self) -> None:
        """Add the engines that the trainer has started, and remove those that it has ended."""
        rollouts, fleet = self._scheduler, cast(SGLangFleet, self._fleet)
        now = {ServerAddress.parse(url).name: url for url in engine_addresses(self._args)}
        there = {engine.name for engine in fleet.engines}
        if now.keys() == there:
            return
        for name in now.keys() - there:
            try:
                rollouts.on_loop(partial(fleet.add, now[name]))
            except (EngineError, ConfigError) as error:
                log.warning("an engine does not take part: %s", error)
        rollouts.on_loop(partial(self._keep, now))
        rollouts.on_loop(self._joined)

    async def _joined(self) -> None:
        """Wait until the engines that were added have passed their checks, for some seconds.

        An update must not come before that: it would not reach them.
        """
        fleet = cast(SGLangFleet, self._fleet)
        await _until(
            lambda: {engine.name for engine in fleet.engines} == self._taking_part(), _JOIN_SECONDS
        )

    async def _keep(self, names: Collection[str]) -> None:
        """Remove the other engines from the fleet, but not the last one."""
        fleet = cast(SGLangFleet, self._fleet)
        for engine in fleet.engines:
            if engine.name not in names and len(fleet.engines) > 1:
                await fleet.remove(engine.address)

    def _taking_part(self) -> set[str]:
        """Return the names of the engines that are in use or stand by."""
        return {control.name for control in self._scheduler.state.fleet.control.all()}

    @contextmanager
    def _prompts_flow(self, rollouts: RolloutScheduler) -> Generator[None]:
        """Let groups be taken from the data source in this block only."""
        rollouts.on_loop(self._prompts.start)
        try:
            yield
        finally:
            rollouts.on_loop(self._prompts.end)
            with self._lock:
                pass  # The data source is still being asked.

    async def _calm(self) -> None:
        """Wait until the engines have none of the requests that were called back."""
        state, limit = self._scheduler.state, self._config.timeouts.control_s
        if not await _until(lambda: not state.in_flight.open_attempts, limit):
            log.warning("an engine has not ended the requests that were called back")

    async def _let_lost_engines_go(self) -> None:
        """Remove lost engines from the fleet; the next call looks for them.

        Otherwise the fleet would retry them while the trainer restarts them or uses their memory.
        """
        await self._keep(self._taking_part())

    def _forget(self) -> None:
        """Forget the samples of groups that are dropped, or that need not be given again."""
        with self._lock:
            live = self._scheduler.on_loop(self._live)
            for key in [key for key in self._samples if key not in live]:
                del self._samples[key]
            if self._functions is not None:
                self._functions.forget(live)

    async def _live(self) -> set[Any]:
        """Return the keys of the groups whose samples are still needed."""
        state = self._scheduler.state
        live = {group.prompt.key for group in untrained_groups(state)}
        return live.union(range(state.prompts.cursor, self._next))

    def _pull(self) -> list[Prompt]:
        """Take the next group of the data source; it may give none, or several."""
        with self._lock:
            if not self._prompts.flows:
                return []
            if self._next in self._samples:  # It was taken before a restart and not launched.
                groups = [self._samples[self._next]]
            else:
                # Each sample by itself, because a data source may give the same object twice.
                groups = [
                    [copy.deepcopy(sample) for sample in group]
                    for group in self.data_source.get_samples(1)
                ]
            prompts: list[Prompt] = []
            for group in groups:
                prompts.append(self._prompt(self._next, group))
                self._samples[self._next] = group
                self._next += 1
            return prompts

    def _starved(self) -> str:
        """Why no batch can come if the data source has nothing; empty if one can."""
        if self._open is None:  # It is being closed.
            return ""
        state = self._open.state
        ready = len(state.in_flight.ready)
        if state.in_flight.training > ready:
            return ""
        size, unit = self._config.policies.stop.amount, self._config.delivery
        return (
            f"the data source gives no group, and {ready} of the {size} {unit} of this step are "
            "there; give it more prompts, or set a smaller --rollout-batch-size."
        )

    def _prompt(self, number: int | str, group: Sequence[Any]) -> Prompt:
        size = self._args.n_samples_per_prompt
        if isinstance(number, int) and len(group) != size:
            raise ConfigError(
                f"the data source gave a group of {len(group)} samples, and "
                f"--n-samples-per-prompt is {size}; give as many."
            )
        first = group[0]
        for sample in group:
            check_sample(sample)
            if sample.generate_function_path is not None and self._functions is None:
                raise ConfigError(
                    f"sample {sample.index} has a generate_function_path, and rollouts are not "
                    "generated by functions; set --custom-generate-function-path too."
                )
            if sample.prompt != first.prompt:
                raise ConfigError(
                    f"samples {first.index} and {sample.index} of a group have two prompts; give "
                    "a group the same prompt."
                )
        inputs: dict[str, Any] = first.multimodal_inputs or {}
        media = images_of(inputs.get("images") or ())
        ids = np.array(
            self._expanded(group, media) if media else self._prompt_ids(first), dtype=np.int32
        )
        return Prompt(
            input_ids=ids,
            key=number,
            sampling=self._seeded(self._config.sampling, len(group)),
            group_size=len(group),
            media=media,
        )

    def _expanded(self, group: Sequence[Any], media: Sequence[Media]) -> Any:
        """Return the ids that engines receive for a prompt with images.

        The prompt's samples get the ids with expanded placeholders, and the output of the trainer's
        processor for the images.
        """
        check_media(media, self._config.policies.companions)
        with self._reading:
            processor, made = self._trainer.processed(self._args, group[0])
        ids = np.array(made["input_ids"][0])
        train = {name: each for name, each in made.items() if name not in _PROCESSED}
        for sample in group:
            sample.tokens, sample.response_length = ids.tolist(), 0
            sample.multimodal_train_inputs = train
        return ids[one_placeholder_each(ids, len(media), processor)]

    def _prompt_ids(self, sample: Any) -> list[int]:
        known = sample.tokens[: len(sample.tokens) - sample.response_length]
        if sample.response_length and not self._warned:
            self._warned = True
            log.warning("a sample of the data source has a response; it is generated again")
        if known:
            return known
        text = sample.prompt
        if not isinstance(text, str):
            # The function sends these messages, so the prompt's own ids are not used.
            text = json.dumps(text, default=str)
        with self._reading:
            return self._tokenizer.encode(text, add_special_tokens=False)

    def _seeded(
        self, sampling: SamplingParams, size: int
    ) -> SamplingParams | tuple[SamplingParams, ...]:
        args = self._args
        if not getattr(args, "sglang_enable_deterministic_inference", False):
            return sampling
        return tuple(
            replace(sampling, sampling_seed=args.rollout_seed + index) for index in range(size)
        )

    async def _score(self, rollout: Rollout, prompt: Prompt) -> float:
        key: Any = prompt.key
        evaluation = isinstance(key, str)
        sample = await asyncio.to_thread(self._sampled, key, rollout)
        sample = await self._trainer.on_its_loop(self._rewarded(sample, evaluation))
        self._samples[key][rollout.index] = sample
        args = self._args
        key = (evaluation and getattr(args, "eval_reward_key", None)) or args.reward_key
        return _reward_number(sample, key, counts=takes_advantages(args) and not evaluation)

    async def _score_group(self, group: Group) -> list[float]:
        key: Any = group.prompt.key
        samples = await asyncio.to_thread(
            lambda: [self._sampled(key, rollout) for rollout in group.rollouts]
        )
        samples = await self._trainer.on_its_loop(self._group_rewarded(samples))
        self._samples[key][:] = samples
        counts = takes_advantages(self._args)
        return [_reward_number(each, self._args.reward_key, counts=counts) for each in samples]

    async def _rewarded(self, sample: Any, evaluation: bool) -> Any:
        """`sample` with its reward; it runs on the trainer's event loop."""
        sample = await self._trainer.hooked(self._args, sample, evaluation=evaluation)
        if sample.reward is None:
            sample.reward = await self._trainer.rewards.async_rm(self._args, sample)
        return _with_reward(sample)

    async def _group_rewarded(self, samples: list[Any]) -> list[Any]:
        hooked = self._trainer.hooked
        samples = [await hooked(self._args, sample, evaluation=False) for sample in samples]
        rewards = await self._trainer.rewards.batched_async_rm(self._args, samples)
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward = reward
        return [_with_reward(sample) for sample in samples]

    async def _accept(self, unit: Unit, rollouts: RolloutScheduler) -> bool:
        """Ask the dynamic filter about a group, or about a sample with its siblings."""
        args, filters = self._args, self._trainer.filters
        key: Any = unit.prompt.key
        samples, size = self._samples[key], args.rollout_batch_size
        single = isinstance(unit, Sample)
        if single:
            samples = [samples[each.index] for each in (unit.rollout, *unit.siblings)]
            size *= args.n_samples_per_prompt
        verdict = await asyncio.to_thread(filters.call_dynamic_filter, self._filter, args, samples)
        dropped = not verdict.keep
        if (drops := getattr(filters, "should_drop_dynamic_filter_output", None)) is not None:
            # A group that was dropped a moment ago may be in flight still.
            flying = {
                each.rollout_id if single else group.group_id
                for group in rollouts.state.in_flight.training_groups()
                for each in group.members
            }
            self._refused &= flying
            left = len(flying - self._refused)
            dropped = drops(verdict, remaining_batch_size=left, target_data_size=size)
        if dropped:
            self._refused.add(unit.unit_id)
            self._dropped.on_dynamic_filter_drop(reason=verdict.reason)
            if args.rollout_all_samples_process_path is not None:
                self._rejected.append(samples[:1] if single else samples)
        return not dropped

    def _sampled(self, key: int | str, rollout: Rollout) -> Any:
        """Return a copy of a rollout's sample with what was generated."""
        made: Any = None
        if self._functions is not None:
            made = self._functions.made.get(key, {}).get(rollout.index)
        sample = copy.deepcopy(self._samples[key][rollout.index] if made is None else made)
        ids = rollout.token_ids.tolist()
        with self._reading:
            sample.response = self._tokenizer.decode(
                ids,
                skip_special_tokens=self._args.rollout_skip_special_tokens,
                spaces_between_special_tokens=False,
            )
        shown = sample.multimodal_train_inputs is not None
        before = sample.tokens[: len(sample.tokens) - sample.response_length]
        sample.tokens = [*(before if shown else rollout.prompt_ids.tolist()), *ids]
        sample.response_length = len(ids)
        sample.loss_mask = rollout.loss_mask.astype(int).tolist()
        sample.rollout_log_probs = rollout.logprobs.tolist()
        if (experts := routed_experts(rollout.companions)) is not None:
            sample.rollout_routed_experts = experts
        if (chosen := rollout.companions.get("indexer_topk")) is not None:
            sample.rollout_indexer_topk = chosen.rows.values.astype(np.int32)
        if (kept := rollout.companions.get("sampling_mask")) is not None:
            sample.rollout_top_p_token_ids = kept.rows.values.tolist()
            sample.rollout_top_p_token_offsets = [0, *kept.rows.offsets]
        versions = (each.version for each in rollout.segments if each.version != NO_VERSION)
        sample.weight_versions = [str(version) for version, _ in itertools.groupby(versions)]
        ended: Any = self._trainer.sample.Status
        sample.status = ended.TRUNCATED if rollout.finish_reason == "length" else ended.COMPLETED
        sample.reward = None
        if made is not None and self._functions is not None:
            self._functions.settle(sample, made)
        return sample

    def _output(self, batch: Batch) -> Any:
        args = self._args
        off_policy = getattr(args, "partial_rollout", False) and getattr(
            args, "mask_offpolicy_in_partial_rollout", False
        )
        found = iter(trained_advantages(batch.units) if takes_advantages(args) else ())
        by_prompt: dict[Any, list[Any]] = {}
        for unit in batch.units:
            key: Any = unit.prompt.key
            for rollout in unit.rollouts:
                sample = self._samples[key][rollout.index]
                by_prompt.setdefault(key, []).append(sample)
                if (advantage := next(found, None)) is not None:
                    sample.metadata = {**(sample.metadata or {}), _ADVANTAGE: float(advantage)}
                # The scheduler masks tokens that are too old for this batch. It scored the sample
                # before it knew the batch.
                counts = rollout.loss_mask
                if off_policy:
                    counts = counts & (rollout.versions >= batch.version)
                if not counts.all() and len(counts) == len(sample.loss_mask):
                    sample.loss_mask = [
                        int(a and b) for a, b in zip(sample.loss_mask, counts, strict=True)
                    ]
        groups = sorted(by_prompt.values(), key=_group_index)
        rejected, self._rejected = self._rejected, []
        if (path := args.rollout_sample_filter_path) is not None:
            self._trainer.load(path)(args, groups)
        if (path := args.rollout_all_samples_process_path) is not None:
            every = sorted([*groups, *rejected], key=_group_index)
            self._trainer.load(path)(args, every, self.data_source)
        dropped, self._dropped = self._dropped, self._trainer.filters.MetricGatherer()
        counted = np.concatenate([staleness(rollout, batch.version) for rollout in batch.rollouts])
        metrics = {
            **dropped.collect(),
            "rollout/aprilsched/off_policy_tokens": float(
                (counted > 0).sum() / max(1, counted.size)
            ),
            "rollout/aprilsched/staleness_max": float(counted.max(initial=0)),
        }
        return self._trainer.outputs.RolloutFnTrainOutput(samples=groups, metrics=metrics)

    def evaluate(self) -> Any:
        """Answer the evaluation datasets with the weights that the engines have."""
        args = self._args
        if args.group_rm:
            raise ConfigError("an evaluation has no groups; leave --group-rm out, or evaluation.")
        with self._calls:
            rollouts = self._scheduler
            self._follow(None)
            prompts: list[Prompt] = []
            keys: dict[str, list[str]] = {}
            datasets: list[Any] = getattr(args, "eval_datasets", None) or []
            for dataset in datasets:
                asked = list(self._questions(dataset))
                keys[dataset.name] = [str(prompt.key) for prompt in asked]
                prompts += asked
            try:
                if prompts:
                    batch = rollouts.evaluate(prompts)
                    rollouts.on_loop(self._let_lost_engines_go)
                    if len(batch.groups) < len(prompts):
                        self._say_what_failed(len(prompts) - len(batch.groups))
                return self._trainer.outputs.RolloutFnEvalOutput(
                    data={name: self._evaluation(of) for name, of in keys.items()}
                )
            finally:
                for key in itertools.chain(*keys.values()):
                    self._samples.pop(key, None)
                    if self._functions is not None:
                        self._functions.made.pop(key, None)

    def _questions(self, dataset: Any) -> Iterator[Prompt]:
        """The prompts of an evaluation dataset."""
        if dataset.name not in self._evaluated:
            self._evaluated[dataset.name] = self._trainer.dataset(self._args, dataset)
        stop, ids = getattr(dataset, "stop", None), getattr(dataset, "stop_token_ids", None)
        skips = getattr(dataset, "skip_special_tokens", None)
        sampling = sampling_of(
            self._args,
            temperature=dataset.temperature,
            top_p=dataset.top_p,
            top_k=dataset.top_k,
            max_new_tokens=dataset.max_response_len,
            min_new_tokens=getattr(dataset, "min_new_tokens", None),
            repetition_penalty=getattr(dataset, "repetition_penalty", None),
            **{} if stop is None else {"stop": stop},
            **{} if ids is None else {"stop_token_ids": ids},
            **{} if skips is None else {"skip_special_tokens": skips},
        )
        index = itertools.count()
        for sample in self._evaluated[dataset.name].samples:
            group = [copy.deepcopy(sample) for _ in range(dataset.n_samples_per_eval_prompt)]
            for each in group:
                each.index = next(index)
                each.metadata = dataset.inject_metadata(getattr(each, "metadata", None))
                own = getattr(dataset, "custom_generate_function_path", None)
                each.generate_function_path = own
                if getattr(dataset, "custom_rm_path", None) is not None:
                    each.custom_rm_path = dataset.custom_rm_path
            key = f"evaluation {next(self._numbers)}"
            self._samples[key] = group
            yield replace(self._prompt(key, group), sampling=self._seeded(sampling, len(group)))

    def _evaluation(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the result for one dataset, as the trainer logs it."""
        samples = [sample for key in keys for sample in self._samples[key]]
        key = self._args.eval_reward_key or self._args.reward_key
        ended: Any = self._trainer.sample.Status
        return {
            "rewards": [each.reward if not key else each.reward[key] for each in samples],
            "truncated": [each.status is ended.TRUNCATED for each in samples],
            "samples": samples,
        }

    def _say_what_failed(self, count: int) -> NoReturn:
        entries = self._scheduler.state.in_flight.ledger.entries
        cause = entries[-1].cause if entries else "no cause is known"
        raise ConfigError(
            f"{count} prompts of the evaluation have no result, the last because {cause}; correct "
            "that, and evaluate again."
        )

    def save(self, rollout_id: int, path: Path) -> None:
        """Save the data source and the scheduler after training on `rollout_id`."""
        rollouts = self._open
        # No group may be taken between the two saves: it would be in one of them only.
        with self._lock:
            self.data_source.wrapped.save(rollout_id)
            if rollouts is None:
                return
            self._trained(lambda number: number <= rollout_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            rollouts.checkpoint(path, acknowledge=False)
            # Groups scored in the checkpoint must be scored here too, so this is saved second.
            samples = {
                key: list(group)
                for key, group in list(self._samples.items())
                if isinstance(key, int)
            }
            made = {} if self._functions is None else self._functions.made
            saved = {"samples": samples, "version": rollouts.version, "made": dict(made)}
            with written_whole(path.with_suffix(_SAMPLES)) as file:
                self._trainer.torch.save(saved, file)


async def _until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until `condition` holds, for at most `seconds`; return whether it does."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)
            return True
    return False


def _reward_number(sample: Any, key: str | None, *, counts: bool) -> float:
    """Return the reward as the number that the run's figures have.

    A reward that is not a number is meant for a function of the user in
    ``--custom-reward-post-process-path``, and is 0 here.

    Raises:
        TypeError, ValueError: if it is not a number and `counts` in advantages.
    """
    reward = sample.reward[key] if key else sample.reward
    try:
        return float(reward)
    except (TypeError, ValueError):
        if counts:
            raise
        return 0.0


def _with_reward(sample: Any) -> Any:
    if sample.reward is None:
        raise ValueError(f"it returned None for sample {sample.index}; return a reward")
    return sample


def _group_index(group: Sequence[Any]) -> int:
    return group[0].index or 0


class _Prompts:
    """The groups of the data source as prompts, while :attr:`flows` is true."""

    def __init__(self, pull: Callable[[], list[Prompt]], starved: Callable[[], str]) -> None:
        self._pull = pull
        self._starved = starved
        self._flow = asyncio.Event()

    @property
    def flows(self) -> bool:
        """Whether a call of the trainer waits for a batch."""
        return self._flow.is_set()

    async def start(self) -> None:
        """Let prompts be taken."""
        self._flow.set()

    async def end(self) -> None:
        """Take no more prompts."""
        self._flow.clear()

    def skip(self, count: int) -> _Prompts:
        """The source of a resumed run: itself, because the data source has its own position."""
        return self

    async def __aiter__(self) -> AsyncIterator[Prompt]:
        dry = False
        while True:
            await self._flow.wait()
            prompts = await asyncio.to_thread(self._pull)
            for prompt in prompts:
                yield prompt
            if prompts or not self.flows:
                dry = False
                continue
            # Prompts yielded earlier are launched within the first wait.
            if dry and (why := self._starved()):
                raise ConfigError(why)
            dry = True
            await asyncio.sleep(_DRY_SECONDS)
