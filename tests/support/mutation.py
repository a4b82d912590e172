"""Makes random faults in streams and answers, in their bytes and in their structure."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

WORDS = (
    b"\n", b"\n\n", b"\r\n", b"data:", b"data: [DONE]\n\n", b": comment\n", b"\xff", b"\x00",
    b'"', b"\\", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b"[" * 3000, b"null", b"true",
    b"-", b"0", b"1e999", b"-1e39", b"9" * 20, b"9" * 5000, b"NaN", b"-Infinity", b'"x"',
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 17, 40, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30,
    0.5, -0.5, 1e-4, -1e39, 1e308, "", "x", "7", "-1", "4294967295", "default", "\u0663",
    "x" * 5000, [], {}, [[]], [None], [[-1.0, 5, None]], [[0.1, 5, None]], [[-1.0, 5]],
    {"type": "abort"}, {"type": "length"}, {"type": "stop", "status_code": 500},
    {"message": "m", "code": 400}, [{"version": "1", "start": 0, "end": 5}],
    [{"version": "1", "start": 5, "end": 5}],
)  # fmt: skip
KEYS = (
    "output_ids", "meta_info", "error", "index", "finish_reason", "completion_tokens",
    "output_token_logprobs", "output_token_logprobs_length", "weight_versions", "version", "start",
    "end", "message", "type", "status_code", "unknown",
)  # fmt: skip


def cut(draw: random.Random, data: bytes) -> list[bytes]:
    """`data` in pieces, as a network may cut it: in one piece, or in up to 21 of any size."""
    if len(data) < 2 or draw.random() < 0.3:
        return [data]
    places = sorted(draw.choices(range(len(data)), k=draw.choice((1, 2, 5, 20))))
    bounds = [0, *places, len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def spoiled_stream(draw: random.Random, stream: bytes, events: Sequence[Any]) -> bytes:
    """`stream`, which is made of `events`, with one to three faults."""
    faults = draw.choice((1, 1, 1, 2, 3))
    if draw.random() < 0.4:
        return spoiled_bytes(draw, stream, faults)
    changed = list(events)
    for _ in range(faults):
        _spoil_order(draw, changed) if draw.random() < 0.25 else _spoil_one(draw, changed)
    return b"".join(b"data: " + _encoded(event) + b"\n\n" for event in changed)


def spoiled_answer(draw: random.Random, answer: Any) -> bytes:
    """The JSON of `answer` with one to three faults."""
    faults = draw.choice((1, 1, 2, 3))
    if draw.random() < 0.4:
        return spoiled_bytes(draw, _encoded(answer), faults)
    changed = [answer]
    for _ in range(faults):
        _spoil_one(draw, changed)
    return _encoded(changed[0]) if changed else b""


def spoiled_bytes(draw: random.Random, data: bytes, faults: int) -> bytes:
    """`data` with `faults` random changes of its bytes."""
    for _ in range(faults):
        at = draw.randrange(len(data) + 1)
        upto = min(len(data), at + draw.choice((1, 1, 2, 8, 64, 500)))
        match draw.randrange(6):
            case 0:
                data = data[:at] + draw.choice(WORDS) + data[at:]
            case 1:
                data = data[:at] + draw.choice(WORDS) + data[upto:]
            case 2:
                data = data[:at] + data[upto:]
            case 3:
                data = data[:upto] + data[at:]
            case 4:
                data = data[:at] + draw.randbytes(upto - at) + data[upto:]
            case _:
                data = data[:at]
    return data


def _encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _spoil_order(draw: random.Random, events: list[Any]) -> None:
    if not events:
        return
    at = draw.randrange(len(events))
    match draw.randrange(4):
        case 0:
            events.insert(draw.randrange(len(events) + 1), events[at])
        case 1:
            del events[at]
        case 2:
            events.append(events.pop(at))
        case _:
            draw.shuffle(events)


def _spoil_one(draw: random.Random, values: list[Any]) -> None:
    """Change one thing somewhere inside one of the values."""
    if not values:
        return
    at = draw.randrange(len(values))
    values[at] = copy.deepcopy(values[at])
    holder: Any = values
    key: Any = at
    while (inside := _keys(holder[key])) and draw.random() < 0.85:
        holder, key = holder[key], draw.choice(inside)
    draw.choice(_CHANGES)(draw, holder, key)


def _keys(value: Any) -> Sequence[Any]:
    """Keys or indices of a container; none for any other value."""
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value))
    return range(len(cast("list[Any]", value))) if isinstance(value, list) else ()


def _replace(draw: random.Random, holder: Any, key: Any) -> None:
    holder[key] = copy.deepcopy(draw.choice(VALUES))


def _nudge(draw: random.Random, holder: Any, key: Any) -> None:
    if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] += draw.choice((-1, 1, -5, 5, 100))
    else:
        _replace(draw, holder, key)


def _remove(draw: random.Random, holder: Any, key: Any) -> None:
    del holder[key]


def _repeat(draw: random.Random, holder: Any, key: Any) -> None:
    if isinstance(holder, list):
        values = cast("list[Any]", holder)
        values.insert(draw.randrange(len(values) + 1), copy.deepcopy(values[key]))
    else:
        holder[draw.choice(KEYS)] = copy.deepcopy(holder[key])


def _add(draw: random.Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder[draw.choice(KEYS)] = copy.deepcopy(draw.choice(VALUES))
    else:
        _replace(draw, holder, key)


_CHANGES: Sequence[Callable[[random.Random, Any, Any], None]] = (
    _replace, _replace, _nudge, _nudge, _remove, _repeat, _add,
)  # fmt: skip
