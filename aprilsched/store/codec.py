"""Encodes records as typed MessagePack with a checksum, and decodes them; it never unpickles.

The order of the fields in these structs is the format: a new field goes to the end, with a default.
"""

from __future__ import annotations

import datetime
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from aprilsched.companions import Rows
from aprilsched.core.policies.kinds import REFILLS
from aprilsched.core.policies.placement import Placement
from aprilsched.core.policies.schedule import Forecast, Pace, Schedule
from aprilsched.core.state.saved import SavedGroup, SavedMember
from aprilsched.errors import ConfigError
from aprilsched.types import Media, Prompt, SamplingParams

# Packs the caller's own values (keys and metadata of prompts) as MessagePack that keeps types.
#
# Invariant: a value comes back equal and of the same type, or it is refused when it is packed.
# Types are compared exactly, because a subclass (an integer enum, a named tuple) would come back as
# its base class. Nothing is ever imported or called by a name in the data.

TimeT = TypeVar("TimeT", datetime.datetime, datetime.time)

_PLAIN = frozenset({type(None), bool, float, str, bytes})
"""The types that MessagePack has itself."""
_ARRAY_KINDS = frozenset("biufcSUmM")
"""The NumPy kinds whose string gives their type and whose bytes give their values."""
_TUPLE, _SET, _FROZENSET, _DICT, _INT, _COMPLEX, _BYTEARRAY, _ARRAY, _SCALAR = range(1, 10)
_DECIMAL, _UUID, _DATETIME, _DATE, _TIME, _TIMEDELTA = range(10, 16)


def pack(value: object) -> Any:
    """Turn a value into one that msgspec encodes without loss.

    Raises:
        TypeError or ValueError: if it, or a value in it, would not come back unchanged.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    by_kind = _PACK.get(kind)
    if by_kind is not None:
        return by_kind(value)
    if isinstance(value, np.generic):
        return _scalar(cast("np.generic[Any]", value))
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__}")


def unpack(code: int, data: memoryview) -> Any:
    """Restore a value that :func:`pack` wrapped; a decoder's hook for extension types."""
    if code not in _UNPACK:
        raise ValueError(f"a value of the unknown kind {code}")
    return _UNPACK[code](data)


def _ext(code: int, parts: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(parts))


def _parts(data: memoryview) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=unpack)


def _integer(value: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return msgspec.msgpack.Ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, signed=True))


def _items(code: int) -> Callable[[Iterable[object]], Any]:
    return lambda values: _ext(code, [pack(value) for value in values])


def _dict(value: dict[object, object]) -> Any:
    if all(type(key) is str for key in value):
        return {key: pack(each) for key, each in value.items()}
    return _ext(_DICT, [(pack(key), pack(each)) for key, each in value.items()])


def _storable(dtype: np.dtype[Any]) -> str:
    if dtype.kind not in _ARRAY_KINDS:
        raise TypeError(f"a NumPy value of type {dtype}")
    return dtype.str


def _array(value: NDArray[Any]) -> Any:
    name = _storable(value.dtype)
    if not value.dtype.itemsize:
        raise TypeError("a NumPy array of empty strings without room")
    return _ext(_ARRAY, (name, value.shape, value.tobytes()))


def _array_of(data: memoryview) -> NDArray[Any]:
    name, shape, body = _parts(data)
    array = np.empty(tuple(shape), dtype=np.dtype(name))
    if array.size:
        array[...] = np.frombuffer(body, dtype=array.dtype).reshape(array.shape)
    return array


def _scalar(value: np.generic[Any]) -> Any:
    name = _storable(value.dtype)
    if value.dtype.type is not type(value):
        raise TypeError(f"a value of type {type(value).__qualname__}")
    body = value.tobytes()
    if value.dtype.kind == "S" and body.endswith(b"\0"):
        # NumPy takes the null for padding; in other string kinds it has removed it before.
        raise ValueError("a NumPy string that ends with a null")
    return _ext(_SCALAR, (name, body))


def _scalar_of(data: memoryview) -> np.generic[Any]:
    name, body = _parts(data)
    dtype = np.dtype(name)
    return np.frombuffer(body, dtype=dtype)[0] if dtype.itemsize else dtype.type()


def _iso(code: int) -> Callable[[datetime.datetime | datetime.time], Any]:
    """Packs times, with or without a date, as the digit of their fold and their text in ISO 8601,
    which has the offset of a time zone and not its name."""

    def packed(value: datetime.datetime | datetime.time) -> Any:
        if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
            raise TypeError(f"a time zone of type {type(value.tzinfo).__qualname__}")
        return msgspec.msgpack.Ext(code, f"{value.fold}{value.isoformat()}".encode())

    return packed


def _text(data: memoryview) -> str:
    return bytes(data).decode()


def _time_of(kind: type[TimeT], data: memoryview) -> TimeT:
    fold, text = _text(data)[:1], _text(data)[1:]
    return kind.fromisoformat(text).replace(fold=int(fold))


_PACK: dict[type, Callable[[Any], Any]] = {
    int: _integer,
    list: lambda values: [pack(value) for value in values],
    dict: _dict,
    tuple: _items(_TUPLE),
    set: _items(_SET),
    frozenset: _items(_FROZENSET),
    complex: lambda value: _ext(_COMPLEX, (value.real, value.imag)),
    bytearray: lambda value: msgspec.msgpack.Ext(_BYTEARRAY, bytes(value)),
    np.ndarray: _array,
    Decimal: lambda value: msgspec.msgpack.Ext(_DECIMAL, str(value).encode()),
    uuid.UUID: lambda value: msgspec.msgpack.Ext(_UUID, value.bytes),
    datetime.datetime: _iso(_DATETIME),
    datetime.date: lambda value: msgspec.msgpack.Ext(_DATE, value.isoformat().encode()),
    datetime.time: _iso(_TIME),
    datetime.timedelta: lambda value: _ext(
        _TIMEDELTA, (value.days, value.seconds, value.microseconds)
    ),
}
_UNPACK: dict[int, Callable[[memoryview], Any]] = {
    _INT: lambda data: int.from_bytes(data, signed=True),
    _DICT: lambda data: dict(_parts(data)),
    _TUPLE: lambda data: tuple(_parts(data)),
    _SET: lambda data: set(_parts(data)),
    _FROZENSET: lambda data: frozenset(_parts(data)),
    _COMPLEX: lambda data: complex(*_parts(data)),
    _BYTEARRAY: bytearray,
    _ARRAY: _array_of,
    _SCALAR: _scalar_of,
    _DECIMAL: lambda data: Decimal(_text(data)),
    _UUID: lambda data: uuid.UUID(bytes=bytes(data)),
    _DATETIME: partial(_time_of, datetime.datetime),
    _DATE: lambda data: datetime.date.fromisoformat(_text(data)),
    _TIME: partial(_time_of, datetime.time),
    _TIMEDELTA: lambda data: datetime.timedelta(*_parts(data)),
}


# --- codec ---------------------------------------------------------------------------------------

T = TypeVar("T")


class _Group(msgspec.Struct, array_like=True):
    group_id: int
    opened: int
    input_ids: bytes
    sampling: SamplingParams | list[SamplingParams] | None
    key: Any
    metadata: Any
    """The caller's own values, as :func:`pack` makes them."""
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
    return msgspec.msgpack.decode(body, type=kind, ext_hook=unpack, dec_hook=_array_from)


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
        key=None,
        metadata=None,
        members=members,
        samplings=samplings,
        group_size=prompt.group_size,
        affinity=prompt.affinity,
        again=group.again,
        media=[[each.kind, each.source] for each in prompt.media],
        companions=prompt.companions,
        lost=group.lost,
    )
    try:
        record.key, record.metadata = pack(prompt.key), pack(prompt.metadata)
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
        lost=record.lost,
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


def rows_record(rows: Rows) -> bytes:
    """Encode rows of a companion."""
    ends = None if rows.ends is None else pack(rows.ends)
    return encode((pack(np.ascontiguousarray(rows.values)), ends))


def rows_from(body: bytes) -> Rows:
    """Decode the rows in `body`.

    Raises:
        msgspec.MsgspecError or ValueError: if `body` has no rows.
    """
    values, ends = decode(body, tuple[Any, Any])
    if not isinstance(values, np.ndarray) or not (ends is None or isinstance(ends, np.ndarray)):
        raise ValueError("it has no arrays")
    return Rows(cast("NDArray[Any]", values), cast("NDArray[np.int64] | None", ends))


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
