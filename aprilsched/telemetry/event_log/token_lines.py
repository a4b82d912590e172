"""Events and commands as lines of events.jsonl that hold the tokens too: for who asked for them.

They say all that the plain ones of :mod:`aprilsched.telemetry.event_log.lines` say, in the same
words, so whatever reads a log reads either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import asdict

from aprilsched.telemetry.event_log.lines import FIELDS, Writers
from aprilsched.types import Batch, Float32Array, Group, Int32Array, Prompt

__all__ = ["TOKEN_FIELDS"]


def _ids(name: str) -> Callable[[Int32Array], dict[str, Any]]:
    return lambda ids: {**FIELDS[name](ids), name: ids.tolist()}


def _logprobs(logprobs: Float32Array) -> dict[str, Any]:
    return {"logprobs": logprobs.tolist()}


def _prompt(prompt: Prompt) -> dict[str, Any]:
    return {**FIELDS["prompt"](prompt), **_asked(prompt)}


def _prompts(prompts: tuple[Prompt, ...]) -> dict[str, Any]:
    return {**FIELDS["prompts"](prompts), "asked": [_asked(prompt) for prompt in prompts]}


def _asked(prompt: Prompt) -> dict[str, Any]:
    return {"key": prompt.key, "input_ids": prompt.input_ids.tolist()}


def _group(group: Group) -> dict[str, Any]:
    return {**FIELDS["group"](group), "key": group.prompt.key}


def _batch(batch: Batch) -> dict[str, Any]:
    plain = FIELDS["batch"](batch)
    keys = [group.prompt.key for group in batch.groups for _ in group.rollouts]
    with_tokens = [
        {
            **asdict(line),
            "key": key,
            "input_ids": rollout.prompt_ids.tolist(),
            "token_ids": rollout.token_ids.tolist(),
            "logprobs": rollout.logprobs.tolist(),
        }
        for line, rollout, key in zip(plain["rollouts"], batch.rollouts, keys, strict=True)
    ]
    return {**plain, "rollouts": with_tokens}


TOKEN_FIELDS: Writers = {
    **FIELDS,
    "token_ids": _ids("token_ids"),
    "input_ids": _ids("input_ids"),
    "logprobs": _logprobs,
    "prompt": _prompt,
    "prompts": _prompts,
    "group": _group,
    "batch": _batch,
}
"""The table of :mod:`aprilsched.telemetry.event_log.lines`, with tokens and prompt keys."""
