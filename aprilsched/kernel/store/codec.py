"""Encodes records as typed MessagePack with a checksum, and decodes them; it never unpickles.

The order of the fields in these structs is the format: a new field goes to the end, with a default.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, TypeVar, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.policies.kinds import REFILLS
from aprilsched.kernel.core.policies.placement import Placement
from aprilsched.kernel.core.policies.schedule import Forecast, Pace, Schedule
from aprilsched.kernel.core.state.saved import SavedGroup, SavedMember
from aprilsched.kernel.values.companions import Rows
from aprilsched.types import Media, Prompt, SamplingParams, Sibling

T = TypeVar("T")

_SCALARS = frozenset({type(None), bool, float, str})


def check_json(value: object) -> None:
    """Refuse a value that JSON has no form for. Types are compared exactly, because a subclass (an
    integer enum, a named tuple) would come back as its base class.

    Raises:
        TypeError or ValueError: if it, or a value in it, would not come back unchanged.
    """
    kind = type(value)
    if isinstance(value, list) and kind is list:
        for each in cast("list[object]", value):
            check_json(each)
    elif isinstance(value, dict) and kind is dict:
        for key, each in cast("dict[object, object]", value).items():
            if type(key) is not str:
                raise TypeError(f"a key of type {type(key).__qualname__}")
            check_json(each)
    elif isinstance(value, int) and kind is int:
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError("a whole number of more than 64 bits")
    elif kind not in _SCALARS:
        raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__}")


class _Group(msgspec.Struct, array_like=True):
    group_id: int
    opened: int
    input_ids: bytes
    sampling: SamplingParams | list[SamplingParams] | None
    key: Any
    metadata: Any
    """The caller's own values, which :func:`check_json` has passed."""
    members: list[tuple[int, int, int, int]]
    """For each member its rollout id, its index, the index of its sampling in `samplings`, and how
    often it was generated again."""
    samplings: list[SamplingParams]
    group_size: int | None = None
    affinity: str | None = None
    again: int | None = None
    media: list[list[Any]] = []
    """The kind and the source, str or bytes, of each."""
    lost: int = 0
    companions: tuple[str, ...] | None = None
    source: int | None = None
    siblings: tuple[Sibling, ...] = ()


class _Schedule(msgspec.Struct, array_like=True):
    over_provision: float
    refill: tuple[str, dict[str, Any]]
    why: str
    forecast: Forecast | None = None
    pace: Pace | None = None
    placement: Placement | None = None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        plain: dict[Any, Any] = dict(cast("Mapping[Any, Any]", value))
        return plain
    if isinstance(value, np.generic):
        return cast("np.generic[Any]", value).item()
    if isinstance(value, np.ndarray):
        return cast("NDArray[Any]", value).tobytes()
    raise TypeError(type(value).__name__)


def _array_from(kind: Any, body: bytes) -> NDArray[Any]:
    """The array of a field of type `kind`, which is NDArray[...] of one dimension."""
    return np.frombuffer(body, dtype=get_args(get_args(kind)[1])[0])


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(record: object) -> bytes:
    """Encode a record; arrays of one dimension become their bytes."""
    return _encoder.encode(record)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode the record in `body`.

    Raises:
        msgspec.MsgspecError: if it is not a record of this kind.
    """
    return msgspec.msgpack.decode(body, type=kind, dec_hook=_array_from)


def checksum(*parts: bytes | memoryview) -> int:
    """The CRC-32 over all parts."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def check_storable(prompt: Prompt) -> None:
    """Refuse a prompt that would not come back from a store unchanged.

    Raises:
        ConfigError: if its key, metadata or sampling parameters cannot be stored.
    """
    key = prompt.key
    named = key is None or type(key) is int or (type(key) is str and key.isascii())
    if named and prompt.sampling is None and prompt.metadata == {}:
        return
    body = group_record(SavedGroup(group_id=0, prompt=prompt, opened=0, members=()))
    try:
        group_from(body)
    except Exception as error:
        raise _unstorable(prompt, error) from error


def group_record(group: SavedGroup) -> bytes:
    """Encode a group.

    Raises:
        ConfigError: if the prompt holds a value that cannot be stored.
    """
    prompt = group.prompt
    samplings: list[SamplingParams] = []
    members: list[tuple[int, int, int, int]] = []
    for member in group.members:
        if member.sampling not in samplings:
            samplings.append(member.sampling)
        place = samplings.index(member.sampling)
        members.append((member.rollout_id, member.index, place, member.again))
    sampling = prompt.sampling
    record = _Group(
        group_id=group.group_id,
        opened=group.opened,
        input_ids=prompt.input_ids.tobytes(),
        sampling=list(sampling) if isinstance(sampling, tuple) else sampling,
        key=prompt.key,
        metadata=prompt.metadata,
        members=members,
        samplings=samplings,
        group_size=prompt.group_size,
        affinity=prompt.affinity,
        again=group.again,
        media=[[each.kind, each.source] for each in prompt.media],
        companions=prompt.companions,
        lost=group.lost,
        source=group.source,
        siblings=group.siblings,
    )
    try:
        check_json(prompt.key)
        check_json(prompt.metadata)
        return encode(record)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        # RuntimeError includes RecursionError, and a dict that a reward changes meanwhile.
        raise _unstorable(prompt, error) from error


def _unstorable(prompt: Prompt, error: Exception) -> ConfigError:
    return ConfigError(
        f"The key, metadata and sampling parameters of prompt {prompt.key!r} must be JSON values, "
        f"because there is a store, got {error}; use numbers, strings, lists and dicts with "
        "strings as keys, or a key that the reward looks up."
    )


def group_from(body: bytes) -> SavedGroup:
    """Decode the group in `body`.

    Raises:
        msgspec.MsgspecError or ValueError: if `body` is not a group.
    """
    record = decode(body, _Group)
    sampling, metadata = record.sampling, record.metadata
    if type(metadata) is not dict:
        raise ValueError("its metadata is not a dict")
    return SavedGroup(
        group_id=record.group_id,
        opened=record.opened,
        again=record.again,
        lost=record.lost,
        source=record.source,
        siblings=record.siblings,
        prompt=Prompt(
            input_ids=np.frombuffer(record.input_ids, dtype=np.int32),
            sampling=tuple(sampling) if isinstance(sampling, list) else sampling,
            key=record.key,
            metadata=cast("dict[Any, Any]", metadata),
            group_size=record.group_size,
            affinity=record.affinity,
            media=tuple([Media(*each) for each in record.media]),
            companions=record.companions,
        ),
        members=tuple(
            SavedMember(
                rollout_id=rollout, index=index, sampling=record.samplings[place], again=again
            )
            for rollout, index, place, again in record.members
        ),
    )


class _Rows(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    values: bytes
    ends: bytes | None


def rows_record(rows: Rows) -> bytes:
    """Encode rows of a companion."""
    values = rows.values
    ends = None if rows.ends is None else rows.ends.tobytes()
    return encode(_Rows(values.dtype.str, values.shape, values.tobytes(), ends))


def rows_from(body: bytes) -> Rows:
    """Decode the rows in `body`.

    Raises:
        msgspec.MsgspecError or ValueError: if `body` has no rows.
    """
    record = decode(body, _Rows)
    values = np.frombuffer(record.values, np.dtype(record.dtype)).reshape(record.shape).copy()
    ends = None if record.ends is None else np.frombuffer(record.ends, np.int64)
    return Rows(values, ends)


def schedule_record(schedule: Schedule) -> bytes:
    """Encode a schedule: the names of its rules, and their settings."""
    return encode(
        _Schedule(
            over_provision=schedule.over_provision,
            refill=(schedule.refill.name, msgspec.to_builtins(schedule.refill)),
            why=schedule.why,
            forecast=schedule.forecast,
            pace=schedule.pace,
            placement=schedule.placement,
        )
    )


def schedule_from(body: bytes) -> Schedule | None:
    """Decode the schedule in `body`; None if it has a rule that this version does not know."""
    record = decode(body, _Schedule)
    name, settings = record.refill
    if name not in REFILLS:
        return None
    return Schedule(
        over_provision=record.over_provision,
        refill=msgspec.convert(settings, type=REFILLS[name]),
        forecast=record.forecast,
        why=record.why,
        pace=record.pace,
        placement=record.placement,
    )
