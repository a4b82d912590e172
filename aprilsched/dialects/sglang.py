"""SGLang's /generate: its bodies, and the fields of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from aprilsched.companions import Rows
from aprilsched.types import MEDIA, Media


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
    data_parallel_rank: int | None = None
    custom_logit_processor: str | None = None
    return_hidden_states: bool | Literal["last"] = False
    image_data: str | list[str] | None = None
    video_data: str | list[str] | None = None
    audio_data: str | list[str] | None = None

    @property
    def media(self) -> tuple[Media, ...]:
        """The images, videos and sounds, of each kind in their order."""
        found: list[Media] = []
        for kind in MEDIA:
            given: str | list[str] | None = getattr(self, f"{kind}_data")
            several = [given] if isinstance(given, str) else given or ()
            found += [Media(kind, source) for source in several]
        return tuple(found)


class PromptsBody(msgspec.Struct, frozen=True):
    """POST /generate with one prompt or several, and a number of responses to each."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool = False
    lora_path: str | None = None
    extra_key: str | None = None


def finish_reason(reason: str | None, *, tokens: int, last: int) -> dict[str, Any] | None:
    """The field ``finish_reason`` of a response that has `tokens` tokens, of which `last` is the
    last; None while it goes on."""
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
    """The field ``output_token_logprobs``: for each token its logprob, its id, and no text."""
    return [(p, i, None) for p, i in zip(logprobs, ids, strict=True)]


def likely_triples(rows: Rows, n: int) -> list[list[tuple[float, int, None]]]:
    """The field ``output_top_logprobs``: for each token the `n` likeliest in its place, each with
    its logprob, its id, and no text. A row that is not known is empty."""
    return [
        [(float(p), int(i), None) for i, p in row[:n] if p == p] for row in rows.values.tolist()
    ]


def labelled(
    spans: Iterable[tuple[int, int, int]], label_of: Callable[[int], str]
) -> list[dict[str, str | int]]:
    """The field ``weight_versions``: the label of each token, where adjacent tokens of one label
    are one span.

    Args:
        spans: the version, the first token and the end of each span, in order.
        label_of: the label of a version.
    """
    found: list[dict[str, str | int]] = []
    for version, start, end in spans:
        label = label_of(version)
        if found and found[-1]["version"] == label:
            found[-1]["end"] = end
        elif start < end:
            found.append({"version": label, "start": start, "end": end})
    return found
