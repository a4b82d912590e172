"""Rollouts for SkyRL's fully asynchronous trainer from vLLM servers that the scheduler drives.

SkyRL's trainer keeps a number of groups in generation, and each of its agent loops sends requests
through a router. :class:`ScheduledRollouts` makes an experiment of SkyRL that sends them through a
scheduler. It is written for SkyRL 0.3.

- The agent loops of SkyRL's generator run inside of the scheduler, as episodes. Environments, chat
  templates, rewards and what the trainer gets are SkyRL's own code.
- How many groups are in flight, and how old they may be, SkyRL's trainer decides.
- SkyRL's checkpoints list the prompts that were trained on. Next to this list is the scheduler's
  state, so the other prompts, which SkyRL's dataloader gives again, continue from their tokens.
- The policy's ranks write the weights into a folder with SkyRL's ``save_hf_model``, and the servers
  load them. No process group joins the trainer and the servers.
"""

# The checker does not know the classes of SkyRL that some classes here are made from.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import copy
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.engines.vllm.engine import VLLMFleet
from aprilsched.kernel.shell import Turn
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.store import MemoryStore
from aprilsched.kernel.values.sampling import sampling_params
from aprilsched.kernel.weights.disk import DiskPublisher
from aprilsched.kernel.weights.publisher import WeightPublisher
from aprilsched.trainers.adapter import (
    Theirs,
    check_fixed_groups,
    package,
    read_state,
    refuse,
    save_state,
    untrained_groups,
)
from aprilsched.trainers.pushed import NOT_TOKENIZED, GroupLost, PushedRollouts, as_pushed
from aprilsched.types import Prompt, SamplingParams, Score

log = logging.getLogger("aprilsched")

_package = partial(package, "skyrl")
_FILE = "aprilsched.checkpoint"
"""Name of the scheduler's file in a checkpoint folder of the trainer."""
_ASIDE = {"logprobs", "skip_special_tokens", "include_stop_str_in_output"}
"""Sampling parameters of SkyRL that are about the text and form of an answer."""
_TURN: ContextVar[Turn] = ContextVar("turn")
"""The turn of the episode that runs."""
_GROUP: ContextVar[_Group] = ContextVar("group")
"""The group whose agent loops are starting."""


class ScheduledRollouts(Theirs):
    """Makes an experiment of SkyRL take its rollouts from a scheduler.

    .. code-block:: python

        class Experiment(ScheduledRollouts, BasePPOExp):
            directory = "/shared/weights"
            scheduler = SchedulerConfig(straggler="retract")

    The servers are those of ``generator.inference_engine.external_server_urls``.
    """

    directory: ClassVar[str | os.PathLike[str]]
    """Directory that the trainer's nodes and the servers see under the same path, for the
    weights."""
    scheduler: ClassVar[SchedulerConfig] = SchedulerConfig()
    """Settings of the scheduler that SkyRL does not decide: `straggler`, `dispatch`, `retries`,
    `health`, `timeouts` and others."""

    def fleet(self) -> Fleet:
        """Make the fleet."""
        return VLLMFleet(self.cfg.generator.inference_engine.external_server_urls)

    def listeners(self) -> Sequence[AnyListener]:
        """Make the listeners of the scheduler."""
        return ()

    def trainer_class(self) -> type[Any]:
        """SkyRL's trainer, which gets the methods of :class:`ScheduledTrainer`."""
        return _package("skyrl.train.fully_async_trainer").FullyAsyncRayPPOTrainer

    def get_inference_client(self) -> Any:
        """SkyRL's client of the servers; no router is needed, since nothing is sent through it.

        Raises:
            ConfigError: if the configuration or the settings would give wrong or lost rollouts.
        """
        _check(self.cfg, type(self).scheduler)
        servers = _package("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")
        urls = list(self.cfg.generator.inference_engine.external_server_urls)
        return servers.RemoteInferenceClient(
            proxy_url=urls[0],
            server_urls=urls,
            data_parallel_size=1,
            model_name=self.cfg.trainer.policy.model.path,
            tokenizer=self.tokenizer,
        )

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Generator:
        """SkyRL's generator, as one whose agent loops are scheduled."""
        theirs = super().get_generator(cfg, tokenizer, inference_engine_client)
        config = as_pushed(
            type(self).scheduler,
            group_size=cfg.generator.n_samples_per_prompt,
            sampling=_sampling(_own(cfg), tokenizer),
        )
        return Generator(theirs, self.fleet(), config, self.listeners())

    def get_trainer(self, **given: Any) -> Any:
        """Return the trainer, which opens the scheduler and brings the weights to the servers."""
        made = type("Trainer", (ScheduledTrainer, self.trainer_class()), {})(**given)
        made.directory = Path(type(self).directory)
        return made


class ScheduledTrainer(Theirs):
    """The methods that the scheduler adds to SkyRL's trainer."""

    directory: Path

    async def train(self) -> None:
        """Train; the scheduler is opened when the servers get their first weights."""
        data, self._loop = self.async_train_dataloader, asyncio.get_running_loop()
        for name in ("mark_consumed_uids", "mark_filtered_uids"):
            setattr(data, name, self._marking(getattr(data, name)))
        self.generator.step = lambda: self.global_step
        try:
            await super().train()
        finally:
            await self.generator.close()

    def _marking(self, mark: Callable[[list[str]], Awaitable[None]]) -> Any:
        async def marked(uids: Iterable[str]) -> None:
            ended = list(uids)
            await mark(ended)
            self.generator.trained(ended)

        return marked

    def init_weight_sync_state(self) -> None:
        """Open no process group: weights go through the folder."""
        publisher = DiskPublisher(self.directory, self._save)

        async def save_weights_for_sampler(model_id: str | None = None) -> None:
            await self.generator.update_weights(publisher)
            self.inference_engine_client.increment_weight_version()

        self.dispatch.save_weights_for_sampler = save_weights_for_sampler

    def save_checkpoints(self) -> str:
        """Save a checkpoint of SkyRL, and what is in flight, from another thread than the loop's.

        A process that is killed between the two generates what was in flight from the start.
        """
        folder = super().save_checkpoints()
        if "://" in folder:
            log.warning("%s is in a bucket, and the checkpoint lacks what is in flight", folder)
            return folder
        saving = self.generator.save(Path(folder) / _FILE)
        asyncio.run_coroutine_threadsafe(saving, self._loop).result()
        return folder

    def load_checkpoints(self) -> Any:
        """Load a checkpoint of SkyRL, and what was in flight."""
        found = super().load_checkpoints()
        if found[0]:
            self.generator.restore(Path(found[1]) / _FILE)
        return found

    def convert_generation_group_mini_batch_to_training_input(
        self, groups: list[Any], *args: Any
    ) -> Any:
        """Give SkyRL the steps in which restored groups were started, for their staleness."""
        for group in groups:
            group.global_step_when_scheduled = self.generator.first_step(
                group.uid, group.global_step_when_scheduled
            )
        return super().convert_generation_group_mini_batch_to_training_input(groups, *args)

    def _save(self, folder: Path) -> None:
        self.dispatch.save_hf_model("policy", str(folder), self.tokenizer)


class _Group:
    """The agent loops of one call of the generator, and their results."""

    def __init__(
        self, size: int, uid: str = "", step: int = 0, outputs: Mapping[int, Any] | None = None
    ) -> None:
        self.size = size
        self.uid = uid
        """The uid of its prompt; empty in an evaluation."""
        self.step = step
        """The trainer's step when it was started."""
        self.called = asyncio.Event()
        """Set when all agent loops have their arguments; restored rollouts wait for it."""
        self.calls: list[tuple[Any, Any]] = []
        """The arguments of each agent loop."""
        self.outputs: dict[int, Any] = dict(outputs or {})
        self.error: Exception | None = None
        """What an agent loop has raised last."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Generator:
    """A generator of SkyRL whose agent loops run as episodes of a scheduler.

    Args:
        theirs: SkyRL's generator, one with an ``agent_loop``.
        fleet: the engines.
        config: settings for groups that are pushed.
        listeners: telemetry of the scheduler.

    Attributes:
        scheduler: the scheduler.
    """

    def __init__(
        self, theirs: Any, fleet: Fleet, config: SchedulerConfig, listeners: Sequence[AnyListener]
    ) -> None:
        self._theirs = theirs
        self._config = config
        self._groups: dict[str, _Group] = {}
        """Groups that are not trained on, by the uid of their prompt."""
        self._restored: dict[str, _Group] = {}
        """Those of a checkpoint that SkyRL has not asked for again."""
        self._old_weights = False
        """The next weights are those of the checkpoint."""
        self.step: Callable[[], int] = int
        self._loop = theirs.agent_loop
        theirs.agent_loop = self._agent_loop
        theirs.inference_engine_client = _Client(theirs)
        self._rollouts = PushedRollouts(
            fleet,
            episode=self._episode,
            config=config,
            listeners=listeners,
            ended=self._ended,
            store=MemoryStore(),
        )
        self.scheduler = self._rollouts.scheduler

    async def update_weights(self, publisher: WeightPublisher) -> None:
        """Bring the trainer's weights to the servers; the first call opens the scheduler."""
        if not self._rollouts.is_open:
            await self._rollouts.open()
            # Groups that SkyRL started while the file was written are not in it.
            live = {group.prompt.key for group in untrained_groups(self.scheduler.state)}
            for uid in self._groups.keys() - live:
                del self._groups[uid]
            self._restored = dict(self._groups)
        version = None
        if self._old_weights:
            # As a new version they would make all restored rollouts one version older.
            self._old_weights, version = False, self.scheduler.version
        await self.scheduler.update_weights(publisher, version=version, acknowledge=False)

    async def close(self) -> None:
        """Abort requests in flight and release the servers."""
        await self._rollouts.close()

    # --- checkpoints ----------------------------------------------------------------------------

    def trained(self, uids: Iterable[str]) -> None:
        """Note that these groups are trained on, or dropped."""
        for uid in uids:
            self._groups.pop(uid, None)
            self._rollouts.trained(uid)

    def first_step(self, uid: str, step: int) -> int:
        """Return the step in which a group was started, at most `step`."""
        group = self._groups.get(uid)
        return step if group is None else min(step, group.step)

    async def save(self, path: Path) -> None:
        """Save what is in flight, and what is generated and not trained on."""
        # SkyRL may drop a group while the scheduler's state is written, which has it.
        before = dict(self._groups)

        def content() -> dict[str, tuple[int, dict[int, Any]]]:
            groups = {**before, **self._groups}
            return {uid: (each.step, dict(each.outputs)) for uid, each in groups.items()}

        await save_state(path, self.scheduler, self._config, content, acknowledge=False)

    def restore(self, path: Path) -> None:
        """Continue from a file of :meth:`save`; the scheduler must not be open yet.

        Raises:
            ConfigError: if the groups of the file have another size.
            StoreError: if it cannot be read.
        """
        if not path.exists():
            log.warning("%s is missing; what was in flight is generated from the start", path)
            return
        saved = read_state(path, self._config, self.scheduler.restore)
        for uid, (step, outputs) in saved.items():
            self._groups[uid] = _Group(self._config.group_size, uid, step, outputs)
        self._old_weights = True

    # --- groups ---------------------------------------------------------------------------------

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
        """Generate the trajectories of one group, or of an evaluation.

        Raises:
            Exception: what an agent loop has raised, if the group was dropped.
        """
        about = input_batch.get("batch_metadata")
        evaluation = about is not None and about.training_phase == "eval"
        uid = "" if evaluation else input_batch["trajectory_ids"][0].instance_id
        group = self._restored.get(uid)
        if group is None:
            group = _Group(len(input_batch["prompts"]), uid, self.step())
        if uid:
            self._groups[uid] = group
        _GROUP.set(group)
        return await self._theirs.generate(input_batch, disable_tqdm)

    async def _agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Hand an agent loop to the scheduler, and wait for its group."""
        group = _GROUP.get()
        index = len(group.calls)
        group.calls.append((args, kwargs))
        if len(group.calls) == group.size:
            group.called.set()
            if self._restored.pop(group.uid, None) is None:
                await self._push(group)
        await asyncio.shield(group.done)
        return group.outputs[index]

    async def _push(self, group: _Group) -> None:
        prompt = Prompt(
            input_ids=NOT_TOKENIZED,
            key=group.uid or None,
            metadata={} if group.uid else {"group": group},
            group_size=group.size,
        )
        if group.uid:
            self._rollouts.push(prompt)
            return
        try:
            await self._rollouts.evaluate(prompt)
        except Exception as error:
            await self._ended(prompt, error)

    def _group(self, prompt: Prompt) -> _Group:
        evaluated = prompt.metadata.get("group")
        return self._groups[str(prompt.key)] if evaluated is None else evaluated

    async def _episode(self, turn: Turn, prompt: Prompt) -> Score:
        """Run SkyRL's agent loop for one rollout."""
        _TURN.set(turn)
        group = self._group(prompt)
        await group.called.wait()
        # A rollout that is lost runs again, and agent loops change their arguments.
        args, kwargs = copy.deepcopy(group.calls[turn.index])
        try:
            output = await self._loop(*args, **kwargs)
        except Exception as error:
            group.error = error
            raise
        group.outputs[turn.index] = output
        steps = getattr(output, "step_outputs", [output])
        return Score(reward=float(sum(np.sum(step.reward) for step in steps)))

    async def _ended(self, prompt: Prompt, error: Exception | None) -> None:
        group = self._group(prompt)
        if group.done.done():
            return
        if error is None:
            group.done.set_result(None)
        elif isinstance(error, GroupLost):
            dropped = RuntimeError("a group was dropped; the ledger of the run has its cause.")
            group.done.set_exception(group.error or dropped)
        else:
            group.done.set_exception(error)


class _Client:
    """What SkyRL's agent loops generate with: the turn of the episode that they run in."""

    def __init__(self, generator: Any) -> None:
        self._theirs = generator.inference_engine_client
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    async def generate(self, input_batch: Any, model: str | None = None) -> dict[str, Any]:
        """Generate one turn, as SkyRL's RemoteInferenceClient does."""
        if input_batch.get("mm_features"):
            raise ConfigError("the agent loop sends images, and only text is scheduled.")
        given = input_batch.get("sampling_params")
        sampling = None if given is None else _sampling(given, self._generator.tokenizer)
        (ids,) = input_batch["prompt_token_ids"]
        turn = await _TURN.get().generate(ids, sampling)
        response = turn.token_ids.tolist()
        text = self._generator.tokenizer.decode(response, skip_special_tokens=True)
        return {
            "responses": [text],
            "response_ids": [response],
            "stop_reasons": [turn.finish_reason],
            "response_logprobs": [turn.logprobs.tolist()],
        }

    async def finish_session(self, session_id: str) -> None:
        """Do nothing: no router holds room for a session."""


def _own(cfg: Any) -> Any:
    engines = _package("skyrl.backends.skyrl_train.inference_servers.engine_utils")
    return engines.get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)


def _sampling(given: Any, tokenizer: Any) -> SamplingParams:
    """Convert SkyRL's sampling parameters to the scheduler's."""
    chosen = {name: value for name, value in given.items() if name not in _ASIDE}
    return sampling_params(chosen, tokenizer=tokenizer)


def _check(cfg: Any, own: SchedulerConfig) -> None:
    """Refuse what would give wrong or lost rollouts.

    Raises:
        ConfigError: if the configuration of SkyRL or the settings have it.
    """
    if own.delivery == "samples":
        raise ConfigError(
            f"delivery is {own.delivery}, and SkyRL's queue takes all trajectories of a prompt at "
            'once; leave it at "groups".'
        )
    check_fixed_groups(own, "SkyRL")
    engine = cfg.generator.inference_engine
    if not cfg.trainer.fully_async.enabled:
        raise ConfigError(
            "trainer.fully_async.enabled is False, and the other trainer asks for a whole batch at "
            "a time; set it to True."
        )
    if not engine.external_server_urls:
        raise ConfigError(
            "generator.inference_engine.external_server_urls is empty, and the servers that SkyRL "
            "starts are of an older vLLM; start vLLM 0.32 or later, and give their URLs."
        )
    refused = {
        "trainer.policy.model.lora.rank": (
            cfg.trainer.policy.model.lora.rank > 0,
            "the servers load whole models",
        ),
        "generator.batched": (cfg.generator.batched, "agent loops are what is scheduled"),
        "generator.vision_language_generator": (
            cfg.generator.vision_language_generator,
            "only text is scheduled",
        ),
        "generator.inference_engine.enable_return_routed_experts": (
            engine.enable_return_routed_experts,
            "vLLM's routed experts are not passed on",
        ),
    }
    refuse(refused)
