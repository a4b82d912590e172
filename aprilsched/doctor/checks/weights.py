"""Checks of updates of weights and adapters, of released memory, and of the KV cache.

Only the cache keys are tried; the rest would change the server or kill it. A line passes if the
server says that it has what is needed, or if the scheduler avoids the hazard on every server; a
line warns if it depends on the server and is not tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aprilsched.doctor.findings import (
    Check,
    Notes,
    Verdict,
    failed,
    left_out,
    never_met,
    passed,
    warned,
)

__all__ = ["CHECKS"]


def brackets(notes: Notes) -> Verdict:
    """Whether updates have a begin and an end, from the server's own schema."""
    if notes.facts.update_sessions:
        return passed("it has begin_weight_update and end_weight_update")
    if not notes.paths:
        return warned("it publishes no schema, so it is taken to have no begin_weight_update")
    return passed("it has no begin_weight_update")


def ranks(notes: Notes) -> Verdict:
    """The number of ranks, from the server's arguments."""
    count, copies = notes.facts.capabilities.ranks, notes.info.get("dp_size") or 1
    seen = f"{count} rank{'s' if count > 1 else ''} (tp_size times pp_size)"
    if copies > 1 and not notes.info.get("enable_dp_attention"):
        return warned(
            f"{seen}, dp_size {copies} without dp attention: updates from disk only",
            "start it with --enable-dp-attention, or update it from disk",
        )
    return passed(seen)


def label_default(notes: Notes) -> Verdict:
    """The default of update_weight_version, from the server's own schema."""
    return _default(notes, "UpdateWeightVersionReqInput", "abort_all_requests", True)


def pause_default(notes: Notes) -> Verdict:
    """The default of pause_generation, from the server's own schema."""
    return _default(notes, "PauseGenerationReqInput", "mode", "abort")


def _default(notes: Notes, body: str, name: str, dangerous: object) -> Verdict:
    """It passes with every default, because the scheduler always gives the value."""
    field: dict[str, Any] = notes.schemas.get(body, {}).get(name, {})
    if "default" not in field:
        return passed(f"its schema does not give the default of {name}")
    found = field["default"]
    danger = " (every request ends)" if found == dangerous else ""
    return passed(f"the default of {name} is {found!r}{danger}")


def flush_in_update(notes: Notes) -> Verdict:
    """It warns: the scheduler never does it, but updates of the same server by hand may."""
    if notes.simulated:
        return warned("not tried: the simulated server refuses it, where a real one dies")
    return warned(f"not tried: {notes.facts.capabilities.server} asserts that it is idle")


def failed_load(notes: Notes) -> Verdict:
    """It warns: only some failures are answered at all."""
    if notes.simulated:
        return warned("not tried: the simulated server keeps its old weights")
    return warned("not tried: it loads the same directory once more, and dies if that fails too")


def release(notes: Notes) -> Verdict:
    """It is derived from the version and never tried, because an older server dies of it."""
    if notes.facts.capabilities.release_while_paused:
        return warned("not tried: known to be possible since 0.5.21")
    return warned("not tried: 0.5.17 asserts that nothing waits, and dies")


def kept(notes: Notes) -> Verdict:
    """What happens to released weights, from the server's arguments."""
    if not notes.info.get("enable_memory_saver"):
        return warned(
            "no memory saver: a release frees nothing, and the weights stay",
            "start it with --enable-memory-saver if the trainer shares its GPUs",
        )
    if notes.facts.capabilities.keeps_released_weights:
        return passed("a copy of the weights stays on the CPU")
    return warned("released weights are gone until an update brings new ones")


def adapters(notes: Notes) -> Verdict:
    """Whether LoRA is enabled, from the server's arguments."""
    if notes.facts.capabilities.adapters:
        return passed("LoRA is enabled")
    return warned("LoRA is not enabled", "start it with --enable-lora if you train adapters")


def cache_keys(notes: Notes) -> Verdict:
    """Whether cache keys separate prompts: the same one twice under one key, then under another."""
    if len(notes.cached) < 3:
        return left_out(notes, "cache_keys")
    _, again, other = notes.cached
    seen = f"{again} cached tokens under the same key, {other} under another"
    if other:
        return failed(seen, 'do not use kv_after_refit="apart"')
    return passed(seen) if again else warned(f"{seen}: it shares no cache, so keys do not show")


CHECKS: Sequence[Check] = (
    Check(
        name="cache keys",
        judge=cache_keys,
        meaning="With a key for each version, new requests never use old KV that was not flushed.",
        action='sends a key for each version with kv_after_refit="apart"',
    ),
    Check(
        name="default of a pause",
        judge=pause_default,
        meaning="A bare pause_generation can end every request.",
        action="always sends the mode",
    ),
    Check(
        name="update outside of a pause (hazard 8)",
        judge=never_met,
        meaning="Such an update waits for every running request.",
        action="pauses the server first",
    ),
    Check(
        name="flush within an update (hazard 3)",
        judge=flush_in_update,
        meaning="An update with flush_cache=true, its default, can kill a busy scheduler.",
        action="flushes while paused, then updates with flush_cache=false; do the same by hand",
    ),
    Check(
        name="failed load from disk",
        judge=failed_load,
        meaning="Weights are written in place: what failed half-way is not rolled back.",
        action="treats such weights as inconsistent and sends nothing there until a complete refit",
    ),
    Check(
        name="brackets of an update",
        judge=brackets,
        meaning="Tensor and distributed updates must stand between these calls where they exist.",
        action="puts them there, and closes an update that a failure left open",
    ),
    Check(
        name="default of a new label",
        judge=label_default,
        meaning="A bare update_weight_version can end every request.",
        action=(
            "labels tensor and distributed updates by it with abort_all_requests=false; other "
            "updates carry a label"
        ),
    ),
    Check(
        name="ranks",
        judge=ranks,
        meaning="Each rank takes its own part of a tensor or distributed update.",
        action="counts them for the trainer's group (rank offsets) and sends a handle to each",
    ),
    Check(
        name="LoRA adapters",
        judge=adapters,
        meaning="Several adapters can be loaded while the server generates.",
        action="publishes adapters only where it is enabled",
    ),
    Check(
        name="unload of an adapter in use",
        # It passes: an adapter is unloaded when no request of ours samples with it any more.
        judge=never_met,
        meaning="An unload waits for the adapter's last request; no other adapter loads meanwhile.",
        action="unloads an adapter only after the last request of the scheduler with it",
    ),
    Check(
        name="release while requests wait",
        judge=release,
        meaning="Stragglers can stay in a sleeping engine only if it can release memory meanwhile.",
        action="keeps them in the engine since 0.5.21; elsewhere takes them back before asleep()",
    ),
    Check(
        name="released weights",
        judge=kept,
        meaning="--enable-memory-saver frees memory; --enable-weights-cpu-backup keeps weights.",
        action="sends nothing to an engine whose weights were lost until it has had a refit",
    ),
)
