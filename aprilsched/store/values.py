"""Packs the caller's own values (keys and metadata of prompts) as MessagePack that keeps types.

Invariant: a value comes back equal and of the same type, or it is refused when it is packed. Types
are compared exactly, because a subclass (an integer enum, a named tuple) would come back as its
base class. Nothing is ever imported or called by a name in the data.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

_PLAIN = frozenset({type(None), bool, float, str, bytes})
"""The types that MessagePack has itself."""
_ARRAY_KINDS = frozenset("biufcSUmM")
"""The NumPy kinds whose string gives their type and whose bytes give their values."""
_TUPLE, _SET, _FROZENSET, _DICT, _INT, _COMPLEX, _BYTEARRAY, _ARRAY, _SCALAR = range(1, 10)
_DECIMAL, _UUID, _DATETIME, _DATE, _TIME, _TIMEDELTA = range(10, 16)


def packed(value: object) -> Any:
    """Turn a value into one that msgspec encodes without loss.

    Raises:
        TypeError or ValueError: if it, or a value in it, would not come back unchanged.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    pack = _PACK.get(kind)
    if pack is not None:
        return pack(value)
    if isinstance(value, np.generic):
        return _scalar(cast("np.generic[Any]", value))
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__}")


def unpacked(code: int, data: memoryview) -> Any:
    """Restore a value that :func:`packed` wrapped; a decoder's hook for extension types."""
    if code not in _UNPACK:
        raise ValueError(f"a value of the unknown kind {code}")
    return _UNPACK[code](data)


def _ext(code: int, parts: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(parts))


def _parts(data: memoryview) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=unpacked)


def _integer(value: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return msgspec.msgpack.Ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, signed=True))


def _items(code: int) -> Callable[[Iterable[object]], Any]:
    return lambda values: _ext(code, [packed(value) for value in values])


def _dict(value: dict[object, object]) -> Any:
    if all(type(key) is str for key in value):
        return {key: packed(each) for key, each in value.items()}
    return _ext(_DICT, [(packed(key), packed(each)) for key, each in value.items()])


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


def _datetime(value: datetime.datetime) -> Any:
    offset = None
    if value.tzinfo is not None:
        if type(value.tzinfo) is not datetime.timezone:
            raise TypeError(f"a time zone of type {type(value.tzinfo).__qualname__}")
        offset = _duration(value.tzinfo.utcoffset(None))
    day = (value.year, value.month, value.day)
    return _ext(_DATETIME, (*day, *_clock(value), offset))


def _datetime_of(data: memoryview) -> datetime.datetime:
    *fields, fold, offset = _parts(data)
    zone = None if offset is None else datetime.timezone(datetime.timedelta(*offset))
    return datetime.datetime(*fields, tzinfo=zone, fold=fold)


def _time(value: datetime.time) -> Any:
    if value.tzinfo is not None:
        raise TypeError("a time of day with a time zone")
    return _ext(_TIME, _clock(value))


def _time_of(data: memoryview) -> datetime.time:
    *fields, fold = _parts(data)
    return datetime.time(*fields, fold=fold)


def _clock(value: datetime.datetime | datetime.time) -> tuple[int, int, int, int, int]:
    return (value.hour, value.minute, value.second, value.microsecond, value.fold)


def _duration(value: datetime.timedelta) -> tuple[int, int, int]:
    return (value.days, value.seconds, value.microseconds)


_PACK: dict[type, Callable[[Any], Any]] = {
    int: _integer,
    list: lambda values: [packed(value) for value in values],
    dict: _dict,
    tuple: _items(_TUPLE),
    set: _items(_SET),
    frozenset: _items(_FROZENSET),
    complex: lambda value: _ext(_COMPLEX, (value.real, value.imag)),
    bytearray: lambda value: msgspec.msgpack.Ext(_BYTEARRAY, bytes(value)),
    np.ndarray: _array,
    Decimal: lambda value: msgspec.msgpack.Ext(_DECIMAL, str(value).encode()),
    uuid.UUID: lambda value: _ext(_UUID, value.bytes),
    datetime.datetime: _datetime,
    datetime.date: lambda value: _ext(_DATE, (value.year, value.month, value.day)),
    datetime.time: _time,
    datetime.timedelta: lambda value: _ext(_TIMEDELTA, _duration(value)),
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
    _DECIMAL: lambda data: Decimal(bytes(data).decode()),
    _UUID: lambda data: uuid.UUID(bytes=_parts(data)),
    _DATETIME: _datetime_of,
    _DATE: lambda data: datetime.date(*_parts(data)),
    _TIME: _time_of,
    _TIMEDELTA: lambda data: datetime.timedelta(*_parts(data)),
}
