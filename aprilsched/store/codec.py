"""Encodes records as typed MessagePack with a checksum, and decodes them; it never unpickles.

The order of the fields in these structs is the format: a new field goes to the end, with a default.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from aprilsched.core.lengths.observed import GroupLengths, Remembered
from aprilsched.core.policies.kinds import OVER_PROVISIONS, REFILLS
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.schedule import Forecast, OverProvision, Pace, Schedule
from aprilsched.core.state.saved import SavedGroup, SavedMember
from aprilsched.errors import ConfigError
from aprilsched.store.values import packed, unpacked
from aprilsched.types import Prompt, SamplingParams

T = TypeVar("T")


class _Group(msgspec.Struct, array_like=True):
    group_id: int
    opened: int
    input_ids: bytes
    sampling: SamplingParams | list[SamplingParams] | None
    key: Any
    metadata: Any
    """The caller's own values, packed by :mod:`aprilsched.store.values`."""
    members: list[tuple[int, int, int]]
    """For each member its rollout id, its index, and the index of its sampling in `samplings`."""
    samplings: list[SamplingParams]
    group_size: int | None = None
    affinity: str | None = None
    again: int | None = None
    size: int | None = None


class _Lengths(msgspec.Struct, array_like=True):
    launched: int
    tokens: bytes
    finished: bytes


class _Remembered(msgspec.Struct, array_like=True):
    key: str | int
    responses: float
    mean_log: float
    version: int


class _Schedule(msgspec.Struct, array_like=True):
    over_provision: tuple[str, dict[str, Any]]
    refill: tuple[str, dict[str, Any]]
    why: str
    forecast: Forecast | None = None
    pace: Pace | None = None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        plain: dict[Any, Any] = dict(cast("Mapping[Any, Any]", value))
        return plain
    if isinstance(value, np.generic):
        return cast("np.generic[Any]", value).item()
    raise TypeError(type(value).__name__)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(record: object) -> bytes:
    """Encode a record."""
    return _encoder.encode(record)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode the record in `body`.

    Raises:
        msgspec.MsgspecError: if it is not a record of this kind.
    """
    return msgspec.msgpack.decode(body, type=kind, ext_hook=unpacked)


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
    members: list[tuple[int, int, int]] = []
    for member in group.members:
        if member.sampling not in samplings:
            samplings.append(member.sampling)
        place = samplings.index(member.sampling)
        members.append((member.rollout_id, member.index, place))
    sampling = prompt.sampling
    record = _Group(
        group_id=group.group_id,
        opened=group.opened,
        input_ids=prompt.input_ids.tobytes(),
        sampling=list(sampling) if isinstance(sampling, tuple) else sampling,
        key=None,
        metadata=None,
        members=members,
        samplings=samplings,
        group_size=prompt.group_size,
        affinity=prompt.affinity,
        again=group.again,
        size=group.size,
    )
    try:
        record.key, record.metadata = packed(prompt.key), packed(prompt.metadata)
        return encode(record)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        # RuntimeError includes RecursionError, and a dict that a reward changes meanwhile.
        raise _unstorable(prompt, error) from error


def _unstorable(prompt: Prompt, error: Exception) -> ConfigError:
    return ConfigError(
        f"the key, metadata or sampling parameters of prompt {prompt.key!r} cannot be stored as "
        f"they are ({error}); use numbers, strings, bytes, dates, lists, tuples, sets, dicts and "
        "NumPy arrays, or a key that the reward looks up."
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
        size=record.size,
        prompt=Prompt(
            input_ids=np.frombuffer(record.input_ids, dtype=np.int32),
            sampling=tuple(sampling) if isinstance(sampling, list) else sampling,
            key=record.key,
            metadata=cast("dict[Any, Any]", metadata),
            group_size=record.group_size,
            affinity=record.affinity,
        ),
        members=tuple(
            SavedMember(rollout_id=rollout, index=index, sampling=record.samplings[place])
            for rollout, index, place in record.members
        ),
    )


def lengths_record(group: GroupLengths) -> bytes:
    """Encode the lengths of a group."""
    return encode(_Lengths(group.launched, group.tokens.tobytes(), group.finished.tobytes()))


def lengths_from(body: bytes) -> GroupLengths:
    """Decode the lengths of a group in `body`."""
    record = decode(body, _Lengths)
    return GroupLengths(
        launched=record.launched,
        tokens=np.frombuffer(record.tokens, dtype=np.int64),
        finished=np.frombuffer(record.finished, dtype=np.bool_),
    )


def remembered_record(record: Remembered) -> bytes:
    """Encode what is remembered of a key."""
    return encode(_Remembered(record.key, record.responses, record.mean_log, record.version))


def remembered_from(body: bytes) -> Remembered:
    """Decode what is remembered of a key."""
    record = decode(body, _Remembered)
    return Remembered(
        key=record.key,
        responses=record.responses,
        mean_log=record.mean_log,
        version=record.version,
    )


def schedule_record(schedule: Schedule) -> bytes:
    """Encode a schedule: the names of its rules, and their settings."""
    return encode(
        _Schedule(
            over_provision=_named(schedule.over_provision),
            refill=_named(schedule.refill),
            why=schedule.why,
            forecast=schedule.forecast,
            pace=schedule.pace,
        )
    )


def schedule_from(body: bytes) -> Schedule | None:
    """Decode the schedule in `body`; None if it has a rule that this version does not know."""
    record = decode(body, _Schedule)
    (ratio, ratio_settings), (refill, refill_settings) = record.over_provision, record.refill
    over_provision = OVER_PROVISIONS.get(ratio)
    refills = REFILLS.get(refill)
    if over_provision is None or refills is None:
        return None
    return Schedule(
        over_provision=msgspec.convert(ratio_settings, type=over_provision),
        refill=msgspec.convert(refill_settings, type=refills),
        forecast=record.forecast,
        why=record.why,
        pace=record.pace,
    )


def _named(rule: OverProvision | Refill) -> tuple[str, dict[str, Any]]:
    return rule.name, msgspec.to_builtins(rule)
