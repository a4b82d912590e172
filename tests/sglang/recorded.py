"""Runs the scheduler on real servers, and records everything that the servers answer."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aprilsched import (
    Batch,
    DiskPublisher,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.errors import PromptsExhausted
from aprilsched.kernel.core.invariants import check
from aprilsched.kernel.core.messages.commands import Command, Send
from aprilsched.kernel.core.messages.events import (
    EngineLost,
    Event,
    Finished,
    Interrupted,
    Progress,
)
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.core.state.ledger import Counters
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.store.in_memory import Store
from aprilsched.testing.contract import until
from aprilsched.types import Int32Array, VersionSpan
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.server import run_with_server_packages
from tests.support.small import by_length

T = TypeVar("T")

BATCHES = 6
GROUPS = 4
GROUP_SIZE = 4
CONFIG: dict[str, object] = {
    "batch_groups": GROUPS,
    "group_size": GROUP_SIZE,
    "over_provision": 2.0,
}
SCORED = 80
TOLERANCE = 1e-4
"""Largest difference of a logprob between SGLang's paged decode and one pass of transformers, both
in float32."""
TRIES = 8
"""Number of runs that may pass before one must show what its test is about."""
_SHORT = (8, 48)


@dataclass
class Recorder:
    """A listener that checks the core after every event and keeps the servers' answers."""

    scheduler: RolloutScheduler | None = None
    commands: list[Command] = field(default_factory=list[Command])
    sends: dict[tuple[int, int], Send] = field(default_factory=dict[tuple[int, int], Send])
    arrived: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    spans: dict[tuple[int, int], tuple[VersionSpan, ...] | None] = field(
        default_factory=dict[tuple[int, int], "tuple[VersionSpan, ...] | None"]
    )

    def on_event(self, event: Event, now: float) -> None:
        if self.scheduler is not None:
            check(self.scheduler.state)
        match event:
            case Progress():
                key = (event.request_id, event.attempt)
                self.arrived[key] = self.arrived.get(key, 0) + len(event.token_ids)
            case Finished() | Interrupted():
                self.spans[event.request_id, event.attempt] = event.spans
            case _:
                pass

    def on_command(self, command: Command, now: float) -> None:
        self.commands.append(command)
        if isinstance(command, Send):
            self.sends[command.request_id, command.attempt] = command

    def reported(self, rollout: Rollout) -> list[int]:
        """The version of each token by the servers' own spans, attempt after attempt."""
        versions: list[int] = []
        for key, send in sorted(self.sends.items()):
            if send.rollout_id != rollout.rollout_id or not self.arrived.get(key):
                continue
            spans = self.spans[key]
            assert spans is not None, "the server reported no spans"
            own: list[int] = []
            for span in spans:
                own += [span.version] * (span.end - span.start)
            versions += own[: self.arrived[key]]
        return versions


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    batches: list[Batch]
    recorder: Recorder
    counters: Counters
    in_flight: set[int]
    dropped: set[int]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for batch in self.batches for rollout in batch.rollouts]


def long_tail(
    count: int, *, longest: int = 900, temperature: float = 1.0, every: int = 5
) -> list[Prompt]:
    """Prompts whose responses are short, except one response in each of `every` groups."""
    rng = np.random.default_rng(7)
    prompts: list[Prompt] = []
    for index in range(count):
        last = longest if index % every == 2 % every else _SHORT[1]
        lengths = [int(rng.integers(*_SHORT)) for _ in range(GROUP_SIZE - 1)] + [last]
        prompts.append(
            Prompt(
                input_ids=rng.integers(3, 500, size=12).astype(np.int32),
                key=index,
                sampling=tuple(
                    SamplingParams(max_new_tokens=length, temperature=temperature, ignore_eos=True)
                    for length in lengths
                ),
            )
        )
    return prompts


def scheduled(
    urls: Sequence[str],
    recorder: Recorder,
    *,
    prompts: Sequence[Prompt] | None = None,
    fleet: Fleet | None = None,
    listeners: Sequence[Any] = (),
    store: Store | None = None,
    **changes: Any,
) -> RolloutScheduler:
    """A scheduler with 32 rollouts in flight, whose servers' answers `recorder` keeps.

    By default the responses are greedy, so that each token can be held to the model of its version,
    and one in eight is long. `changes` are other settings.
    """
    if fleet is None:
        fleet = SGLangFleet(urls, admin_key=ADMIN_KEY, stream_interval=16)
    if prompts is None:
        prompts = long_tail(2_000, longest=400, temperature=0.0, every=2)
    config = SchedulerConfig(**{**CONFIG, **changes})  # type: ignore[arg-type]
    recorder.scheduler = RolloutScheduler(
        fleet,
        prompts,
        reward=by_length if config.delivery == "samples" else None,
        config=config,
        listeners=[recorder, *listeners],
        store=store,
    )
    return recorder.scheduler


def check_whole(rollouts: RolloutScheduler, batches: Sequence[Batch]) -> list[Rollout]:
    """The delivered rollouts, of which none is lost, dropped or doubled."""
    delivered = [rollout for batch in batches for rollout in batch.rollouts]
    ids = {rollout.rollout_id for rollout in delivered}
    in_flight = rollouts.state.in_flight
    assert len(ids) == len(delivered)
    assert not ids & set(in_flight.rollouts)
    assert in_flight.ledger.total == 0, [entry.cause for entry in in_flight.ledger.entries]
    assert in_flight.counters.launched == len(ids) + len(in_flight.rollouts)
    return delivered


async def record(
    urls: Sequence[str],
    checkpoints: Sequence[Path],
    straggler: StragglerRule,
    *,
    prompts: Sequence[Prompt] | None = None,
    batches: int = BATCHES,
    lose_one: bool = False,
    changes: Mapping[str, Any] | None = None,
    fleet: Callable[[Sequence[str]], Fleet] | None = None,
    folder: Path | None = None,
) -> Run:
    """Run `batches` batches; after each, version v comes from ``checkpoints[v % len]``.

    Ends earlier with the prompts. With `lose_one` an engine is given up in mid-response.
    `changes` are further settings of the scheduler, and `fleet` makes a fleet that is not SGLang's.
    Each version is copied into `folder` first, if that is given: rolling refits need it.
    """
    recorder = Recorder()
    scheduler = scheduled(
        urls,
        recorder,
        prompts=long_tail(200) if prompts is None else prompts,
        fleet=fleet and fleet(urls),
        straggler=straggler,
        **(changes or {}),
    )
    taken: list[Batch] = []

    def checkpoint() -> Path:
        return checkpoints[(scheduler.version + 1) % len(checkpoints)]

    publisher = folder and DiskPublisher(
        folder, lambda path: shutil.copytree(checkpoint(), path, dirs_exist_ok=True)
    )
    async with scheduler as rollouts, asyncio.TaskGroup() as group:
        losing = group.create_task(_lose_one(rollouts)) if lose_one else None
        for _ in range(batches):
            try:
                taken.append(await rollouts.next_batch())
            except PromptsExhausted:
                break
            await rollouts.update_weights(publisher or DiskPublisher(checkpoint()))
        if losing is not None:
            losing.cancel()  # It may still wait for a response that is long enough.
        in_flight = rollouts.state.in_flight
        return Run(
            batches=taken,
            recorder=recorder,
            counters=in_flight.counters,
            in_flight=set(in_flight.rollouts),
            dropped={entry.rollout_id for entry in in_flight.ledger.entries},
        )


async def _lose_one(rollouts: RolloutScheduler) -> None:
    """Give up the engine that has a request in the middle of its response, whichever it is."""

    def halfway() -> str:
        return next(
            (
                request.engine
                for request in rollouts.state.in_flight.open_requests()
                if request.generated >= 20 and request.remaining >= 100
            ),
            "",
        )

    await until(lambda: halfway() != "")
    rollouts._feed(EngineLost(engine=halfway(), cause="given up by the test"))


def crossing(run: Run, versions: int = 2) -> list[Rollout]:
    """The rollouts that several versions sampled; a rollout of one version proves little."""
    return [r for r in run.rollouts if len(set(r.versions.tolist())) >= versions]


async def try_until(
    once: Callable[[int], Awaitable[T]], shows: Callable[[T], object], missing: str
) -> T:
    """Return the first result of `once` that shows what a test is about.

    `once` gets the number of the try; `missing` names what no result shows. A server generates
    while a busy machine keeps the scheduler waiting, so the stragglers of a whole run may end
    before an update reaches them.
    """
    for number in range(TRIES):
        if shows(result := await once(number)):
            return result
    raise AssertionError(f"{missing} in {TRIES} runs")


async def until_crossing(once: Callable[[int], Awaitable[Run]], versions: int = 2) -> Run:
    """Return the first run of `once` in which a response has at least `versions` versions."""
    return await try_until(
        once, lambda run: crossing(run, versions), "no response outlived enough updates"
    )


def check_greedy(delivered: Sequence[Rollout], models: Sequence[Path], folder: Path) -> int:
    """Each token is the best one of its own version's model, with that model's logprob.

    Version v has the weights of ``models[v % 2]``. Looks at :data:`SCORED` rollouts, those of most
    segments first, and gives how many of them are of several versions.
    """
    chosen = sorted(delivered, key=lambda rollout: len(rollout.segments), reverse=True)[:SCORED]
    by_model = [_greedy_scores(model, chosen, folder) for model in models]
    for index, rollout in enumerate(chosen):
        at, of = np.arange(len(rollout)), rollout.versions % 2
        score = np.stack([own[index] for own, _ in by_model])[of, at]
        best = np.stack([best[index] for _, best in by_model])[of, at]
        assert np.abs(rollout.logprobs - score).max() < TOLERANCE
        assert (best - score).max() < TOLERANCE, "not the greedy token of its version"
    return sum(len(set(rollout.versions.tolist())) > 1 for rollout in chosen)


def _greedy_scores(
    model: Path, rollouts: Sequence[Rollout], folder: Path
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """The log-probability by `model` of each response token, and of the likeliest token at its
    place."""
    (own,) = scores([model], rollouts, folder)
    with np.load(folder / f"{model.name}.npz") as arrays:
        best = [arrays[f"best-{i}"][len(r.prompt_ids) :] for i, r in enumerate(rollouts)]
    return own, best


def scores(
    models: Sequence[Path],
    rollouts: Sequence[Rollout],
    folder: Path,
    *,
    python: Path | None = None,
) -> list[list[NDArray[np.float64]]]:
    """For each model, the log-probabilities of every response token according to transformers of
    `python`, by default that of SGLang."""
    responses = [(r.prompt_ids, r.token_ids) for r in rollouts]
    return sequence_scores(models, responses, folder, python=python)


def sequence_scores(
    models: Sequence[Path],
    responses: Sequence[tuple[Int32Array, Int32Array]],
    folder: Path,
    *,
    python: Path | None = None,
) -> list[list[NDArray[np.float64]]]:
    """The same log-probabilities for prompts and their responses."""
    source = folder / "in.npz"
    targets = [folder / f"{model.name}.npz" for model in models]
    whole = {str(i): np.concatenate(r).astype(np.int64) for i, r in enumerate(responses)}
    np.savez(source, **whole)  # type: ignore[arg-type]
    pairs = [part for pair in zip(models, targets, strict=True) for part in pair]
    run_with_server_packages("score", source, *pairs, python=python)
    found: list[list[NDArray[np.float64]]] = []
    for target in targets:
        with np.load(target) as arrays:
            found.append([arrays[str(i)][len(prompt) :] for i, (prompt, _) in enumerate(responses)])
    return found
