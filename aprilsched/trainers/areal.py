"""Rollouts for AReaL's trainer from SGLang engines that the scheduler drives.

:class:`RolloutEngine` takes the place of AReaL's rollout engine (``RemoteSGLangEngine``, or
``RolloutController`` where one process drives everything). It is written for AReaL 1.0.4.

- Workflows run unchanged. Their engine sends every request through the scheduler, so an interrupted
  response continues inside the same ``await engine.agenerate(...)``. An agent with
  ``run(data, **extra_kwargs)`` gets a session's URL and key instead of AReaL's proxy URL and key.
- Trajectories are built from the scheduler's rollouts, in the format of AReaL's own workflows, so
  the version of each token is the one that the server reported.
- AReaL does not label its weights. The scheduler labels them with its own version, and
  :meth:`RolloutEngine.set_version` maps this version to the trainer's.
- Prompts are read from the dataloader in the trainer's thread, inside of
  :meth:`RolloutEngine.prepare_batch`, so that AReaL may save the state of the dataloader between
  two calls.
- AReaL keeps one recover checkpoint. Next to it is the scheduler's state of the same step.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module  # noqa: TID251 (a module of AReaL)
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from aprilsched.agents.chat.tokenizer import load_tokenizer
from aprilsched.agents.sessions import Session
from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError, MemberLost, MissingExtra, RefitError
from aprilsched.fronts.blocking import RolloutScheduler
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.engines.refit import RefitFromGroup
from aprilsched.kernel.shell import PromptQueue, Turn
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.weights.collective import GroupEngine, leave
from aprilsched.kernel.weights.disk import DiskPublisher
from aprilsched.trainers.adapter import (
    check_replay,
    fitted,
    forget_delivered,
    generate,
    missing_prompts,
    one_placeholder_each,
    read_state,
    refuse,
    routed_experts,
    trained_advantages,
    write_state,
)
from aprilsched.trainers.by_session import BySession
from aprilsched.trainers.tensors import pack
from aprilsched.types import (
    NO_VERSION,
    BoolArray,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Unit,
)

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("aprilsched")

Trajectory: TypeAlias = "dict[str, Tensor]"
ShouldAccept: TypeAlias = Callable[[Trajectory], bool]

_KEYS = {"input_ids", "loss_mask", "logprobs", "versions", "attention_mask", "rewards"}
"""What the scheduler gives of a trajectory, in AReaL's names. Further entries are the workflow's
own."""
_REJECTED = "areal_rejected"
"""Fact of a rollout whose workflow returned None."""
_UNCHANGED = {
    **{"reward_norm": None, "adv_norm": None, "reward_bias": 0, "reward_scaling": 1},
    **{"overlong_reward_penalty": False, "mask_no_eos_with_zero": False},
    **{"discount": 1, "gae_lambda": 1},
}
"""Settings of AReaL's actor, with the values that leave the advantage of a sample as it is."""
_FILE = "aprilsched-"
"""Name, before the number of the step, of the scheduler's file in the folder of recover info."""
_LOOK_SECONDS = 0.2
"""Interval at which a call that waits for a batch pushes further prompts."""
_POLL_SECONDS = 0.05
"""Interval at which AReaL's registry is polled for weights on the disk."""


class RolloutEngine:
    """An inference engine of AReaL that takes its rollouts from a scheduler.

    .. code-block:: python

        class Trainer(PPOTrainer):
            def _init_rollout(self, rollout_config, is_eval=False, lora_path=None):
                if not is_eval:
                    self.engine = RolloutEngine(SGLangFleet(urls), config=rollout_config,
                                                gconfig=self.config.gconfig,
                                                recover=self.config.recover)
                    self.engine.initialize()
                return self.engine  # evaluations run on the same engines

    Args:
        fleet: the engines.
        config: AReaL's ``InferenceEngineConfig``. `consumer_batch_size` is the number of groups of
            a batch, `max_head_offpolicyness` the bound on staleness, and `max_concurrent_rollouts`
            the largest number of groups whose requests the engines have at the same time.
        gconfig: AReaL's ``GenerationHyperparameters``. `n_samples` is the size of a group. The
            parameters of sampling are those of the workflow's requests.
        settings: settings of the scheduler; the asynchronous pace by default. What `config` and
            `gconfig` say is replaced.
        listeners: telemetry of the scheduler.
        tokenizer: for agents, the folder of the model's tokenizer; by default the `tokenizer_path`
            of `config`.
        trainer: AReaL's ``PPOConfig``, needed for ``delivery="samples"``.
        recover: AReaL's ``RecoverConfig``. With its `mode` "on" or "auto" the recover checkpoint
            includes what is in flight.
        sessions: for agents, arguments of :class:`~aprilsched.agents.sessions.Sessions`: branches,
            limits (a mapping), host, port, public_url and remote_images.

    Attributes:
        settings: the scheduler's settings with what `config` and `gconfig` say.
        scheduler: the scheduler itself, for its state.

    Raises:
        ConfigError: if `config` or `settings` require something that is not supported.
    """

    staleness_manager = None
    """AReaL sets it right after a recovery, if there is one. The scheduler bounds the staleness."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        config: Any,
        gconfig: Any,
        settings: SchedulerConfig | None = None,
        listeners: Sequence[AnyListener] = (),
        tokenizer: Path | str | None = None,
        trainer: Any = None,
        recover: Any = None,
        sessions: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self._gconfig = gconfig
        self._tokenizer = tokenizer or getattr(config, "tokenizer_path", None)
        self._sessions = sessions or {}
        self.settings = _settings(
            settings or SchedulerConfig(pace="asynchronous"), config, gconfig.n_samples
        )
        if self.settings.delivery == "samples":
            _check_samples(trainer)
        self._fleet = fleet
        self._queue = PromptQueue()
        self.scheduler = RolloutScheduler(
            fleet,
            self._queue,
            accept=self._accept,
            episode=self._episode,
            config=self.settings,
            listeners=listeners,
        )
        self.initialized = False
        self._began = 0.0
        self._items: Iterator[Sequence[Any]] | None = None
        self._training: Future[_About] = Future()
        """What the first :meth:`prepare_batch` was given; restored rollouts wait for it."""
        self._tasks: dict[int, _Task] = {}
        """What was read and is not delivered, by the number of the prompt, from 0."""
        self._read_count = 0
        self._epoch = 0
        self._recover_info: Path | None = None
        if recover is not None and recover.mode in ("on", "auto"):
            names = recover.experiment_name, recover.trial_name, recover.fileroot
            handler = _areal("areal.utils.recover").RecoverHandler
            self._recover_info = Path(handler.recover_info_path(*names))
        self._restored: Any = None
        """State of the dataloader in the checkpoint, until the dataloader is there."""
        self._old_weights = False
        """The next weights are those of the checkpoint."""
        self.ahead = 0
        """The scheduler's version minus the trainer's, which restarts at 0 in a new process."""
        self._updated = False
        """The engines have weights for which set_version() was not called yet."""
        self._evaluations = 0
        self._submitted: deque[Prompt] = deque()
        self._resolved: tuple[Any, Any, Any] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="aprilsched-areal")
        self._client: Any = None
        self._broadcast: ExitStack | None = None
        """The block in which the engines are paused for a broadcast, while there is one."""
        self._loading = 0
        """The version of the broadcast."""
        self._broken: BaseException | None = None
        """Why a bucket of the broadcast has not arrived."""
        self._asleep = ExitStack()
        self._callbacks: _Callbacks | None = None

    def initialize(
        self,
        engine_id: str | None = None,
        addr: object = None,
        train_data_parallel_size: int | None = None,
        **_: object,
    ) -> None:
        """Open the fleet.

        Raises:
            ConfigError: if several processes of the trainer would have an engine each.
        """
        if (train_data_parallel_size or 1) > 1:
            raise ConfigError(
                f"{train_data_parallel_size} data-parallel processes of the trainer would each "
                "schedule the same servers; let one process drive the trainer "
                "(scheduler.type=local, without AREAL_SPMD_MODE)."
            )
        self._restore()
        self.scheduler.__enter__()
        for number in range(self.scheduler.state.prompts.cursor, self._read_count):
            self._queue.put(self._prompt(number))
        self.ahead = self.scheduler.version
        self._began = time.time()
        self.initialized = True

    def destroy(self) -> None:
        """Abort requests in flight and release the engines; a second call does nothing."""
        if not self.initialized:
            return
        self.initialized = False
        with ExitStack() as end:
            end.callback(self._worker.shutdown)
            end.callback(self.scheduler.close)
            end.callback(self._give_up, RefitError("the rollout engine was destroyed."))
            if self._client is not None:
                end.callback(self._client.destroy)
            if self._callbacks is not None:
                end.callback(self._callbacks.close)

    @property
    def workflow_executor(self) -> RolloutEngine:
        """Return self, which implements AReaL's executor (:attr:`staleness_manager`)."""
        return self

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: Any,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: ShouldAccept | str | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> list[Trajectory]:
        """The next batch: one trajectory for each group, with padded tensors [group, longest].

        With ``delivery="samples"`` there is one for each sample, with tensors [1, length] and the
        baseline in "values": AReaL's advantage is the return minus the value.

        As in AReaL, `dataloader`, `workflow`, `workflow_kwargs` and `should_accept_fn` are those
        of the first call.

        Args:
            dataloader: gives lists of items; it is read again and again.
            workflow: a ``RolloutWorkflow``, or an agent with ``async run(data, **extra_kwargs)``;
                its class, or its import path. An item for which a workflow returns None is left
                out of its group.
            workflow_kwargs: arguments of the class.
            should_accept_fn: keeps or rejects the trajectory of a group; a function, or its path.
                Refused with ``delivery="samples"``.
            group_size: must be `n_samples` of `gconfig`.
            dynamic_bs: True for a batch that lacks the rejected groups, in the place of one that
                waits for others.

        Raises:
            ConfigError: if an argument contradicts the settings.
        """
        if group_size != self.settings.group_size:
            raise ConfigError(
                f"group_size is {group_size}, and gconfig.n_samples was {self.settings.group_size}"
                "; give both the same number."
            )
        if dataloader.batch_size != self.settings.batch_groups:
            raise ConfigError(
                f"the dataloader gives {dataloader.batch_size} items at a time, and "
                f"consumer_batch_size of the rollout's config is {self.settings.batch_groups}; "
                "give both the same number."
            )
        samples = self.settings.delivery == "samples"
        if samples and should_accept_fn is not None:
            raise ConfigError(
                'should_accept_fn judges whole groups, and delivery is "samples"; leave it out.'
            )
        if self._items is None:
            found = self._workflow(workflow, workflow_kwargs)
            self._items = self._read(dataloader)
            accept = _imported(should_accept_fn)
            self._training.set_result(_About(found, accept, dynamic=dynamic_bs))
            if self._recover_info is not None:
                self._save_with(dataloader, self._recover_info)
        self.scheduler.on_loop(self._forget)
        batch = None
        while batch is None:
            while missing_prompts(self._queue, self.settings):
                for item in next(self._items):
                    self._tasks[self._read_count] = _Task(item)
                    self._queue.put(self._prompt(self._read_count))
                    self._read_count += 1
            with suppress(TimeoutError):
                batch = self.scheduler.next_batch(timeout=_LOOK_SECONDS)
        about = self._training.result()
        units = [unit for unit in batch.units if self._passes(unit, about)]
        made = [each for unit in units if (each := self._trajectory(unit)) is not None]
        if samples:
            for trajectory, advantage in zip(made, trained_advantages(units), strict=True):
                baseline = trajectory["rewards"][:, None] - float(advantage)
                trajectory["values"] = baseline.expand(trajectory["logprobs"].shape).clone()
                trajectory["values"][:, -1] = 0  # Nothing follows the last token.
        return made

    def _read(self, dataloader: Any) -> Iterator[Sequence[Any]]:
        if resumed := self._restored is not None:
            dataloader.load_state_dict(self._restored)
        while True:
            # A distributed sampler shuffles by the number of the epoch.
            if hasattr(getattr(dataloader, "sampler", None), "set_epoch"):
                dataloader.sampler.set_epoch(self._epoch)
            before = self._read_count
            yield from dataloader
            # A checkpoint may be of the end of an epoch.
            if self._read_count == before and not resumed:
                raise ConfigError("the dataloader gives no items; give one that has some.")
            resumed = False
            self._epoch += 1

    @staticmethod
    def _prompt(number: int) -> Prompt:
        # The workflow makes the tokens, and the first request of an episode brings them.
        return Prompt(input_ids=[0], key=number)  # pyright: ignore[reportArgumentType]

    def _task(self, prompt: Prompt) -> _Task:
        evaluated = prompt.metadata.get("task")
        return self._tasks[cast("int", prompt.key)] if evaluated is None else evaluated

    async def _about(self, task: _Task) -> _About:
        if task.about is not None:
            return task.about
        return await asyncio.shield(asyncio.wrap_future(self._training))

    # --- checkpoints ----------------------------------------------------------------------------

    def _save_with(self, dataloader: Any, folder: Path) -> None:
        """Save the scheduler whenever AReaL saves `dataloader`, as its recover checkpoints do."""
        theirs = dataloader.state_dict

        def state_dict() -> Any:
            state = theirs()
            self._save(state, folder)
            return state

        dataloader.state_dict = state_dict

    def _save(self, dataloader: Any, folder: Path) -> None:
        step = self.get_version() - 1
        with tempfile.TemporaryDirectory() as made:
            file = Path(made) / "scheduler"
            self.scheduler.checkpoint(file)
            # With the tasks of prompts that have left while the scheduler's file was written.
            tasks = self.scheduler.on_loop(self._copied)
            content = (tasks, self._read_count, self._epoch, dataloader)
            write_state(folder / f"{_FILE}{step}", file, self.settings, content)
        # AReaL's step_info.json is written after this, so the step before is still needed.
        paths = {path.name.removeprefix(_FILE): path for path in folder.glob(f"{_FILE}*")}
        files = {int(number): path for number, path in paths.items() if number.isdecimal()}
        kept = [step, *sorted(number for number in files if number < step)[-1:]]
        for number in files.keys() - kept:
            files[number].unlink()

    def _restore(self) -> None:
        """Continue from the step of AReaL's recover checkpoint, if there is one."""
        if self._recover_info is None:
            return
        recover = _areal("areal.utils.recover")
        try:
            step = recover.RecoverInfo.load(str(self._recover_info)).last_step_info.global_step
        except (FileNotFoundError, recover.InValidRecoverInfo):  # AReaL starts from step 0 then.
            return
        path = self._recover_info / f"{_FILE}{step}"
        if not path.exists():
            log.warning("%s is missing; prompts in flight at step %d are skipped", path, step)
            return
        content = read_state(path, self.settings, self.scheduler.restore)
        self._tasks, self._read_count, self._epoch, self._restored = content
        self._old_weights = True

    async def _forget(self) -> None:
        """Forget what belongs to prompts that have left."""
        forget_delivered(self._tasks, self.scheduler.state)

    async def _copied(self) -> dict[int, _Task]:
        return {number: replace(each, made=dict(each.made)) for number, each in self._tasks.items()}

    # --- episodes -------------------------------------------------------------------------------

    async def _accept(self, unit: Unit) -> bool:
        about = await self._about(self._task(unit.prompt))
        return about.dynamic or self._passes(unit, about)

    def _passes(self, unit: Unit, about: _About) -> bool:
        """Return whether a unit has a rollout that its workflow kept, and is not rejected."""
        trajectory = self._trajectory(unit)
        return trajectory is not None and (about.accept is None or bool(about.accept(trajectory)))

    def _trajectory(self, unit: Unit) -> Trajectory | None:
        """The rollouts of a unit that its workflow kept, in AReaL's form; None without one."""
        rollouts = [each for each in unit.rollouts if not each.info.get(_REJECTED)]
        if not rollouts:
            return None
        made = self._task(unit.prompt).made
        join = _areal("areal.utils.data").concat_padded_tensors
        return join([self._row(each, made.get(each.index)) for each in rollouts])

    def _row(self, rollout: Rollout, made: _Made | None) -> Trajectory:
        """Return a rollout as a trajectory of one row, with the entries that its workflow added.

        An agent adds none.
        """
        import torch

        if made is None:
            tokens = [*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()]
            made = _Made(tokens, np.ones(len(tokens), dtype=np.bool_), {})
        one = pack([rollout], no_version=NO_VERSION)

        def placed(values: Tensor, fill: int = 0) -> Tensor:
            # The engine was sent one placeholder for each image.
            row = torch.full((1, len(made.tokens)), fill, dtype=values.dtype)
            row[0, torch.tensor(made.sent)] = values
            return row

        ours = one.versions != NO_VERSION
        return {
            "input_ids": torch.tensor([made.tokens], dtype=torch.int32),
            "loss_mask": placed(one.loss_mask.int()),
            "logprobs": placed(one.logprobs),
            "versions": placed((one.versions - self.ahead * ours).int(), NO_VERSION),
            "attention_mask": torch.ones(1, len(made.tokens), dtype=torch.bool),
            "rewards": one.rewards,
            **made.further,
        }

    def _workflow(self, workflow: Any, kwargs: Mapping[str, Any] | None) -> Any:
        """Return the workflow that `workflow` names, made once for the same arguments."""
        if self._resolved is not None and self._resolved[:2] == (workflow, kwargs):
            return self._resolved[2]
        found = _imported(workflow)
        if isinstance(found, type):
            found = found(**(kwargs or {}))
        if not hasattr(found, "arun_episode"):
            found = self._agent(found)
        self._resolved = (workflow, kwargs, found)
        return found

    def _agent(self, agent: Any) -> BySession:
        """Return an agent, which is given the URL of a session."""
        if not inspect.iscoroutinefunction(getattr(agent, "run", None)):
            raise ConfigError(
                f"the workflow is a {type(agent).__name__}, which has no arun_episode(), and no "
                "coroutine run(); give a RolloutWorkflow, or an agent."
            )
        own = getattr(self.config, "agent", None)
        if (mode := getattr(own, "mode", "inline")) != "inline":
            raise ConfigError(
                f"agent.mode is {mode!r}, and agents run in the process of the scheduler here; set "
                '"inline".'
            )
        if not self._tokenizer:
            raise ConfigError(
                "an agent needs the model's tokenizer; give tokenizer= to RolloutEngine, or set "
                "tokenizer_path of the rollout."
            )
        # An agent's requests use the trainer's sampling parameters.
        asked = SimpleNamespace(gconfig=self._gconfig.new(n_samples=1), input_ids=())
        sampling = _sampling(asked)

        async def harness(session: Session, prompt: Prompt) -> float:
            context = _areal("areal.infra.workflow_context")
            outcome: Any = await agent.run(
                self._task(prompt).item,
                base_url=session.url,
                api_key=session.key,
                http_client=await context.get_httpx_client(),
            )
            # By the ids of the responses; the last one is that of the whole sequence.
            *_, reward = map(float, outcome.values() if hasattr(outcome, "values") else (outcome,))
            _areal("areal.utils.stats_tracker").get(context.stat_scope()).scalar(reward=reward)
            return reward

        tokenizer = load_tokenizer(Path(self._tokenizer))
        return BySession(harness, tokenizer, self._sessions, "AReaL", sampling=sampling)

    async def _episode(self, turn: Turn, prompt: Prompt) -> Score:
        """Run the workflow for one rollout."""
        workflow_context = _areal("areal.infra.workflow_context")

        task = self._task(prompt)
        about = await self._about(task)
        context = workflow_context.WorkflowContext(is_eval=about.evaluation, task_id=prompt.key)
        workflow_context.set(context)
        if isinstance(about.workflow, BySession):
            return await about.workflow(turn, prompt)
        engine = _TurnEngine(turn, self)
        trajectory = await about.workflow.arun_episode(engine, task.item)
        if trajectory is None:
            if self.settings.delivery == "samples" and not context.is_eval:
                # Otherwise it would count as a reward of 0 in the baselines of its siblings.
                raise MemberLost("the workflow returned None.")
            return Score(reward=0.0, info={_REJECTED: True})
        made = engine.check(trajectory)
        task.made[turn.index] = made
        return Score(reward=float(trajectory["rewards"].reshape(())))

    def submit(
        self,
        data: Any,
        workflow: Any,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: ShouldAccept | str | None = None,
        group_size: int = 1,
        task_id: int | None = None,
        is_eval: bool = False,
    ) -> int:
        """Note an item that the next :meth:`wait` generates, under one version of the weights."""
        found = self._workflow(workflow, workflow_kwargs)
        about = _About(found, _imported(should_accept_fn), evaluation=is_eval)
        self._evaluations += 1
        self._submitted.append(
            Prompt(
                input_ids=[0],  # pyright: ignore[reportArgumentType]
                key=self._evaluations,
                metadata={"task": _Task(data, about=about)},
                group_size=group_size,
            )
        )
        return self._evaluations if task_id is None else task_id

    def wait(
        self, count: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> list[Trajectory | None]:
        """Generate the `count` oldest items that were submitted, and wait for all of them.

        Returns for each of them its trajectory; None for one that failed or was rejected.

        Raises:
            ConfigError: if fewer items were submitted, or if there is a timeout.
        """
        if count > len(self._submitted):
            raise ConfigError(
                f"{count} items are waited for, and {len(self._submitted)} were submitted."
            )
        if timeout is not None:
            raise ConfigError("an evaluation cannot be waited for with a timeout; give None.")
        prompts = [self._submitted.popleft() for _ in range(count)]
        done = self.scheduler.evaluate(prompts)
        found = {
            group.prompt.key: self._trajectory(group)
            for group in done.groups
            if self._passes(group, group.prompt.metadata["task"].about)
        }
        return [found.get(prompt.key) for prompt in prompts]

    def rollout_batch(
        self,
        data: Sequence[Any],
        workflow: Any,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: ShouldAccept | str | None = None,
        group_size: int = 1,
    ) -> list[Trajectory]:
        """The trajectories of these items, under one version; those that failed are missing."""
        for item in data:
            self.submit(item, workflow, workflow_kwargs, should_accept_fn, group_size)
        return [found for found in self.wait(len(data)) if found is not None]

    def pause_generation(self) -> None:
        """Do nothing: the weight call itself pauses, loads and continues, in one update."""

    def update_weights_from_disk(self, meta: Any) -> Future[None]:
        """Load the weights that the trainer saves in ``meta.path``, once they are complete.

        The engines generate until then. They are paused for the loading alone.

        Raises:
            ConfigError: if `meta` asks for an adapter.
        """
        _check_meta(meta)
        # The trainer adds this name to AReaL's registry when everything is written.
        saved = _areal("areal.utils.names").update_weights_from_disk(
            self.config.experiment_name, self.config.trial_name, self.get_version()
        )
        return self._worker.submit(self._load, meta, saved)

    def _load(self, meta: Any, saved: str) -> None:
        name_resolve = _areal("areal.utils.name_resolve")

        end = time.monotonic() + self.config.request_timeout
        while True:
            with suppress(TimeoutError):
                saved_at = name_resolve.wait(saved, timeout=1.0, poll_frequency=_POLL_SECONDS)
                # The name may be there from a former run, which counted its versions from 0 too.
                if float(saved_at) >= self._began:
                    break
                time.sleep(_POLL_SECONDS)
            if not self.initialized:  # A trainer that fails while it saves must not hang here.
                raise RefitError("the rollout engine was destroyed.")
            if time.monotonic() > end:
                raise RefitError(f"the trainer has saved nothing in {meta.path} in time.")
        self.scheduler.update_weights(DiskPublisher(meta.path), version=self._next_version())
        self._updated = True
        if meta.clear_checkpoint_after_load:
            shutil.rmtree(meta.path, ignore_errors=True)

    def _next_version(self) -> int:
        """Return the version of the next weights: those of a checkpoint have its version.

        As a new version they would make all restored rollouts one version older.
        """
        old, self._old_weights = self._old_weights, False
        return self.scheduler.version + (not old)

    def init_weights_update_group(
        self, meta: Any, xccl_group_ranks: list[int] | None = None
    ) -> Future[None]:
        """Let every engine join the group of AReaL's broadcasts, by AReaL's own calls.

        Raises:
            ConfigError: if requests would wait inside of the engines during a broadcast.
        """
        _check_meta(meta)
        if self.settings.behaviour.waits_inside:
            raise ConfigError(
                "AReaL's broadcast aborts every request that an engine has, and "
                f'straggler="{self.settings.straggler_name}" lets requests wait in it; set '
                'straggler="abort" or "run", or weight_update_mode=disk.'
            )
        engines = self._fleet.engines
        members = [cast(GroupEngine, each) for each in engines if isinstance(each, RefitFromGroup)]
        if len(members) < len(engines):
            others = [each.name for each in engines if not isinstance(each, RefitFromGroup)]
            raise ConfigError(
                f"{', '.join(others)} take no broadcast; set weight_update_mode=disk."
            )
        if self._client is None:
            self._client = _areal("areal.engine").RemoteSGLangEngine(self.config)
            self._client.initialize(addr=[engine.name for engine in self._fleet.engines])
        # A server keeps the NCCL group of a killed trainer and rejects a new group of that name.
        # AReaL's trainer would then wait for the server forever.
        self.scheduler.on_loop(lambda: leave(members, meta.nccl_group_name))
        return self._client.init_weights_update_group(meta, xccl_group_ranks=xccl_group_ranks)

    def update_weights_from_distributed(
        self, meta: Any, param_specs: Sequence[Any]
    ) -> Future[None]:
        """Receive one bucket of AReaL's broadcast; the first one pauses the engines.

        Raises:
            ConfigError: if :meth:`init_weights_update_group` was not called.
            RefitError: if the engines cannot be paused, or if one of the group is missing.
        """
        if self._client is None:
            raise ConfigError("the engines are in no group; call init_weights_update_group().")
        if self._broadcast is None:
            self._begin_broadcast()
        received = self._client.update_weights_from_distributed(meta, param_specs)
        received.add_done_callback(self._note_failure)
        return received

    def _begin_broadcast(self) -> None:
        engines = self._fleet.engines
        with ExitStack() as block:
            version = self._next_version()
            if version == self.scheduler.version and self.scheduler.state.fleet.control.engines:
                version += 1  # AReaL broadcasts to engines that have the weights already, too.
            self._loading = version
            pausing = self.scheduler.paused_for_weights(version=version, label=True)
            paused = block.enter_context(pausing)
            if missing := {engine.name for engine in engines}.difference(paused):
                raise RefitError(
                    f"{', '.join(sorted(missing))} does not take part, and AReaL's broadcast would "
                    "wait for it forever; restart the trainer, or use weight_update_mode=disk."
                )
            # AReaL 1.0.4 makes neither this call nor the one at the end, and SGLang 0.5.21 takes no
            # broadcast without them.
            self.scheduler.on_loop(lambda: self._on_each(lambda each: each.begin_update()))
            self._broadcast, self._broken = block.pop_all(), None

    def _note_failure(self, received: Future[None]) -> None:
        self._broken = self._broken or received.exception()

    async def _on_each(self, call: Callable[[RefitFromGroup], Awaitable[None]]) -> None:
        members = [each for each in self._fleet.engines if isinstance(each, RefitFromGroup)]
        await asyncio.gather(*map(call, members))

    def _give_up(self, error: RefitError) -> None:
        """End an update without its weights; the engines stay on standby until the next one."""
        block, self._broadcast = self._broadcast, None
        if block is not None:
            with suppress(RefitError), block:
                raise error

    def continue_generation(self) -> None:
        """End a broadcast: label the weights, read every engine's version, continue.

        Raises:
            RefitError: if a bucket has not arrived, or if no engine has the new weights.
            EngineError: if an engine does not end the update.
        """
        block, self._broadcast = self._broadcast, None
        if block is None:
            return
        with block:
            if self._broken is not None:
                raise RefitError(repr(self._broken)) from self._broken
            version = self._loading
            self.scheduler.on_loop(lambda: self._on_each(lambda each: each.end_update(version)))
        self._updated = True

    def set_version(self, version: int) -> None:
        """Note the trainer's number for the weights that the engines have.

        Raises:
            ConfigError: if the engines have got no new weights for it.
        """
        if version == self.get_version():
            return
        if not self._updated:
            raise ConfigError(
                f"the trainer reports that the engines have version {version}, and no weights were "
                f"brought in since version {self.get_version()}; update the weights first."
            )
        self._updated = False
        self.ahead = self.scheduler.version - version

    def get_version(self) -> int:
        """Return the trainer's number for the weights that the engines have."""
        # Between an update and set_version() AReaL still requests the old number, which names the
        # weights on the disk.
        return self.scheduler.version - self.ahead - self._updated

    def pause(self) -> None:
        """Do nothing: the staleness bound already limits launches while the trainer is busy."""

    def resume(self) -> None:
        """Do nothing."""

    def offload(self) -> None:
        """Release the engines' memory; requests in flight are kept."""
        self._asleep.enter_context(self.scheduler.asleep())

    def onload(self, tags: Sequence[str] | None = None) -> None:
        """Restore the engines' memory and resume generation."""
        self._asleep.close()

    def export_stats(self) -> dict[str, float]:
        """What the workflows have recorded since the last call, such as "rollout/reward"."""
        return _areal("areal.utils.stats_tracker").export_all(reduce_group=None)

    def save_perf_tracer(self, step: int | None = None, force: bool = False) -> None:
        """Do nothing: the listeners of the scheduler trace it."""

    def config_perf_tracer(self, config: Any, rank: int = 0, role: str = "") -> None:
        """Do nothing."""

    @property
    def callback_addr(self) -> str:
        """Address, as host:port, for weight-transfer calls of AReaL's ``TrainController``."""
        if self._callbacks is None:
            self._callbacks = _Callbacks(self)
        return self._callbacks.address


@dataclass(frozen=True, slots=True)
class _About:
    """How AReaL generates and judges items."""

    workflow: Any
    accept: Any
    dynamic: bool = False
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class _Task:
    """An item, and what its workflow made of each of its rollouts, by their index."""

    item: Any
    made: dict[int, _Made] = field(default_factory=dict[int, "_Made"])
    about: _About | None = None
    """None in training, where it is the same for all."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A workflow's result for a rollout.

    It contains the `tokens` with images expanded, the part of them that was `sent`, and `further`
    entries of the trajectory.
    """

    tokens: list[int]
    sent: BoolArray
    further: Mapping[str, Any]


class _TurnEngine:
    """The engine that a workflow gets: it generates one rollout, and notes its tokens."""

    def __init__(self, turn: Turn, engine: RolloutEngine) -> None:
        self.get_version = engine.get_version
        self._turn = turn
        self._engine = engine
        self._tokens: list[int] = []
        self._mask: list[int] = []
        self._shown: tuple[int, Any] = (0, None)
        """Number of the latest request's images, and its processor."""

    async def agenerate(self, req: Any) -> Any:
        """Generate the response to a ``ModelRequest``.

        Raises:
            ConfigError: if the request asks for more than one response, or if its images do not
                fit its tokens.
        """
        started = time.perf_counter()
        images: list[Any] = req.image_data or []
        self._shown = len(images), req.processor
        output = await generate(
            self._turn, req.input_ids, _sampling(req), images=images, processor=req.processor
        )
        response = output.token_ids.tolist()
        experts = routed_experts(output.companions)
        added = len(req.input_ids) - len(self._tokens)
        self._tokens = [*req.input_ids, *response]
        self._mask += [0] * added + [1] * len(response)
        seconds = time.perf_counter() - started
        return _areal("areal.api").ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=response,
            output_logprobs=output.logprobs.tolist(),
            output_versions=(output.versions - self._engine.ahead).tolist(),
            stop_reason=output.finish_reason,
            tokenizer=req.tokenizer,
            input_images=images,
            processor=req.processor,
            latency=seconds,
            ttft=seconds,
            routed_experts=None if experts is None else experts.reshape(len(experts), -1),
        )

    def check(self, trajectory: Any) -> _Made:
        """What a workflow returned.

        Raises:
            ConfigError: if it is not one sequence, as it was generated, since the rest would be
                lost.
        """
        found: dict[str, Any] = trajectory if hasattr(trajectory, "keys") else {}
        if missing := sorted({"input_ids", "rewards"} - found.keys()):
            raise ConfigError(
                f"the workflow returned {sorted(found) or type(trajectory).__name__}, without "
                f"{' and '.join(missing)}; return a trajectory of tensors, as RLVRWorkflow does."
            )
        further = {name: each for name, each in found.items() if name not in _KEYS}
        if wrong := sorted(name for name, each in further.items() if np.shape(each)[:1] != (1,)):
            raise ConfigError(
                f"{', '.join(wrong)} of the workflow's trajectory has not one row; make it a "
                "tensor or a list with a first dimension of 1."
            )
        tokens, mask = found["input_ids"].tolist(), found.get("loss_mask")
        if tokens != [self._tokens] or (mask is not None and mask.tolist() != [self._mask]):
            raise ConfigError(
                "the workflow returned other tokens or another loss mask than those of its "
                "requests and their responses; return one sequence, as it was generated."
            )
        sent = one_placeholder_each(self._tokens, *self._shown)
        return _Made(self._tokens, sent, further)


class _Callbacks:
    """Serves the calls that AReaL's training processes make of the process that has the engine.

    They are those of AReaL's ``RolloutCallback``. A broadcast needs both sides at the same time,
    so each call has a thread of its own.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        deserialize = _areal("areal.infra.rpc.serialization").deserialize_value
        calls: Mapping[str, Callable[..., object]] = {
            # One address for each server: the engine numbers them itself.
            "init_weights_group": engine.init_weights_update_group,
            "update_weights_xccl": engine.update_weights_from_distributed,
            "update_weights_disk": engine.update_weights_from_disk,
            "pause_generation": engine.pause_generation,
            "continue_generation": engine.continue_generation,
        }

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    given = {
                        name: deserialize(each) for name, each in json.loads(body or b"{}").items()
                    }
                    done = calls[self.path.removeprefix("/callback/")](**given)
                    if isinstance(done, Future):
                        done.result()
                except Exception as error:  # The trainer's process raises it.
                    self._answer(500, {"error": str(error)})
                else:
                    self._answer(200, {"status": "ok"})

            def _answer(self, status: int, content: Mapping[str, str]) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer((_areal("areal.utils.network").gethostip(), 0), Handler)
        host, port = self._server.server_address[:2]
        self.address = f"{host!s}:{port}"
        self._thread = threading.Thread(
            target=partial(self._server.serve_forever, 0.05), name="aprilsched-areal", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _settings(config: SchedulerConfig, areal: Any, group_size: int) -> SchedulerConfig:
    """Return the scheduler's settings with the sizes and the bound of AReaL's."""
    if getattr(areal, "use_lora", False):
        raise ConfigError("use_lora is set, which the scheduler does not carry; leave it out.")
    if getattr(areal, "return_routed_experts", False):
        check_replay(config, "return_routed_experts")
    limit = areal.max_concurrent_rollouts
    if limit is not None and config.dispatch.max_in_flight is None:
        dispatch = replace(config.dispatch, max_in_flight=limit * group_size)
        config = replace(config, dispatch=dispatch)
    return fitted(
        config,
        "AReaL",
        max_staleness=areal.max_head_offpolicyness,
        setting="max_head_offpolicyness",
        samples=True,
        group_size=group_size,
        batch_groups=areal.consumer_batch_size,
    )


def _check_samples(trainer: Any) -> None:
    """Refuse settings of the trainer with which an advantage is not the reward minus "values"."""
    if trainer is None:
        raise ConfigError(
            'delivery is "samples", and the trainer\'s settings decide about advantages; set '
            "trainer=self.config of RolloutEngine."
        )
    settings = {f"actor.{name}": getattr(trainer.actor, name) for name in _UNCHANGED}
    settings["critic"] = trainer.critic
    usual = {f"actor.{name}": value for name, value in _UNCHANGED.items()}
    why = "an advantage is the workflow's reward minus the mean of its siblings"
    refuse({name: (each != usual.get(name), why) for name, each in settings.items()})


def _sampling(req: Any) -> SamplingParams:
    """Return the parameters of a ``ModelRequest``."""
    given = req.gconfig
    if given.n_samples != 1 or given.use_beam_search:
        raise ConfigError(
            "a request asks for several responses or a beam search; set gconfig.n_samples to 1 in "
            "the workflow, since a group is made of several episodes."
        )
    room = given.max_tokens - len(req.input_ids)
    if room < 1:
        raise ConfigError(
            f"gconfig.max_tokens is {given.max_tokens}, and the prompt has {len(req.input_ids)} "
            "tokens; raise max_tokens, or leave such prompts out."
        )
    extra: dict[str, Any] = {"skip_special_tokens": given.skip_special_tokens}
    if given.stop:
        extra["stop"] = list(given.stop)
    if given.frequency_penalty:
        extra["frequency_penalty"] = given.frequency_penalty
    longest = min(given.max_new_tokens, room)
    return SamplingParams(
        max_new_tokens=longest,
        min_new_tokens=min(given.min_new_tokens, longest),
        temperature=0.0 if given.greedy else given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
        extra=extra,
    )


def _check_meta(meta: Any) -> None:
    if meta.use_lora:
        raise ConfigError(
            "the update is that of a LoRA adapter, which this engine does not take; train without "
            "use_lora, or use aprilsched.LoraPublisher with a trainer of your own."
        )


def _imported(given: Any) -> Any:
    """What an import path names; anything else as it is."""
    if not isinstance(given, str):
        return given
    return _areal("areal.utils.dynamic_import").import_from_string(given)


def _areal(module: str) -> Any:
    """Return a module of AReaL."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"AReaL cannot be imported ({error}); install the package areal, or its repository."
        ) from error
