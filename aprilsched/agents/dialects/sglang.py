"""SGLang's /generate: its bodies, and the fields of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aprilsched.agents.dialects.values import (
    Asked,
    Dialect,
    Part,
    Question,
    TextOptions,
    prompts_of,
)
from aprilsched.agents.serving.refusals import Refused, error_event
from aprilsched.agents.serving.streams import Event
from aprilsched.errors import ConfigError
from aprilsched.kernel.values.companions import Rows
from aprilsched.types import MEDIA, Media, SamplingParams


class GenerateBody(msgspec.Struct, frozen=True):
    """POST /generate with one prompt."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: dict[str, Any] | None = None
    rid: str | None = None
    stream: bool = False
    return_logprob: bool = False
    lora_path: str | None = None
    extra_key: str | None = None
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_indexer_topk: bool = False
    return_sampling_mask: bool = False
    top_logprobs_num: int = 0
    priority: int | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    custom_logit_processor: str | None = None
    return_hidden_states: bool | Literal["last"] = False
    image_data: str | list[str] | None = None
    video_data: str | list[str] | None = None
    audio_data: str | list[str] | None = None

    @property
    def media(self) -> tuple[Media, ...]:
        """The images, videos and sounds, each kind in order."""
        found: list[Media] = []
        for kind in MEDIA:
            given: str | list[str] | None = getattr(self, f"{kind}_data")
            several = [given] if isinstance(given, str) else given or ()
            found += [Media(kind, source) for source in several]
        return tuple(found)


class PromptsBody(msgspec.Struct, frozen=True):
    """POST /generate with one or more prompts, and a number of responses per prompt."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool = False
    lora_path: str | None = None
    # Not passed on: it separates cached KV, which the scheduler does itself between versions.
    extra_key: str | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None


class _Options(TextOptions, frozen=True, kw_only=True):
    """The sampling parameters that are handled here and not only by an engine."""

    n: Annotated[int, Meta(ge=1)] | None = None
    max_new_tokens: int | None = None
    max_tokens: int | None = None


def _ask(body: PromptsBody) -> Asked:
    if body.text is not None and body.input_ids is not None:
        raise ConfigError("Both text and input_ids are given; give either.")
    given, name = (body.text, "text") if body.input_ids is None else (body.input_ids, "input_ids")
    if given is None:
        raise ConfigError("Either text, input_ids or input_embeds should be provided.")
    if body.lora_path is not None:
        raise ConfigError("lora_path must be left out, because no adapter is served by its name.")
    prompts = prompts_of(given, name)
    params = body.sampling_params or {}
    each = params if isinstance(params, list) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise ConfigError(f"There are {len(prompts)} prompts and {len(each)} sampling_params.")
    try:
        options = [msgspec.convert(params, _Options) for params in each]
    except msgspec.ValidationError as error:
        raise ConfigError(f"sampling_params: {error}.") from error
    counts = {each.n or 1 for each in options}
    if len(counts) > 1:
        raise ConfigError("n differs between the prompts; give one n for all.")
    is_list = not isinstance(given, str) and not isinstance(given[0], int)
    return Asked(
        questions=[
            Question(
                prompt=prompt,
                params=params,
                text=text,
                max_tokens=text.max_tokens if text.max_new_tokens is None else text.max_new_tokens,
            )
            for prompt, params, text in zip(prompts, each, options, strict=True)
        ],
        n=options[0].n or 1,
        is_listed=is_list or counts != {1},
        name=body.rid,
        stream=body.stream,
        # A client that sends text expects SGLang's default form, which repeats the output so far.
        repeats=body.text is not None,
        logprobs=body.return_logprob,
        has_media=any((body.image_data, body.video_data, body.audio_data)),
    )


class Generate(Dialect):
    """SGLang's /generate, for one or more prompts."""

    body = PromptsBody
    parse = staticmethod(_ask)
    default_tokens = 128  # SGLang's default of max_new_tokens.
    is_native = True
    survives_failure = True
    stream_error = staticmethod(error_event)

    def events(self, part: Part) -> Iterable[Event]:
        yield self._event(part)

    def whole(self, wholes: Sequence[Part]) -> Event | list[Event]:
        events = [self._event(part) for part in wholes]
        return events if self._asked.is_listed else events[0]

    def _event(self, part: Part) -> Event:
        total, end = part.start + len(part.token_ids), part.end
        meta: Event = {
            "id": part.name,
            "finish_reason": None,
            "prompt_tokens": len(part.prompt_ids),
            "weight_version": self._names.label(),
            "completion_tokens": total,
            "cached_tokens": 0,
        }
        if self._asked.logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = token_logprobs(part.token_ids, part.logprobs)
            meta["output_token_logprobs_length"] = total
            if part.likely:
                meta["output_top_logprobs"] = part.likely
        meta |= part.rows
        if end is not None:
            last = 0 if end.matched is None else end.matched
            reason = finish_reason(end.reason, tokens=total, last=last)
            if reason is not None and end.reason == "abort":
                reason["message"] = end.why
            meta["finish_reason"] = reason
            meta |= end.versions
        text = {} if part.text is None else {"text": part.text}
        index = {"index": part.index} if self._asked.is_listed else {}
        return {**text, "output_ids": part.token_ids, "meta_info": meta, **index}


def check_vocabulary(size: int, input_ids: Sequence[int], sampling: SamplingParams) -> None:
    """Refuse token ids that would kill the scheduler of an engine, in SGLang's words.

    Raises:
        Refused: if one is not from 0 to `size` - 1.
    """
    given: Mapping[str, Iterable[int | str]] = {
        "input_ids must be": (min(input_ids), max(input_ids)),
        "stop_token_ids must be": sampling.stop_token_ids,
        "logit_bias must has keys": sampling.extra.get("logit_bias", ()),
    }
    for must_be, token_ids in given.items():
        for each in token_ids:
            if not (str(each).isdecimal() and int(each) < size):
                raise Refused(f"{must_be} in [0, {size - 1}], got {each}.")


def finish_reason(reason: str | None, *, tokens: int, last: int | str) -> dict[str, Any] | None:
    """Return the field ``finish_reason`` of a response with `tokens` tokens.

    `last` is its last token. None while the response is still running.
    """
    match reason:
        case None:
            return None
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case "stop":
            return {"type": "stop", "matched": last}
        case _:
            return {"type": reason, "length": tokens}


def token_logprobs(ids: Sequence[int], logprobs: Sequence[float]) -> list[tuple[float, int, None]]:
    """Return the field ``output_token_logprobs``: the logprob and id of each token, no text."""
    return [(p, i, None) for p, i in zip(logprobs, ids, strict=True)]


def likely_triples(rows: Rows, n: int) -> list[list[tuple[float, int, None]]]:
    """Return the field ``output_top_logprobs``: the `n` likeliest tokens at each position.

    Each has its logprob, its id, and no text. A row that is not known is empty.
    """
    return [
        [(float(p), int(i), None) for i, p in row[:n] if p == p] for row in rows.values.tolist()
    ]


def labelled(
    spans: Iterable[tuple[int, int, int]], label_of: Callable[[int], str]
) -> list[dict[str, str | int]]:
    """Return the field ``weight_versions``: the label of each span of tokens.

    Adjacent tokens with one label are one span.

    Args:
        spans: the version, the first token and the end of each span, in order.
        label_of: returns the label of a version.
    """
    found: list[dict[str, str | int]] = []
    for version, start, end in spans:
        label = label_of(version)
        if found and found[-1]["version"] == label:
            found[-1]["end"] = end
        elif start < end:
            found.append({"version": label, "start": start, "end": end})
    return found
