"""Request bodies of SGLang's HTTP API as typed structs. Unknown fields of a body are ignored."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from aprilsched.serving.refusals import Malformed

__all__ = [
    "AbortBody",
    "AdapterBody",
    "DiskBody",
    "GenerateBody",
    "MemoryBody",
    "PauseBody",
    "VersionBody",
    "decode",
]

T = TypeVar("T")


class GenerateBody(msgspec.Struct, frozen=True):
    """POST /generate."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: dict[str, Any] | None = None
    rid: str | None = None
    stream: bool = False
    return_logprob: bool = False
    lora_path: str | None = None
    extra_key: str | None = None


class PauseBody(msgspec.Struct, frozen=True):
    """Body of POST /pause_generation; SGLang's default ends every request."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortBody(msgspec.Struct, frozen=True):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False


class DiskBody(msgspec.Struct, frozen=True):
    """POST /update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class VersionBody(msgspec.Struct, frozen=True):
    """Body of POST /update_weight_version; SGLang's default ends every request."""

    new_version: str
    abort_all_requests: bool = True


class AdapterBody(msgspec.Struct, frozen=True):
    """Body of POST /load_lora_adapter and /unload_lora_adapter; unloading needs no path."""

    lora_name: str
    lora_path: str = ""


class MemoryBody(msgspec.Struct, frozen=True):
    """Body of POST /release_memory_occupation and /resume_memory_occupation.

    Without `tags` the call is for all parts.
    """

    tags: list[str] | None = None


def decode(body: bytes, kind: type[T]) -> T:
    """Decode `body` as a `kind`.

    Raises:
        Malformed: if it is missing or has another form.
    """
    if not body:
        raise Malformed("Field required: the request has no body.")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from error
