"""Converts values of sampling parameters to the plain Python types that every engine understands.

Numpy's scalars and arrays look like numbers and lists, but JSON cannot encode them. So they are
converted when a parameter is made, and a value that cannot be converted is refused at that time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from aprilsched.errors import ConfigError

Class = TypeVar("Class", bound=type[Any])
Kind: TypeAlias = type | tuple[type, ...]

OWN: Mapping[str, Kind] = {
    "max_new_tokens": Integral,
    "min_new_tokens": Integral,
    "temperature": Real,
    "top_p": Real,
    "top_k": Integral,
    "min_p": Real,
    "stop_token_ids": Iterable,
    "ignore_eos": bool,
    "sampling_seed": Integral,
}
"""The fields of :class:`~aprilsched.types.SamplingParams` that are sampling parameters."""

OWNED = frozenset(
    {
        *("rid", "text", "prompt", "input_ids", "input_embeds", "sampling_params", "n"),
        *("stream", "background", "http_worker_ipc", "positional_embed_overrides"),
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
        *("return_routed_experts", "routed_experts_start_len"),
        *("return_indexer_topk", "return_sampling_mask"),
        *("lora_path", "lora_id", "extra_key", "routing_key", "weight_version"),
        *("session_id", "session_params"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
        *("image_data", "video_data", "audio_data"),
    }
)
"""Request fields that users may not set: the scheduler sets them, or they would change a response
that continues on another engine."""

WORDS: Mapping[Kind, str] = {
    Integral: "a whole number",
    Real: "a finite number",
    Iterable: "a list of token ids",
    Mapping: "a mapping",
    bool: "True or False",
    str: "a string",
    (str, list): "a string or a list of strings",
    (list, tuple): "a string or a list of strings",
}

SYNONYMS: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",  # OpenAI completions, vLLM
    "max_completion_tokens": "max_new_tokens",  # OpenAI chat
    "max_tokens_to_sample": "max_new_tokens",  # Anthropic text completions
    "min_tokens": "min_new_tokens",  # vLLM
    "seed": "sampling_seed",  # OpenAI, vLLM
}
"""Names of other libraries for sampling parameters."""

_SEEDS = ("sampling_seed", "seed")
MAX_COUNT = 2**31 - 1
"""Largest number of tokens, and largest token id: engines keep them in 32 bits."""
_LARGEST = 2**63
"""JSON has no bound for whole numbers, but the JSON readers of engines have this one."""
_DEEPEST = 32
"""Largest depth of nested lists and mappings."""


def converted(name: str, value: Any, kind: Kind) -> Any:
    """`value` as the plain Python type that a field of kind `kind` has.

    Raises:
        ConfigError: if it is of another kind.
    """
    if kind is Iterable:
        return _token_ids(name, value)
    value = checked(name, value, kind)
    if kind is Integral:
        most = _LARGEST - 1 if name in _SEEDS else MAX_COUNT
        if abs(int(value)) > most:
            raise ConfigError(f"{name} must be at most {most}, got {typed(value)}.")
        return int(value)
    if kind is bool:
        return bool(value)
    return float(value) if kind is Real else value


def checked(name: str, value: Any, kind: Kind) -> Any:
    """`value`, if it is of `kind`. True and False do not count as numbers here.

    Raises:
        ConfigError: if it is not.
    """
    true_or_false = type(value) in (bool, np.bool_)
    if kind is bool:
        fits = true_or_false
    else:
        fits = isinstance(value, kind) and not (kind in (Integral, Real) and true_or_false)
    if not fits or (kind is Real and not _is_finite(value)):
        raise mistyped(name, value, kind)
    return value


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def plain(name: str, value: Any, *, depth: int = 0) -> Any:
    """`value` in types that JSON has. Numpy's scalars and arrays, tuples and whole-number keys are
    converted.

    Raises:
        ConfigError: if JSON has no form for something in it.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = cast("Any", value).tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, which an encoder may not know, only the text
    if isinstance(value, int):
        if abs(value) >= _LARGEST:
            raise ConfigError(f"{name} must have whole numbers below 2**63, got {typed(value)}.")
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth < _DEEPEST and isinstance(value, list | tuple):
        items = cast("Iterable[Any]", value)
        return [plain(name, item, depth=depth + 1) for item in items]
    if depth < _DEEPEST and isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {_key(name, key): plain(name, item, depth=depth + 1) for key, item in pairs}
    raise ConfigError(
        f"{name} holds {typed(value)}; give what JSON can hold: numbers, strings, lists, mappings."
    )


def request_fields(value: Any) -> dict[str, Any]:
    """Return `value` as additional request fields, by name.

    Raises:
        ConfigError: if it is not a mapping of JSON values, or has a field that the scheduler sets.
    """
    fields: dict[str, Any] = plain("request", checked("request", value, Mapping))
    for name in fields:
        if name in OWNED:
            raise ConfigError(f"request holds {name}, which the scheduler sets; {_instead(name)}.")
    return fields


def _instead(name: str) -> str:
    if name.endswith("_data"):
        return "give media of Prompt"
    return "ask for it in companions" if name.startswith("return_") else "leave it out"


def names(name: str, value: Any) -> tuple[str, ...]:
    """Return `value` as a tuple of strings.

    Raises:
        ConfigError: if it is not a sequence of strings.
    """
    several: Any = cast("Any", value if isinstance(value, list | tuple) else (None,))
    if not all(isinstance(each, str) for each in several):
        raise ConfigError(f"{name} is {value!r}; give a list of names.")
    return tuple(str.__str__(each) for each in several)


def suggesting(synonyms: Mapping[str, str] | None = None) -> Callable[[Class], Class]:
    """Decorates a dataclass, so that an unknown keyword is refused with the name of the nearest
    field, as an unknown flag is.

    Args:
        synonyms: fields by the names that other libraries have for them.
    """

    def decorated(kind: Class) -> Class:
        made: Callable[..., None] = kind.__init__

        @wraps(made)
        def init(self: Any, *values: Any, **given: Any) -> None:
            try:
                made(self, *values, **given)
            except TypeError:
                names = [field.name for field in fields(kind)]
                for name in given:
                    if name not in names:
                        near = (synonyms or {}).get(name) or nearest(name, names)
                        raise ConfigError(
                            f"{name} is no setting of {kind.__name__}; the nearest known one is "
                            f"{near}."
                        ) from None
                raise

        kind.__init__ = init
        return kind

    return decorated


def nearest(name: str, names: Iterable[str]) -> str:
    """The known name that is most like `name`."""
    return get_close_matches(name, names, n=1, cutoff=0.0)[0]


def _key(name: str, key: Any) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    # Of a mapping in memory; JSON's own keys are strings.
    if type(key) is int or isinstance(key, np.integer):
        return str(int(cast("int", key)))
    raise ConfigError(f"{name} has the key {typed(key)}; give strings as keys.")


def mistyped(name: str, value: object, kind: Kind) -> ConfigError:
    """Return the error for the setting `name` whose `value` is not of `kind`."""
    return ConfigError(f"{name} is {typed(value)}; give {WORDS[kind]}.")


def typed(value: object) -> str:
    """Return `value`, cut to 40 characters, with the name of its type."""
    shown = repr(value)
    return f"{shown if len(shown) <= 40 else shown[:37] + '...'} ({type(value).__name__})"


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids from one id or from several. A string is refused, although it is iterable."""
    ids: Any = (value,) if isinstance(value, Integral) else value
    if isinstance(ids, np.ndarray):
        ids = np.atleast_1d(cast("Any", ids))
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise mistyped(name, value, Iterable)
    each: tuple[Any, ...] = tuple(cast("Iterable[Any]", ids))
    # Thousands of them for each prompt would take more CPU one by one than all of its responses.
    if set(map(type, each)) == {int} and -MAX_COUNT <= min(each) <= max(each) <= MAX_COUNT:
        return each
    return tuple(converted(name, i, Integral) for i in each)
