"""Rollouts for OpenRLHF's trainers from vLLM servers that the scheduler drives.

OpenRLHF makes Ray actors with a vLLM in each, sends them the prompts of a batch, and waits for all
of them. :func:`main` runs its ``train_ppo_ray`` with other servers and with batches of the
scheduler. It is written for OpenRLHF 0.11.

- OpenRLHF's agents (``--train.agent_func_path``) and its own executor run inside of the scheduler,
  as episodes. Tokenization, rewards and the experiences that are trained on are OpenRLHF's code.
- With ``delivery="samples"`` the policy is trained on the scheduler's advantages.
- The policy's ranks write the weights into a folder with OpenRLHF's ``save_model``, and the servers
  load them. No process group joins the trainer and the servers.
- OpenRLHF sends the state of its dataloader along with each batch, for the checkpoint of the step
  that trains on it. The scheduler's state, as it was when the batch was taken, goes the same way.
"""

# The checker does not know the classes of OpenRLHF that some classes here are made from.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import os
import runpy  # noqa: TID251 (OpenRLHF's own command)
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias, cast

from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.config import Delivery
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.shell import PromptQueue, RolloutScheduler, Turn
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.values.files import open_regular, written_whole
from aprilsched.kernel.values.sampling import sampling_params
from aprilsched.kernel.weights.disk import DiskPublisher
from aprilsched.trainers.adapter import (
    Theirs,
    check_fixed_groups,
    class_of,
    forget_delivered,
    missing_prompts,
    package,
    read_state,
    refuse,
    save_state,
    staleness,
    trained_advantages,
)
from aprilsched.trainers.pushed import NOT_TOKENIZED
from aprilsched.types import Batch, Prompt, Sample, SamplingParams, Score, Unit

log = logging.getLogger("aprilsched")

_package = partial(package, "openrlhf")

Response: TypeAlias = dict[str, Any]
"""What an executor of OpenRLHF returns for one rollout."""

_STATE = "aprilsched"
"""What the state of the dataloader has in addition: the number of a batch, and in a checkpoint the
name of the file in the folder "_aprilsched"."""
_LOOK_S = 0.2
"""Seconds between two looks at the number of prompts that the scheduler can launch."""
_SAMPLED_BY = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "seed")
"""Fields of vLLM's SamplingParams that are passed on."""
_REFUSED = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Fields that would change the distribution that the trainer does not know of, with their usual
values."""


def main(
    fleet: Callable[[], Fleet],
    directory: str | os.PathLike[str],
    *,
    config: SchedulerConfig | None = None,
    listeners: Callable[[], Sequence[AnyListener]] = tuple,
) -> None:
    """Run OpenRLHF's ``train_ppo_ray`` with rollouts that are scheduled by aprilsched.

    The arguments on the command line are OpenRLHF's own. `fleet` and `listeners` are called in the
    Ray actor of the scheduler.

    Args:
        fleet: makes the fleet, such as ``partial(VLLMFleet, urls)``.
        directory: directory that the trainer's nodes and the servers see under the same path, for
            the weights.
        config: settings of the scheduler. `batch_groups`, `group_size` and `sampling` are those of
            OpenRLHF; the pace is asynchronous by default.
        listeners: makes the telemetry of the scheduler.

    Raises:
        ConfigError: if a setting would give wrong or lost rollouts.
        MissingExtra: if OpenRLHF or one of its packages is not installed.
    """
    config = config or SchedulerConfig(pace="asynchronous")
    check_fixed_groups(config, "OpenRLHF", samples=True)
    ray, actors = _package("ray"), _package("openrlhf.trainer.ray.ppo_actor")
    made: list[Any] = []

    def engines(*_: Any, **given: Any) -> list[Any]:
        if given["max_images_per_prompt"]:
            raise ConfigError(
                "data.max_images_per_prompt is set, and only text is scheduled; leave it out."
            )
        agent = given["agent_func_path"], given["remote_rm_url"]
        actor = ray.remote(Rollouts).options(num_cpus=1)
        made.append(actor.remote(fleet, Path(directory).absolute(), config, listeners, *agent))
        return made

    _package("openrlhf.trainer.ray").create_vllm_engines = engines
    for module in ("ppo_trainer", "ppo_trainer_async"):
        _package(f"openrlhf.trainer.{module}").SamplesGenerator = samples_generator(config.delivery)
    actors.PolicyModelActor = ray.remote(num_gpus=1)(
        policy_actor(class_of(actors.PolicyModelActor))
    )
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
    ray.get([actor.close.remote() for actor in made])


@dataclass(frozen=True, slots=True)
class _Row:
    """A prompt, and the responses to it by their index.

    `given` are arguments of ``AgentExecutorBase.execute``, without the tokenizer.
    """

    given: Mapping[str, Any]
    responses: dict[int, Response] = field(default_factory=dict[int, "Response"])


class Rollouts:
    """The scheduler as a Ray actor, in the place of OpenRLHF's actors with a vLLM in each."""

    def __init__(
        self,
        fleet: Callable[[], Fleet],
        directory: Path,
        config: SchedulerConfig,
        listeners: Callable[[], Sequence[AnyListener]],
        agent_func_path: str | None,
        remote_rm_url: Any,
    ) -> None:
        if agent_func_path:
            load = _package("openrlhf.trainer.ray.vllm_engine")._load_agent_executor
            self._executor = load(agent_func_path)
        else:
            executor = _package("openrlhf.utils.agent").SingleTurnAgentExecutor
            self._executor = executor(remote_rm_url)
        self._fleet = fleet
        self._config = config
        self._listeners = listeners
        self._staged = directory / "staged"
        self._states = directory / "states"
        """A file for each batch that may be the last one of a checkpoint."""
        self._publisher = DiskPublisher(directory, self._take_staged)
        self._prompts = PromptQueue()
        self._collected: list[Prompt] | None = None
        """The prompts of an evaluation, while they are collected."""
        self._kept: tuple[float, float] | None = None
        self._rows: dict[int, _Row] = {}
        """What is waiting or in flight, by the number of the prompt, from 0."""
        self._pushed = 0
        self._taken = 0
        """Number of batches that were taken, in this process and before a checkpoint."""
        self._base = 0
        """Version of the weights that no batch was trained on."""
        self._old_weights = False
        """The next weights are those of a checkpoint."""
        self._published = True
        """Whether the engines were sent the weights in the folder."""
        self._kept_states = 0
        self._tokenizer: Any = None
        self.scheduler: RolloutScheduler
        self._opened = False

    async def open(
        self,
        groups: int,
        size: int,
        kept: tuple[float, float] | None,
        tokenizer: Any,
        states: int,
        checkpoint: Path | None,
    ) -> int:
        """Open the fleet for batches of `groups` groups of `size` rollouts.

        With `kept`, a group is accepted if the mean of its scores lies between the two numbers.
        The last `states` batches have a state for a checkpoint. Returns the number of prompts that
        are no longer waiting or in flight.

        Raises:
            ConfigError: if the groups of the `checkpoint` have another size or delivery.
            StoreError: if it cannot be read.
        """
        self._kept, self._tokenizer, self._kept_states = kept, tokenizer, states
        self._config = replace(self._config, batch_groups=groups, group_size=size)
        self.scheduler = RolloutScheduler(
            self._fleet(),
            self._prompts,
            episode=self._episode,
            accept=self._accept,
            config=self._config,
            listeners=self._listeners(),
        )
        if checkpoint is not None:
            content = read_state(checkpoint, self._config, self.scheduler.restore)
            self._rows, self._pushed, self._taken, self._base = content
            self._old_weights = True
        shutil.rmtree(self._states, ignore_errors=True)
        await self.scheduler.__aenter__()
        for number in range(self.scheduler.state.prompts.cursor, self._pushed):
            self._prompts.put(_prompt(number, size))
        self._opened = True
        if not self._published:
            await self._publish()
        if checkpoint is None:
            self._base = self.scheduler.version
        return self._finished()

    # --- methods of its own actors that OpenRLHF calls ------------------------------------------

    def get_num_unfinished_requests(self) -> int:
        """Return 0: there is no other actor that could take a prompt."""
        return 0

    async def generate_responses(self, *, num_samples: int, **given: Any) -> None:
        """Push one prompt, whose arguments are those of ``AgentExecutorBase.execute``."""
        given.pop("hf_tokenizer")
        if self._collected is None:
            self._rows[self._pushed] = _Row(given)
            self._prompts.put(_prompt(self._pushed, num_samples))
            self._pushed += 1
        else:
            self._collected.append(
                Prompt(
                    input_ids=NOT_TOKENIZED,
                    metadata={"row": _Row(given)},
                    group_size=num_samples,
                )
            )

    async def pause_generation(self) -> None:
        """Do nothing: pause, refit and continue are one call of the scheduler."""

    async def resume_generation(self) -> None:
        """Do nothing: the engines continue when they have the weights."""

    # --- what the classes of this module call ---------------------------------------------------

    async def wanted(self) -> int:
        """Number of prompts to push, so that none is missing when the scheduler launches some."""
        return missing_prompts(self._prompts, self._config)

    async def next_batch(self) -> tuple[list[Response], int, int] | None:
        """Return the next batch's responses and two numbers, or None on timeout.

        Responses are in group order. The first number counts the prompts that are no longer waiting
        or in flight; the second one is that of the batch. The timeout is `_LOOK_S`.
        """
        limit = asyncio.timeout(_LOOK_S)
        try:
            async with limit:
                batch = await self.scheduler.next_batch()
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        self._taken += 1
        responses, finished = self._responses(batch), self._finished()
        forget_delivered(self._rows, self.scheduler.state)
        if self._kept_states:
            path = self._states / str(self._taken)
            await save_state(path, self.scheduler, self._config, self._content)
            (self._states / str(self._taken - self._kept_states)).unlink(missing_ok=True)
        return responses, finished, self._taken

    def _finished(self) -> int:
        state = self.scheduler.state
        # A ready sample is a unit of its own, in addition to the rest of its group.
        groups = {unit.origin for unit in state.in_flight.groups.values()}
        return state.prompts.cursor - len(groups)

    def _content(self) -> tuple[dict[int, _Row], int, int, int]:
        rows = {
            number: replace(each, responses=dict(each.responses))
            for number, each in self._rows.items()
        }
        return rows, self._pushed, self._taken, self._base

    async def collect(self) -> None:
        """Keep the prompts that are pushed from now on for :meth:`evaluate`."""
        self._collected = []

    async def evaluate(self) -> list[Response]:
        """Return the responses to the prompts that were collected, all of one version."""
        prompts, self._collected = self._collected or [], None
        return self._responses(await self.scheduler.evaluate(prompts))

    async def staged(self) -> Path:
        """Return the folder into which the trainer writes weights."""
        return self._staged

    async def load_weights(self) -> None:
        """Load the folder's weights into every engine: pause, load, verify, continue.

        Before the fleet is open, they wait for it.
        """
        self._published = False
        if self._opened:
            await self._publish()

    async def state(self, number: int) -> Path:
        """Return the file with the scheduler's state after batch `number`."""
        return self._states / str(number)

    async def _publish(self) -> None:
        # As a new version the weights of a checkpoint would make all restored rollouts older.
        old, self._old_weights = self._old_weights, False
        version = self._base + self._taken if old else None
        await self.scheduler.update_weights(self._publisher, version=version)
        self._published = True

    async def close(self) -> None:
        """Stop the scheduler: abort requests in flight, and release the servers."""
        if self._opened:
            await self.scheduler.close()

    def _take_staged(self, folder: Path) -> None:
        for path in self._staged.iterdir():
            path.rename(folder / path.name)

    # --- episodes ------------------------------------------------------------------------------

    async def _episode(self, turn: Turn, prompt: Prompt) -> Score | None:
        """Run OpenRLHF's executor for one rollout."""
        row = self._row(prompt)
        # A rollout that is lost runs again, and executors change the parameters.
        own = {**row.given, "sampling_params": copy.deepcopy(row.given["sampling_params"])}
        engine = _Engine(turn, self._tokenizer)
        response = await self._executor.execute(
            llm_engine=engine, hf_tokenizer=self._tokenizer, **own
        )
        row.responses[turn.index] = response
        reward = response["reward"]
        return None if reward is None else Score(reward=float(reward))

    def _accept(self, unit: Unit) -> bool:
        scores: list[Any] = [
            each.get("scores") for each in self._row(unit.prompt).responses.values()
        ]
        if self._kept is None or any(score is None for score in scores):
            return True
        low, high = self._kept
        return low < sum(map(float, scores)) / len(scores) < high

    def _row(self, prompt: Prompt) -> _Row:
        evaluated = prompt.metadata.get("row")
        return self._rows[cast("int", prompt.key)] if evaluated is None else evaluated

    def _responses(self, batch: Batch) -> list[Response]:
        """Return the responses of a batch, unit by unit, each with the staleness of its oldest
        token.

        Samples have their advantage too.
        """
        found: list[Response] = []
        for unit in batch.units:
            for rollout in unit.rollouts:
                response = self._row(unit.prompt).responses[rollout.index]
                oldest = staleness(rollout, batch.version).max(initial=0)
                logs = {**response["extra_logs"], "staleness": float(oldest)}
                found.append({**response, "extra_logs": logs})
        if any(isinstance(unit, Sample) for unit in batch.units):
            for response, advantage in zip(found, trained_advantages(batch.units), strict=True):
                response["extra_logs"]["advantage"] = float(advantage)
        return found


def _prompt(number: int, size: int) -> Prompt:
    return Prompt(input_ids=NOT_TOKENIZED, key=number, group_size=size)


class _Engine:
    """What an executor generates with: the turn of its episode."""

    def __init__(self, turn: Turn, tokenizer: Any) -> None:
        self._turn = turn
        self._tokenizer = tokenizer

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Any:
        """Generate one turn, in the form of vLLM's RequestOutput."""
        if multi_modal_data:
            raise ConfigError("the agent sends images, and only text is scheduled; leave them out.")
        turn = await self._turn.generate(
            list(prompt_token_ids), _sampling(sampling_params, self._tokenizer)
        )
        ids = turn.token_ids.tolist()
        text = self._tokenizer.decode(ids, skip_special_tokens=sampling_params.skip_special_tokens)
        logprobs = [
            {token: SimpleNamespace(logprob=logprob)}
            for token, logprob in zip(ids, turn.logprobs.tolist(), strict=True)
        ]
        output = SimpleNamespace(
            token_ids=ids, text=text, logprobs=logprobs, finish_reason=turn.finish_reason
        )
        return SimpleNamespace(outputs=[output])


def _sampling(given: Any, tokenizer: Any) -> SamplingParams:
    """Convert vLLM's sampling parameters to the scheduler's."""
    for name, usual in _REFUSED.items():
        if getattr(given, name) != usual:
            raise ConfigError(
                f"{name} of the sampling parameters is {getattr(given, name)}, and the trainer's "
                "logprobs are without it; leave it out."
            )
    values: Mapping[str, Any] = {name: getattr(given, name) for name in _SAMPLED_BY}
    chosen = {name: value for name, value in values.items() if value not in (None, [])}
    if given.stop_token_ids:
        chosen["stop_token_ids"] = given.stop_token_ids
    # 0 is vLLM's name for all tokens.
    return sampling_params({**chosen, "top_k": given.top_k or -1}, tokenizer=tokenizer)


def samples_generator(delivery: Delivery = "groups") -> type[Any]:
    """Return a SamplesGenerator class for OpenRLHF that takes batches of :class:`Rollouts`."""
    theirs = _package("openrlhf.trainer.ppo_utils.samples_generator").SamplesGenerator
    return type("SamplesGenerator", (_Samples, theirs), {"delivery": delivery})


class _Samples(Theirs):
    """The methods that the scheduler adds to OpenRLHF's SamplesGenerator."""

    delivery: ClassVar[Delivery]

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)
        _check(self.args, self.delivery)
        self._ray = _package("ray")
        self._rollouts = self.vllm_engines[0]
        self._rows = self._read()
        self._finished = 0
        """Number of prompts that are no longer waiting or in flight."""
        self._number = 0
        """Number of the latest batch."""
        self._is_open = False
        data = self.prompts_dataloader
        self._theirs = data.state_dict, data.load_state_dict
        data.state_dict, data.load_state_dict = self._state_dict, self._load_state_dict

    def _state_dict(self) -> dict[str, Any]:
        return {**self._theirs[0](), _STATE: self._number}

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; OpenRLHF calls this before the first batch."""
        theirs = dict(state)
        tag = theirs.pop(_STATE, None)
        path = None if tag is None else _folder(self.args) / str(tag)
        if path is None or not path.exists():
            log.warning("%s is missing; prompts that were in flight are skipped", path or _STATE)
            path = None
        self._theirs[1](theirs)
        self._open(path)

    def _open(self, checkpoint: Path | None = None) -> None:
        if self._is_open:
            return
        rollout, algo, saves = self.args.rollout, self.args.algo, self.args.ckpt
        kept = tuple(algo.dynamic_filtering_range) if algo.dynamic_filtering_enable else None
        is_saved = saves.save_steps not in (-1, float("inf")) or self.eval_dataloader is not None
        # The queue has this many batches behind the one in training.
        states = self.args.train.async_queue_size + 2 if is_saved and not saves.disable_ds else 0
        sizes = rollout.batch_size, rollout.n_samples_per_prompt
        self._finished = self._call("open", *sizes, kept, self.tokenizer, states, checkpoint)
        self._is_open = True

    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Any], float | None, int, bool]:
        """Return the next batch as (experiences, accepted groups in percent, prompts, last).

        The percentage is None without dynamic filtering. `prompts` is the number of prompts that
        the batch consumed, and `last` is True if it ends the episode.
        """
        self._open()
        batch = None
        while batch is None:
            self._push(itertools.islice(self._rows, self._call("wanted")), generate_kwargs)
            batch = self._call("next_batch")
        responses, finished, self._number = batch
        before, self._finished = self._finished, finished
        taken = finished - before
        accepted = len(responses) // self.args.rollout.n_samples_per_prompt
        share = accepted / taken * 100 if self.args.algo.dynamic_filtering_enable else None
        prompts = len(self.prompts_dataloader)
        over = finished // prompts > before // prompts
        return self._experiences(responses, generate_kwargs), share, taken, over

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Any]:
        """Return the experiences of the whole evaluation set, group by group."""
        self._open()
        self._call("collect")
        self._push(_rows(self.eval_dataloader), generate_kwargs)
        return self._experiences(self._call("evaluate"), generate_kwargs)

    def _read(self) -> Iterator[tuple[Any, Any, Any]]:
        while True:
            yield from _rows(self.prompts_dataloader)

    def _push(self, rows: Iterator[tuple[Any, Any, Any]], kwargs: Mapping[str, Any]) -> None:
        if found := list(rows):
            prompts, labels, images = zip(*found, strict=True)
            self._ray.get(self._dispatch_prompts_to_vllm(prompts, labels, images=images, **kwargs))

    def _experiences(self, responses: list[Response], kwargs: Mapping[str, Any]) -> list[Any]:
        return [self._process_response_into_experience(each, **kwargs) for each in responses]

    def _call(self, name: str, *args: Any) -> Any:
        return self._ray.get(getattr(self._rollouts, name).remote(*args))


def _rows(dataloader: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The prompts, labels and images of a dataloader, one by one."""
    for _, prompts, labels, images in dataloader:
        yield from zip(prompts, labels, images, strict=True)


def policy_actor(theirs: type[Any]) -> type[Any]:
    """OpenRLHF's actor of the policy `theirs`, which writes its weights for the servers."""

    class PolicyModelActor(theirs):
        def init_model_from_pretrained(
            self, strategy: Any, pretrain: Any, max_steps: Any = None, vllm_engines: Any = None
        ) -> None:
            self._rollouts = vllm_engines[0]
            # Without engines it opens no process group for them.
            super().init_model_from_pretrained(strategy, pretrain, max_steps, None)
            # OpenRLHF itself brings the weights of a checkpoint to the engines, and no others.
            if not self.checkpoint_states:
                self.broadcast_to_vllm()

        def append(self, experience: Any) -> None:
            # OpenRLHF's own advantages take each row of a batch for a whole group.
            if (advantage := experience.info.get("advantage")) is not None:
                experience.advantages = advantage[:, None] * experience.action_mask
            super().append(experience)

        def broadcast_to_vllm(self) -> None:
            ray = _package("ray")
            folder = ray.get(self._rollouts.staged.remote())
            # A collective call: rank 0 writes, and all ranks wait for it.
            self.strategy.save_model(self.actor, self.tokenizer, str(folder))
            if self.strategy.is_rank_0():
                ray.get(self._rollouts.load_weights.remote())

        def save_checkpoint(self, tag: str, client_states: Any = None, **given: Any) -> None:
            state: dict[str, Any] = (client_states or {}).get("data_loader_state_dict", {})
            number, own = state.get(_STATE), _folder(self.strategy.args)
            if number is not None:
                state[_STATE] = tag
            if saves := bool(number) and self.strategy.is_rank_0():
                path = _package("ray").get(self._rollouts.state.remote(number))
                own.mkdir(parents=True, exist_ok=True)
                with open_regular(path) as source, written_whole(own / tag) as copied:
                    shutil.copyfileobj(source, copied)
            super().save_checkpoint(tag, client_states, **given)
            if saves:
                for path in own.iterdir():
                    if not (own.parent / "_actor" / path.name).exists():
                        path.unlink()

    return PolicyModelActor


def _folder(args: Any) -> Path:
    return Path(args.ckpt.path).absolute() / "_aprilsched"


def _check(args: Any, delivery: Delivery) -> None:
    """Refuse what would give wrong or lost rollouts.

    Raises:
        ConfigError: if `args` of OpenRLHF has it.
    """
    refused = {
        "vllm.enable_sleep": (args.vllm.enable_sleep, "the servers have GPUs of their own"),
        "ds.lora.rank": (args.ds.lora.rank, "the servers load whole models"),
    }
    if delivery == "samples":
        algo, reward = args.algo, args.reward
        if algo.advantage.estimator != "rloo":
            raise ConfigError(
                f"algo.advantage.estimator is {algo.advantage.estimator}, and the advantage of a "
                'single sample is its reward minus the mean of its siblings; set "rloo".'
            )
        if algo.kl.init_coef and not algo.kl.use_loss:
            raise ConfigError(
                f"algo.kl.init_coef is {algo.kl.init_coef}, and siblings have rewards without the "
                "penalty; set it to 0, or set algo.kl.use_loss too."
            )
        why = "siblings have rewards without it"
        refused |= {
            "algo.dynamic_filtering_enable": (algo.dynamic_filtering_enable, "it judges groups"),
            "reward.overlong_buffer_len": (reward.overlong_buffer_len is not None, why),
            "reward.stop_properly_penalty_coef": (
                reward.stop_properly_penalty_coef is not None,
                why,
            ),
        }
    refuse(refused)
