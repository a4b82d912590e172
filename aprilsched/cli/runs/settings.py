"""All settings of a run as plain data, as set by flags and config.toml.

The classes here check little, so that a mistake is reported once, in one sentence, by the class
that uses the value (:class:`SchedulerConfig`, :class:`LongTailWorkload`, :class:`SimFleet`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from aprilsched.config import SamplingParams, SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.observe.exports.tracker_writers import tracker_names
from aprilsched.observe.log.lengths_of_run import distribution_of, known_lengths
from aprilsched.simulation.engine.settings import Admission, RankRule, SimConfig
from aprilsched.simulation.workload import Empirical, Limits, LongTailWorkload

CAP = 6000
COMMAS = "a list with commas"
"""Marks a setting whose text is a comma-separated list. Its flag also accepts several values."""
_MAX_QUANTILES = 100_000
VOCABULARY = 32_000
"""Number of token ids of the built-in workload, unless the user or a server sets another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSettings:
    """The built-in long-tail workload, used if no prompts are given."""

    median: float = 700.0
    """Median of the response lengths, in tokens, before the cap."""
    sigma: float = 0.9
    """Standard deviation of the log length."""
    cap: int | None = None
    """Tokens of the longest response. If not given: 6,000, the longest of `lengths`, or the limit
    of the servers."""
    within_group: float = 0.5
    """Share of the variance of the log length that the responses to one prompt share."""
    lengths: str | None = None
    """A file of lengths in tokens, each equally likely, or a run folder whose responses give the
    distribution. Replaces `median` and `sigma`."""
    prompt_tokens: int = 8
    """Number of tokens of each prompt."""
    vocab_size: int | None = None
    """Number of token ids. If not given, the vocabulary of the served model, or 32,000 with the
    embedded engine."""
    epoch_prompts: int | None = None
    """Number of prompts per epoch, after which the same prompts repeat with new responses. If not
    given, prompts never repeat."""
    drift: float = 0.0
    """Share of a prompt's effect on its lengths that is new in each epoch, 0 to 1."""
    limits: Limits | None = None
    """The limit of a request: the cap, as in training, or exact, the length of its response. If not
    given, cap with the embedded engine, and exact with servers, whose models do not know the
    lengths."""

    def checked(self, *, seed: int, group_size: int) -> LongTailWorkload:
        """Return the workload.

        Raises:
            ConfigError: if a parameter is out of range, or `lengths` cannot be read.
        """
        values = _values(self) | {"lengths": self._empirical()}
        return LongTailWorkload.of(values, seed=seed, group_size=group_size)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest response if neither `cap` nor a server bounds it.

        Raises:
            ConfigError: if `lengths` cannot be read.
        """
        dist = self._empirical()
        return CAP if dist is None else dist.lengths[-1]

    def _empirical(self) -> Empirical | None:
        """Return the distribution that `lengths` names. Unfinished responses of a run folder are
        censored (Kaplan-Meier)."""
        if self.lengths is None:
            return None
        if not Path(self.lengths).is_dir():
            return Empirical.read(self.lengths)
        groups = known_lengths(Path(self.lengths))
        if not groups:
            raise ConfigError(f"lengths must be a run with responses, got {self.lengths}.")
        dist = distribution_of(groups)
        count = min(dist.observations, _MAX_QUANTILES)
        return Empirical(tuple(dist.quantile((np.arange(count) + 0.5) / count).tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class SimSettings:
    """The embedded engine: SGLang on one H200 with a 4B model, as a fitted time model."""

    engines: int = 1
    """Number of embedded engines."""
    dp_ranks: int = 1
    """Number of data-parallel ranks of one engine, which step together. `max_running`, `kv_tokens`
    and the step times are of one rank. Trials of automatic schedules expect it of servers too."""
    rank_rule: RankRule = "prefix"
    """Rank of a request: by prefix and load, as clients of SGLang servers choose it, or the next
    one, as servers choose. serve-sim always takes the next one for a request that names none."""
    max_running: int = 512
    """Largest number of requests that one engine decodes together."""
    kv_tokens: int = 1_000_000
    """Number of tokens in the KV pool of one engine."""
    admission: Admission = "sglang"
    """The rule by which waiting requests are admitted: of SGLang since 0.5.22 (running requests
    with ignore_eos reserve all of their tokens to come), of SGLang up to 0.5.21, or of vLLM (none
    are reserved; requests are preempted)."""
    reserve_clip: int = 4096
    """SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION: tokens to come that a request reserves at most. Trials
    of automatic schedules expect it of servers too."""
    conservativeness: float = 1.0
    """--schedule-conservativeness: factor of what SGLang reserves for running requests."""
    stream_interval: int = 64
    """Number of tokens between two chunks of a response."""
    prefix_cache: bool = False
    """Whether engines have a prefix cache: the prompt of a group is prefilled once, and a request
    that is sent again reuses KV that was not flushed."""
    refit_seconds: float = 0.0
    """Seconds for loading new weights."""
    reward_seconds: float = 0.0
    """Seconds for scoring one rollout. Only simulate uses it."""

    @property
    def of_engine(self) -> dict[str, Any]:
        """The settings of one engine, as arguments of SimConfig and SimFleet."""
        values = _values(self)
        return {each.name: values[each.name] for each in fields(SimConfig) if each.name in values}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """All settings of a run."""

    engine: tuple[str, ...] = ("sim",)
    """"sim", the embedded engine under a virtual clock, or the URLs of SGLang servers, or of
    vLLM servers as vllm+http://…, with spaces between them."""
    prompts: str | None = None
    """A file of prompts as JSON lines, or one JSON array. A row has input_ids, prompt, text or
    messages, and optionally key, group_size and sampling. Other columns, such as a label, are not
    used. Without a file the built-in long-tail workload is used."""
    input_key: str | None = None
    """The key of a row's prompt: text, messages or token ids. If not given, the one of input_ids,
    prompt, text and messages that a row has."""
    apply_chat_template: bool = False
    """Whether to treat a text prompt as a user message and apply the model's chat template to it.
    The template is always applied to messages."""
    tokenizer: str | None = None
    """A folder with the model's tokenizer.json, for prompts that are text or messages."""
    batches: int = 10
    """Number of batches to deliver."""
    seed: int = 0
    """Seed of the built-in workload."""
    update_every: int | None = None
    """Number of batches between two policy versions; 0 for one version during the whole run. If not
    given, 1 on the embedded engine and with `weights`, otherwise 0."""
    train_seconds: float = 0.0
    """Seconds that the trainer takes for a batch."""
    streamed: bool = False
    """The trainer takes each batch group by group as groups are scored, and spends an equal part of
    its seconds on each."""
    burn_in: int | None = None
    """Number of batches left out of the steady-state figures; a quarter of the batches if not
    given."""
    weights: str | None = None
    """A checkpoint folder, readable by all servers, which they load as each new version. Without it
    they keep their current weights, and the run has one version."""
    model: str | None = None
    """A TOML file that aprilsched calibrate wrote: the engines' step times, for automatic
    over-provisioning and, with servers, for their efficiency."""
    log_tokens: bool = False
    """Write prompts and outputs into events.jsonl: token ids, logprobs and prompt keys. Otherwise
    the file contains only their lengths."""
    sample: float = 1.0
    """Seconds between two samples of the engines' load and of the GPUs in samples.jsonl; 0 for no
    samples."""
    gpu: Literal["auto", "on", "off"] = "auto"
    """Whether the GPUs of this machine are sampled with NVML. "auto" samples them if there are any
    and nvidia-ml-py is installed."""
    metrics_port: int = 0
    """Serve metrics for Prometheus on this port of 127.0.0.1 during the run; 0 for no metrics."""
    track: Annotated[str, COMMAS] = ""
    """Trackers that receive the figures of each batch, comma-separated: tensorboard, trackio,
    wandb."""
    admin_key_env: str | None = None
    """Name of the environment variable that holds the servers' admin API key."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' API key."""
    sim: SimSettings = field(default_factory=SimSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """How rollouts are scheduled."""

    @property
    def simulated(self) -> bool:
        return self.engine == ("sim",)

    @property
    def updates_every(self) -> int:
        """Return `update_every`, or its default if unset."""
        if self.update_every is None:
            return 1 if self.simulated or self.weights is not None else 0
        return self.update_every

    def check(self) -> None:
        """Check the settings that no other class checks.

        Raises:
            ConfigError: naming the setting and what to change.
        """
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; give {least} or more.")
        if self.train_seconds > _MOST_SECONDS:
            raise ConfigError(f"train_seconds must be at most 1e9, got {self.train_seconds:g}.")
        if not self.engine:
            raise ConfigError('engine is empty; give "sim" or the URLs of servers.')
        if "sim" in self.engine and not self.simulated:
            raise ConfigError('engine mixes "sim" with URLs; give one or the other.')
        if self.simulated and self.weights is not None:
            raise ConfigError("weights is for servers; give their URLs as engine too.")
        if not self.simulated and self.weights is None and self.update_every:
            raise ConfigError(
                f"update_every is {self.update_every} and there are no new weights; give weights "
                "too, or leave update_every out."
            )
        if self.simulated and self.gpu == "on":
            raise ConfigError(
                'gpu is "on", and the embedded engine has none; give the URLs of servers, '
                'or leave it "auto".'
            )
        tracker_names(self.track)
        for name in ("tokenizer", "input_key", "apply_chat_template"):
            if getattr(self, name) and self.prompts is None:
                raise ConfigError(f"{name} is for the rows of a file; give prompts too.")
        # ``max_new_tokens`` in flags and files also sets the cap of the built-in workload, which is
        # its longest response.
        given = self.scheduler.sampling
        if self.prompts is None and given != replace(_UNUSED, max_new_tokens=given.max_new_tokens):
            raise ConfigError(
                "The built-in workload samples in its own way; give prompts too, or of sampling "
                "nothing but max_new_tokens."
            )


_UNUSED = SamplingParams()
_MOST_SECONDS = 1e9
"""Beyond it a virtual clock no longer resolves the time of a step."""
_LEAST: dict[str, float] = {
    "batches": 1,
    "seed": 0,
    "update_every": 0,
    "train_seconds": 0,
    "burn_in": 0,
    "sample": 0,
    "metrics_port": 0,
}


def _values(settings: Any) -> dict[str, Any]:
    return {f.name: getattr(settings, f.name) for f in fields(settings)}
