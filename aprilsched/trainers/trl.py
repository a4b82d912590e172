"""Rollouts for TRL's AsyncGRPOTrainer from SGLang or vLLM engines.

:class:`RolloutWorker` takes the place of two parts of TRL, which serve one vLLM server: the worker
that generates and scores rollouts, and the transfer of weights. It is written for TRL 1.16, whose
AsyncGRPOTrainer is experimental.

- A batch contains the rollouts of one optimizer step. It is taken from the scheduler only when the
  trainer requests its first rollout, because rollouts that wait in a queue become stale beyond the
  control of the staleness bound.
- A batch is acknowledged when the step that trains on it has ended. accelerate fetches rollouts one
  step ahead, so when the trainer writes a checkpoint, the next batch is already taken and not yet
  trained on. The scheduler's checkpoint keeps that batch.
- With ``delivery="samples"`` a batch has single rollouts. Their advantages are those of
  :func:`aprilsched.advantages`: TRL computes none itself.
- With ``streamed=True`` the trainer takes a batch group by group while its last responses are
  generated. The trainer must be a :class:`StreamedSteps`, which fetches nothing ahead.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import itertools
import json
import os
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import msgspec
import numpy as np

from aprilsched.agents.chat.tokenizer import ModelTokenizer, wrapped_tokenizer
from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.fronts.blocking import RolloutScheduler
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.shell import Accept
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.store import MemoryStore
from aprilsched.kernel.values.files import read_regular, written_whole
from aprilsched.kernel.weights.disk import DiskPublisher
from aprilsched.kernel.weights.distributed import DistributedPublisher
from aprilsched.kernel.weights.publisher import WeightPublisher
from aprilsched.kernel.weights.tensor_buckets import iter_buckets
from aprilsched.trainers.adapter import fitted, package, staleness, trained_advantages
from aprilsched.trainers.by_session import BySession
from aprilsched.trainers.trl_tools import Conversation, Factories, ToolHarness, called
from aprilsched.types import Batch, Group, Prompt, Rollout, Sample, SamplingParams, Score, Unit

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import TrainerCallback
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    _Trainer = AsyncGRPOTrainer
else:
    _Trainer = object

Named: TypeAlias = "Iterator[tuple[str, Tensor]]"

_FILE = "aprilsched.checkpoint"
"""Name of the scheduler's file in a checkpoint folder of the trainer."""
_CONVERSATIONS = "aprilsched.conversations.json"
"""Name of the file of conversations with tools, in the same checkpoint folder."""
_SHARD_BYTES = 2**32
"""Largest file of weights, which is in memory while it is written."""
_NOT_COLUMNS = {"prompt", "completion", "completion_ids"}
"""Dataset columns that reward functions receive under other names or never."""
_PARSED_BY = ("template", "schema")
"""A tokenizer that can take responses apart has `response_template` or `response_schema`."""


class Dataset(Protocol):
    """A dataset with a length, such as ``datasets.Dataset`` or a list of dictionaries."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class RolloutWorker:
    """Both `rollout_worker` and `weight_transfer` of TRL's AsyncGRPOTrainer.

    .. code-block:: python

        worker = RolloutWorker(fleet, args=args, train_dataset=dataset, processing_class=tokenizer,
                               reward_funcs=[accuracy_reward])
        trainer = AsyncGRPOTrainer(model, args=args, train_dataset=dataset,
                                   processing_class=tokenizer, rollout_worker=worker,
                                   weight_transfer=worker, callbacks=[worker.callback])
        trainer.train()

    Args:
        fleet: the engines.
        args: the trainer's arguments. They set the group size, the batch size, the sampling
            parameters and the staleness bound.
        train_dataset: the trainer's dataset. Column "prompt" contains a conversation or a text; the
            other columns are arguments of the reward functions. It is repeated forever.
        processing_class: the tokenizer, with its chat template.
        reward_funcs: reward functions as TRL calls them, plain or asynchronous.
        reward_weights: factors of their rewards in the sum; 1 for each by default.
        config: settings of the scheduler. `group_size`, `batch_groups` and `sampling` are replaced
            by those of `args`. Without a `max_staleness`, the bound is ``args.max_staleness - 1``,
            because accelerate fetches each batch one step before it is trained on; with
            `streamed`, it is ``args.max_staleness``.
        publisher: makes the publisher from a function that returns the trainer's weights, an
            iterator of (name, tensor). The default broadcasts them over NCCL. A path names a
            directory that the trainer and every engine see: each version is written there, and
            the engines load it, as :class:`~aprilsched.DiskPublisher` does.
        accept: keeps or rejects a scored group, or with ``delivery="samples"`` a sample.
        listeners: telemetry of the scheduler.
        streamed: True for a trainer that is a :class:`StreamedSteps`, which gets the groups of a
            batch one by one while the others are generated.
        tools: functions that the policy may call, as TRL takes them.
        environment_factory: makes an environment whose methods are tools, or one for each name in
            the column "environment", as TRL takes it. An environment's `get_reward` is one more
            reward, with the weight 1.
        sessions: for tools and environments, arguments of
            :class:`~aprilsched.agents.sessions.Sessions`, such as limits (a mapping).

    Attributes:
        config: the scheduler's settings with what `args` say.

    Raises:
        ConfigError: if `args` and `config` would give wrong or lost rollouts.
        MissingExtra: if trl is not installed.
    """

    callback: TrainerCallback
    """Acknowledges trained batches, and saves the scheduler's state in the trainer's checkpoints.

    It must be among the trainer's callbacks.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        args: AsyncGRPOConfig,
        train_dataset: Dataset,
        processing_class: Any,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        reward_weights: Sequence[float] | None = None,
        config: SchedulerConfig | None = None,
        publisher: Callable[[Callable[[], Named]], WeightPublisher]
        | str
        | os.PathLike[str] = DistributedPublisher,
        accept: Accept | None = None,
        listeners: Sequence[AnyListener] = (),
        streamed: bool = False,
        tools: Sequence[Callable[..., Any]] = (),
        environment_factory: Factories | None = None,
        sessions: Mapping[str, Any] | None = None,
    ) -> None:
        _check_args(args, streamed=streamed)
        self._args = args
        self._fleet = fleet
        given: Any = args
        self._chat = _Chat(processing_class, given.chat_template_kwargs or {})
        self._dataset = train_dataset
        self._tools: ToolHarness | None = None
        self._episode: BySession | None = None
        if tools or environment_factory is not None:
            self._tools = ToolHarness(
                tools,
                environment_factory,
                rows=train_dataset,
                options=given.chat_template_kwargs or {},
                most=given.max_tool_calling_iterations,
            )
            self._episode = BySession(self._tools, self._chat.for_sessions(), sessions or {}, "TRL")
        self._rewards = _Rewards(
            reward_funcs, reward_weights, train_dataset, self._chat, self._tools
        )
        self.config = _settings(
            config or SchedulerConfig(pace="asynchronous"), args, streamed=streamed
        )
        self.streamed = streamed
        self._publisher = (
            publisher(self._weights)
            if callable(publisher)
            else DiskPublisher(publisher, self._write)
        )
        self._accept = accept
        self._listeners = listeners
        self._epochs = args.max_steps <= 0
        self._rollouts: RolloutScheduler | None = None
        self._restored: Path | None = None
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._samples: deque[RolloutSample] = deque()
        self._untrained: deque[Batch] = deque()
        self._given: _Given | None = None
        self._model: Any = None
        """The model in training; None until training starts."""
        self._ahead_of_trl = 0
        """The scheduler's version minus the trainer's, which restarts at 0 in a new process."""
        # TRL declares its own types of queues for both, and uses get() and qsize() alone.
        self.rollout_buffer: Any = self
        self.metrics_queue: Any = queue.Queue[dict[str, Any]](maxsize=4096)
        self.callback = _callback(self)

    def init_weight_transfer(self) -> None:
        """Open the engines. The trainer sends its weights next, and calls :meth:`start` then."""
        self._started = concurrent.futures.Future()
        self._samples.clear()
        self._untrained.clear()
        by_sample = self.config.delivery == "samples"
        rollouts = RolloutScheduler(
            self._fleet,
            _Prompts(self._dataset, self._prompt_ids, self._started),
            episode=self._episode,
            reward=self._rewards.score_one if by_sample else self._rewards.score,
            reward_scope="rollout" if by_sample else "group",
            accept=self._accept,
            config=self.config,
            listeners=self._listeners,
            # The store keeps the batch that is taken and not trained on, for a checkpoint.
            store=MemoryStore(),
        )
        if self._restored is not None:
            rollouts.restore(self._restored)
        rollouts.__enter__()
        self._rollouts = rollouts

    def _prompt_ids(self, row: Mapping[str, Any]) -> Sequence[int]:
        """Return the tokens of a row's prompt; with tools, the session's tokens replace them."""
        prompt = row["prompt"] if self._tools is None else self._tools.prompt_of(row)
        return self._chat.prompt_ids(prompt)

    def start(self) -> None:
        """Start generating; the engines have the trainer's weights now."""
        _ = self.scheduler  # Raises an error with a remedy if it is not open.
        self._started.set_result(None)

    def stop(self) -> None:
        """Abort requests in flight and release the engines."""
        rollouts, self._rollouts = self._rollouts, None
        if rollouts is not None:
            with contextlib.ExitStack() as end:
                end.callback(rollouts.close)
                if (leave := getattr(self._publisher, "aclose", None)) is not None:
                    rollouts.on_loop(leave)

    def destroy(self) -> None:
        """Do nothing: :meth:`stop` has left the engines' groups."""

    def check_health(self, stale_after_s: float) -> None:
        """Do nothing: the scheduler watches its engines, and :meth:`get` raises what ended it."""

    @property
    def scheduler(self) -> RolloutScheduler:
        """The scheduler, while the engines are open.

        Raises:
            ConfigError: if they are not.
        """
        if self._rollouts is None:
            raise ConfigError(
                "the engines are not open; give this object to AsyncGRPOTrainer as weight_transfer "
                "and as rollout_worker."
            )
        return self._rollouts

    def get(self, timeout: float | None = None) -> RolloutSample:
        """Return the next rollout, within `timeout` seconds.

        Raises:
            queue.Empty: if none is there within that time; nothing is lost.
            ConfigError: if the trainer does not have :attr:`callback`.
        """
        while not self._samples:
            batch = self._next(timeout)
            if batch is None:
                continue
            if batch.complete:
                self._untrained.append(batch)
            self._measure(batch)
            for unit in batch.units:
                self._samples.extend(self._trl_samples(unit, batch.version))
        return self._samples.popleft()

    def _next(self, timeout: float | None) -> Batch | None:
        """The next batch, or of a streamed one the next group; None if it ends without one."""
        rollouts = self.scheduler
        # The batch in training, and the batch that accelerate has fetched ahead.
        most = 1 if self.streamed else 2
        if len(self._untrained) == most:
            raise ConfigError(
                f"the trainer asks for another batch and has ended no step with {most}; give "
                "callbacks=[worker.callback] to AsyncGRPOTrainer, and use streamed=True only with "
                "a trainer that is a StreamedSteps."
            )
        try:
            if self.streamed:
                return next(rollouts.stream(timeout=timeout), None)
            return rollouts.next_batch(timeout=timeout)
        except TimeoutError:
            raise queue.Empty from None

    def qsize(self) -> int:
        """Return the number of rollouts that can be taken without waiting for the engines."""
        return len(self._samples)

    def _trl_samples(self, unit: Unit, version: int) -> Iterator[RolloutSample]:
        """The rollouts of a unit, with their advantages and TRL's metrics."""
        make = package("trl", "trl.experimental.async_grpo.async_rollout_worker").RolloutSample
        by_rollout = self._rewards.conversations(unit)
        # TRL leaves the figures of tools out of a group without calls. Without those of a sample
        # their mean would be too high.
        calls = isinstance(unit, Sample) or any(each.calls for each in by_rollout)
        rewards, advantages, spread = _advantages(unit)
        for index, (rollout, reward, advantage) in enumerate(
            zip(unit.rollouts, rewards, advantages, strict=True)
        ):
            prompt, completion = self._rewards.messages(unit, rollout)
            known = np.zeros(len(rollout.prompt_ids), dtype=np.int64)
            counts = rollout.loss_mask.copy()
            oldest = version
            if counts.any():
                oldest = int(rollout.versions[counts].min())
            else:
                # TRL fails on a micro-batch without a token. One token without an advantage gives
                # no gradient.
                counts[-1], advantage = True, 0.0
            parts = {
                f"rewards/{name}": rollout.reward_parts.get(name, float("nan"))
                for name in self._rewards.names
            }
            if calls and by_rollout:
                own = by_rollout[index]
                parts["tools/call_frequency"] = float(own.calls)
                parts["tools/failure_frequency"] = own.failures / own.calls if own.calls else 0.0
            yield make(
                prompt=prompt,
                completion=completion,
                input_ids=np.concatenate([rollout.prompt_ids, rollout.token_ids]).astype(np.int64),
                completion_mask=np.concatenate([known, counts]).astype(np.int64),
                old_log_probs=np.concatenate([known, rollout.logprobs]).astype(np.float32),
                advantage=float(advantage),
                model_version=oldest - self._ahead_of_trl,
                group_id=rollout.group_id,
                metrics={"reward": float(reward), "reward_std": spread, **parts},
            )

    def _measure(self, batch: Batch) -> None:
        """Tell the trainer's log what the batch is like, in TRL's names where it has some."""
        rollouts = list(batch.rollouts)
        lengths = [len(rollout) for rollout in rollouts]
        cut = [rollout.finish_reason == "length" for rollout in rollouts]
        counted = np.concatenate([staleness(rollout, batch.version) for rollout in rollouts])
        with contextlib.suppress(queue.Full):
            self.metrics_queue.put_nowait(
                {
                    "completions/mean_length": (float(sum(lengths)), float(len(lengths))),
                    "completions/max_length": float(max(lengths)),
                    "completions/min_length": float(min(lengths)),
                    "completions/clipped_ratio": (float(sum(cut)), float(len(cut))),
                    "rollout/off_policy_tokens": (float((counted > 0).sum()), float(counted.size)),
                }
            )

    def pause(self) -> None:
        """Do nothing: pause, refit and continue are one call of the scheduler."""

    def send_weights(self, iterator: Named) -> None:
        """Bring the weights to every engine: pause, load, verify, continue.

        If an engine fails during the update, it is left out, and the others get the weights once
        more. It rejoins when it has recovered and the next weights are sent.

        Raises:
            RefitError: if no engine took them.
        """
        rollouts = self.scheduler
        restored, self._restored = self._restored, None
        self._given = _Given(iterator, self._model)
        try:
            if restored is None:
                rollouts.update_weights(self._publisher, acknowledge=False)
            elif not rollouts.state.fleet.control.engines:
                # These are the checkpoint's weights, and no engine has them, because engines that
                # have them are in use already. As a new version they would make all restored
                # rollouts one version older, and TRL would drop some of them.
                rollouts.update_weights(
                    self._publisher, version=rollouts.version, acknowledge=False
                )
        finally:
            self._given = None
            # Each tensor may be gathered by all ranks, which wait for this one to take part.
            for _ in iterator:
                pass

    def resume(self) -> None:
        """Do nothing: the engines continue when they have the weights."""

    def update_model_version(self, model_version: int) -> None:
        """Note the trainer's number for the weights that the engines have."""
        self._ahead_of_trl = self.scheduler.version - model_version

    def _weights(self) -> Named:
        if self._given is None:
            raise ConfigError("the trainer gives its weights in send_weights() alone.")
        return self._given.read()

    def _write(self, folder: Path) -> None:
        """Write the trainer's weights and the configuration of its model into `folder`."""
        files = package("trl", "safetensors.torch")
        self._model.config.save_pretrained(folder)
        where: dict[str, str] = {}
        for number, bucket in enumerate(iter_buckets(self._weights(), _SHARD_BYTES)):
            tensors = {name: tensor.detach().contiguous() for name, tensor in bucket}
            file = f"model-{number:05}.safetensors"
            files.save_file(tensors, folder / file, {"format": "pt"})
            where |= dict.fromkeys(tensors, file)
        index = json.dumps({"metadata": {}, "weight_map": where})
        (folder / "model.safetensors.index.json").write_text(index)

    def start_sync(self, model: Any) -> None:
        """Note the model that is trained."""
        self._model = model

    def trained(self) -> None:
        """Note that a step has ended, which trained on the oldest batch that the trainer has."""
        if self._untrained:
            self._untrained.popleft().acknowledge()
        if self._tools is not None:
            live = self.scheduler.on_loop(self._live)
            live.update(each.rollout_id for batch in self._untrained for each in batch.rollouts)
            for number in [each for each in self._tools.ended if each not in live]:
                del self._tools.ended[number]

    async def _live(self) -> set[int]:
        """Return the numbers of the rollouts in flight."""
        groups = self.scheduler.state.in_flight.training_groups()
        return {member.rollout_id for group in groups for member in group.members}

    def save(self, folder: Path) -> None:
        """Save the rollouts in flight and the untrained batch in `folder`."""
        self.scheduler.checkpoint(folder / _FILE, acknowledge=False)
        if self._tools is not None:
            ended = list(self._tools.ended.items())
            with written_whole(folder / _CONVERSATIONS) as file:
                file.write(msgspec.json.encode(dict(ended), enc_hook=str))

    def restore(self, folder: Path) -> None:
        """Restore the state saved in `folder`; the engines must not be open yet.

        Raises:
            ConfigError: if the file does not exist, or if the trainer's epoch count would restart.
        """
        if not (folder / _FILE).is_file():
            raise ConfigError(
                f"{folder} has no {_FILE}; resume from a checkpoint in args.output_dir that was "
                "written with callbacks=[worker.callback]."
            )
        if self._epochs:
            raise ConfigError(
                "a resumed trainer counts the prompts of its epochs from 0 again; set max_steps."
            )
        self._restored = folder / _FILE
        if self._tools is not None and (folder / _CONVERSATIONS).is_file():
            saved = read_regular(folder / _CONVERSATIONS)
            self._tools.ended.update(msgspec.json.decode(saved, type=dict[int, Conversation]))


class StreamedSteps(_Trainer):
    """Makes AsyncGRPOTrainer train on each group of a batch while the others are generated.

    .. code-block:: python

        class Trainer(StreamedSteps, AsyncGRPOTrainer):
            pass

        worker = RolloutWorker(fleet, args=args, ..., streamed=True)
        trainer = Trainer(model, args=args, ..., rollout_worker=worker, weight_transfer=worker,
                          callbacks=[worker.callback])

    Forward and backward of a micro-batch run as soon as its rollouts are there, and nothing is
    fetched ahead: a step ends, and sends its weights, before a rollout of the next step is taken.
    """

    def get_train_dataloader(self) -> Any:
        """Return TRL's loader of micro-batches, without accelerate's wrapper.

        Raises:
            ConfigError: if the worker is not for streamed batches.
        """
        worker: Any = self.rollout_worker
        if not isinstance(worker, RolloutWorker) or not worker.streamed:
            raise ConfigError(
                "a trainer with StreamedSteps takes groups one by one; give it a "
                "RolloutWorker(..., streamed=True) as rollout_worker."
            )
        # accelerate's loader fetches a micro-batch before it yields the previous one. At the end of
        # a step this belongs to the next batch, so the trainer would wait for that batch before its
        # update. TRL moves tensors to the device itself.
        trainer: Any = super()
        return trainer.get_train_dataloader().base_dataloader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[Any, None]:
        """Return the micro-batches of a step, and None.

        Each micro-batch is fetched after training on the previous one. None makes TRL divide the
        loss by the number of micro-batches.
        """
        return _MicroBatches(epoch_iterator, num_batches), None


class _MicroBatches:
    """The next `count` items of an iterator, in place of a list of them."""

    def __init__(self, iterator: Iterator[Any], count: int) -> None:
        self._iterator = iterator
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._iterator, self._count)


class _Given:
    """The weights of one update, which TRL passes as an iterator that can be read once.

    They can be reread from the start as long as they are the parameters of `model` themselves,
    because references to parameters take no memory. TRL gathers a sharded parameter on access, with
    all ranks, and frees it afterwards. References to gathered tensors would keep the whole model in
    memory, so sharded weights cannot be read twice.
    """

    def __init__(self, iterator: Named, model: Any) -> None:
        self._rest = iterator
        self._seen: list[tuple[str, Tensor]] | None = []
        """The weights read so far; None if they are not kept, and cannot be read again."""
        parameters = model.parameters() if model is not None else ()
        self._own = {_memory(each) for each in parameters if not hasattr(each, "full_tensor")}

    def read(self) -> Named:
        """All weights, from the beginning.

        Raises:
            ConfigError: if some were read that cannot be read again.
        """
        if self._seen is None:
            raise ConfigError(
                "the trainer gathers its weights once for each update, and an engine failed when "
                "some were sent, so they cannot be sent again; train on from the last checkpoint."
            )
        return self._read(self._seen)

    def _read(self, seen: list[tuple[str, Tensor]]) -> Named:
        yield from list(seen)
        for pair in self._rest:
            if not self._own or _memory(pair[1]) not in self._own:
                self._seen = None
            elif self._seen is not None:
                self._seen.append(pair)
            yield pair


def _memory(tensor: Any) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


class _Prompts:
    """The dataset's prompts, again and again.

    The first one is given when `started` is done: before that the engines do not have the
    trainer's weights.
    """

    def __init__(
        self,
        dataset: Dataset,
        prompt_ids: Callable[[Mapping[str, Any]], Sequence[int]],
        started: concurrent.futures.Future[None],
    ) -> None:
        self._dataset = dataset
        self._prompt_ids = prompt_ids
        self._started = started
        self._start = 0

    def skip(self, count: int) -> _Prompts:
        """Skip the first `count` prompts."""
        self._start += count
        return self

    async def __aiter__(self) -> AsyncIterator[Prompt]:
        await asyncio.shield(asyncio.wrap_future(self._started))
        for number in itertools.count(self._start):
            key = number % len(self._dataset)
            row = self._dataset[key]
            _check_text(row)
            yield Prompt(input_ids=self._prompt_ids(row), key=key)  # pyright: ignore[reportArgumentType]


def _check_text(row: Mapping[str, Any]) -> None:
    """Refuse a row of the dataset with images: the trainer would train on the text without them."""
    messages: Any = row.get("prompt", ())
    parts: list[Any] = [
        part
        for message in (() if isinstance(messages, str) else messages)
        if isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    others = {part["type"] for part in parts} - {"text"}
    if named := [name for name in ("image", "images") if row.get(name)] or sorted(others):
        raise ConfigError(
            f"a row of the dataset has {named[0]}, and AsyncGRPOTrainer gives its model token ids "
            "alone; leave it out, or use a trainer of your own."
        )


class _Chat:
    """Turns prompts into tokens and responses into texts, as TRL's own worker does."""

    def __init__(self, tokenizer: Any, template: Mapping[str, Any]) -> None:
        utils = package("trl", "trl.chat_template_utils")
        # TRL knows how the responses of some models are taken apart (a part for reasoning).
        with contextlib.suppress(ValueError):
            utils.add_response_schema(tokenizer)
        self._parse: Callable[..., Mapping[str, Any]] = utils.parse_response
        self._tokenizer = tokenizer
        self._template = template
        # A tokenizer of Hugging Face may raise "Already borrowed" when two threads use it.
        self._alone = threading.Lock()

    def for_sessions(self) -> ModelTokenizer:
        """Return a copy for sessions; one tokenizer is not safe in the threads of both."""
        folder = Path(getattr(self._tokenizer, "name_or_path", None) or ".")
        return wrapped_tokenizer(copy.deepcopy(self._tokenizer), folder)

    def prompt_ids(self, prompt: Any) -> Sequence[int]:
        """Return the tokens of a conversation in the chat template, or of a text."""
        with self._alone:
            if isinstance(prompt, str):
                return self._tokenizer(prompt)["input_ids"]
            return self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=False, **self._template
            )

    def completion(self, prompt: Any, rollout: Rollout) -> Any:
        """Return the response as reward functions get it: a conversation, or a text for a text."""
        ids = rollout.token_ids.tolist()
        parts = any(getattr(self._tokenizer, f"response_{how}", None) for how in _PARSED_BY)
        with self._alone:
            if parts and not isinstance(prompt, str):
                # TRL's fallback to plain text catches only some errors of parsers.
                with contextlib.suppress(Exception):
                    return [self._parse(self._tokenizer, ids, prefix=rollout.prompt_ids.tolist())]
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


class _Rewards:
    """TRL's reward functions, which score a group."""

    def __init__(
        self,
        functions: Callable[..., Any] | Sequence[Callable[..., Any]],
        weights: Sequence[float] | None,
        dataset: Dataset,
        chat: _Chat,
        tools: ToolHarness | None = None,
    ) -> None:
        self._functions = [functions] if callable(functions) else list(functions)
        self._own = [] if tools is None else tools.reward_names
        self._tools = tools
        self.names = [*map(_name, self._functions), *self._own]
        if not self.names or len(set(self.names)) < len(self.names):
            raise ConfigError(
                f"the reward functions are {self.names}; give at least one, each with another name."
            )
        own = [1.0] * len(self._own)
        given = [1.0] * len(self._functions) if weights is None else list(weights)
        self._weights = [*given, *own]
        if len(self._weights) != len(self.names):
            raise ConfigError(
                f"reward_weights has {len(given)} numbers for {len(self._functions)} reward "
                "functions; give one for each."
            )
        self._dataset = dataset
        self._chat = chat

    async def score(self, group: Group) -> list[Score]:
        """Score a group; the parts of a score have the rewards that are not None."""
        # Texts are decoded in a thread, because long responses take tens of milliseconds.
        call = await asyncio.to_thread(self._arguments, group)
        count = len(group.rollouts)
        columns = await asyncio.gather(
            *(_rewarded(function, call, count) for function in self._functions)
        )
        by_rollout = [each.reward for each in self.conversations(group)]
        for name in self._own:
            columns = [
                *columns,
                [each[1] if each and each[0] == name else None for each in by_rollout],
            ]
        scores: list[Score] = []
        for rewards in zip(*columns, strict=True):
            found = {
                name: float(reward)
                for name, reward in zip(self.names, rewards, strict=True)
                if reward is not None and not np.isnan(reward)
            }
            weighted = zip(self.names, self._weights, strict=True)
            total = sum(weight * found[name] for name, weight in weighted if name in found)
            scores.append(Score(reward=total, parts=found))
        return scores

    async def score_one(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Score a rollout by itself.

        Raises:
            ValueError: if no function gives it a reward. As 0 it would count for its siblings.
        """
        group = Group(group_id=rollout.group_id, prompt=prompt, rollouts=(rollout,))
        (score,) = await self.score(group)
        if not score.parts:
            raise ValueError("every reward function returned None")
        return score

    def conversations(self, unit: Unit) -> list[Conversation]:
        """Return the conversations of a unit; an empty list without tools."""
        if self._tools is None:
            return []
        return [self._tools.ended[each.rollout_id] for each in unit.rollouts]

    def messages(self, unit: Unit, rollout: Rollout) -> tuple[Any, Any]:
        """Return the prompt and the completion of a rollout, as reward functions get them."""
        if self._tools is not None:
            found = self._tools.ended[rollout.rollout_id]
            return found.prompt, found.completion
        prompt = self._dataset[_row(unit)]["prompt"]
        return prompt, self._chat.completion(prompt, rollout)

    def _arguments(self, group: Group) -> dict[str, Any]:
        """What TRL calls reward functions with."""
        row = self._dataset[_row(group)]
        count = len(group.rollouts)
        by_rollout = [self.messages(group, each) for each in group.rollouts]
        return {
            "prompts": [prompt for prompt, _ in by_rollout],
            "completions": [completion for _, completion in by_rollout],
            "completion_ids": [rollout.token_ids.tolist() for rollout in group.rollouts],
            **{name: [row[name]] * count for name in row if name not in _NOT_COLUMNS},
        }


async def _rewarded(function: Callable[..., Any], call: Mapping[str, Any], count: int) -> list[Any]:
    """Return the rewards that `function` gives, one for each rollout."""
    rewards = list(await called(functools.partial(function, **call)))
    if len(rewards) != count:
        raise ValueError(f"{_name(function)} gave {len(rewards)} rewards for {count} rollouts")
    return rewards


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _row(unit: Unit) -> int:
    """Index of the unit's prompt in the dataset."""
    return cast("int", unit.prompt.key)


def _advantages(unit: Unit) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], float]:
    """Return the rewards, the advantages, and the standard deviation of the rewards.

    Those of a group are computed as in TRL's `_score_group`: a rollout for which every function
    returned None has the reward NaN and the advantage 0. A sample is compared with its siblings.
    """
    if isinstance(unit, Sample):
        known = np.array([each.reward for each in (unit, *unit.siblings)], dtype=float)
        return known[:1], trained_advantages([unit]), float(known.std())
    rewards = np.array(
        [rollout.reward if rollout.reward_parts else np.nan for rollout in unit.rollouts],
        dtype=float,
    )
    scored = np.isfinite(rewards)
    advantages, spread = np.zeros_like(rewards), float("nan")
    if scored.any():
        among = rewards[scored]
        spread = float(among.std())
        advantages[scored] = (among - among.mean()) / (spread + 1e-8)
    return rewards, advantages, spread


def _check_args(args: Any, *, streamed: bool) -> None:
    configs = package("trl", "trl.experimental.async_grpo.async_grpo_config")
    if not isinstance(args, configs.AsyncGRPOConfig):
        raise ConfigError(
            f"args is a {type(args).__name__}; use AsyncGRPOTrainer and its AsyncGRPOConfig, "
            "because GRPOTrainer ignores the logprobs of a rollout_func without vLLM, and stale "
            "tokens would not be corrected."
        )
    if args.token_budget is None:
        raise ConfigError(
            "token_budget is None, for which TRL asks a vLLM server; set it to 0, and bound the "
            "memory by per_device_train_batch_size."
        )
    if args.token_budget > 0:
        raise ConfigError(
            f"token_budget is {args.token_budget}, so a step takes a number of rollouts that is "
            "not known before, and no checkpoint can record which ones it took; set it to 0, and "
            "bound the memory by per_device_train_batch_size."
        )
    if args.max_staleness < 1 and not streamed:
        raise ConfigError(
            "max_staleness is 0, and accelerate fetches each batch one step before it is trained "
            "on; set 1 or more, or train with StreamedSteps and streamed=True."
        )
    if not streamed:
        return
    given: Any = args
    if given.world_size > 1:
        raise ConfigError(
            f"the trainer has {given.world_size} processes, and streamed batches are for one; use "
            "streamed=False."
        )
    sizes = args.per_device_train_batch_size, args.num_generations
    if max(sizes) % min(sizes):
        raise ConfigError(
            f"per_device_train_batch_size is {sizes[0]} and num_generations is {sizes[1]}; for "
            "streamed batches set one of them to a multiple of the other, so that no micro-batch "
            "waits for a group that it needs a part of."
        )


def _settings(config: SchedulerConfig, args: Any, *, streamed: bool) -> SchedulerConfig:
    """Return the scheduler's settings with the sizes, the sampling and the bound of the trainer."""
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if step % args.num_generations:
        raise ConfigError(
            f"a step takes {step} rollouts (per_device_train_batch_size x "
            f"gradient_accumulation_steps x processes), and groups have {args.num_generations}; "
            "set num_generations to a divisor of it."
        )
    if config.policies.companions:
        raise ConfigError(
            "the scheduler's companions are set, and AsyncGRPOTrainer gives its model token ids "
            "alone, so they would reach nothing; leave them out, or use a trainer of your own."
        )
    penalty = args.repetition_penalty
    return fitted(
        config,
        "TRL",
        max_staleness=args.max_staleness - (0 if streamed else 1),
        setting="max_staleness of AsyncGRPOConfig",
        samples=True,
        group_size=args.num_generations,
        batch_groups=step // args.num_generations,
        sampling=SamplingParams(
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or -1,
            min_p=args.min_p or 0.0,
            extra={} if penalty == 1 else {"repetition_penalty": penalty},
        ),
    )


def _callback(worker: RolloutWorker) -> TrainerCallback:
    """Return the part of `worker` that the trainer calls at its steps and checkpoints."""

    class Checkpoints(package("trl", "transformers").TrainerCallback):
        # It comes before TRL's own callbacks, so that a checkpoint is restored before the engines
        # are opened.
        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            worker.start_sync(model)
            if state.is_world_process_zero and state.global_step:
                worker.restore(_folder(args, state))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            worker.trained()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                worker.save(_folder(args, state))

    return Checkpoints()


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
