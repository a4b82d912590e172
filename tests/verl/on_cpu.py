"""verl's asynchronous trainer on a CPU: everything is verl's own except what needs a GPU.

- The servers are SGLang-compatible test servers, each in a Ray actor that has the methods of verl's
  SGLangHttpServer. verl's replicas, its manager of servers and its balancer start and list them.
- The weights are files, which the servers load in the place of tensors that verl broadcasts. verl's
  CheckpointEngineManager does it, in its own order, and labels nothing.
- The policy is not trained. The steps before and after that are verl's own: the prompts, the
  TransferQueue, the replay buffer, rewards, advantages, metrics and validation.
"""

# pyright: basic, reportMissingImports=false
# The packages are in an environment of their own, and have no complete types.
from __future__ import annotations

import asyncio
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from aprilsched import SchedulerConfig
from aprilsched.config import Health
from aprilsched.simulation.engine.toy_model import ContextState, ToyModel
from aprilsched.trainers.verl import AgentLoopManager
from tests.verl.server import VOCAB_SIZE, WEIGHTS, HoldingServer, Server

MODEL = ToyModel(VOCAB_SIZE)
PATIENT = Health(stall_s=1800.0, slow_share=0)
"""Held responses have no tokens for as long as a step of the trainer takes."""


def make_server() -> Any:
    """Return the actor of a new server; a test may replace this."""
    return ray.remote(Server).options(num_cpus=0).remote(os.environ[WEIGHTS])


def make_holding_server() -> Any:
    return ray.remote(HoldingServer).options(num_cpus=0).remote(os.environ[WEIGHTS])


class Replica(RolloutReplica):
    """Starts one server."""

    async def init_standalone(self) -> None:
        await self.launch_servers()

    async def launch_servers(self) -> None:
        server = make_server()
        self.workers = self.servers = [server]
        self._server_handle = server
        host, port = await server.get_server_address.remote()
        self._server_address = f"{host}:{port}"

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await asyncio.gather(*(server.abort_all_requests.remote() for server in self.servers))


@CheckpointEngineRegistry.register("files")
class Files(CheckpointEngine):
    """Weights that are files: the workers need no connection between them."""

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: Any) -> Any:
        return {"rank": [0] * actors}, {"rank": [0] * rollouts}

    def init_process_group(self, **_: Any) -> None: ...

    def finalize(self) -> None: ...

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None: ...

    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class TwoTurns(AgentLoopBase):
    """Generates, adds two tokens of an environment, and generates again."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(row["raw_prompt"]))
        tokens, logprobs, mask = list[int](), list[float](), list[int]()
        sampling_params = {**sampling_params, "max_tokens": 200}
        extra: dict[str, Any] = {}
        for turn in range(2):
            output = await self.server_manager.generate(
                request_id=str(turn),
                prompt_ids=prompt + tokens,
                sampling_params=sampling_params,
            )
            extra.setdefault("min_global_steps", output.extra_fields["min_global_steps"])
            extra["max_global_steps"] = output.extra_fields["max_global_steps"]
            tokens += output.token_ids
            logprobs += output.log_probs
            mask += [1] * len(output.token_ids)
            if turn == 0:
                tokens, logprobs, mask = [*tokens, 7, 8], [*logprobs, 0.0, 0.0], [*mask, 0, 0]
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=tokens,
            response_mask=mask,
            response_logprobs=logprobs,
            num_turns=4,
            metrics={},
            extra_fields=extra,
        )


class TwoOutputs(AgentLoopBase):
    """Two turns, each a trajectory of its own."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        prompt, made = await self.ct_build_initial_tokens(list(row["raw_prompt"])), list[Any]()
        for turn in range(2):
            output = await self.server_manager.generate(
                request_id=str(turn),
                prompt_ids=prompt,
                sampling_params={**sampling_params, "max_tokens": 200},
            )
            made.append(
                AgentLoopOutput(
                    prompt_ids=prompt,
                    response_ids=output.token_ids,
                    response_mask=[1] * len(output.token_ids),
                    response_logprobs=output.log_probs,
                    num_turns=2,
                    metrics={},
                    extra_fields=dict(output.extra_fields),
                )
            )
            prompt = [*prompt, *output.token_ids, 7, 8]
        return made


class Usual(AgentLoopManager):
    """The manager itself."""

    scheduler = SchedulerConfig(health=PATIENT)


class WithExperts(AgentLoopManager):
    """Asks the servers for the experts of each token."""

    scheduler = SchedulerConfig(companions=("routed_experts=uint8[3,2]",), health=PATIENT)


class Finishing(AgentLoopManager):
    """Lets requests finish before an update."""

    scheduler = SchedulerConfig(straggler="run")


class SingleSamples(AgentLoopManager):
    """Delivers single samples."""

    scheduler = SchedulerConfig(delivery="samples", pace="asynchronous", health=PATIENT)


class Masked(AgentLoopManager):
    """Has more prompts in flight than a batch takes, and masks tokens of more than one version."""

    scheduler = SchedulerConfig(
        over_provision=2.0, max_staleness=1, pace="asynchronous", health=PATIENT
    )


class Automatic(AgentLoopManager):
    """Chooses the ratio during the run, and pauses the servers with requests inside."""

    scheduler = SchedulerConfig(over_provision="auto", max_staleness=4, pace="synchronous")


class NoActors:
    """A group of no workers that train."""

    world_size = 0

    def __init__(self) -> None:
        self._dispatch_info = {"actor": [0]}

    def execute_checkpoint_engine(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def update_weights(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def save_checkpoint(self, *_: Any, **__: Any) -> None: ...

    def load_checkpoint(self, *_: Any, **__: Any) -> None: ...


class Trainer(PPOTrainerSeparateAsync):
    """verl's trainer without a policy that is trained."""

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.reward_loop_manager = RewardLoopManager(config=self.config)
        self.teacher_model_manager = self.distillation_config = None
        self.actor_rollout_wg: Any = NoActors()
        self.resource_pool_manager: Any = self
        RolloutReplicaRegistry.register(self.config.actor_rollout_ref.rollout.name, lambda: Replica)
        self.standalone_server_manager = LLMServerManager.create(config=self.config, start_rank=0)
        self.standalone_checkpoint_manager = CheckpointEngineManager(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=self.standalone_server_manager.get_replicas(),
        )
        self.current_mode = HybridEngineMode.TRAINER
        self._load_checkpoint()
        self.trained: list[Trajectory] = []
        """Everything that was trained on."""
        self.logged: list[dict[str, Any]] = []
        """What was logged, step by step."""

    def get_n_gpus(self) -> int:
        return 1

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], *args: Any, **given: Any
    ) -> Any:
        super()._compute_metrics(batch, metrics, *args, **given)
        self.logged.append(dict(metrics))
        fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"]
        fields.append("advantages")
        if self.config.actor_rollout_ref.rollout.enable_rollout_routing_replay:
            fields.append("routed_experts")
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        for row, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if not tag.get("is_padding"):
                arrays = {name: data[name][row].numpy() for name in fields}
                self.trained.append(Trajectory(key, tag, self.global_steps, **arrays))


@dataclass(frozen=True)
class Trajectory:
    """What verl's trainer had of one trajectory, and the step that trained on it."""

    key: str
    tag: dict[str, Any]
    step: int
    prompts: np.ndarray[Any, Any]
    responses: np.ndarray[Any, Any]
    response_mask: np.ndarray[Any, Any]
    rollout_log_probs: np.ndarray[Any, Any]
    rm_scores: np.ndarray[Any, Any]
    advantages: np.ndarray[Any, Any]
    routed_experts: np.ndarray[Any, Any] | None = None

    def versions(self, weights: Path) -> list[int]:
        """The steps whose weights sampled the tokens, one after the other."""
        return [step for step, _ in self.stretches(weights)]

    def stretches(self, weights: Path, *, every: bool = False) -> list[tuple[int, range]]:
        """The stretches of sampled tokens, each with the step whose weights sampled it and its
        places in the response. With `every`, tokens with mask 0 count as sampled.

        The tokens and their logprobs follow from the weights and from all tokens before. Each
        stretch is tried with the weights of the step before it and of later ones.
        """
        tokens = np.concatenate((self.prompts, self.responses)).astype(np.int32)
        place, end, step = len(self.prompts), len(tokens), 0
        found = list[tuple[int, range]]()
        while place < end:
            if not every and not self.response_mask[place - len(self.prompts)]:
                place += 1
                continue
            key = zlib.crc32((weights / f"step-{step}" / "model.safetensors").read_bytes())
            hashed = MODEL.absorb(0, tokens[: place - 1], key)
            state = ContextState(hash=hashed, last=int(tokens[place - 1]), length=place, seed=0)
            ((ids, logprobs),) = MODEL.sample([state], [end - place], key)
            given = self.rollout_log_probs[place - len(self.prompts) :]
            same = (ids == tokens[place:]) & (logprobs == given)
            length = int(np.argmin(same)) if not same.all() else len(same)
            if length:
                start = place - len(self.prompts)
                found.append((step, range(start, start + length)))
            else:
                step += 1
            place += length
        return found
