"""Paths of the simulated server, in the groups in which faults happen to them."""

from __future__ import annotations

from aprilsched.agents.serving import calls

GENERATE = ("/generate",)
ABORT = ("/abort_request",)
STEERING = ("/pause_generation", "/continue_generation", "/flush_cache")
UPDATES = (
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weight_version",
    "/load_lora_adapter",
)
CONTROL = (
    *calls.CONTROL,
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)
INFO = calls.INFO
ALL = (*GENERATE, *CONTROL, *INFO)
