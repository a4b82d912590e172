"""Checks that every token arrives once, with its logprob and its version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aprilsched.core.policies.straggler import rules_that
from aprilsched.doctor.client import INTERVAL
from aprilsched.doctor.findings import (
    NEWER,
    NO_STRAGGLERS,
    Check,
    Notes,
    Verdict,
    failed,
    left_out,
    passed,
    warned,
)

__all__ = ["CHECKS"]


def form(notes: Notes) -> Verdict:
    """Whether events are incremental or cumulative."""
    sizes = [len(event.get("output_ids", [])) for event in notes.events]
    if not sizes:
        return left_out(notes, "responses")
    total = notes.events[-1]["meta_info"]["completion_tokens"]
    seen = f"events of {', '.join(map(str, sizes))} tokens for {total}"
    if sum(sizes) == total:
        if len(sizes) > 1 or notes.facts.incremental:
            return passed(seen)
        return warned(f"{seen}: one event shows no form")
    return failed(
        f"{seen}: each event repeats all tokens", "start it with --incremental-streaming-output"
    )


def interval(notes: Notes) -> Verdict:
    """Whether a request can set the interval of its events."""
    if not notes.facts.stream_interval:
        return warned("a request cannot set stream_interval", _INTERVAL)
    if not notes.events:
        return left_out(notes, "responses")
    total = notes.events[-1]["meta_info"]["completion_tokens"]
    seen = f"asked for {INTERVAL}, {total} tokens came in {len(notes.events)} events"
    return passed(seen) if len(notes.events) * INTERVAL >= total else warned(seen, _INTERVAL)


def logprobs(notes: Notes) -> Verdict:
    """Whether each token has one logprob."""
    whole = notes.whole
    if whole is None:
        return left_out(notes, "responses")
    meta, ids = whole["meta_info"], whole["output_ids"]
    triples: list[Any] = meta.get("output_token_logprobs") or []
    seen = f"{len(triples)} logprobs for {len(ids)} tokens"
    agree = [triple[1] for triple in triples] == ids and len(ids) == meta["completion_tokens"]
    return passed(seen) if agree else failed(f"{seen}; they do not match", NEWER)


def spans(notes: Notes) -> Verdict:
    """Whether each token has a version."""
    if notes.whole is None:
        return left_out(notes, "responses")
    found = notes.whole["meta_info"].get("weight_versions")
    if found is None:
        return failed("a finished response has no weight_versions", _SPANS)
    tokens = len(notes.whole["output_ids"])
    if _covered(found) != tokens:
        return failed(f"weight_versions cover {_covered(found)} of {tokens} tokens", _SPANS)
    return passed(f"weight_versions cover all {tokens} tokens")


def _covered(found: list[dict[str, Any]]) -> int:
    """Number of tokens from the first one on that are covered without a gap."""
    at = 0
    for span in found:
        if span["start"] > at:
            break
        at = max(at, span["end"])
    return at


def same(notes: Notes) -> Verdict:
    """Whether two greedy responses are equal."""
    if notes.whole is None or not notes.events:
        return left_out(notes, "responses")
    ids: list[int] = []
    for event in notes.events:
        new, total = event["output_ids"], event["meta_info"]["completion_tokens"]
        ids = new if len(new) == total else ids + new
    if ids == notes.whole["output_ids"]:
        return passed("the same greedy response twice")
    return warned("two greedy responses differ")


_INTERVAL = "start it with --stream-interval 64"
_SPANS = f"{NEWER}, {NO_STRAGGLERS}, or set allow_inexact_versions"
_MIXING = " or ".join(f'"{name}"' for name in rules_that(lambda rule: rule.needs_spans))

CHECKS: Sequence[Check] = (
    Check(
        name="stream form (hazard 10)",
        judge=form,
        meaning="Cumulative events cost the square of a response's length.",
        action="reads both forms",
    ),
    Check(
        name="stream interval (hazard 10)",
        judge=interval,
        meaning="Long intervals are cheap; a lost server loses the tokens of one interval.",
        action="asks for 64 tokens where it can",
    ),
    Check(
        name="logprobs",
        judge=logprobs,
        meaning="A token without its own logprob cannot be trained on.",
        action="refuses a response whose tokens and logprobs do not match",
    ),
    Check(
        name="version spans",
        judge=spans,
        meaning="Without spans, nobody knows which policy sampled a straggler's tokens.",
        action=f"refuses straggler={_MIXING} without them",
    ),
    Check(
        name="greedy repeats",
        judge=same,
        meaning="Without determinism a re-sent prefix continues with other, equally valid tokens.",
        action="none; every token has the logprob it was sampled with",
    ),
)
