"""Rollouts for verl's asynchronous trainer from the SGLang servers that verl starts.

verl's trainer pushes the prompts of one step at a time and takes groups from its TransferQueue when
they are complete. :class:`AgentLoopManager` connects the two. It is written for verl 0.9 and its
trainer ``trainer.v1.trainer_mode=separate_async``.

- verl's own agent loops run inside of the scheduler, as episodes. Chat templates, tools, rewards
  and what is written into the TransferQueue are verl's own code.
- verl moves the weights and does not label them. ``python -m aprilsched.trainers.verl`` takes
  the place of ``python -m verl.trainer.main_ppo``: the trainer then waits until the scheduler has
  paused the servers, and the scheduler labels the weights before the first token under them.
- Without it, the scheduler learns of new weights only from the trainer's next prompts. Tokens
  sampled in between are attributed to the previous version.
- With ``delivery="samples"`` verl trains on single rollouts. Its custom sampler is then
  :func:`sample_buffer`, and its advantage estimator has the name "aprilsched".
"""

# The checker does not know the classes of verl that some classes here are made from.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError, MemberLost
from aprilsched.kernel.engines.sglang.http_engine import SGLangListedFleet
from aprilsched.kernel.shell import Turn
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.values.sampling import sampling_params
from aprilsched.kernel.weights.external import ExternalWeights
from aprilsched.trainers.adapter import (
    check_fixed_groups,
    check_replay,
    class_of,
    generate,
    package,
    refuse,
    routed_experts,
    trained_advantages,
)
from aprilsched.trainers.pushed import NOT_TOKENIZED, PushedRollouts, as_pushed
from aprilsched.types import Prompt, Sample, SamplingParams, Score

if TYPE_CHECKING:
    from tensordict import TensorDict

    _Theirs = Any
else:
    _Theirs = object

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
_DECIDED = (
    "batch_groups",
    "follow_weights",
    "group_size",
    "kv_after_refit",
    "max_staleness",
    "over_provision",
    "pace",
    "ready_batches",
    "refill",
    "refit",
    "sampling",
    "stop",
    "straggler",
)
"""Settings of the scheduler that verl decides."""


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
    does not decide."""

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> None:
        settings = _settings(config, type(self).scheduler)
        if settings.delivery == "samples" and reward_loop_worker_handles is None:
            raise ConfigError(
                "verl computes rewards after sampling, and a single sample needs those of its "
                "siblings before; set reward.reward_model.enable_resource_pool=True."
            )
        ray = self._ray = _package("ray")
        self._scheduler = (
            ray.remote(_scheduler())
            .options(num_cpus=1)
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
    main_ppo.main()


def _task_runner() -> type[Any]:
    """verl's task runner, with the manager of this module and a trainer that waits for it."""

    class TaskRunner(class_of(_package("verl.trainer.main_ppo").TaskRunnerV1)):
        def init_agent_loop_manager(self) -> None:
            with _package("omegaconf").open_dict(self.config):
                agent = self.config.actor_rollout_ref.rollout.agent
                if not agent.get("agent_loop_manager_class"):
                    agent.agent_loop_manager_class = f"{__name__}.AgentLoopManager"
            super().init_agent_loop_manager()
            hold_updates(self.trainer, self.agent_loop_manager)

    return TaskRunner


def hold_updates(trainer: Any, manager: AgentLoopManager) -> None:
    """Make `trainer` update weights after a step only while `manager` pauses the servers."""
    update = trainer.on_step_end

    def on_step_end() -> None:
        with manager.paused_for_weights(trainer.global_steps):
            update()

    trainer.on_step_end = on_step_end


def sample_buffer(**given: Any) -> Any:
    """Make a replay buffer of verl that samples single rollouts.

    .. code-block:: text

        trainer.v1.sampler.custom_sampler.path=pkg://aprilsched.trainers.verl
        trainer.v1.sampler.custom_sampler.name=sample_buffer
        algorithm.adv_estimator=aprilsched
    """
    _package("verl.trainer.ppo.core_algos").register_adv_est("aprilsched")(_advantages)
    theirs = _package("verl.trainer.ppo.v1.replay_buffer").ReplayBufferAsync
    return type("SampleBuffer", (_SampleBuffer, theirs), {})(**given)


def _advantages(
    token_level_rewards: Any, response_mask: Any, index: Sequence[str], **_: Any
) -> tuple[Any, Any]:
    """Return the advantages and returns [B, T]: the reward minus the baseline of the siblings."""
    # verl pads a batch with rows that have no tokens in the loss.
    baselines = [0.0 if uid.startswith("pad") else _BASELINES[uid] for uid in index]
    rewards = token_level_rewards.sum(-1)
    found = (rewards - rewards.new_tensor(baselines))[:, None] * response_mask
    return found, found


class _SampleBuffer(_Theirs):
    """The methods that the scheduler adds to verl's ReplayBufferAsync."""

    _lost = 0
    """Number of rollouts for which verl must push further prompts."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, Row]:
        """Sample the oldest delivered rollouts, as many as `batch_size` groups have."""
        if partition_id == "val":
            return super().sample(global_steps, partition_id, batch_size)
        queue, looked = _package("transfer_queue"), time.time()
        while True:
            self._sync_metadata_from_transfer_queue()
            items: dict[str, Row] = (queue.kv_list(partition_id) or {}).get(partition_id, {})
            size = max((tag.get("size", 0) for tag in items.values()), default=0)
            steps = {
                tag["rollout"]: cast("int", tag["global_steps"])
                for tag in items.values()
                if "rollout" in tag
            }
            stale = self._stale(steps, global_steps)
            over = {uid: tag["lost"] for uid, tag in items.items() if "lost" in tag}
            gone = [
                key
                for key, tag in items.items()
                if (tag["rollout"] in stale if "rollout" in tag else key.split("_")[0] in over)
            ]
            if gone:
                queue.kv_clear(keys=gone, partition_id=partition_id)
            self._lost += len(stale) + sum(over.values())
            if size and self._lost >= size:
                prompts, self._lost = divmod(self._lost, size)
                self.refill_fn(prompts)
                continue
            fresh = sorted(steps.keys() - stale, key=steps.__getitem__)
            count = batch_size * size
            if size and self._has_enough_samples(global_steps, partition_id, count, set(fresh)):
                break
            looked = self._wait_for_next_poll(partition_id, looked)
        chosen = set(fresh[:count])
        taken = {key: tag for key, tag in items.items() if tag.get("rollout") in chosen}
        _BASELINES.clear()
        _BASELINES.update({tag["rollout"]: tag["baseline"] for tag in taken.values()})
        tags = list(taken.values())
        return queue.KVBatchMeta(partition_id=partition_id, keys=list(taken), tags=tags), {}

    def _stale(self, steps: Mapping[str, int], global_steps: int) -> set[str]:
        """Return the rollouts that verl drops, of those with the `steps` of their prompts."""
        if self.max_off_policy_threshold is None or self.max_off_policy_strategy != "drop":
            return set()
        oldest = global_steps + 1 - self.max_off_policy_threshold
        return {name for name, step in steps.items() if step < oldest}


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


class _Scheduler(_Theirs):
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
        self._samples = settings.delivery == "samples"
        self._keys: dict[str, list[str]] = {}
        """Keys of the trajectories of each rollout that is not delivered yet."""
        self._sessions: dict[str, set[asyncio.Task[Any]]] = {}
        """The trajectories of each prompt that are being scored, by its uid."""
        self._paused: AbstractAsyncContextManager[Any] | None = None
        self._rollouts = PushedRollouts(
            SGLangListedFleet(lambda: _servers(load_balancer), poll_s=_POLL_S),
            episode=self._episode,
            config=settings,
            listeners=listeners(),
            ended=self._ended,
            delivered=self._delivered if self._samples else None,
        )

    async def generate_sequences(self, batch: Any) -> None:
        """Push the prompts of a step."""
        await self._rollouts.open()
        scheduler = self._rollouts.scheduler
        validate = bool(batch["validate"]) if "validate" in batch else False
        # When verl starts a step, it has the weights of the previous step.
        version = int(batch["global_steps"]) - (not validate)
        if version > scheduler.version:
            await scheduler.update_weights(ExternalWeights(label=True), version=version)
        await super().generate_sequences(batch)

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
            size = self.config.actor_rollout_ref.rollout.n
            await self._end(uid, validate, failed=True, lost=size, size=size)

    async def _push(self, uid: str, validate: bool, row: Row, given: Row) -> None:
        rollout = self.config.actor_rollout_ref.rollout
        usual = rollout.val_kwargs.n if validate else rollout.n
        size = int(row.pop("__rollout_n__", usual))
        if not row.pop("__do_sample__", True) and not validate:
            given["sampling"] = {**given["sampling"], "temperature": 0, "top_p": 1.0, "top_k": -1}
        prompt = Prompt(
            input_ids=NOT_TOKENIZED,
            key=uid,
            metadata={"row": row, "delivered": 0, **given},
            group_size=size,
        )
        if validate:
            await self._rollouts.evaluate(prompt)
        else:
            self._rollouts.push(prompt)

    async def _episode(self, turn: Turn, prompt: Prompt) -> Score | None:
        """Run verl's agent loop for one rollout, until it is in the TransferQueue."""
        self.llm_client.enter(turn)
        given = prompt.metadata
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
        if self._samples and not validate:
            if not outputs:
                raise MemberLost("the agent loop returned no trajectory.")
            name = f"{kwargs['uid']}_{kwargs['session_id']}"
            self._keys[name] = [f"{name}_{number}" for number in range(len(outputs))]
        return outputs[-1].reward_score if outputs else None

    async def _delivered(self, sample: Sample) -> None:
        """Offer a rollout to :class:`_SampleBuffer`, with the baseline of its siblings."""
        (advantage,) = trained_advantages([sample])
        name = f"{sample.prompt.key}_{sample.rollout.index}"
        tag = {
            "rollout": name,
            "baseline": cast("float", sample.reward) - float(advantage),
            "size": self.config.actor_rollout_ref.rollout.n,
        }
        keys = self._keys.pop(name)
        # An estimator of advantages gets the rewards and the "uid" of each row.
        rows = [{"uid": name} for _ in keys]
        await _package("transfer_queue").async_kv_batch_put(
            keys=keys,
            partition_id="train",
            fields=_package("verl.utils.tensordict_utils").list_of_dict_to_tensordict(rows),
            tags=[tag] * len(keys),
        )
        given = cast("Row", sample.prompt.metadata)
        given["delivered"] += 1

    async def _ended(self, prompt: Prompt, error: Exception | None) -> None:
        given = prompt.metadata
        uid, validate = cast("str", prompt.key), given["trajectory"]["validate"]
        if self._samples and not validate:
            size = cast("int", prompt.group_size)
            for index in range(size):
                self._keys.pop(f"{uid}_{index}", None)
            lost = size - given["delivered"]
            await self._end(uid, validate, failed=lost > 0, lost=lost, size=size)
        else:
            await self._end(uid, validate, failed=error is not None)

    async def _end(self, uid: str, validate: bool, *, failed: bool, **tag: int) -> None:
        sessions = self._sessions.pop(uid, None)
        if failed and sessions:
            # verl removes a failed group's trajectories from the queue; later ones would stay.
            await asyncio.wait(sessions)
        await self._report(uid, validate, "failure" if failed else "finished", **tag)

    async def _report(self, uid: str, validate: bool, status: str, **tag: int) -> None:
        partition = "val" if validate else "train"
        queue = _package("transfer_queue")
        await queue.async_kv_put(key=uid, partition_id=partition, tag={"status": status, **tag})


async def _servers(load_balancer: Any) -> list[str]:
    """Return the URLs of the servers that verl has for rollouts now."""
    return [f"http://{address}" for address in await load_balancer.get_all_servers.remote()]


def _settings(config: Any, own: SchedulerConfig) -> SchedulerConfig:
    """The scheduler's own settings with those of verl, if verl's configuration can be served.

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
    if rollout.name != "sglang":
        raise ConfigError(
            f"actor_rollout_ref.rollout.name is {rollout.name!r}; set it to sglang, because the "
            "vLLM of verl 0.9 does not tell which version sampled a token."
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
    usual = SchedulerConfig()
    for name in _DECIDED:
        if getattr(own, name) != getattr(usual, name):
            raise ConfigError(f"{name} of the scheduler is set, and verl decides it; leave it out.")
    check_fixed_groups(own, "verl", samples=True)
    if own.delivery == "samples":
        _check_samples(config)
    return as_pushed(
        own,
        group_size=rollout.n,
        straggler="abort",
        # verl pauses servers behind the scheduler's back, which must not take them for hanging.
        follow_weights=True,
        sampling=SamplingParams(max_new_tokens=rollout.response_length),
    )


def _check_samples(config: Any) -> None:
    algorithm, sampler = config.algorithm, config.trainer.v1.sampler
    custom = sampler.get("custom_sampler") or {}
    if (algorithm.adv_estimator, custom.get("name")) != ("aprilsched", sample_buffer.__name__):
        raise ConfigError(
            'delivery is "samples", and verl\'s own sampler and estimator take whole groups; set '
            "algorithm.adv_estimator=aprilsched and trainer.v1.sampler.custom_sampler with "
            "path=pkg://aprilsched.trainers.verl and name=sample_buffer."
        )
    filters: Any = algorithm.get("filter_groups") or {}
    refuse(
        {
            "algorithm.filter_groups.enable": (filters.get("enable"), "it judges whole groups"),
            "algorithm.use_kl_in_reward": (
                algorithm.use_kl_in_reward,
                "the penalty is not in the siblings' rewards",
            ),
        }
    )


if __name__ == "__main__":
    # Ray imports the module by its name, and the classes of both must be the same.
    from aprilsched.trainers import verl

    verl.main()
