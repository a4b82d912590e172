"""Makes :class:`SamplingParams` from a mapping that uses the names of other libraries.

Every key is translated, passed on, or refused with one sentence. No key is ignored, because the
only sign of an ignored mistyped name is a policy that trains badly. Parameters that the scheduler
itself decides (number of responses, streaming, logprobs) are refused with a hint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any, Protocol

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.checks import OWN, SYNONYMS, Kind, checked, converted, mistyped, typed
from aprilsched.types import SamplingParams

SERVER: Mapping[str, Kind] = {
    "frequency_penalty": Real,
    "presence_penalty": Real,
    "repetition_penalty": Real,
    "regex": str,
    "json_schema": str,
    "ebnf": str,
    "structural_tag": str,
    "skip_special_tokens": bool,
    "spaces_between_special_tokens": bool,
    "no_stop_trim": bool,
    "stop_regex": (str, list),
    "logit_bias": Mapping,
    "custom_params": Mapping,
}
"""Parameters that SGLang 0.5.17 to 0.5.23 know and :class:`SamplingParams` does not have as
fields; they go to ``extra`` unchanged."""

REFUSED: Mapping[str, str] = {
    "n": "set group_size in SchedulerConfig to get several responses of a prompt",
    "best_of": "use accept= or the reward to choose among the responses of a group",
    "beam_width": "beam search samples nothing, so its logprobs are of no use to a trainer",
    "logprobs": "leave it out: every token comes with its logprob",
    "top_logprobs": "leave it out: only the logprob of the sampled token is kept",
    "prompt_logprobs": "leave it out: only response tokens have logprobs",
    "stream": "leave it out: the scheduler decides how responses travel",
    "stream_interval": "leave it out: the scheduler decides how responses travel",
}

HARMLESS: Mapping[str, Any] = {"n": 1, "beam_width": 1}
"""Refused names that have one harmless value, with this value."""


class Tokenizer(Protocol):
    """The part of a tokenizer that is used; the tokenizers of transformers have it."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Sequence[int]:
        """The token ids of `text`."""
        ...


def sampling_params(
    mapping: Mapping[str, Any], *, tokenizer: Tokenizer | None = None
) -> SamplingParams:
    """Sampling parameters from `mapping`, which uses SGLang's, vLLM's or OpenAI's names.

    The value None means that the parameter is not given, so that the default of
    :class:`SamplingParams` is used. An explicit ``extra`` mapping reaches the server unchanged, and
    ``request`` and ``keep`` are as in :class:`SamplingParams`.

    Args:
        mapping: names and values, for example ``{"max_tokens": 4096, "temperature": 0.8}``.
        tokenizer: the model's tokenizer, which turns ``stop`` strings into token ids. Each string
            must be exactly one token; the response then ends when the model samples that token.

    Raises:
        ConfigError: if a name is unknown, given twice, or has a value of the wrong type.
    """
    if not isinstance(mapping, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"Sampling parameters are {typed(mapping)}; give a mapping.")
    given = {name: value for name, value in mapping.items() if value is not None}
    extra = dict(checked("extra", given.pop("extra", {}), Mapping))
    request, keep = given.pop("request", {}), given.pop("keep", ())
    stops = given.pop("stop", None)
    sources: dict[str, str] = {}
    own: dict[str, Any] = {}
    for name, value in given.items():
        target = _target(name, value)
        if target is None:
            continue
        if target in sources:
            raise ConfigError(
                f"Both {sources[target]} and {name} are given and mean the same; keep one of them."
            )
        sources[target] = name
        if target in OWN:
            own[target] = converted(name, value, OWN[target])
        elif target in extra:
            raise ConfigError(f"{name} is given twice, once inside extra; keep one of them.")
        else:
            extra[target] = checked(name, value, SERVER[target])
    _keep_apart(extra)
    if stops is not None:
        own["stop_token_ids"] = own.get("stop_token_ids", ()) + _stop_ids(stops, tokenizer)
    return SamplingParams(**own, extra=extra, request=request, keep=keep)


def check_sampling(sampling: object) -> None:
    """Check that `sampling` can be used.

    Raises:
        ConfigError: if it is not a :class:`SamplingParams`, or if its ``extra`` holds a parameter
            that the scheduler decides.
    """
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(
            f"sampling is {typed(sampling)}; give SamplingParams, or sampling_params(...) of a "
            "mapping."
        )
    _keep_apart(sampling.extra)
    for name, value in sampling.extra.items():
        if name in REFUSED:
            _target(name, value)


def _target(name: str, value: Any) -> str | None:
    """SGLang's name for the parameter; None if nothing has to be passed on."""
    if name in REFUSED:
        if name in HARMLESS and value == HARMLESS[name]:
            return None
        raise ConfigError(f"{name} is no parameter here; {REFUSED[name]}.")
    target = SYNONYMS.get(name, name)
    if target in OWN or target in SERVER:
        return target
    known = [*OWN, *SERVER, *SYNONYMS, "stop", "extra", "request", "keep"]
    near = get_close_matches(str(name), known, n=1)
    extra = "put it into extra if your server knows it; the gateway refuses extra."
    hint = f"did you mean {near[0]}?" if near else extra
    raise ConfigError(f"{name} is no known sampling parameter; {hint}")


def _keep_apart(extra: Mapping[str, Any]) -> None:
    """Refuse names of :class:`SamplingParams` fields inside ``extra``.

    A resumed response asks only for the remaining tokens. max_new_tokens in ``extra`` would
    override that and allow the whole length again.
    """
    for name in extra:
        if name in OWN:
            raise ConfigError(f"extra holds {name}; give it outside of extra.")


def _stop_ids(stop: Any, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The token id of each stop string."""
    strings = [stop] if isinstance(stop, str) else checked("stop", stop, (list, tuple))
    for string in strings:
        if not isinstance(string, str):
            raise mistyped("stop", stop, (list, tuple))
    if not strings:
        return ()
    if tokenizer is None:
        raise ConfigError(
            "stop holds strings and there is no tokenizer; give tokenizer=, or stop_token_ids."
        )
    return tuple(_stop_id(string, tokenizer) for string in strings)


def _stop_id(string: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.encode(string, add_special_tokens=False)
    if len(ids) != 1:
        raise ConfigError(
            f"The stop string {string!r} is {len(ids)} tokens, not one; give the ids of single "
            "tokens in stop_token_ids, or the string in extra if your server has a tokenizer."
        )
    return int(ids[0])
