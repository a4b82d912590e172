"""What one simulated engine is, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aprilsched.engines.sim.model import ToyModel
from aprilsched.errors import ConfigError
from aprilsched.timing.model import H200_QWEN3_4B, StepTimeModel

__all__ = ["Counters", "SimConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimConfig:
    """The modelled machine, server and model.

    Attributes:
        timing: how long steps and prefill passes take.
        max_running: most requests that decode together.
        kv_tokens: size of the KV pool. 1.0M tokens of a 4B shape (147 kB each) fill an H200.
        stream_interval: steps between the chunks of running requests.
        vocab_size: of the toy model.
        eos_token_id: ends responses whose sampling has not ``ignore_eos``; None: the model
            never says it.
        stream_at_pause: a pause sends all tokens that have not left yet. False is SGLang's way:
            they leave later, and an abort of a retracted request loses them.
        prefix_cache: prompts of a group are prefilled once, and a request that is sent again
            finds what it had, until the cache is flushed.
        make_tokens: False for pure timing: all token ids and logprobs are 0 and stop tokens
            are never seen.
        model: makes the toy model from the size of its vocabulary. Another one lets a test
            see under which weights each token was sampled, whatever the engine says of it.

    Raises:
        ConfigError: if a number is not positive.
    """

    timing: StepTimeModel = H200_QWEN3_4B
    max_running: int = 512
    kv_tokens: int = 1_000_000
    stream_interval: int = 64
    vocab_size: int = 32_000
    eos_token_id: int | None = None
    stream_at_pause: bool = True
    prefix_cache: bool = False
    make_tokens: bool = True
    model: Callable[[int], ToyModel] = ToyModel

    def __post_init__(self) -> None:
        for name in ("max_running", "kv_tokens", "stream_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1.")
        if self.vocab_size < 2:
            raise ConfigError(f"vocab_size is {self.vocab_size}; give at least 2.")


@dataclass(kw_only=True, slots=True)
class Counters:
    """Totals since the engine was made; times are modelled seconds."""

    generated: int = 0
    """Tokens sampled, those of aborted requests included."""
    prefilled: int = 0
    """Context tokens of prefill passes, those found in a prefix cache included."""
    cached: int = 0
    """Those of them that were found in it."""
    reprefilled: int = 0
    """Those of them that had been computed before in the same request."""
    preemptions: int = 0
    steps: int = 0
    decoded: int = 0
    """Tokens of those steps: all but the first one after each prefill."""
    decoded_squares: int = 0
    """Sum of the squared batch over the steps."""
    prefill_passes: int = 0
    decode_seconds: float = 0.0
    request_seconds: float = 0.0
    """The same, each step as often as it has requests."""
    prefill_seconds: float = 0.0
    paused_seconds: float = 0.0
    """Pauses that have ended."""
