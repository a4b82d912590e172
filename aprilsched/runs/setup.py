"""Makes the parts of a run from its settings: engines, prompts, publisher, planner, time bound.

Nothing is opened or launched here. All errors in the settings are raised here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from aprilsched.checks import nearest
from aprilsched.config import SchedulerConfig
from aprilsched.coordinator.prompts import checked
from aprilsched.engines.addresses import ServerFleet, fleet_at
from aprilsched.engines.base import Fleet
from aprilsched.engines.server import HttpEngine
from aprilsched.engines.sim import SimFleet, SimPublisher
from aprilsched.errors import ConfigError
from aprilsched.extras import extra
from aprilsched.planning import Planner
from aprilsched.runs.settings import VOCABULARY, RunSettings, WorkloadSettings, key_from
from aprilsched.sampling import sampling_params
from aprilsched.telemetry.batch_figures import Bound
from aprilsched.telemetry.live_figures import LiveFigures
from aprilsched.telemetry.summary import Summary
from aprilsched.timing.calibration import load_model
from aprilsched.timing.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.types import Prompt
from aprilsched.weights.disk import DiskPublisher
from aprilsched.weights.publisher import WeightPublisher
from aprilsched.workload import LongTailWorkload


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The parts of a run that has not begun."""

    settings: RunSettings
    config: SchedulerConfig
    prompts: Iterable[Prompt]
    fleet: Fleet
    publisher: WeightPublisher | None
    """Moves new weights; None if the run never updates them."""
    bound: Bound | None
    """Least time in which the engines can generate given lengths; None if it is not known."""
    workload_mean: float | None
    """Mean length of the built-in workload; None for other prompts."""
    clock: Literal["virtual", "wall"]
    timing: StepTimeModel
    """Step times of the engines: those that the settings name, or else the default."""
    planner: Planner
    """Chooses schedules for automatic over-provisioning. On the virtual clock it has the engines'
    own step times; otherwise it begins with them, and learns during the run."""
    run_id: str | None
    """Prefix of the request ids; None for a random one, which is unique on a shared server."""


def prepare(settings: RunSettings) -> Setup:
    """Make the parts that `settings` ask for.

    Raises:
        ConfigError: if a setting is wrong, or if a file that it names cannot be used.
    """
    settings.check()
    config = settings.scheduler
    launched = config.policies.refill.launched(config.group_size)
    workload = settings.workload.checked(seed=settings.seed, group_size=launched)
    timing = H200_QWEN3_4B if settings.model is None else load_model(Path(settings.model))
    simulated, sim = settings.simulated, settings.sim
    known = simulated or settings.model is not None
    return Setup(
        settings=settings,
        config=config,
        prompts=_prompts(settings, config, workload),
        fleet=_fleet(settings, timing),
        publisher=_publisher(settings) if settings.updates_every else None,
        bound=bound_of(settings, timing) if known else None,
        timing=timing,
        planner=(
            Planner(timing, max_running=sim.max_running, inline=True)
            if simulated
            else Planner(timing)
        ),
        workload_mean=workload.mean_length() if settings.prompts is None else None,
        clock="virtual" if simulated else "wall",
        run_id="run" if simulated else None,
    )


def run_on_clock(setup: Setup, program: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `program` to its end, on the clock that the setup's engines need.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when the program has cleaned up.
    """
    from aprilsched.engines.sim import run_virtual

    run = run_virtual if setup.clock == "virtual" else asyncio.run
    run(program())


def _prompts(
    settings: RunSettings, config: SchedulerConfig, workload: LongTailWorkload
) -> Iterable[Prompt]:
    if settings.prompts is None:
        return workload
    tokenizer = None if settings.tokenizer is None else Path(settings.tokenizer)
    prompts = read_prompts(Path(settings.prompts), tokenizer=tokenizer)
    return [checked(prompt, config.group_size, config.policies.refill) for prompt in prompts]


def _fleet(settings: RunSettings, timing: StepTimeModel) -> Fleet:
    sim = settings.sim
    if not settings.simulated:
        return servers(settings)
    return SimFleet(
        sim.engines,
        max_running=sim.max_running,
        kv_tokens=sim.kv_tokens,
        stream_interval=sim.stream_interval,
        refit_seconds=sim.refit_seconds,
        prefix_cache=sim.prefix_cache,
        timing=timing,
    )


def servers(settings: RunSettings) -> ServerFleet:
    """The servers of a run.

    Raises:
        ConfigError: if a URL or a key cannot be used, or the servers are of two programs.
    """
    return fleet_at(
        settings.engine,
        admin_key=key_from(settings.admin_key_env, "admin_key_env"),
        api_key=key_from(settings.api_key_env, "api_key_env"),
    )


def _publisher(settings: RunSettings) -> WeightPublisher | None:
    if settings.simulated:
        return SimPublisher()
    return None if settings.weights is None else DiskPublisher(settings.weights)


def bound_of(settings: RunSettings, timing: StepTimeModel) -> Bound:
    """The least time in which all engines of a run can generate given lengths."""
    engines = settings.sim.engines if settings.simulated else len(settings.engine)
    most = settings.sim.max_running
    return partial(timing.bound_seconds, max_running=most, engines=engines)


# --- workload limits -----------------------------------------------------------------------------

# Fits the built-in workload to the servers of a run before it is made.
#
# A server would refuse each request that has a token id beyond the model's vocabulary or a
# response beyond its context, and group after group would fail. So defaults are chosen to fit the
# servers, and a setting that does not fit is refused at once.


def fitted(settings: RunSettings, fleet: Callable[[], ServerFleet]) -> RunSettings:
    """`settings` with the vocabulary and the longest response of the built-in workload.

    Args:
        settings: the settings as given. For a file of prompts or for the embedded engine, only the
            defaults are filled in.
        fleet: makes the fleet of the servers, which is opened and closed here.

    Raises:
        ConfigError: if the given workload does not fit the servers.
        EngineError: if a call to a server fails.
    """
    workload = settings.workload
    if settings.simulated or settings.prompts is not None:
        return replace(settings, workload=_filled(workload, VOCABULARY, workload.longest))
    return replace(settings, workload=asyncio.run(_fitted(workload, fleet())))


async def _fitted(workload: WorkloadSettings, fleet: ServerFleet) -> WorkloadSettings:
    await fleet.open()
    try:
        if any(engine.facts.vocab_size is None for engine in fleet.engines):
            # A paused server does not tell its vocabulary. The run would continue it anyway.
            for engine in fleet.engines:
                await engine.resume()
            await fleet.close()
            await fleet.open()
        for engine in fleet.engines:
            _check(workload, engine)
        known = [e.facts.vocab_size for e in fleet.engines if e.facts.vocab_size is not None]
        room = [_room(workload, e) for e in fleet.engines if e.facts.context_tokens is not None]
        return _filled(workload, min(known, default=VOCABULARY), min([workload.longest, *room]))
    finally:
        await fleet.close()


def _check(workload: WorkloadSettings, engine: HttpEngine[Any]) -> None:
    known, context = engine.facts.vocab_size, engine.facts.context_tokens
    if known is not None and (workload.vocab_size or 0) > known:
        raise ConfigError(
            f"vocab_size is {workload.vocab_size}, and the model of {engine.name} knows {known} "
            f"token ids; give {known} or less, or leave it out."
        )
    if context is None:
        return
    room = _room(workload, engine)
    if room < 1:
        raise ConfigError(
            f"prompt_tokens is {workload.prompt_tokens}, and {engine.name} has room for {context} "
            "tokens of a prompt and its response together; give fewer."
        )
    if (workload.cap or 0) > room:
        raise ConfigError(
            f"cap is {workload.cap}, and {engine.name} has room for {room} tokens behind a prompt "
            f"of {workload.prompt_tokens}; give {room} or less, or leave it out."
        )


def _room(workload: WorkloadSettings, engine: HttpEngine[Any]) -> int:
    """Number of tokens of the longest response that fits the engine's context."""
    return (engine.facts.context_tokens or 0) - workload.prompt_tokens


def _filled(workload: WorkloadSettings, vocab_size: int, cap: int) -> WorkloadSettings:
    return replace(
        workload,
        vocab_size=vocab_size if workload.vocab_size is None else workload.vocab_size,
        cap=cap if workload.cap is None else workload.cap,
    )


# --- prompts file --------------------------------------------------------------------------------

# Reads prompts from a JSONL file and checks every line before anything is launched.
#
# A line is an object with ``input_ids``, or with ``prompt`` or ``text``, which are text and need a
# tokenizer. It may also have ``key``, ``group_size``, and ``sampling`` with the names that
# :func:`aprilsched.sampling.sampling_params` knows.

_CONTENT = ("input_ids", "prompt", "text")
"""The keys of a prompt's content. The data sets of most trainers have it as `prompt`."""
_KEYS = (*_CONTENT, "key", "sampling", "group_size")


class _Tokenizer:
    """Gives a tokenizers.Tokenizer the interface that :mod:`aprilsched.sampling` needs."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids


def read_prompts(path: Path, *, tokenizer: Path | None = None) -> list[Prompt]:
    """The prompts of the file at `path`; empty lines are skipped.

    Raises:
        ConfigError: if the file cannot be read, or if a line cannot be used; it names the line.
    """
    known = None if tokenizer is None else _load(tokenizer)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"The prompts file {path} cannot be read: {error.strerror}.") from error
    prompts = [
        _prompt(line, known, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"The prompts file {path} has no prompts; give at least one line.")
    return prompts


def _prompt(line: bytes, tokenizer: _Tokenizer | None, where: str) -> Prompt:
    try:
        content = msgspec.json.decode(line)
        if not isinstance(content, dict):
            raise ConfigError('this is no object; write {"input_ids": [...]}.')
        fields = cast("dict[str, Any]", content)
        _check_keys(fields)
        sampling = fields.get("sampling")
        return Prompt(
            input_ids=_input_ids(fields, tokenizer),
            key=_key(fields.get("key")),
            group_size=fields.get("group_size"),
            sampling=None if sampling is None else sampling_params(sampling, tokenizer=tokenizer),
        )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: this is no JSON ({error}).") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_keys(content: Mapping[str, Any]) -> None:
    for key in content:
        if key not in _KEYS:
            raise ConfigError(
                f"{key} is no key of a prompt; the nearest known one is {nearest(key, _KEYS)}."
            )
    if sum(key in content for key in _CONTENT) != 1:
        raise ConfigError(f"give one of {', '.join(_CONTENT)}.")


def _input_ids(content: Mapping[str, Any], tokenizer: _Tokenizer | None) -> Any:
    if "input_ids" in content:
        ids = content["input_ids"]
        if not isinstance(ids, list) or not all(type(i) is int for i in cast("list[Any]", ids)):
            raise ConfigError("input_ids is no list of whole numbers; give token ids.")
        return cast("list[int]", ids)
    name = "prompt" if "prompt" in content else "text"
    text = content[name]
    if not isinstance(text, str):
        raise ConfigError(f"{name} is no string; give text, after the chat template if it has one.")
    if tokenizer is None:
        raise ConfigError("the prompt is text; name the model's tokenizer folder (--tokenizer).")
    return tokenizer.encode(text)


def _key(key: Any) -> str | int | None:
    if key is None or (isinstance(key, str | int) and not isinstance(key, bool)):
        return key
    raise ConfigError("key is neither a string nor a whole number; give one of them.")


def _load(folder: Path) -> _Tokenizer:
    with extra("tokenizers"):
        from tokenizers import Tokenizer
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"There is no {file}; name the folder with the model's tokenizer.json.")
    try:
        read: Any = Tokenizer  # The package has no type annotations.
        return _Tokenizer(read.from_file(str(file)))
    except Exception as error:
        # The package raises Exception itself for any file that it cannot read.
        raise ConfigError(f"{file} is no tokenizer: {error}.") from error


def summary_of(setup: Setup) -> Summary:
    """The listener that sums up the run which `setup` describes."""
    return Summary(
        trainer_waits=setup.config.trainer_waits,
        bound=setup.bound,
        workload_mean=setup.workload_mean,
        burn_in=setup.settings.burn_in,
    )


def live_figures_of(setup: Setup, summary: Summary) -> LiveFigures:
    """The figures of a run, shared by all that show it. They read `summary`, so the summary must
    be the earlier listener."""
    return LiveFigures(
        meter=summary.meter,
        batch_groups=setup.config.batch_groups,
        clock=None if setup.clock == "virtual" else time.monotonic,
    )
