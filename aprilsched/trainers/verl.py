"""Rollouts for verl's asynchronous trainer from the SGLang or vLLM servers that verl starts.

verl's trainer pushes the prompts of one step at a time and takes groups from its TransferQueue when
they are complete. :class:`AgentLoopManager` connects the two. It is written for verl 0.9 and its
trainer ``trainer.v1.trainer_mode=separate_async``.

- verl's own agent loops run inside of the scheduler, as episodes. Chat templates, tools, rewards
  and what is written into the TransferQueue are verl's own code.
- verl moves the weights and does not label them. ``python -m aprilsched.trainers.verl`` takes
  the place of ``python -m verl.trainer.main_ppo``: the trainer then waits until the scheduler has
  paused the servers, and the scheduler labels the weights before the first token under them. The
  trainer's checkpoints then have the rollouts in flight.
- Without it, the scheduler learns of new weights only from the trainer's next prompts. Tokens
  sampled in between are attributed to the previous version.
- With verl's custom sampler :func:`scheduled_batches` the scheduler decides when a prompt starts
  and which rollouts form a batch. Otherwise each prompt starts when verl pushes it.
- With ``delivery="samples"`` verl trains on single rollouts. Its advantage estimator then has the
  name "aprilsched".
"""

# The checker does not know the classes of verl that some classes here are made from.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from aprilsched.config import SchedulerConfig, Staleness
from aprilsched.errors import ConfigError, MemberLost, RefitError
from aprilsched.kernel.core.policies.straggler import Behaviour, StragglerRule
from aprilsched.kernel.core.state.ledger import FAILURES, Reason
from aprilsched.kernel.core.state.records import State
from aprilsched.kernel.engines.sglang.http_engine import SGLangListedFleet
from aprilsched.kernel.engines.vllm.engine import VLLMListedFleet
from aprilsched.kernel.shell import Turn
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.values.sampling import sampling_params
from aprilsched.kernel.weights.external import ExternalWeights
from aprilsched.trainers.adapter import (
    Theirs,
    check_fixed_groups,
    check_replay,
    class_of,
    generate,
    missing_prompts,
    package,
    read_state,
    refuse,
    routed_experts,
    save_state,
    trained_advantages,
)
from aprilsched.trainers.pushed import NOT_TOKENIZED, PushedRollouts, as_pushed
from aprilsched.types import NO_VERSION, Batch, Prompt, Rollout, SamplingParams, Score

if TYPE_CHECKING:
    from tensordict import TensorDict

log = logging.getLogger("aprilsched")

Row: TypeAlias = dict[str, Any]
"""One row of verl's dataset, with the columns that verl adds."""

_package = partial(package, "verl")
_POLL_S = 1.0
"""Seconds between two looks at the list of servers, from which verl takes those that it needs for
training."""
_TURN: ContextVar[Turn] = ContextVar("turn")
"""The turn of the episode that runs."""
_BASELINES: dict[str, float] = {}
"""In the trainer's process, the baseline of each rollout that it trains on, by its "uid"."""
_manager: AgentLoopManager | None = None
"""The manager of the trainer in this process."""
_holds_updates = False
"""Whether the trainer in this process waits for the scheduler with its updates."""
_FILE = "aprilsched.checkpoint"
"""Name of the scheduler's file in a checkpoint folder of verl."""
_FLEETS = {"sglang": SGLangListedFleet, "vllm": VLLMListedFleet}
_SAMPLER = "scheduled_batches"
_LOST = FAILURES | {Reason.SIBLING_FAILED, Reason.MEMBER_LOST}
_EVICTED = {
    "training/off_policy/evicted_samples": {Reason.STALE, Reason.BEGUN_AGAIN},
    "training/rollout_failure/evicted_samples": _LOST,
}
"""verl's metrics of evicted rollouts, each with the scheduler's reasons."""
_DECIDED = ("batch_groups", "follow_weights", "group_size", "refit", "sampling", "stop")
"""Settings of the scheduler that verl decides."""
_BY_SCHEDULER = (
    "delivery",
    "kv_after_refit",
    "max_staleness",
    "over_provision",
    "pace",
    "ready_batches",
    "refill",
)
"""Settings that need :func:`scheduled_batches`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """What a training batch of the scheduler consists of.

    Attributes:
        rollouts: names of its rollouts, each with the mean reward of its siblings, which is None if
            whole groups are delivered.
        finished: uids of prompts of which nothing more is delivered.
        metrics: for verl's log.
    """

    rollouts: Mapping[str, float | None]
    finished: Collection[str]
    metrics: Mapping[str, float]


class AgentLoopManager:
    """An agent loop manager whose rollouts are scheduled by aprilsched.

    .. code-block:: text

        actor_rollout_ref.rollout.agent.agent_loop_manager_class=aprilsched.trainers.verl.AgentLoopManager

    verl makes it by :meth:`create` and calls :meth:`generate_sequences`. The scheduler runs in a
    Ray actor of its own. A subclass, which is then named in verl's configuration, may change its
    settings and listeners.

    Args:
        config: verl's whole configuration.
        llm_client: verl's client, which knows the servers.
        teacher_client: verl's clients of teachers, for distillation.
        reward_loop_worker_handles: verl's reward workers; None if rewards are computed later.

    Raises:
        ConfigError: if the configuration would produce wrong or lost rollouts.
        MissingExtra: if verl or one of its packages is not installed.
    """

    scheduler: ClassVar[SchedulerConfig] = SchedulerConfig()
    """Settings of the scheduler: `dispatch`, `retries`, `health`, `timeouts` and others that verl
    does not decide. With :func:`scheduled_batches` also `over_provision`, `max_staleness` and
    others that need batches of the scheduler."""

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> None:
        global _manager
        _manager = self
        settings = _settings(config, type(self).scheduler, held=_holds_updates)
        if settings.delivery == "samples" and reward_loop_worker_handles is None:
            raise ConfigError(
                "verl computes rewards after sampling, and a single sample needs those of its "
                "siblings before; set reward.reward_model.enable_resource_pool=True."
            )
        data = config.data
        self._fetched = data.get("gen_batch_size") or data.train_batch_size
        self.waits_inside = settings.behaviour.waits_inside
        ray = self._ray = _package("ray")
        # It writes checkpoints into the trainer's folder.
        here = _package("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self._scheduler = (
            ray.remote(_scheduler())
            .options(num_cpus=1, scheduling_strategy=here)
            .remote(
                config,
                llm_client._load_balancer,
                teacher_client,
                reward_loop_worker_handles,
                settings,
                type(self).listeners,
            )
        )

    @staticmethod
    def listeners() -> Sequence[AnyListener]:
        """Make the listeners of the scheduler, inside of its actor; a subclass may have some."""
        return ()

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> AgentLoopManager:
        """Make the manager; the arguments are those of the class."""
        return cls(*args, **kwargs)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Push prompts, and return before anything is generated for them.

        Raises:
            Exception: the error that stopped the scheduler, if it is no longer running.
        """
        self._ray.get(self._scheduler.generate_sequences.remote(prompts))

    @contextmanager
    def paused_for_weights(self, version: int) -> Generator[None]:
        """Pause the servers while verl brings the weights of step `version` into them.

        At the end of the block the servers are labelled with the version, and generation resumes.
        """
        self._ray.get(self._scheduler.pause_for_weights.remote(version))
        try:
            yield
        except BaseException as error:
            self._ray.get(self._scheduler.weights_loaded.remote(repr(error)))
            raise
        self._ray.get(self._scheduler.weights_loaded.remote())

    def next_batch(self, push: Callable[[int], object], poll_s: float) -> _Taken:
        """Wait for the scheduler's next batch; `push` adds that many prompts of the dataset.

        Raises:
            Exception: the error that stopped the scheduler.
        """
        while True:
            found = self._ray.get(self._scheduler.next_batch.remote(poll_s))
            if isinstance(found, _Taken):
                return found
            if found:
                push(math.ceil(found / self._fetched) * self._fetched)

    def save(self, folder: Path) -> None:
        """Save the rollouts in flight in `folder`."""
        self._ray.get(self._scheduler.save.remote(folder / _FILE))

    def restore(self, folder: Path) -> None:
        """Continue with the rollouts that :meth:`save` wrote into `folder`, if it did."""
        if (folder / _FILE).is_file():
            self._ray.get(self._scheduler.restore.remote(folder / _FILE))
        else:
            log.warning("no %s in %s: prompts in flight are generated again", _FILE, folder)

    def finished_rollouts(self) -> dict[str, set[str]]:
        """Return the names of restored rollouts that are finished, by the uid of the prompt."""
        return self._ray.get(self._scheduler.finished_rollouts.remote())

    def end_restore(self, outputs: Mapping[str, int]) -> None:
        """Drop the restored rollouts whose prompts verl has not pushed again; `outputs` are the
        numbers of trajectories of those that are finished."""
        self._ray.get(self._scheduler.end_restore.remote(outputs))

    def close(self) -> None:
        """Stop the scheduler: abort what is in flight, and release the servers."""
        self._ray.get(self._scheduler.close.remote())
        self._ray.kill(self._scheduler)


def main() -> None:
    """Run verl's ``main_ppo`` with rollouts that are scheduled by aprilsched.

    The arguments on the command line are verl's own.
    """
    main_ppo = _package("verl.trainer.main_ppo")
    main_ppo.TaskRunnerV1 = _package("ray").remote(_task_runner())
    run = main_ppo.run_ppo

    def run_ppo(config: Any, **given: Any) -> None:
        open_control_calls(config)
        run(config, **given)

    main_ppo.run_ppo = run_ppo
    main_ppo.main()


def open_control_calls(config: Any) -> None:
    """Let the vLLM servers that verl starts answer the scheduler's calls."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        return
    conf = _package("omegaconf").OmegaConf
    environment = "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_SERVER_DEV_MODE"
    conf.update(config, environment, "1", force_add=True)
    conf.update(rollout, "engine_kwargs.vllm.enable_scale_out", True, force_add=True)


def _task_runner() -> type[Any]:
    """verl's task runner, with the manager of this module and a trainer that waits for it."""

    class TaskRunner(class_of(_package("verl.trainer.main_ppo").TaskRunnerV1)):
        def init_agent_loop_manager(self) -> None:
            with _package("omegaconf").open_dict(self.config):
                agent = self.config.actor_rollout_ref.rollout.agent
                if not agent.get("agent_loop_manager_class"):
                    agent.agent_loop_manager_class = f"{__name__}.AgentLoopManager"
            with _holding_updates():
                super().init_agent_loop_manager()
            hold_updates(self.trainer, self.agent_loop_manager)
            save_rollouts(self.trainer, self.agent_loop_manager)

    return TaskRunner


@contextmanager
def _holding_updates() -> Generator[None]:
    """Let managers that are made in this block know that the trainer waits for them."""
    # The task runner's own methods are pickled with a copy of the module's variables.
    global _holds_updates
    _holds_updates = True
    try:
        yield
    finally:
        _holds_updates = False


def hold_updates(trainer: Any, manager: AgentLoopManager) -> None:
    """Make `trainer` update weights after a step only while `manager` pauses the servers."""
    update = trainer.on_step_end
    servers = trainer.standalone_checkpoint_manager

    async def leave_paused(**_: Any) -> None:
        """The scheduler has paused the servers with requests inside, and continues them."""

    def on_step_end() -> None:
        with manager.paused_for_weights(trainer.global_steps):
            update()

    if manager.waits_inside:
        servers.abort_replicas = servers.resume_generation_replicas = leave_paused
    trainer.on_step_end = on_step_end


def save_rollouts(trainer: Any, manager: AgentLoopManager) -> None:
    """Make the checkpoints of `trainer` contain the rollouts in flight.

    verl's own checkpoint has the prompts and the finished trajectories. The scheduler's is written
    first, because verl names a checkpoint the latest one when it has written it. What ends in
    between is finished in verl's, which decides.
    """
    save, resend = trainer._save_checkpoint, trainer._reissue_inflight_prompts
    settings = trainer.config.trainer

    def save_checkpoint() -> None:
        folder = Path(settings.default_local_dir, f"global_step_{trainer.global_steps}")
        manager.save(folder.absolute())
        save()

    def reissue_inflight_prompts() -> int:
        queue, names = _package("transfer_queue"), manager.finished_rollouts()
        items: dict[str, Row] = (queue.kv_list("train") or {}).get("train", {})
        kept = [
            key
            for key in items
            if items.get(key.split("_")[0], {}).get("status") in ("pending", "running")
            and key.rsplit("_", 1)[0] in names.get(key.split("_")[0], ())
        ]
        # verl removes the trajectories of all unfinished prompts.
        data = queue.kv_batch_get(keys=kept, partition_id="train") if kept else None
        count = resend()
        if data is not None:
            tags = [items[key] for key in kept]
            queue.kv_batch_put(keys=kept, partition_id="train", fields=data, tags=tags)
        manager.end_restore(Counter(key.rsplit("_", 1)[0] for key in kept))
        return count

    if trainer.global_steps:
        folder = Path(settings.default_local_dir, f"global_step_{trainer.global_steps}")
        if settings.resume_mode == "resume_path":
            folder = Path(settings.resume_from_path)
        manager.restore(folder.absolute())
        trainer._reissue_inflight_prompts = reissue_inflight_prompts
    trainer._save_checkpoint = save_checkpoint


def scheduled_batches(**given: Any) -> Any:
    """Make a replay buffer of verl whose training batches the scheduler forms.

    .. code-block:: text

        trainer.v1.sampler.custom_sampler.path=pkg://aprilsched.trainers.verl
        trainer.v1.sampler.custom_sampler.name=scheduled_batches

    With ``delivery="samples"``, also ``algorithm.adv_estimator=aprilsched``.
    """
    _package("verl.trainer.ppo.core_algos").register_adv_est("aprilsched")(_advantages)
    theirs = _package("verl.trainer.ppo.v1.replay_buffer").ReplayBufferAsync
    return type("ScheduledBatches", (_ScheduledBatches, theirs), {})(**given)


def _advantages(
    token_level_rewards: Any, response_mask: Any, index: Sequence[str], **_: Any
) -> tuple[Any, Any]:
    """Return the advantages and returns [B, T]: the reward minus the baseline of the siblings."""
    # verl pads a batch with rows that have no tokens in the loss.
    baselines = [0.0 if uid.startswith("pad") else _BASELINES[uid] for uid in index]
    rewards = token_level_rewards.sum(-1)
    found = (rewards - rewards.new_tensor(baselines))[:, None] * response_mask
    return found, found


class _ScheduledBatches(Theirs):
    """The method that the scheduler replaces in verl's ReplayBufferAsync."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, Row]:
        """Take the next training batch; its size is that of the scheduler's settings."""
        if partition_id == "val":
            return super().sample(global_steps, partition_id, batch_size)
        manager, queue = cast("AgentLoopManager", _manager), _package("transfer_queue")
        batch = manager.next_batch(self.refill_fn, self.poll_interval)
        items: dict[str, Row] = queue.kv_list(partition_id)[partition_id]
        taken = {key: tag for key, tag in items.items() if key.rsplit("_", 1)[0] in batch.rollouts}
        gone = [key for key in items if key.split("_")[0] in batch.finished and key not in taken]
        if gone:
            queue.kv_clear(keys=gone, partition_id=partition_id)
        _BASELINES.clear()
        _BASELINES.update({name: each for name, each in batch.rollouts.items() if each is not None})
        tags = list(taken.values())
        found = queue.KVBatchMeta(partition_id=partition_id, keys=list(taken), tags=tags)
        return found, dict(batch.metrics)


class _Client:
    """What verl's agent loops generate with: the turn of the episode that they run in."""

    def __init__(self, rollout: Any) -> None:
        self._rollout = rollout
        self.processor: Any = None
        """verl's processor, which has expanded the placeholders of images; None without one."""

    def enter(self, turn: Turn) -> None:
        """Generate with `turn` in this task and those that it starts."""
        _TURN.set(turn)

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        **given: Any,
    ) -> Any:
        """Generate one turn, as verl's LLMServerClient does."""
        if seen := [name for name in ("video_data", "audio_data") if given.get(name)]:
            raise ConfigError(
                f"the agent loop sends {seen[0]} as verl has decoded it, and servers are sent "
                "files; use verl's own agent loop manager for it."
            )
        turn = await generate(
            _TURN.get(),
            prompt_ids,
            self._sampling(sampling_params, len(prompt_ids)),
            images=given.get("image_data") or (),
            processor=self.processor,
        )
        versions = turn.versions.tolist()
        first, last = (min(versions), max(versions)) if versions else (None, None)
        return _package("verl.workers.rollout.replica").TokenOutput(
            token_ids=turn.token_ids.tolist(),
            log_probs=turn.logprobs.tolist() if sampling_params.get("logprobs") else None,
            stop_reason=turn.finish_reason,
            routed_experts=routed_experts(turn.companions),
            extra_fields={
                "global_steps": last,
                "min_global_steps": first,
                "max_global_steps": last,
            },
        )

    def _sampling(self, given: Mapping[str, Any], context: int) -> SamplingParams:
        """Return the parameters with the bound on new tokens that verl's server has."""
        rollout = self._rollout
        chosen = {name: value for name, value in given.items() if name != "logprobs"}
        if chosen.get("repetition_penalty") == 1:
            del chosen["repetition_penalty"]
        limit = chosen.pop("max_new_tokens", chosen.pop("max_tokens", None))
        if limit is None:
            both = rollout.prompt_length + rollout.response_length
            limit = min(rollout.response_length, both - context)
        if rollout.max_model_len is not None:
            limit = min(limit, rollout.max_model_len - context - 1)
        return sampling_params({**chosen, "max_new_tokens": max(1, limit)})


def _scheduler() -> type[Any]:
    """The class of the actor that schedules: verl's worker of agent loops as a :class:`_Scheduler`.

    It is made when it is needed, since the library is imported without verl.
    """
    worker = class_of(_package("verl.trainer.ppo.v1.agent_loop_tq").AgentLoopWorkerTQ)
    return type("Scheduler", (_Scheduler, worker), {})


class _Scheduler(Theirs):
    """The methods added to verl's agent-loop worker; its prompts go to a RolloutScheduler."""

    def __init__(
        self,
        config: Any,
        load_balancer: Any,
        teacher_client: Any,
        reward_loop_worker_handles: Any,
        settings: SchedulerConfig,
        listeners: Callable[[], Sequence[AnyListener]],
    ) -> None:
        client = _Client(config.actor_rollout_ref.rollout)
        super().__init__(config, client, teacher_client, reward_loop_worker_handles)
        client.processor = self.processor
        self._settings = settings
        self._batches = _has_sampler(config)
        self._given: dict[str, asyncio.Future[Row]] = {}
        """What verl has pushed for each prompt, by its uid; a restored rollout waits for it."""
        self._restored: dict[str, int] = {}
        """The steps in which the prompts of restored rollouts were pushed first, by uid, until verl
        pushes them again."""
        self._outputs: dict[str, int] = {}
        """Number of trajectories of each rollout that is in the TransferQueue."""
        self._sessions: dict[str, set[asyncio.Task[Any]]] = {}
        """The trajectories of each prompt that are being scored, by its uid."""
        self._counted = dict.fromkeys(_EVICTED, 0)
        """Values of verl's metrics in the batches before."""
        self._paused: AbstractAsyncContextManager[Any] | None = None
        fleet = _FLEETS[config.actor_rollout_ref.rollout.name]
        self._rollouts = PushedRollouts(
            fleet(lambda: _servers(load_balancer), poll_s=_POLL_S),
            episode=self._episode,
            config=settings,
            listeners=listeners(),
            ended=self._ended,
            batches=self._batches,
        )

    async def generate_sequences(self, batch: Any) -> None:
        """Push the prompts of a step."""
        await self._open()
        scheduler = self._rollouts.scheduler
        validate = bool(batch["validate"]) if "validate" in batch else False
        # When verl starts a step, it has the weights of the previous step.
        version = int(batch["global_steps"]) - (not validate)
        if version > scheduler.version:
            await scheduler.update_weights(ExternalWeights(label=True), version=version)
        await super().generate_sequences(batch)

    async def _open(self) -> None:
        restores = self._rollouts.scheduler.restores and not self._rollouts.is_open
        await self._rollouts.open()
        if restores:
            for group in self._rollouts.scheduler.state.in_flight.training_groups():
                uid = cast("str", group.prompt.key)
                self._restored[uid] = group.prompt.metadata["global_steps"]
            # The ledger has what the processes before have dropped, too.
            self._evicted()

    async def next_batch(self, within: float) -> _Taken | int:
        """Return the next batch, or the number of prompts to push first; 0 after `within` s."""
        await self._open()
        if missing := missing_prompts(self._rollouts.prompts, self._settings):
            return missing
        scheduler = self._rollouts.scheduler
        try:
            async with asyncio.timeout(within):
                batch = await scheduler.next_batch()
        except TimeoutError:
            return 0
        except RefitError:
            # Possibly no server has complete weights until the trainer's next update.
            await asyncio.sleep(within)
            return 0
        samples = self._settings.delivery == "samples"
        rollouts: dict[str, float | None] = {
            f"{unit.prompt.key}_{rollout.index}": None
            for unit in batch.units
            for rollout in unit.rollouts
        }
        if samples:
            found = trained_advantages(batch.units)
            for name, each, advantage in zip(rollouts, batch.rollouts, found, strict=True):
                rollouts[name] = cast("float", each.reward) - float(advantage)
        await self._write(batch, rollouts, named=samples)
        finished = self._given.keys() - self._rollouts.unfinished()
        for uid in finished:
            del self._given[uid]
            if sessions := self._sessions.pop(uid, None):
                # Trajectories of lost rollouts would stay in the queue.
                await asyncio.wait(sessions)
        for name in [name for name in self._outputs if name.rsplit("_", 1)[0] in finished]:
            del self._outputs[name]
        return _Taken(rollouts=rollouts, finished=finished, metrics=self._evicted())

    async def _write(self, batch: Batch, names: Collection[str], *, named: bool) -> None:
        """Write into the queue what the scheduler decided when it formed the batch.

        Tokens beyond the staleness bound get mask 0. With `named`, an estimator of advantages gets
        the name of the rollout as the "uid" of a row.
        """
        named_rows, masked_rows = dict[str, Row](), dict[str, Row]()
        for name, rollout in zip(names, batch.rollouts, strict=True):
            keys = [f"{name}_{number}" for number in range(self._outputs[name])]
            if named:
                named_rows |= {key: {"uid": name} for key in keys}
            if (~rollout.loss_mask & (rollout.versions != NO_VERSION)).any():
                masked_rows |= await self._masks(keys, rollout)
        for rows in (named_rows, masked_rows):
            if rows:
                fields = _package("verl.utils.tensordict_utils").list_of_dict_to_tensordict(
                    list(rows.values())
                )
                await _package("transfer_queue").async_kv_batch_put(
                    keys=list(rows), partition_id="train", fields=fields
                )

    async def _masks(self, keys: list[str], rollout: Rollout) -> dict[str, Row]:
        """Return the masks of trajectories without the tokens that are masked in their rollout."""
        fields = ["prompts", "responses", "response_mask"]
        data = await _package("transfer_queue").async_kv_batch_get(
            keys=keys, partition_id="train", select_fields=fields
        )
        counts, rows = _package("torch").from_numpy(rollout.loss_mask), dict[str, Row]()
        for at, key in enumerate(keys):
            # Each trajectory is the beginning of the rollout up to one of its turns.
            start = len(data["prompts"][at]) - len(rollout.prompt_ids)
            mask = data["response_mask"][at]
            mask = mask * counts[start : start + len(mask)]
            rows[key] = {"response_mask": mask, "loss_mask": mask}
        return rows

    def _evicted(self) -> dict[str, float]:
        """Return verl's metrics of the rollouts that were evicted since the batch before."""
        dropped, metrics = (
            self._rollouts.scheduler.state.in_flight.ledger.rollouts,
            dict[str, float](),
        )
        for name, reasons in _EVICTED.items():
            total = sum(dropped[each] for each in reasons)
            metrics[name], self._counted[name] = total - self._counted[name], total
        return metrics

    async def save(self, path: Path) -> None:
        """Save the rollouts in flight."""
        await self._open()
        # verl's own checkpoint has the rows of the prompts.
        await save_state(path, self._rollouts.scheduler, self._settings, lambda: None)

    def restore(self, path: Path) -> None:
        """Continue with the rollouts of a file, when the servers are opened.

        Raises:
            ConfigError: if the groups of the file have another size or delivery.
            StoreError: if it cannot be read.
        """
        read_state(path, self._settings, self._rollouts.scheduler.restore)

    async def finished_rollouts(self) -> dict[str, set[str]]:
        """Return the names of the finished rollouts in flight, by the uid of the prompt."""
        await self._open()
        found: dict[str, set[str]] = {}
        for group in self._rollouts.scheduler.state.in_flight.training_groups():
            uid = cast("str", group.prompt.key)
            done = {f"{uid}_{each.index}" for each in group.members if each.state is State.DONE}
            found.setdefault(uid, set()).update(done)
        return found

    async def end_restore(self, outputs: Mapping[str, int]) -> None:
        """Drop the restored rollouts that verl has finished, or does not know."""
        self._outputs.update(outputs)
        # verl's worker pushes the prompts of a call in tasks, which it does not wait for.
        await asyncio.gather(*self.background_tasks)
        scheduler = self._rollouts.scheduler
        for group in list(scheduler.state.in_flight.training_groups()):
            if group.prompt.key in self._restored:
                scheduler.withdraw(group.group_id, "verl's checkpoint has no such prompt in flight")
                self._given.pop(group.prompt.key, None)
        self._restored.clear()

    async def pause_for_weights(self, version: int) -> None:
        """Pause the servers; the weights of `version` may be loaded then."""
        if self._rollouts.is_open:
            paused = self._rollouts.scheduler.paused_for_weights(version=version, label=True)
            await paused.__aenter__()
            self._paused = paused

    async def weights_loaded(self, error: str | None = None) -> None:
        """Resume the servers, unless `error` gives the reason why loading failed."""
        paused, self._paused = self._paused, None
        if paused is None:
            return
        if error is None:
            await paused.__aexit__(None, None, None)
            return
        failure = RuntimeError(f"verl did not load the weights: {error}")
        try:
            await paused.__aexit__(RuntimeError, failure, None)
        except RuntimeError as raised:
            if raised is not failure:
                raise

    async def close(self) -> None:
        """Stop the scheduler."""
        await self._rollouts.close()

    async def _run_prompt(
        self, prompt: Row, sampling_params: Row, trajectory: Row, trace: bool = False
    ) -> None:
        """Push one prompt; verl's worker calls this for each row."""
        uid, validate = prompt["uid"], trajectory["validate"]
        await self._report(uid, validate, "running")
        try:
            given = {"sampling": sampling_params, "trajectory": trajectory, "trace": trace}
            await self._push(uid, validate, prompt, given)
        except Exception:
            # verl does not await this call, so without a failure it would wait forever.
            log.exception("prompt %s was given up", uid)
            await self._end(uid, validate, failed=True)

    async def _push(self, uid: str, validate: bool, row: Row, given: Row) -> None:
        rollout = self.config.actor_rollout_ref.rollout
        usual = rollout.val_kwargs.n if validate else rollout.n
        size = int(row.pop("__rollout_n__", usual))
        if not row.pop("__do_sample__", True) and not validate:
            given["sampling"] = {**given["sampling"], "temperature": 0, "top_p": 1.0, "top_k": -1}
        step = self._restored.pop(uid, None)
        if step is not None:
            # verl counts the age of a prompt from its second push, so its bound would be later.
            row["global_steps"] = step
            tag = {"global_steps": step}
            queue = _package("transfer_queue")
            await queue.async_kv_put(key=uid, partition_id="train", tag=tag)
        self._pushed(uid).set_result({"row": row, **given})
        if step is not None:
            return
        prompt = Prompt(
            input_ids=NOT_TOKENIZED,
            key=uid,
            # A checkpoint has only this; verl's own has the rows.
            metadata={"global_steps": int(row["global_steps"])},
            group_size=size,
        )
        if validate:
            await self._rollouts.evaluate(prompt)
        else:
            self._rollouts.push(prompt)

    def _pushed(self, uid: str) -> asyncio.Future[Row]:
        return self._given.setdefault(uid, asyncio.get_running_loop().create_future())

    async def _episode(self, turn: Turn, prompt: Prompt) -> Score | None:
        """Run verl's agent loop for one rollout, until it is in the TransferQueue."""
        given = await asyncio.shield(self._pushed(cast("str", prompt.key)))
        self.llm_client.enter(turn)
        reward = await self._run_agent_loop(
            given["sampling"],
            trajectory=given["trajectory"],
            trace=given["trace"],
            session_id=turn.index,
            **given["row"],
        )
        return None if reward is None else Score(reward=reward)

    async def _agent_loop_postprocess(
        self, output: Any, validate: bool, **kwargs: Any
    ) -> float | None:
        """Score a trajectory and put it into the TransferQueue; returns its reward.

        It is never interrupted: half a trajectory in the queue would be worse than a whole one of a
        failed group, which verl removes.
        """
        work = asyncio.create_task(super()._agent_loop_postprocess(output, validate, **kwargs))
        sessions = self._sessions.setdefault(kwargs["uid"], set())
        sessions.add(work)
        await asyncio.shield(work)
        outputs = output if isinstance(output, list) else [output]
        if self._batches and not validate:
            if not outputs:
                raise MemberLost("the agent loop returned no trajectory.")
            name = f"{kwargs['uid']}_{kwargs['session_id']}"
            before, self._outputs[name] = self._outputs.get(name, 0), len(outputs)
            if extra := [f"{name}_{number}" for number in range(len(outputs), before)]:
                # An earlier rollout of this member was lost.
                await _package("transfer_queue").async_kv_clear(keys=extra, partition_id="train")
        return outputs[-1].reward_score if outputs else None

    async def _ended(self, prompt: Prompt, error: Exception | None) -> None:
        uid = cast("str", prompt.key)
        given = self._given.pop(uid, None)
        validate = given is not None and given.done() and given.result()["trajectory"]["validate"]
        await self._end(uid, validate, failed=error is not None)

    async def _end(self, uid: str, validate: bool, *, failed: bool) -> None:
        sessions = self._sessions.pop(uid, None)
        if failed and sessions:
            # verl removes a failed group's trajectories from the queue; later ones would stay.
            await asyncio.wait(sessions)
        await self._report(uid, validate, "failure" if failed else "finished")

    async def _report(self, uid: str, validate: bool, status: str) -> None:
        partition = "val" if validate else "train"
        queue = _package("transfer_queue")
        await queue.async_kv_put(key=uid, partition_id=partition, tag={"status": status})


async def _servers(load_balancer: Any) -> list[str]:
    """Return the URLs of the servers that verl has for rollouts now."""
    return [f"http://{address}" for address in await load_balancer.get_all_servers.remote()]


def _settings(config: Any, own: SchedulerConfig, *, held: bool = False) -> SchedulerConfig:
    """The scheduler's own settings with those of verl, if verl's configuration can be served.

    `held` is whether the trainer waits for the scheduler with its updates.

    Raises:
        ConfigError: if it cannot.
    """
    rollout, model, v1 = (
        config.actor_rollout_ref.rollout,
        config.actor_rollout_ref.model,
        config.trainer.get("v1", {}),
    )
    mode = v1.get("trainer_mode")
    if not config.trainer.get("use_v1", True):
        raise ConfigError(
            "trainer.use_v1 is False, and only that trainer is served; set it to True."
        )
    if mode != "separate_async":
        raise ConfigError(
            f"trainer.v1.trainer_mode is {mode!r}, which takes the servers' memory away at every "
            'step; set it to "separate_async".'
        )
    if config.actor_rollout_ref.get("hybrid_engine", True):
        raise ConfigError(
            "actor_rollout_ref.hybrid_engine is True, so verl puts servers to sleep in mid "
            "generation; set it to False, and give the servers GPUs of their own."
        )
    if rollout.name not in _FLEETS:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name must be sglang or vllm, got {rollout.name!r}."
        )
    lora: Any = model.get("lora") or {}
    refused: dict[str, tuple[Any, str]] = {
        "actor_rollout_ref.rollout.disaggregation.enabled": (
            (rollout.get("disaggregation") or {}).get("enabled"),
            "a request would need a prefill and a decode server, and is sent to one",
        ),
        "actor_rollout_ref.model.lora_rank": (
            (lora.get("rank", 0) or model.get("lora_rank", 0)) and not lora.get("merge"),
            "requests would not name the adapter; set model.lora.merge=True",
        ),
    }
    refuse(refused)
    if rollout.get("enable_rollout_routing_replay"):
        check_replay(own, "actor_rollout_ref.rollout.enable_rollout_routing_replay")
    check_fixed_groups(own, "verl", samples=True)
    changes: dict[str, Any] = {
        "group_size": rollout.n,
        "straggler": _straggler(rollout, own, held=held),
        # Without that, verl pauses servers behind the scheduler's back, which must not take them
        # for hanging.
        "follow_weights": not held,
        "sampling": SamplingParams(max_new_tokens=rollout.response_length),
    }
    _check_decided(own, _DECIDED, "verl decides it; leave it out")
    if _has_sampler(config):
        changes["batch_groups"] = config.actor_rollout_ref.actor.ppo_mini_batch_size
        return _with_batches(config, replace(own, **changes))
    _check_decided(
        own,
        _BY_SCHEDULER,
        "verl forms the batches; set trainer.v1.sampler.custom_sampler with "
        f"path=pkg://aprilsched.trainers.verl and name={_SAMPLER}",
    )
    return as_pushed(own, **changes)


def _check_decided(own: SchedulerConfig, names: Sequence[str], why: str) -> None:
    usual = SchedulerConfig()
    for name in names:
        if getattr(own, name) != getattr(usual, name):
            raise ConfigError(f"{name} of the scheduler is set, and {why}.")


def _has_sampler(config: Any) -> bool:
    return (config.trainer.v1.sampler.get("custom_sampler") or {}).get("name") == _SAMPLER


def _straggler(rollout: Any, own: SchedulerConfig, *, held: bool) -> StragglerRule | Behaviour:
    """Return what happens to requests in a pause, if verl's updates allow it.

    Raises:
        ConfigError: if they do not.
    """
    name, waits = own.straggler_name, own.behaviour.waits_inside
    if waits and own.cached_kv != "recompute" and rollout.name == "sglang":
        raise ConfigError(
            f"straggler is {name!r}, and verl flushes the cache of an SGLang server after the "
            'update, which then refuses; set straggler="retract".'
        )
    left_alone = held and not rollout.get("free_cache_engine", True)
    if name == "retract" and not left_alone:
        return "abort"
    if name != "abort" and not held:
        raise ConfigError(
            f"straggler is {name!r}, and verl aborts all requests at an update that it does not "
            "announce; start the training by python -m aprilsched.trainers.verl."
        )
    if waits and not left_alone:
        raise ConfigError(
            f"straggler is {name!r}, and verl releases the memory of the cache at an update; set "
            "actor_rollout_ref.rollout.free_cache_engine=False."
        )
    return own.straggler


def _with_batches(config: Any, own: SchedulerConfig) -> SchedulerConfig:
    """Return the settings of a scheduler that forms verl's batches, with verl's bound on staleness.

    Raises:
        ConfigError: if the settings' own bound is looser, or verl would change an advantage.
    """
    algorithm, sampler = config.algorithm, config.trainer.v1.sampler
    filters: Any = algorithm.get("filter_groups") or {}
    refuse(
        {
            "algorithm.filter_groups.enable": (
                filters.get("enable"),
                "verl's own sampler would filter",
            )
        }
    )
    if own.delivery == "samples":
        if algorithm.adv_estimator != "aprilsched":
            raise ConfigError(
                'delivery is "samples", and verl\'s own estimators take whole groups; set '
                "algorithm.adv_estimator=aprilsched."
            )
        why = "the penalty is not in the siblings' rewards"
        refuse({"algorithm.use_kl_in_reward": (algorithm.use_kl_in_reward, why)})
    threshold = sampler.get("max_off_policy_threshold")
    if threshold is None:
        return own
    bound = own.policies.staleness.bound
    if own.max_staleness == "auto":
        rule = "finish" if sampler.max_off_policy_strategy == "wait" else "evict"
        return replace(own, max_staleness=Staleness(bound=threshold - 1, rule=rule))
    if bound is None or bound >= threshold:
        raise ConfigError(
            f"max_staleness must be below trainer.v1.sampler.max_off_policy_threshold={threshold}, "
            f"got {bound}; raise the threshold, or leave max_staleness out."
        )
    return own


if __name__ == "__main__":
    # Ray imports the module by its name, and the classes of both must be the same.
    from aprilsched.trainers import verl

    verl.main()
