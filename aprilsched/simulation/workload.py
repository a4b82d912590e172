"""Prompts whose response lengths are drawn beforehand, mostly with a long tail.

With ``limits="cap"`` every request has the cap as its limit, as in training, and the embedded
engine ends a response by itself at its length, which it knows from ``min_new_tokens``. Schedulers
do not read that field. With ``limits="exact"`` the length is the limit, with ``ignore_eos``. Then a
workload has the same lengths on the embedded engine and on a real server, but admission knows them
too. A length never depends on the schedule.

The log of a length is ``log(median) + sigma * x`` with x of variance 1, of which `within_group`
is shared by the responses of one prompt:

    x = sqrt(within_group) * z_group + sqrt(1 - within_group) * z_response

where the z are standard normal. Lengths above `cap` become `cap`, so the distribution has an atom
there, as truncated responses do.

Any other distribution is a value that knows its distribution function F
(:class:`LengthDistribution`). The responses of a prompt then have a Gaussian copula: a length is
the quantile of F at Phi(x), with the x from above.

With `epoch_prompts` the prompts come again: prompt i is prompt ``i % epoch_prompts`` of its epoch,
with the same key, tokens and group effect and with new responses. The policy may change between
two epochs: `drift` is the share of the group effect that is new in each,

    z_group(e) = (1 - drift) * z_group(e - 1) + sqrt(1 - (1 - drift)**2) * z_new

so the distribution stays the same and the correlation of a prompt's effect falls by 1 - drift an
epoch.

Invariant: prompt i of a seed is always the same, in whatever order prompts are requested. Each
prompt has a counter-based generator of its own: Philox with the key (seed, i).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count as count_up
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeAlias, cast

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.bounds import (
    AT_LEAST_0,
    AT_LEAST_1,
    COUNT_32_BITS,
    NOT_NEGATIVE,
    POSITIVE,
    Bound,
    check_settings,
)
from aprilsched.kernel.values.checks import MAX_COUNT, checked, converted, typed
from aprilsched.kernel.values.files import read_text
from aprilsched.types import Prompt, SamplingParams

Limits: TypeAlias = Literal["cap", "exact"]

_SHARE = Bound(least=0, most=1, words="0 to 1")
_GRID = 1 << 16
"""Largest number of lengths at which a distribution function is evaluated. Up to
this cap, it is evaluated at every length."""
_PROMPTS = 1024
"""Number of prompts in the moments if each has its own distribution and no number is set."""

_MANY_CAPPED = 0.25
"""A larger share of responses at the cap is more likely a mistake than a workload."""
_MOMENTS_STREAM = 2**64 - 1
"""Index of the generator for moments. No prompt has this index, so none shares its draws."""


class LengthDistribution(Protocol):
    """A distribution of response lengths: an immutable object with this method."""

    def cdf(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of responses that are not longer than each of `lengths`, in tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths whose logarithm is normal: `median` in tokens, `sigma` of the natural logarithm."""

    median: Annotated[float, POSITIVE] = 700.0
    sigma: Annotated[float, POSITIVE] = 0.9

    def __post_init__(self) -> None:
        check_settings(self)

    def cdf(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :class:`LengthDistribution`."""
        return _phi((np.log(lengths) - math.log(self.median)) / self.sigma)


@dataclass(frozen=True, slots=True)
class Pareto:
    """Pareto distribution of lengths of at least `least` tokens.

    A share ``(least / n)**alpha`` of the lengths is longer than n. Without a cap, the mean is
    infinite for an `alpha` up to 1.
    """

    least: Annotated[float, POSITIVE] = 200.0
    alpha: Annotated[float, POSITIVE] = 1.5

    def __post_init__(self) -> None:
        check_settings(self)

    def cdf(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :class:`LengthDistribution`."""
        return 1.0 - (self.least / np.maximum(lengths, self.least)) ** self.alpha


@dataclass(frozen=True, slots=True)
class Empirical:
    """The lengths of a list, each as likely as the others."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        _check(len(self.lengths) > 0, "lengths must not be empty; list at least one.")
        lengths = sorted(converted("a length", length, Integral) for length in self.lengths)
        _check(lengths[0] >= 1, "a length is below 1; give tokens, each 1 or more.")
        object.__setattr__(self, "lengths", tuple(lengths))

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read lengths from a file of whole numbers of tokens.

        They are separated by white space, new lines or commas.

        Raises:
            ConfigError: if it cannot be read, or something in it is not a length.
        """
        try:
            text = read_text(path)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"the lengths in {path} cannot be read: {reason}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the lengths in {path} are not text: {error}.") from error
        lengths: list[int] = []
        for number, line in enumerate(text.splitlines(), start=1):
            for word in line.replace(",", " ").split():
                length = _length(word)
                if length is None:
                    raise ConfigError(
                        f"line {number} of {path} has {word!r}, which is not a length; write whole "
                        "numbers of tokens, each from 1 to 2**31 - 1."
                    )
                lengths.append(length)
        _check(len(lengths) > 0, f"{path} has no lengths; give at least one.")
        return cls(tuple(lengths))

    def cdf(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :class:`LengthDistribution`."""
        return np.searchsorted(self.lengths, lengths, side="right") / len(self.lengths)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Weighted distributions, such as ``Mixture((0.9, Lognormal(300)), (0.1, Pareto(4000)))``."""

    parts: tuple[tuple[float, LengthDistribution], ...]

    def __init__(self, *parts: tuple[float, LengthDistribution]) -> None:
        _check(len(parts) > 0, "a mixture has no parts; give (weight, distribution), one or more.")
        for part in parts:
            if not isinstance(cast("Any", part), tuple) or len(part) != 2:
                raise ConfigError(
                    f"a mixture has {typed(part)}; give each part as (weight, distribution)."
                )
            weight, distribution = part
            checked("a weight", weight, Real)
            _check(weight > 0, "a weight is not above 0; leave its part out.")
            _value(distribution, "a part of a mixture")
        object.__setattr__(self, "parts", parts)

    def cdf(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :class:`LengthDistribution`."""
        total = math.fsum(weight for weight, _ in self.parts)
        shares = [weight / total * distribution.cdf(lengths) for weight, distribution in self.parts]
        return np.sum(shares, axis=0)


def _length(word: str) -> int | None:
    """Return `word`, such as 80, 80.0 or 1e3, as a whole number of 1 or more, or None."""
    try:
        value = float(word)
    except ValueError:
        return None
    return int(value) if value.is_integer() and 1 <= value <= MAX_COUNT else None


def _phi(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distribution function of the standard normal distribution."""
    flat = (-x / math.sqrt(2.0)).ravel().tolist()
    return 0.5 * np.array([math.erfc(each) for each in flat]).reshape(x.shape)


@lru_cache(maxsize=256)
def _quantiles(
    dist: LengthDistribution, cap: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Shares of responses and the lengths that these are not longer than; both grow."""
    lengths = np.arange(1.0, cap + 1)
    if cap > _GRID:
        lengths = np.unique(np.rint(np.geomspace(1, cap, _GRID)))
    shares = np.asarray(dist.cdf(lengths))
    if shares.shape != lengths.shape:
        raise ConfigError(
            f"distribution.cdf gives the shape {shares.shape} for {len(lengths)} lengths; give a "
            "share for each of an array of lengths."
        )
    if not (np.diff(shares) >= 0).all() or not 0 <= shares[0] <= shares[-1] <= 1:
        raise ConfigError("distribution.cdf does not grow from 0 to 1; correct it.")
    return shares, lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthMoments:
    """Moments of the capped distribution: `mean` in tokens, `cv2` (variance over squared mean), and
    the share of responses that are `capped`."""

    mean: float
    cv2: float
    capped: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LongTailWorkload:
    """An iterable of prompts; iterating it again starts at the first one.

    The defaults are the workload that the timing model was checked against: mean 1,028 tokens,
    cv2 0.98.

    Args:
        median: median length in tokens, before the cap.
        sigma: standard deviation of the log length, before the cap.
        cap: length of the longest response, in tokens.
        within_group: share of the log length's variance that a prompt's responses have in
            common, 0 to 1.
        prompt_tokens: number of tokens of every prompt; they are random ids below `vocab_size`.
        vocab_size: bound of the token ids, at most the vocabulary size of the served model.
        distribution: another distribution as a value, which does not use `median` and `sigma`, or a
            function that gives the distribution of each prompt, by its key.
        seed: decides the prompts, the lengths and the sampling seeds.
        group_size: responses for each prompt; give the scheduler's group size.
        count: number of prompts; None for an endless workload.
        epoch_prompts: number of prompts of one epoch; None for prompts that never come again.
        drift: share of a prompt's effect on its lengths that is new in each epoch, 0 to 1.
        limits: "cap" if requests have the cap as their limit, "exact" if they have their length.

    Raises:
        ConfigError: if a parameter is out of its range.
    """

    median: Annotated[float, POSITIVE] = 700.0
    sigma: Annotated[float, NOT_NEGATIVE] = 0.9
    cap: Annotated[int, COUNT_32_BITS] = 6000
    within_group: Annotated[float, _SHARE] = 0.5
    prompt_tokens: Annotated[int, COUNT_32_BITS] = 8
    vocab_size: Annotated[int, Bound(least=2, most=2**31 - 1, words="2 to 2**31 - 1")] = 32_000
    distribution: LengthDistribution | Callable[[int], LengthDistribution] | None = None
    seed: Annotated[int, Bound(least=0, below=2**64, words="0 to 2**64 - 1")] = 0
    group_size: Annotated[int, AT_LEAST_1] = 8
    count: Annotated[int, AT_LEAST_0] | None = None
    epoch_prompts: Annotated[int, AT_LEAST_1] | None = None
    drift: Annotated[float, _SHARE] = 0.0
    limits: Limits = "cap"

    def __post_init__(self) -> None:
        dist = self.distribution
        if dist is not None and (isinstance(dist, type) or not callable(dist)):
            _value(dist, "distribution")
        check_settings(self)

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, seed: int, group_size: int) -> Self:
        """Return the workload of the parameters above by name, where None means the default.

        `lengths` is a file of lengths, or their :class:`~aprilsched.simulation.workload.Empirical`
        distribution.

        Raises:
            ConfigError: if a parameter is out of its range, or the file cannot be read.
        """
        given: dict[str, Any] = {k: value for k, value in settings.items() if value is not None}
        path = given.pop("lengths", None)
        if path is not None:
            distribution = path if isinstance(path, Empirical) else Empirical.read(path)
            given = {"cap": distribution.lengths[-1]} | given | {"distribution": distribution}
        return cls(seed=seed, group_size=group_size, **given)

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.prompt, count_up() if self.count is None else range(self.count))

    def prompt(self, index: int) -> Prompt:
        """Return prompt `index`, with one ``SamplingParams`` for each response.

        Its ``key`` is `index`, or its number in its epoch.
        """
        rng = self._generator(index)
        lengths = self._lengths(index, rng)
        input_ids = rng.integers(0, self.vocab_size, self.prompt_tokens, dtype=np.int32)
        key = self._key(index)
        if key != index:
            first = self._generator(key)
            self._draw(first, 1)
            input_ids = first.integers(0, self.vocab_size, self.prompt_tokens, dtype=np.int32)
        seeds = rng.integers(0, 2**31 - 1, self.group_size)
        exact = self.limits == "exact"
        sampling = tuple(
            SamplingParams(
                max_new_tokens=int(length) if exact else self.cap,
                min_new_tokens=0 if exact else int(length),
                ignore_eos=exact,
                temperature=1.0,
                sampling_seed=int(seed),
            )
            for length, seed in zip(lengths, seeds, strict=True)
        )
        named = {} if key == index else {"index": index}
        return Prompt(input_ids=input_ids, sampling=sampling, key=key, metadata=named)

    def lengths(self, index: int) -> NDArray[np.int64]:
        """The response lengths of prompt `index`, int64 [group_size], without making the prompt."""
        return self._lengths(index, self._generator(index))

    def lengths_again(self, prompt: Prompt, draw: int) -> NDArray[np.int64]:
        """Return response lengths of a prompt that is generated again, int64 [group_size].

        `draw` is a number of 1 or more; the same `draw` always returns the same lengths.
        """
        index = prompt.metadata.get("index", prompt.key)
        counter = np.array([0, 0, 0, draw], dtype=np.uint64)
        key = np.array([self.seed, index], dtype=np.uint64)
        return self._lengths(index, Generator(Philox(key=key, counter=counter)), again=True)

    def _key(self, index: int) -> int:
        return index if self.epoch_prompts is None else index % self.epoch_prompts

    def _lengths(self, index: int, rng: Generator, *, again: bool = False) -> NDArray[np.int64]:
        key, epoch = self._key(index), self.epoch_prompts or index + 1
        if key == index and not again:
            return self._draw(rng, 1, key=key)[0]
        first = self._generator(key)
        shared, stays = first.standard_normal(), 1 - self.drift
        for earlier in range(key + epoch, index + 1, epoch):
            new = self._generator(earlier).standard_normal() if self.drift else 0.0
            shared = stays * shared + math.sqrt(1 - stays**2) * new
        return self._draw(rng, 1, key=key, shared=shared)[0]

    def moments(self, samples: int = 1 << 20) -> LengthMoments:
        """Moments of the capped distribution, by Monte Carlo over about `samples` responses.

        The draws come from a stream that no prompt uses. The standard error of the mean is
        ``mean * sqrt(cv2 * (1 + (group_size - 1) * rho) / samples)``, where rho is the correlation
        within a group, at most 1. With the defaults it is 0.3 % of the mean or less.
        """
        groups, rng = -(-samples // self.group_size), self._generator(_MOMENTS_STREAM)
        own = callable(self.distribution)
        keys = min((self.epoch_prompts or self.count or _PROMPTS) if own else 1, groups)
        each = [self._draw(rng, -(-groups // keys), key=key) for key in range(keys)]
        drawn = np.concatenate(each)
        mean = float(drawn.mean())
        return LengthMoments(
            mean=mean,
            cv2=float(drawn.var()) / mean**2,
            capped=float((drawn == self.cap).mean()),
        )

    def cap_warning(self) -> str | None:
        """Return a warning if the cap cuts off more than a quarter of the responses, or None."""
        dist = self.distribution
        whole = isinstance(dist, Empirical) and dist.lengths[-1] <= self.cap
        capped = 0.0 if whole else self.moments(1 << 16).capped
        if capped <= _MANY_CAPPED:
            return None
        return (
            f"{capped:.0%} of the responses are cut off at the cap of {self.cap:,} tokens; raise "
            "the cap, or give the length distribution of your responses."
        )

    def mean_length(self, samples: int = 1 << 20) -> float:
        """Return the mean length in tokens; see :meth:`moments`."""
        return self.moments(samples).mean

    def _generator(self, index: int) -> Generator:
        return Generator(Philox(key=np.array([self.seed, index], dtype=np.uint64)))

    def _draw(
        self, rng: Generator, groups: int, *, key: int = 0, shared: float | None = None
    ) -> NDArray[np.int64]:
        """Draw lengths, int64 [groups, group_size], from the distribution of prompt `key`.

        `shared` is the effect of a prompt that was drawn before.
        """
        drawn = rng.standard_normal((groups, 1))
        effect = drawn if shared is None else np.full((groups, 1), shared)
        own = rng.standard_normal((groups, self.group_size))
        x = np.sqrt(self.within_group) * effect + np.sqrt(1 - self.within_group) * own
        distribution = self.distribution
        if callable(distribution):
            distribution = distribution(key)
            _value(distribution, f"distribution({key})")
        if distribution is not None:
            shares, lengths = _quantiles(distribution, self.cap)
            place = np.searchsorted(shares[:-1], _phi(x))
            return lengths[place].astype(np.int64)
        # The cap applies to the logarithm, because exp() of an extreme draw would overflow.
        log_length = np.minimum(np.log(self.median) + self.sigma * x, np.log(self.cap))
        return np.clip(np.rint(np.exp(log_length)), 1, self.cap).astype(np.int64)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _value(given: Any, name: str) -> None:
    """Check that a distribution is an immutable value with a distribution function."""
    if isinstance(given, type):
        raise ConfigError(
            f"{name} is the class {given.__name__}; give a value, such as {given.__name__}(…)."
        )
    if not callable(getattr(given, "cdf", None)):
        raise ConfigError(
            f"{name} is {typed(given)}; give an object with cdf(lengths), or a function that gives "
            "that of each prompt by its key."
        )
    try:
        hash(given)
    except TypeError:
        raise ConfigError(
            f"{name} is {typed(given)}, which may change; give an immutable one, such as a frozen "
            "dataclass."
        ) from None
