"""The routes that a fault can be on: each path of the served API, and names for groups of them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ABORT", "GENERATE", "GROUPS", "PATHS", "STEERING", "UPDATES", "paths_of"]

GENERATE = ("/generate",)
ABORT = ("/abort_request",)
STEERING = ("/pause_generation", "/continue_generation", "/flush_cache")
UPDATES = ("/update_weights_from_disk", "/update_weight_version", "/load_lora_adapter")
_CONTROL = (
    *STEERING,
    *ABORT,
    *UPDATES,
    "/unload_lora_adapter",
    "/begin_weight_update",
    "/end_weight_update",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)
_INFO = (
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/openapi.json",
    "/v1/loads",
    "/v1/models",
    "/ready",
    "/health",
    "/health_generate",
)
PATHS = (*GENERATE, *_CONTROL, *_INFO)
"""Every path that is served."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": PATHS,
    "control": _CONTROL,
    "info": _INFO,
    "steering": STEERING,
    "updates": UPDATES,
}
"""What a script may say instead of a list of paths."""


def paths_of(name: str) -> tuple[str, ...]:
    """The paths that `name`, a path or a group, stands for; none if there is no such thing."""
    return GROUPS.get(name, (name,) if name in PATHS else ())
