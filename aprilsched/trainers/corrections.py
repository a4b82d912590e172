"""What off-policy tokens need in a trainer's loss: weights, masks, ratios and the clipped loss.

A batch holds tokens of several policy versions. Their log-probabilities and versions are in the
batch (:class:`~aprilsched.Rollout`, :meth:`~aprilsched.Batch.to_torch`), and nothing
else is needed here, so the functions work in any trainer::

    tensors = batch.to_torch()
    mask = staleness_mask(
        tensors.versions, tensors.loss_mask, version=batch.version, max_staleness=4
    )
    weights = importance_weights(proximal, tensors.logprobs, mask, high=2.0)
    loss = clipped_loss(logprobs, proximal, advantages, mask, weights=weights)
    (loss.sum() / tensors.loss_mask.sum()).backward()

Three policies have names in all signatures and formulas. The *behaviour* policy b sampled the
token: its log-probabilities are those of the batch. The *proximal* policy p is the one that the
training step starts with, and the trust region is around it. The *current* policy θ is being
trained, and only its log-probabilities carry a gradient.

Every function takes either numpy arrays or torch tensors, not a mixture, and returns the same
kind on the same device. Arrays of tokens have one shape: padded [B, S] (a row is a sequence) or
packed [N] (then levels other than "token" need ``cu_seqlens``). Log-probabilities are natural
logarithms of any floating dtype; the result is at least float32. A mask is boolean, or a number
that is 0 for tokens that do not count, such as prompts, padding and tokens of an environment. The
other arrays' values at these tokens have no influence, not even if they are NaN or infinite.

torch is never imported here: a caller who has a tensor has imported it. The few functions that
are used (exp, clip, where, sum, cumsum, argsort) have the same names and positional arguments in
numpy and torch, so an array API wrapper would be a dependency without a use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from numpy.typing import NDArray

from aprilsched.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
from aprilsched.trainers.arrays import (
    advantages_like,
    detached,
    like,
    masked_difference,
    namespace,
    owners,
    per_sequence,
    sums,
    wide,
)

__all__ = [
    "Level",
    "clipped_loss",
    "importance_weights",
    "interpolated_proximal",
    "ratios",
    "renormalized",
    "second_moment_mask",
    "staleness",
    "staleness_mask",
]

T = TypeVar("T", NDArray[Any], "Tensor")
Level: TypeAlias = Literal["token", "sequence", "geometric"]

_LARGEST_LOG_RATIO = 20.0
"""Log-ratios are limited to ±20 (slime's SAFETY_BOUND), so that a ratio is finite in float32. The
product over a long sequence would overflow otherwise, and give a NaN gradient."""


def staleness(versions: T, *, version: int) -> T:
    """Return the number of versions between the policy that sampled a token and `version`.

    It is ``max(0, version - versions)``, and 0 for tokens that no policy sampled (negative
    versions).

    Args:
        versions: integers, any shape; the versions of the batch.
        version: the version that consumes the tokens, usually ``batch.version``.

    Returns:
        Integers of the shape and dtype of `versions`.
    """
    xp = namespace(versions=versions)
    return xp.where(versions < 0, 0, xp.clip(version - versions, 0, None))


def staleness_mask(versions: T, mask: T, *, version: int, max_staleness: int) -> T:
    """Return the tokens of `mask` that are at most `max_staleness` versions old.

    The ``loss_mask`` of a batch follows the scheduler's own bound already. This function is for a
    bound that the trainer chooses, for example one that it changes during the run.

    Args:
        versions: integers, any shape; the versions of the batch.
        mask: the tokens that count, same shape.
        version: the version that consumes the tokens, usually ``batch.version``.
        max_staleness: the largest allowed staleness in versions; 0 leaves on-policy tokens only.

    Returns:
        Booleans of the same shape.

    Raises:
        ConfigError: if `max_staleness` is negative.
    """
    if max_staleness < 0:
        raise ConfigError(f"max_staleness is {max_staleness}; give 0 or more.")
    namespace(versions=versions, mask=mask)
    young: Any = staleness(versions, version=version) <= max_staleness
    return (mask != 0) & young


def ratios(
    logprobs: T,
    behaviour_logprobs: T,
    mask: T,
    *,
    level: Level = "token",
    cu_seqlens: T | None = None,
) -> T:
    """Importance ratios of one policy against another.

    With d_t = log π(t) - log b(t), a token's ratio is

    - ``"token"``: exp(d_t), each token's own;
    - ``"sequence"``: exp(Σ d_t), the ratio of the whole response: unbiased, and of large variance;
    - ``"geometric"``: exp(mean d_t), the geometric mean of GSPO (arXiv 2507.18071, eq. 7), whose
      size does not depend on the response's length.

    Sums and means are over the tokens of `mask` in one sequence, and each of these tokens has the
    ratio of its sequence. The gradient flows through `logprobs`, and through no other argument.

    Args:
        logprobs: log-probabilities under the policy in the numerator, [B, S] or [N].
        behaviour_logprobs: log-probabilities under the policy in the denominator, same shape.
        mask: the tokens that count, same shape.
        level: which ratio.
        cu_seqlens: integers [B + 1], the bounds of packed sequences; only for [N], and only for
            the levels that need it.

    Returns:
        The ratios, of the same shape; 0 outside of `mask`.

    Raises:
        ConfigError: if shapes or kinds of arrays differ, or `level` and `cu_seqlens` do not fit.
    """
    xp = namespace(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, mask=mask)
    counted: Any = mask != 0
    difference = masked_difference(logprobs, detached(behaviour_logprobs), counted)
    if level == "token":
        log_ratio = difference
    elif level in ("sequence", "geometric"):
        mean = level == "geometric"
        log_ratio = per_sequence(difference, counted, mean=mean, cu_seqlens=cu_seqlens)
    else:
        raise ConfigError(f"level is {level!r}; give 'token', 'sequence' or 'geometric'.")
    ratio = xp.exp(xp.clip(log_ratio, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO))
    return xp.where(counted, ratio, 0.0)


def renormalized(logits: T, token_ids: T, mask: T, *, kept: T, offsets: T) -> T:
    """Log-probabilities under the policy that top-k, top-p and min-p left to sample from.

    With the ids K of a token's sampling mask and its logits z, that is

    log π'(t) = z_t - log Σ_K exp(z_k) = log π(t) - log Σ_K π(k).

    The engine chose K under its own weights. The current and the proximal policy are cut to the
    same K, so that both sides of their ratio have the same support (slime's ``--rollout-top-p``).
    The log-probabilities of a batch are those before the cut, and no side of such a ratio.
    Gradients flow through the logits of K alone. No array of the size of `logits` is made.

    Args:
        logits: [B, S, V] or [N, V], as a model gives them and divided by the temperature: entry i
            is for the token after token i.
        token_ids: integers [B, S] or [N], the tokens; ``input_ids`` of a batch.
        mask: the tokens that count, same shape.
        kept: integers [n], ``companions["sampling_mask"].values`` of a batch.
        offsets: integers [B * S + 1] or [N + 1], its offsets.

    Returns:
        Log-probabilities of the shape of `token_ids`; 0 outside of `mask`.

    Raises:
        ConfigError: if a token that counts has no sampling mask, or for shapes and kinds of arrays
            that differ.
    """
    xp = namespace(token_ids=token_ids, mask=mask)
    untyped: Any = logits
    rows: Any = untyped.reshape(-1, untyped.shape[-1])
    counted: Any = (mask != 0).reshape(-1)
    if logits.shape[:-1] != token_ids.shape or len(offsets) != len(rows) + 1:
        raise ConfigError(
            f"logits have shape {tuple(logits.shape)}, tokens {tuple(token_ids.shape)} and there "
            f"are {len(offsets)} offsets; give a row of logits and of kept ids for each token."
        )
    if bool((counted & (offsets[1:] == offsets[:-1])).any()):
        raise ConfigError(
            "a token that counts has no sampling mask; ask for it with required=True, which masks "
            "tokens whose sampling mask was lost."
        )
    owner = owners(offsets)
    # The largest logit is subtracted before exp, which would overflow.
    top = wide(xp.amax(detached(rows), -1))
    among = xp.exp(wide(rows[owner - 1, kept]) - top[owner - 1])
    total = xp.where(counted, sums(among, owner, len(rows)), 1.0)
    # The first token of a sequence has none before it, and is one of the prompt.
    before = xp.cumsum(xp.ones_like(offsets[1:]), 0) - 2
    own = wide(rows[before, token_ids.reshape(-1)]) - top[before]
    return xp.where(counted, own - xp.log(total), 0.0).reshape(token_ids.shape)


def importance_weights(
    logprobs: T,
    behaviour_logprobs: T,
    mask: T,
    *,
    high: float = 2.0,
    low: float = 0.0,
    outside: Literal["truncate", "mask"] = "truncate",
    level: Level = "token",
    cu_seqlens: T | None = None,
) -> T:
    """Factors for the loss of tokens that another policy sampled: truncated importance sampling.

    With the ratio r of :func:`ratios` a token's weight is

    - ``outside="truncate"``: min(max(r, low), high). This is slime's TIS (``--use-tis``,
      ``--tis-clip``, ``--tis-clip-low``; its defaults are the defaults here), and TRL's modes
      ``token_truncate`` and ``sequence_truncate``.
    - ``outside="mask"``: r if low ≤ r ≤ high, otherwise 0, so that the token does not count at
      all. This is the masked variant: slime's icepop function, TRL's ``token_mask`` and
      ``sequence_mask``, AReaL's rejection sampling.

    The bias of truncation is bounded and one-sided; masking also removes tokens that the engine
    and the trainer disagree about. Weights carry no gradient: they correct who sampled the token,
    and the loss that they multiply has the gradient.

    Args:
        logprobs: log-probabilities under the proximal policy, recomputed by the trainer or from
            :func:`interpolated_proximal`; [B, S] or [N].
        behaviour_logprobs: those of the batch, same shape.
        mask: the tokens that count, same shape.
        high: upper bound of the ratio, at least 1.
        low: lower bound of the ratio, from 0 to 1.
        outside: what is done with a ratio outside of the bounds.
        level: see :func:`ratios`.
        cu_seqlens: see :func:`ratios`.

    Returns:
        Weights of the same shape, without a gradient; 0 outside of `mask`.

    Raises:
        ConfigError: if a bound is out of its range, or for the causes of :func:`ratios`.
    """
    if not 0 <= low <= 1 <= high:
        raise ConfigError(
            f"low is {low} and high is {high}; give 0 <= low <= 1 <= high, so that an on-policy "
            "token has the weight 1."
        )
    if outside not in ("truncate", "mask"):
        raise ConfigError(f"outside is {outside!r}; give 'truncate' or 'mask'.")
    ratio = ratios(detached(logprobs), behaviour_logprobs, mask, level=level, cu_seqlens=cu_seqlens)
    xp = namespace(logprobs=logprobs)
    if outside == "truncate":
        return xp.where(mask != 0, xp.clip(ratio, low, high), 0.0)
    # Written so that a NaN is kept and seen, as it is by truncation.
    return xp.where((ratio < low) | (ratio > high), 0.0, ratio)


def interpolated_proximal(
    logprobs: T,
    behaviour_logprobs: T,
    versions: T,
    *,
    proximal_version: int,
    current_version: int | None = None,
) -> T:
    """An estimate of the proximal policy's log-probabilities, without a forward pass for them.

    Between the behaviour version v_b and the current version v_θ, log-probabilities are taken as
    linear in the version (AReaL's ``prox_logp_method="loglinear"``):

    log p ≈ log b + a (log π_θ - log b), with a = (v_p - v_b) / (v_θ - v_b), limited to [0, 1].

    A token of the proximal version itself has ``a = 0``: its proximal log-probability is that of
    the batch, which is exact. Tokens of a newer version and tokens that no policy sampled keep that
    of the batch too. The older a token is, the nearer `a` is to 1.

    For the steps on one batch the proximal version is ``batch.version``, and the weights that they
    lead to have the next one. (AReaL counts one less: it takes the version that it trains from as
    the current one, and the version before it as the proximal one.)

    Args:
        logprobs: log-probabilities under the current policy, any shape.
        behaviour_logprobs: those of the batch, same shape.
        versions: integers, same shape; the versions of the batch.
        proximal_version: the version that the training step starts with.
        current_version: the version that is being trained; None means ``proximal_version + 1``.

    Returns:
        Log-probabilities of the same shape, without a gradient.

    Raises:
        ConfigError: if `current_version` is below `proximal_version`, or for shapes and kinds of
            arrays that differ.
    """
    current = proximal_version + 1 if current_version is None else current_version
    if current < proximal_version:
        raise ConfigError(
            f"current_version is {current} and proximal_version is {proximal_version}; the current "
            "policy is the proximal one or a later one."
        )
    xp = namespace(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, versions=versions)
    behaviour: Any = wide(detached(behaviour_logprobs))
    older: Any = (versions >= 0) & (versions < proximal_version)
    # The divisor is 1 where nothing is interpolated, so that nothing is divided by zero there.
    distance = like(xp.where(older, current - versions, 1), behaviour)
    step = masked_difference(detached(logprobs), behaviour, older)
    return behaviour + like(proximal_version - versions, behaviour) / distance * step


def clipped_loss(
    logprobs: T,
    proximal_logprobs: T,
    advantages: T,
    mask: T,
    *,
    weights: T | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: Level = "token",
    cu_seqlens: T | None = None,
) -> T:
    """The clipped policy-gradient loss of each token, to be summed and divided by the trainer.

    With u = π_θ / p (:func:`ratios` of that level), weight w and advantage A:

    loss = -w min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)

    What it is depends on the arguments:

    - *PPO, GRPO*: `proximal_logprobs` are those of the batch, without `weights`. The trust region
      is then around the policy that sampled each token, however old it is.
    - *Decoupled PPO* (AReaL, arXiv 2505.24298, eq. 5): `proximal_logprobs` recomputed or from
      :func:`interpolated_proximal`, `weights` from :func:`importance_weights` of the proximal
      against the behaviour policy. slime's ``--use-tis`` is the same with weights of at most 2.
    - *GSPO* (arXiv 2507.18071): ``level="geometric"``, with bounds of a few 1e-4 and one advantage
      for each sequence.
    - *M2PO* (arXiv 2510.01161): the mask of :func:`second_moment_mask`, ``clip_low=1`` and
      ``clip_high=math.inf``, which clip nothing.

    The gradient flows through `logprobs` only. All other arguments are constants here.

    Args:
        logprobs: log-probabilities under the policy being trained, [B, S] or [N].
        proximal_logprobs: log-probabilities that the trust region is around, same shape.
        advantages: same shape, or [B, 1] for one value for each row.
        mask: the tokens that count, same shape as `logprobs`.
        weights: factors of the same shape; None means 1.
        clip_low: how far the ratio may fall below 1, from 0 to 1.
        clip_high: how far the ratio may rise above 1, at least 0.
        level: see :func:`ratios`.
        cu_seqlens: see :func:`ratios`.

    Returns:
        Losses of the shape of `logprobs`; 0 outside of `mask`. They are to be divided by the number
        of tokens that count *before* any token was masked for its staleness or its ratio; divided
        by the rest, the remaining tokens would weigh more the more were masked.

    Raises:
        ConfigError: if a bound is out of its range, or for the causes of :func:`ratios`.
    """
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ConfigError(
            f"clip_low is {clip_low} and clip_high is {clip_high}; give 0 <= clip_low <= 1 and "
            "clip_high >= 0."
        )
    ratio = ratios(logprobs, proximal_logprobs, mask, level=level, cu_seqlens=cu_seqlens)
    xp = namespace(logprobs=logprobs)
    counted: Any = mask != 0
    advantage = xp.where(counted, advantages_like(advantages, logprobs), 0.0)
    clipped = xp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -xp.minimum(ratio * advantage, clipped * advantage)
    if weights is not None:
        namespace(logprobs=logprobs, weights=weights)
        loss = loss * xp.where(counted, wide(detached(weights)), 0.0)
    return xp.where(counted, loss, 0.0)


def second_moment_mask(
    logprobs: T,
    behaviour_logprobs: T,
    mask: T,
    *,
    bound: float = 0.04,
    advantages: T | None = None,
) -> T:
    """Return the tokens of `mask` without those of the largest importance ratios: M2PO's mask.

    The second moment M2 is the mean of (log π - log b)² over the tokens. The tokens with the
    largest squares are left out, one after the other, until M2 of the rest is at most `bound`
    (M2PO, arXiv 2510.01161). So extreme tokens go, and a batch whose tokens are all a little off
    keeps them; a bound on each single ratio clips them all. All tokens are one population: call
    this for a whole batch, not for a micro-batch.

    With `advantages` only tokens that a training step moves further away are counted and left
    out: those with a positive advantage and a ratio above 1, or a negative one and a ratio below
    1. The authors' code does this. Without, every token counts, as in AReaL
    (``actor.m2_threshold``). AReaL keeps one token even if it is above the bound; here none is
    kept then.

    Args:
        logprobs: log-probabilities under the current or the proximal policy, any shape.
        behaviour_logprobs: those of the batch, same shape.
        mask: the tokens that count, same shape.
        bound: the largest allowed mean, in squared nats; 0.04 is the authors' value.
        advantages: same shape, or [B, 1]; None means that every token counts.

    Returns:
        Booleans of the same shape, without a gradient.

    Raises:
        ConfigError: if `bound` is negative, or for shapes and kinds of arrays that differ.
    """
    if not bound >= 0:
        raise ConfigError(f"bound is {bound}; give 0 or more.")
    xp = namespace(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, mask=mask)
    counted: Any = mask != 0
    difference = masked_difference(detached(logprobs), detached(behaviour_logprobs), counted)
    constrained = counted
    if advantages is not None:
        advantage = xp.where(counted, advantages_like(advantages, logprobs), 0.0)
        constrained = counted & (advantage * difference > 0)
    squares = difference[constrained] ** 2
    # Sorted from small to large, the means of the beginnings rise, so those within the bound are
    # the first ones. A NaN is sorted to the end, and left out.
    order = xp.argsort(squares, stable=True)
    means = xp.cumsum(squares[order], 0) / xp.cumsum(xp.ones_like(order), 0)
    kept = order < 0
    kept[order] = means <= bound
    result: Any = counted & ~constrained
    result[constrained] = kept
    return result
