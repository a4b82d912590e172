"""Request bodies of SGLang's HTTP API as typed structs. Unknown fields of a body are ignored."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from aprilsched.serving.refusals import Malformed

__all__ = [
    "AbortBody",
    "AdapterBody",
    "BroadcastBody",
    "DiskBody",
    "GenerateBody",
    "JoinBody",
    "LeaveBody",
    "MemoryBody",
    "PauseBody",
    "PromptsBody",
    "TensorBody",
    "VersionBody",
    "decode",
]

T = TypeVar("T")


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


class PauseBody(msgspec.Struct, frozen=True):
    """Body of POST /pause_generation; SGLang's default ends every request."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortBody(msgspec.Struct, frozen=True):
    """POST /abort_request; the gateway alone knows a `group`."""

    rid: str | None = None
    abort_all: bool = False
    group: str | None = None


class DiskBody(msgspec.Struct, frozen=True):
    """POST /update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class TensorBody(msgspec.Struct, frozen=True):
    """POST /update_weights_from_tensor: one handle or pickled bucket for each rank, as base64. They
    are passed on as they come; nothing here opens them."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class BroadcastBody(msgspec.Struct, frozen=True):
    """POST /update_weights_from_distributed: what the ranks of a group receive next."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class JoinBody(msgspec.Struct, frozen=True):
    """POST /init_weights_update_group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class LeaveBody(msgspec.Struct, frozen=True):
    """POST /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)) from error
