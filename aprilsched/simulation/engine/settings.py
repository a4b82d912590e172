"""The settings of one simulated engine, and its counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.bounds import AT_LEAST_1, POSITIVE, Bound, check_range
from aprilsched.kernel.values.capabilities import Capabilities, Reservation
from aprilsched.kernel.values.companions import KINDS
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.simulation.engine.toy_model import KvTier, ToyModel
from aprilsched.types import MEDIA

Admission: TypeAlias = Literal["sglang", "sglang-0.5.21", "vllm"]
RankRule: TypeAlias = Literal["prefix", "round_robin"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimConfig:
    """The modelled machine, server and model.

    Attributes:
        timing: time model of decode steps and prefill passes; of one rank if there are several.
        dp_ranks: number of data-parallel ranks, which step together, as with
            --enable-dp-attention of SGLang. `max_running`, `kv_tokens` and the prefix cache are of
            one rank.
        rank_rule: the rank of a request that names none: "prefix" chooses it by prefix and load,
            as clients of SGLang servers do, and "round_robin" takes the next one, as the servers
            do for clients that leave it to them.
        max_running: largest number of requests that decode together.
        max_queued: largest number of requests that may wait for a place in the batch, as
            --max-queued-requests of SGLang; one more is refused. None for any number.
        kv_tokens: size of the KV pool. 1.0M tokens of a 4B shape (147 kB each) fill an H200.
        admission: the rule by which waiting requests are admitted: that of SGLang up to 0.5.21,
            that of later versions, in which running requests with ``ignore_eos`` reserve all of
            their tokens to come, or that of vLLM, which reserves none and preempts.
        reserve_clip: tokens that a request reserves at most for what it may still generate, as
            SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION of SGLang.
        conservativeness: factor of what running requests reserve, as SGLang's
            --schedule-conservativeness.
        stream_interval: number of steps between the chunks of running requests.
        vocab_size: vocabulary size of the toy model.
        eos_token_id: token that ends responses whose sampling has not ``ignore_eos``. With None
            and without stop tokens such a response ends at its ``min_new_tokens``, if not 0.
        stream_at_pause: whether a pause sends all tokens that are not sent yet. With False, as in
            SGLang, they are sent later, and an abort of a retracted request loses them.
        prefix_cache: whether prompts of a group are prefilled once, and a request that is sent
            again finds its earlier KV, until the cache is flushed.
        priority: whether waiting requests run in the order of their ranks, as those of SGLang with
            --enable-priority-scheduling do.
        make_tokens: False for pure timing: all token ids and logprobs are 0, and stop tokens
            never occur.
        rows: shape of the rows of each companion of the context that the test server returns.
        tier: keeps KV through flushes and restarts, for all engines that have it.
        model: makes the toy model from the size of its vocabulary. With a model of its own a test
            can see which weights sampled each token, whatever the engine reports.

    Raises:
        ConfigError: if a number is not positive.
    """

    timing: StepTimeModel = H200_QWEN3_4B
    dp_ranks: int = 1
    rank_rule: RankRule = "prefix"
    max_running: int = 512
    max_queued: int | None = None
    kv_tokens: int = 1_000_000
    admission: Admission = "sglang"
    reserve_clip: int = Reservation().clip
    conservativeness: float = Reservation().conservativeness
    stream_interval: int = 64
    vocab_size: int = 32_000
    eos_token_id: int | None = None
    stream_at_pause: bool = True
    prefix_cache: bool = False
    priority: bool = False
    make_tokens: bool = True
    rows: tuple[int, ...] = (3, 2)
    tier: KvTier | None = None
    model: Callable[[int], ToyModel] = ToyModel

    def __post_init__(self) -> None:
        counts = "dp_ranks max_running max_queued kv_tokens reserve_clip stream_interval"
        for name in counts.split():
            check_range(AT_LEAST_1, **{name: getattr(self, name)})
        check_range(Bound(least=2, words="2 or more"), vocab_size=self.vocab_size)
        check_range(POSITIVE, conservativeness=self.conservativeness)
        for name, kind in (("admission", Admission), ("rank_rule", RankRule)):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ConfigError(f"{name} must be one of {known}, got {getattr(self, name)!r}.")

    @property
    def reservation(self) -> Reservation | None:
        """What admission reserves for tokens to come."""
        if self.admission == "vllm":
            return None
        return Reservation(
            clip=self.reserve_clip,
            fixed_in_full=self.admission == "sglang",
            conservativeness=self.conservativeness,
        )

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that such an engine reports."""
        return Capabilities(
            version_spans=True,
            flush_while_paused=True,
            max_running_requests=self.max_running * self.dp_ranks,
            kv_tokens=self.kv_tokens * self.dp_ranks,
            caches_contexts=self.prefix_cache and self.tier is None,
            reservation=self.reservation,
            release_while_paused=True,
            keeps_released_weights=True,
            adapters=True,
            kv_tier="none" if self.tier is None else "keyed",
            companions=frozenset(KINDS),
            media=frozenset(MEDIA),
            priority=int(self.priority),
            server="aprilsched simulated engine",
        )


@dataclass(kw_only=True, slots=True)
class Counters:
    """Totals since the engine was made; times are modelled seconds."""

    generated: int = 0
    """Number of sampled tokens, including those of aborted requests."""
    prefilled: int = 0
    """Number of context tokens of prefill passes, including those found in a prefix cache."""
    cached: int = 0
    """Number of prefilled context tokens that were found in a prefix cache."""
    reprefilled: int = 0
    """Number of prefilled context tokens that the same request had computed before."""
    preemptions: int = 0
    steps: int = 0
    """Number of decode steps."""
    decoded: int = 0
    """Number of tokens of decode steps: all but the first one after each prefill."""
    decoded_squares: int = 0
    """Sum over the decode steps of the squared batch size."""
    prefill_passes: int = 0
    decode_seconds: float = 0.0
    request_seconds: float = 0.0
    """Sum over the decode steps of their seconds times their batch size."""
    prefill_seconds: float = 0.0
    paused_seconds: float = 0.0
    """Sum of the durations of the pauses that have ended."""
