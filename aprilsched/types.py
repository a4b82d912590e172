"""Data types that users and all parts of aprilsched share; they are frozen, with numpy arrays.

A :class:`Prompt` becomes a group of rollouts. A :class:`Rollout` is one sampled response.
A :class:`Group` holds the rollouts of one prompt. A :class:`Batch` is what a trainer consumes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.checks import (
    MAX_COUNT,
    OWN,
    SYNONYMS,
    checked,
    converted,
    names,
    plain,
    request_fields,
    suggesting,
    typed,
)
from aprilsched.kernel.values.companions import CompanionRows

if TYPE_CHECKING:
    from aprilsched.trainers.tensors import PackedTensors, PaddedTensors

Int32Array: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
FinishReason: TypeAlias = Literal["stop", "length"]
BranchRule: TypeAlias = Literal["last", "longest", "all"]
EpisodeWait: TypeAlias = Literal["tools", "agent", "score"]
MediaKind: TypeAlias = Literal["image", "video", "audio"]

_PLAIN: Mapping[str, type] = {
    "max_new_tokens": int,
    "min_new_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "ignore_eos": bool,
    "sampling_seed": int,
}
"""Types that need no conversion. This saves time, because a new SamplingParams is made for each
attempt that continues a response."""
_NO_SEED = ("sampling_seed", None)

SCORE_BYTES = 1 << 14
"""Largest size of the parts and the info of a :class:`Score` as JSON, in bytes. They are kept with
each rollout, saved by the store and written to the event log."""

ANSWER_BYTES = 1 << 20
"""Largest size, as JSON in bytes, of the kept entries of an engine's reply to one attempt."""

MAX_GROUP_SIZE = 2**16
"""Largest number of rollouts of one prompt."""

NO_VERSION = -1
"""Policy version of tokens that no policy sampled: an environment added them."""


@suggesting({**SYNONYMS, "stop": "stop_token_ids"})
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one response is sampled, in SGLang's names.

    Numbers may be numpy scalars; they are converted. ``extra`` is passed to the engine unchanged,
    so any other parameter of the server can be used; its values must be valid JSON.
    :func:`aprilsched.sampling_params` builds this from a mapping in the names of other libraries
    (``max_tokens``, ``stop``, ``seed``).

    If several rollouts share a ``sampling_seed`` of the run or of a prompt with a group, each gets
    its own seed, derived from it (`derived_seed`). Parameters of a single rollout keep theirs.

    ``request`` contains further fields of the request itself, in addition to the sampling
    parameters, such as ``{"priority": 3}``; fields that the scheduler sets are rejected. ``keep``
    names what to keep of an engine's reply in addition to the tokens (SGLang: entries of
    ``meta_info``); a rollout has it as ``answers``.
    """

    max_new_tokens: int = 1024
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in OWN.items():
            value = getattr(self, name)
            needless = type(value) is _PLAIN.get(name) and abs(value) <= MAX_COUNT
            if not needless and (name, value) != _NO_SEED:
                object.__setattr__(self, name, converted(name, value, kind))
        if self.extra or type(self.extra) is not dict:
            extra: Any = plain("extra", checked("extra", self.extra, Mapping))
            object.__setattr__(self, "extra", extra)
        if self.request or type(self.request) is not dict:
            object.__setattr__(self, "request", request_fields(self.request))
        if self.keep or type(self.keep) is not tuple:
            object.__setattr__(self, "keep", names("keep", self.keep))
        if self.max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens is {self.max_new_tokens}; a response needs at least 1 token."
            )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {self.min_new_tokens}; give a number from 0 to "
                f"max_new_tokens ({self.max_new_tokens})."
            )
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}; give 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; give a number above 0 and at most 1.")
        if self.top_k < 1 and self.top_k != -1:
            raise ConfigError(f"top_k is {self.top_k}; give 1 or more, or -1 for no limit.")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; give a number from 0 to 1.")

    def after(self, generated: int) -> SamplingParams:
        """The parameters for the rest of a response of which `generated` tokens are known."""
        if not generated:
            return self
        return replace(
            self,
            max_new_tokens=self.max_new_tokens - generated,
            min_new_tokens=max(0, self.min_new_tokens - generated),
        )


def derived_seed(seed: int, *path: int) -> int:
    """Return the seed, from 0 to 2**31 - 1, for the part of a run that `path` names.

    It depends on nothing else, so it is the same after a restart.
    """
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


MEDIA: tuple[MediaKind, ...] = ("image", "video", "audio")


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a video or a sound of a prompt. The scheduler never opens it.

    Args:
        kind: "image", "video" or "audio".
        source: a path or URL that the engines can read, or the content of the file.

    Raises:
        ConfigError: if the kind is unknown, or if the source is empty or neither str nor bytes.
    """

    kind: MediaKind
    source: str | bytes

    def __post_init__(self) -> None:
        if self.kind not in MEDIA:
            raise ConfigError(f"media has the kind {self.kind!r}; give one of {', '.join(MEDIA)}.")
        source: Any = self.source
        if not isinstance(source, str | bytes) or not source:
            raise ConfigError(f"the source of {self.kind} is empty or no str or bytes; give one.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """One prompt, which a group of rollouts answers.

    Args:
        input_ids: token ids, one dimension, at least one token; any integer sequence.
        sampling: parameters for all rollouts of the group, or one for each of them; None means
            the scheduler's own default.
        key: the user's name for the prompt, for example a dataset index. The lengths of the
            responses are remembered under it, if it is a string or a whole number, as evidence for
            the next epoch, so prompts that differ should have different keys. Subclasses of these,
            and NumPy's, become plain ones; other keys are kept unchanged.
        metadata: anything that a reward or an episode needs; it is never sent to an engine.
        group_size: number of rollouts of this prompt; None for that of the scheduler's
            configuration, or of the call of ``evaluate()``.
        affinity: name that prompts share whose contexts start with the same tokens, such as the
            turns of one conversation. With ``Dispatch(placement="prefix")`` their rollouts go to
            the same engine, for its cached keys, unless that has far more to do than the others.
        media: images and other media, in the order of their places in `input_ids`. These ids have
            one placeholder for each, as the chat template writes it: the engine expands it.
        companions: names of those of the run's companions that the responses have; None for all.

    Raises:
        ConfigError: if `input_ids` is empty, not one-dimensional or holds negative ids, if
            `group_size` is not a whole number of 1 or more, or if `media` has anything else.
    """

    input_ids: Int32Array
    sampling: SamplingParams | tuple[SamplingParams, ...] | None = None
    key: str | int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    group_size: int | None = None
    affinity: str | None = None
    media: tuple[Media, ...] = ()
    companions: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", token_array(self.input_ids, "input_ids"))
        if self.media or type(self.media) is not tuple:
            given: Any = self.media
            several: Any = cast("Any", given if isinstance(given, list | tuple) else (None,))
            if not all(isinstance(each, Media) for each in several):
                raise ConfigError(f"media is {typed(self.media)}; give a tuple of Media(...).")
            object.__setattr__(self, "media", tuple(several))
        if self.companions is not None:
            object.__setattr__(self, "companions", names("companions", self.companions))
        key: object = self.key
        # A key of a subclass or of NumPy would not be remembered, nor found again in a store.
        if isinstance(key, str):
            object.__setattr__(self, "key", str.__str__(key))
        elif isinstance(key, Integral) and not isinstance(self.key, bool):
            object.__setattr__(self, "key", int(key))
        if isinstance(self.key, int) and abs(self.key) >= 2**63:
            raise ConfigError(
                f"key must be between -2**63 and 2**63, got {self.key}; use it as text."
            )
        if self.group_size is not None:
            size = int(checked("group_size", self.group_size, Integral))
            if not 1 <= size <= MAX_GROUP_SIZE:
                raise ConfigError(
                    f"group_size must be 1 to {MAX_GROUP_SIZE:,} or None, got {size}."
                )
            object.__setattr__(self, "group_size", size)
        if isinstance(self.sampling, list):
            object.__setattr__(self, "sampling", tuple(self.sampling))


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A reward with its named parts, and other facts about the rollout.

    A reward function may return it in the place of a number, and so may an episode. It ends up in
    the rollout, in the event log and, as means, in the run's summary. Where an episode and a reward
    function give a score for the same rollout, the names of both are kept, and for a name in both
    the value of the reward function.

    Args:
        reward: the reward, a finite number. Only an episode may leave it out, so that the reward
            function gives it.
        parts: parts of the reward by name, such as ``{"format": 0.5, "answer": 1.0}``, finite
            numbers. They are reported and need not add up to `reward`.
        info: facts by name, such as ``{"tool_calls": 3}``, in what JSON can hold. Tuples become
            lists, and NumPy numbers and arrays become numbers and lists.

    Raises:
        ConfigError: if a number is not finite, if `info` holds what JSON cannot, or if parts and
            info together need more than 16 KiB as JSON.
    """

    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.reward is not None:
            object.__setattr__(self, "reward", _finite("the reward", self.reward))
        given: tuple[Any, Any] = (self.parts, self.info)
        if given == ({}, {}):
            return
        parts: Mapping[Any, Any] = checked("parts", given[0], Mapping)
        info: dict[str, Any] = plain("info", checked("info", given[1], Mapping))
        named = {
            str(name): _finite(f"the part {name!r} of the reward", each)
            for name, each in parts.items()
        }
        try:
            size = len(json.dumps((named, info), ensure_ascii=False).encode())
        except ValueError as error:  # half of a surrogate pair
            raise ConfigError(f"a score holds text that is not Unicode ({error}).") from error
        if size > SCORE_BYTES:
            raise ConfigError(
                f"parts and info of a score need {size} bytes as JSON; give at most {SCORE_BYTES}, "
                "and keep larger data elsewhere under a key."
            )
        object.__setattr__(self, "parts", named)
        object.__setattr__(self, "info", info)


def _finite(what: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ConfigError(f"{what} is {number}; give a finite number.")
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedPrompt:
    """A prompt of the source that cannot be used, with the cause.

    It goes to the ledger. It keeps its place among the other prompts, so that a resumed run skips
    the right number of prompts.
    """

    cause: str


def token_array(ids: Sequence[int] | Int32Array, what: str) -> Int32Array:
    """Token ids as a read-only int32 array.

    Raises:
        ConfigError: if `ids` is empty, text, not one-dimensional, not integer or negative.
    """
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise ConfigError(f"{what} must be a row of integer token ids ({error}).") from error
    if array.dtype.kind in "US":
        raise ConfigError(f"{what} is text; give the ids that the model's tokenizer makes of it.")
    if array.ndim != 1 or array.size == 0:
        raise ConfigError(f"{what} has shape {array.shape}; give at least one token id in a row.")
    if array.dtype.kind not in "iu":
        raise ConfigError(f"{what} holds {array.dtype} values; give integer token ids.")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise ConfigError(f"{what} holds ids outside of 0 to 2**31 - 1; give valid token ids.")
    frozen = array.astype(np.int32)
    frozen.flags.writeable = False
    return frozen


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens ``start`` to ``end`` (exclusive) of a request's output were sampled by ``version``."""

    version: int
    start: int
    end: int


class Segment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Response tokens ``start`` to ``end``, of one policy version and from one engine.

    Tokens that an environment added are a segment of their own, with ``version`` -1 and
    ``engine`` None.
    """

    start: int
    end: int
    version: int
    engine: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an engine answered in addition to the tokens of one attempt (``SamplingParams.keep``).

    Attributes:
        start: index of the attempt's first token in the response.
        values: the entries by name, in JSON's types.
        sizes: the size of each entry that came, as JSON in bytes; 0 if JSON has no form for it. An
            entry that is not in `values` was left out: those of one attempt have at most 1 MiB
            together.
    """

    start: int = 0
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of entries that came and are not kept."""
        return tuple(name for name in self.sizes if name not in self.values)

    @staticmethod
    def of(entries: Mapping[str, Any], keep: Sequence[str]) -> Answer | None:
        """What of an engine's `entries` is to be kept; None if nothing of it came."""
        values: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        room = ANSWER_BYTES
        for name in keep:
            if name in entries:
                try:
                    value = plain(name, entries[name])
                except ConfigError:
                    sizes[name] = 0
                    continue
                sizes[name] = len(json.dumps(value))
                if sizes[name] <= room:
                    room -= sizes[name]
                    values[name] = value
        return Answer(values=values, sizes=sizes) if sizes else None


class Rollout(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sampled response. All token arrays have the length of the response, T.

    Attributes:
        prompt_ids: int32 [P], the context of the first token.
        token_ids: int32 [T], the response, including tokens that the environment added.
        logprobs: float32 [T], natural log-probability under the version that sampled the
            token; 0 for tokens of the environment.
        versions: int32 [T], the policy version that sampled the token; -1 for tokens of the
            environment.
        loss_mask: bool [T], False for tokens of the environment and for tokens that are masked
            because their staleness is above the scheduler's bound.
        segments: `versions` as consecutive segments, with the engine that decoded each.
        versions_exact: False if the server could not tell the version of every token, or was lost
            or put on standby before it did. `versions` then has those at the tokens' arrival: the
            first tokens after an update may be of an earlier one.
        reward: the score; None without a reward function.
        reward_parts: parts of the reward by name, if the reward function or the episode gave a
            :class:`Score` with parts.
        info: facts about the rollout from the same :class:`Score`; JSON's types only.
        stale_keys: True if an engine kept the rollout's KV across a refit, or may have found it in
            a storage, and sampled tokens after it. These tokens attend to keys that older weights
            computed, so their logprobs belong to no single version, although `versions` names one.
        companions: what the engines returned in addition to the tokens, by name, if
            ``SchedulerConfig.companions`` asks for it.
        answers: what else the engines answered, for each attempt that brought something of what
            ``SamplingParams.keep`` names, in their order.
        branches: the later branches of an episode that left its context and kept all of them
            (``Turn.branches``), in the order in which they started, each as a rollout with the same
            ids. The reward is that of all of them: each branch has it, and the advantage of the
            group counts it once. :meth:`Batch.to_torch` makes a row of each.
        shared: number of the first response tokens that an earlier branch has too. Their loss mask
            is False here, so that each token is trained once.
    """

    rollout_id: int
    group_id: int
    index: int
    prompt_ids: Int32Array
    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    loss_mask: BoolArray
    segments: tuple[Segment, ...]
    versions_exact: bool
    finish_reason: FinishReason
    reward: float | None = None
    turns: int = 1
    stale_keys: bool = False
    reward_parts: Mapping[str, float] = {}
    info: Mapping[str, Any] = {}
    companions: Mapping[str, CompanionRows] = {}
    answers: tuple[Answer, ...] = ()
    branches: tuple[Rollout, ...] = ()
    shared: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the sampled tokens; None if none was sampled."""
        sampled = self.versions[self.versions != NO_VERSION]
        return int(sampled.min()) if sampled.size else None

    def staleness(self, version: int) -> int:
        """Number of versions from the oldest sampled token to `version`, which consumes it.

        It is 0 if the tokens are of a newer version, which another program loaded.
        """
        oldest = self.oldest_version
        return 0 if oldest is None else max(0, version - oldest)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """All rollouts of one prompt, in the order of their `index`."""

    group_id: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def unit_id(self) -> int:
        """Id of this unit of delivery: that of the group."""
        return self.group_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Sibling:
    """The reward of another rollout of the same prompt."""

    rollout_id: int
    index: int
    reward: float | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One rollout that is delivered without waiting for all of its group.

    Attributes:
        rollout: the rollout.
        prompt: the prompt of its group.
        siblings: the first other members of the group whose generation ended, in that order. They
            are the same whatever this rollout's length and reward are, so a baseline made of their
            rewards keeps the policy gradient unbiased.
        few: True if the group has lost members, so there are fewer siblings than configured.
    """

    rollout: Rollout
    prompt: Prompt
    siblings: tuple[Sibling, ...]
    few: bool = False

    @property
    def unit_id(self) -> int:
        """Id of this unit of delivery: that of the rollout."""
        return self.rollout.rollout_id

    @property
    def group_id(self) -> int:
        """Id of the group that the rollout belongs to."""
        return self.rollout.group_id

    @property
    def reward(self) -> float | None:
        """The reward of the rollout."""
        return self.rollout.reward

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """The rollout, as the only one of this unit."""
        return (self.rollout,)


Unit: TypeAlias = Group | Sample
"""What a batch is made of."""


class Receipt:
    """Acknowledges a batch that the trainer is done with.

    A copy in another process, whether sent or forked, cannot do so: the scheduler is not there.
    """

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[[], None] | None = None) -> None:
        self._tell = tell

    def __reduce__(self) -> tuple[type[Receipt], tuple[()]]:
        return (Receipt, ())

    def acknowledge(self) -> None:
        """Mark the batch as done, so that a restart does not deliver it again.

        Raises:
            ConfigError: in any process but the scheduler's.
        """
        if self._tell is None:
            raise self.elsewhere()
        self._tell()

    @staticmethod
    def elsewhere() -> ConfigError:
        """Return the error for a call in a process that does not have the scheduler."""
        return ConfigError(
            "this batch is a copy from another process; acknowledge it in the process of the "
            "scheduler."
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Whole groups, or single samples, for one training step.

    Attributes:
        index: number of the batch, from 0; a batch that is delivered again keeps its number.
        version: the trainer's policy version at delivery; staleness is counted from it.
        units: the groups of the batch, or its samples.
        redelivered: True if the batch was delivered before a restart and not acknowledged. Its
            content is the same as then, unless the store has lost it, which is logged. Also True
            if some of its units were taken by ``stream()`` before a restart: these come first,
            and the others are new.
        receipt: acknowledges the batch; see :meth:`acknowledge`.
        complete: False for a part of a streamed batch that is not the last one, see
            :meth:`aprilsched.RolloutScheduler.stream`.
    """

    index: int
    version: int
    units: tuple[Unit, ...]
    redelivered: bool = False
    complete: bool = True
    receipt: Receipt | None = field(default=None, repr=False)

    def acknowledge(self) -> None:
        """Mark this batch as done, so that a restart does not deliver it again.

        Call it when the result of training on the batch is saved. The next weight update also
        acknowledges the batch, unless it gets ``acknowledge=False``. Without a store, acknowledging
        has no effect.

        Raises:
            ConfigError: in any process but the scheduler's.
        """
        if self.receipt is not None:
            self.receipt.acknowledge()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the batch.

        Raises:
            ConfigError: if the batch consists of samples.
        """
        groups = tuple([unit for unit in self.units if isinstance(unit, Group)])
        if len(groups) < len(self.units):
            raise ConfigError(
                'delivery="samples" makes batches of single samples; use batch.samples.'
            )
        return groups

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples of the batch.

        Raises:
            ConfigError: if the batch consists of whole groups.
        """
        samples = tuple([unit for unit in self.units if isinstance(unit, Sample)])
        if len(samples) < len(self.units):
            raise ConfigError('delivery="groups" makes batches of whole groups; use batch.groups.')
        return samples

    @property
    def rollouts(self) -> Iterator[Rollout]:
        """Every rollout, unit by unit."""
        return (rollout for unit in self.units for rollout in unit.rollouts)

    @property
    def tokens(self) -> int:
        """Number of response tokens in the batch, those of branches included once."""
        return sum(
            len(each) - each.shared
            for rollout in self.rollouts
            for each in (rollout, *rollout.branches)
        )

    def to_torch(self, *, packed: bool = False, pad_id: int = 0) -> PaddedTensors | PackedTensors:
        """Return the batch as torch tensors (needs the extra ``torch``).

        Padded (the default): [rollouts, longest] with prompt and response in one row, padded
        on the right with `pad_id`. Packed: one row, with ``cu_seqlens`` int32 [rollouts + 1],
        as variable-length attention takes it. See :mod:`aprilsched.trainers.tensors` for the
        fields. Media of the prompts are not among them: ``group.prompt.media`` has the sources.

        Raises:
            ConfigError: if torch is not installed.
        """
        from aprilsched.trainers.tensors import pack, pad

        rollouts = tuple([e for rollout in self.rollouts for e in (rollout, *rollout.branches)])
        if packed:
            return pack(rollouts, no_version=NO_VERSION, units=self.units)
        return pad(rollouts, pad_id=pad_id, no_version=NO_VERSION, units=self.units)
