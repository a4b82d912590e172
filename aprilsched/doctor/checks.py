"""What the doctor checks of a server, by theme and in the order of the report.

Before the checks stand the lines of the report, and the notes of the scenarios on which they are
based.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.policies.straggler import rules_that
from aprilsched.doctor.client import INTERVAL
from aprilsched.doctor.proofs import RefitNotes, Response
from aprilsched.engines.sglang.probe import SPANS_SINCE, ServerFacts

# --- findings ------------------------------------------------------------------------------------

Status: TypeAlias = Literal["pass", "warn", "fail"]
Noted = TypeVar("Noted")

NEWER = "update SGLang to 0.5.21 or later"
NO_STRAGGLERS = 'use straggler="abort"'
"""What to do about a server that cannot keep stragglers through a pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check found, what that means, what the scheduler does about it, what you can do."""

    check: str
    status: Status
    seen: str
    meaning: str
    action: str
    to_do: str = ""
    """What the user can do about it; empty if there is nothing to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of a check; the check has the rest of the line."""

    status: Status
    seen: str
    to_do: str = ""


def passed(seen: str) -> Verdict:
    """The server does what the scheduler needs, or the scheduler itself avoids the hazard."""
    return Verdict(status="pass", seen=seen)


def warned(seen: str, to_do: str = "") -> Verdict:
    """It depends on the server and was not tried, or the user should know about it."""
    return Verdict(status="warn", seen=seen, to_do=to_do)


def failed(seen: str, to_do: str) -> Verdict:
    """The scheduler cannot work with the server as intended, until the user has done `to_do`."""
    return Verdict(status="fail", seen=seen, to_do=to_do)


@dataclass(slots=True)
class PauseNotes:
    """Notes on one pause with a stream of ours in it; None means that it was not observed."""

    why_not: str | None = None
    pause_seconds: float | None = None
    tokens_during: int | None = None
    ended_during: bool | None = None
    ready_status: int | None = None
    running_told: int | None = None
    flush_status: int | None = None
    held_silent: bool | None = None
    held_completed: bool | None = None
    finish: str | None = None
    same_tokens: bool | None = None
    abort_ended_during: bool | None = None
    """Whether another stream, aborted during the pause, ended before the continue."""
    abort_finish: str | None = None
    abort_tokens: int | None = None
    """Number of tokens that arrived from that stream after its abort."""


@dataclass(slots=True)
class Notes:
    """Everything that was seen on one server, in the order of the scenarios."""

    facts: ServerFacts
    version: tuple[int, int, int]
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """The content of /server_info."""
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    paths: frozenset[str] = frozenset()
    paused_before: bool = False
    others: int | None = None
    """Number of others' requests at the start; None where the server does not report it."""
    health_status: int | None = None
    whole: dict[str, Any] | None = None
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    cached: list[int] = field(default_factory=list[int])
    """Number of cached tokens of one prompt: under a cache key, under it again, under another."""
    returned: dict[str, Any] | None = None
    """The meta_info of a response for which everything was asked that the server can return."""
    seam: list[NDArray[Any]] = field(default_factory=list[NDArray[Any]])
    """Routed experts of an aborted response, of its continuation, and of both in one pass."""
    refit: RefitNotes = field(default_factory=RefitNotes)
    aborted: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    abort_seconds: float | None = None
    unknown_abort_status: int | None = None
    duplicate_status: int | None = None
    left_seconds: float | None = None
    """Seconds until a request whose client disconnected had left the server."""
    retract: PauseNotes = field(default_factory=PauseNotes)
    in_place: PauseNotes = field(default_factory=PauseNotes)
    trouble: dict[str, str] = field(default_factory=dict[str, str])
    """The reason why a scenario broke off, by the scenario's name."""
    label_after: str | None = None
    paused_after: bool | None = None
    running_after: int | None = None

    @property
    def returns(self) -> frozenset[str]:
        """What beside tokens it says that it can return."""
        hidden = {"hidden_states"} if self.info.get("enable_return_hidden_states") else set[str]()
        return (self.facts.capabilities.companions & RETURNED.keys()) | hidden

    @property
    def last_hidden(self) -> bool:
        """Whether it returns the hidden states of the last token alone, and refuses a request for
        all."""
        return self.info.get("return_hidden_states_mode") == "last"

    @property
    def simulated(self) -> bool:
        """Whether the server says that it is a simulated engine."""
        return bool(self.info.get("simulated", False))


Judge: TypeAlias = Callable[[Notes], Verdict]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the report: `judge` gives the result, the rest is constant."""

    name: str
    judge: Judge
    meaning: str
    action: str

    def finding(self, notes: Notes) -> Finding:
        """The line of the report."""
        try:
            verdict = self.judge(notes)
        except _NotObserved as missing:
            verdict = _left_out(notes, missing.scenario)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            verdict = failed(
                f"its answers do not have SGLang's form ({type(error).__name__}: {error})", NEWER
            )
        return Finding(
            check=self.name,
            status=verdict.status,
            seen=verdict.seen,
            meaning=self.meaning,
            action=self.action,
            to_do=verdict.to_do,
        )


CHECKS: list[Check] = []
"""The checks in the order of the report, which is the order in which they are written here."""


def check(name: str, action: str) -> Callable[[Judge], Judge]:
    """Make the decorated function a check. Its docstring is what the line of the report means.

    Args:
        name: begins the line of the report.
        action: what the scheduler does about it.
    """

    def add(judge: Judge) -> Judge:
        meaning = inspect.getdoc(judge) or ""
        CHECKS.append(Check(name=name, judge=judge, meaning=meaning, action=action))
        return judge

    return add


class _NotObserved(Exception):
    """A scenario did not note what a check judges."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario


def observed(scenario: str, note: Noted | None) -> Noted:
    """What the scenario noted; without a note, the check is left out."""
    if note is None:
        raise _NotObserved(scenario)
    return note


def _left_out(notes: Notes, scenario: str) -> Verdict:
    """The result of a check whose scenario did not complete."""
    why = {"retract": notes.retract.why_not, "in_place": notes.in_place.why_not}.get(scenario)
    if why is not None:
        return warned(f"left out: {why}")
    if notes.paused_before:
        return warned("left out: somebody else has paused the server")
    if scenario in notes.trouble:
        return failed(
            f"the probe {notes.trouble[scenario]}", "look at its log, and examine it again"
        )
    return warned("left out: the probe saw nothing")


# Constants of several checks.

_READ_UP_TO = (0, 5, 23)
"""The newest release whose source was read for the hazards."""
_FLUSH_FAILS_SINCE = (0, 5, 22)
_RESTART = "look at its log, and restart it"
_INTERVAL = "start it with --stream-interval 64"
_SPANS = f"{NEWER}, {NO_STRAGGLERS}, or set allow_inexact_versions"
_MIXING = " or ".join(f'"{name}"' for name in rules_that(lambda rule: rule.needs_spans))
_NOT_IN_PLACE = 'do not use straggler="in_place"'
_NO_ROWS = "it returns no routed experts"
_NEVER_MET = passed("not tried: the scheduler never causes it")
"""The result for a hazard that the scheduler never causes, on whatever server."""


# --- server --------------------------------------------------------------------------------------

# What the server is.


@check("release", "asks each server what it can do, and does not use what it cannot")
def release(notes: Notes) -> Verdict:
    """The hazards were read or measured on SGLang 0.5.17 to 0.5.23."""
    seen = f"{notes.facts.capabilities.server}, model {notes.facts.model_path}"
    if notes.simulated:
        return warned(f"{seen}, simulated: no model is behind it")
    if notes.version < SPANS_SINCE:
        return warned(seen, NEWER)
    if notes.version > _READ_UP_TO:
        return warned(seen)
    return passed(seen)


@check(
    "left paused (hazard 12)",
    "follows every pause by a continue, and continues every server that it opens",
)
def paused_before(notes: Notes) -> Verdict:
    """A client that stops between pause and continue leaves the server paused for ever."""
    if notes.paused_before:
        return failed(
            "/ready answers 503: it is paused",
            "let whoever paused it continue it, or send POST /continue_generation; then examine it "
            "again",
        )
    return passed("it is not paused")


@check("idle", "none")
def others(notes: Notes) -> Verdict:
    """A server with others' requests is never paused or flushed by this command."""
    if notes.others is None:
        return warned("/v1/loads does not report how many requests are on it")
    if notes.others:
        return warned(
            f"{notes.others} requests of others were on it",
            "examine it again when it is idle, so that pauses are tried",
        )
    return passed("it was idle")


@check("vocabulary (hazard 3b)", "refuses such a prompt before it is sent, where the size is known")
def vocabulary(notes: Notes) -> Verdict:
    """A token id beyond the vocabulary kills the scheduler of a real server."""
    size = notes.facts.vocab_size
    if size is None:
        return warned(
            "it does not report the size of its vocabulary; ids beyond it were not tried",
            "make sure that no prompt has a token id beyond the vocabulary",
        )
    return passed(f"{size} token ids; ids beyond it were not tried")


@check("room", "leaves the rest in the server's queue; set dispatch.max_in_flight to bound it")
def room(notes: Notes) -> Verdict:
    """A batch larger than this cannot run all at once."""
    found = notes.facts.capabilities
    seen = f"{found.max_running_requests} running requests, {found.kv_tokens} tokens of KV"
    whole = found.max_running_requests is not None and found.kv_tokens is not None
    return passed(seen) if whole else warned(seen)


@check("weight version", "labels each update with its number; any other label counts as version 0")
def label(notes: Notes) -> Verdict:
    """Tokens are attributed to policy versions by this label."""
    found = notes.facts.label
    if found == "default" or (found.isascii() and found.isdigit()):
        return passed(f"weight_version is {found!r}")
    return warned(f"weight_version is {found!r}, which is not a number")


@check(
    "health (hazard 6)", "never calls it, but /ready and /model_info; routers should do the same"
)
def health(notes: Notes) -> Verdict:
    """/health generates a token, so it hangs while paused; a router may eject it then."""
    status = observed("health", notes.health_status)
    seen = f"/health answers {status} while it is not paused"
    return passed(seen) if status == 200 else failed(seen, _RESTART)


# --- tokens --------------------------------------------------------------------------------------

# Every token must arrive once, with its logprob and its version.


@check("stream form (hazard 10)", "reads both forms")
def form(notes: Notes) -> Verdict:
    """Cumulative events cost the square of a response's length."""
    sizes = [len(event.get("output_ids", [])) for event in notes.events]
    total = observed("responses", notes.events or None)[-1]["meta_info"]["completion_tokens"]
    seen = f"events of {', '.join(map(str, sizes))} tokens for {total}"
    if sum(sizes) == total:
        if len(sizes) > 1 or notes.facts.incremental:
            return passed(seen)
        return warned(f"{seen}: one event shows no form")
    return failed(
        f"{seen}: each event repeats all tokens", "start it with --incremental-streaming-output"
    )


@check("stream interval (hazard 10)", "asks for 64 tokens where it can")
def interval(notes: Notes) -> Verdict:
    """Long intervals are cheap; a lost server loses the tokens of one interval."""
    if not notes.facts.stream_interval:
        return warned("a request cannot set stream_interval", _INTERVAL)
    total = observed("responses", notes.events or None)[-1]["meta_info"]["completion_tokens"]
    seen = f"asked for {INTERVAL}, {total} tokens came in {len(notes.events)} events"
    return passed(seen) if len(notes.events) * INTERVAL >= total else warned(seen, _INTERVAL)


@check("logprobs", "refuses a response whose tokens and logprobs do not match")
def logprobs(notes: Notes) -> Verdict:
    """A token without its own logprob cannot be trained on."""
    whole = observed("responses", notes.whole)
    meta, ids = whole["meta_info"], whole["output_ids"]
    triples: list[Any] = meta.get("output_token_logprobs") or []
    seen = f"{len(triples)} logprobs for {len(ids)} tokens"
    agree = [triple[1] for triple in triples] == ids and len(ids) == meta["completion_tokens"]
    return passed(seen) if agree else failed(f"{seen}; they do not match", NEWER)


@check("version spans", f"refuses straggler={_MIXING} without them")
def spans(notes: Notes) -> Verdict:
    """Without spans, nobody knows which policy sampled a straggler's tokens."""
    whole = observed("responses", notes.whole)
    found = whole["meta_info"].get("weight_versions")
    if found is None:
        return failed("a finished response has no weight_versions", _SPANS)
    tokens = len(whole["output_ids"])
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


@check("greedy repeats", "none; every token has the logprob it was sampled with")
def same(notes: Notes) -> Verdict:
    """Without determinism a re-sent prefix continues with other, equally valid tokens."""
    whole, ids = observed("responses", notes.whole), list[int]()
    for event in observed("responses", notes.events or None):
        new, total = event["output_ids"], event["meta_info"]["completion_tokens"]
        ids = new if len(new) == total else ids + new
    if ids == whole["output_ids"]:
        return passed("the same greedy response twice")
    return warned("two greedy responses differ")


RETURNED = {
    "routed_experts": "--enable-return-routed-experts",
    "indexer_topk": "--enable-return-indexer-topk",
    "hidden_states": "--enable-return-hidden-states",
    "sampling_mask": "SGLang 0.5.21",
}
"""What a request can ask for beside tokens, and what the server needs for it."""


@check("companions", "refuses a run that asks for what a server does not return")
def companions(notes: Notes) -> Verdict:
    """Routed experts and sampling masks are data of the sampling pass; no later pass has them."""
    told = observed("companions", notes.returned)
    came = {name for name in RETURNED if told.get(name) or told.get(f"output_token_{name}")}
    lacks = ", ".join(f"{name} ({needs})" for name, needs in RETURNED.items() if name not in came)
    seen = f"{', '.join(sorted(came)) or 'nothing'} came" + (f", not {lacks}" if lacks else "")
    if notes.last_hidden:
        seen += "; hidden_states of the last token alone (--return-hidden-states-mode)"
    if missing := notes.returns - came:
        return failed(f"{seen}: it says that it returns {', '.join(sorted(missing))}", _RESTART)
    return passed(seen)


@check("rows at a seam", "asks each attempt for the rows from the first missing one on")
def seam(notes: Notes) -> Verdict:
    """A last token was not forwarded, so its row comes with the continuation of the response."""
    if "routed_experts" not in notes.returns:
        return passed(_NO_ROWS)
    first, more, whole = observed("proofs", notes.seam or None)
    seen = f"{len(first)} rows of an abort and {len(more)} after it, for {len(whole)} positions"
    if len(first) + len(more) != len(whole):
        return failed(seen, NEWER)
    same = _alike(np.concatenate((first, more)), whole)
    seen += f"; {same} are those of one pass"
    # Rounding decides between experts that are nearly as good.
    return passed(seen) if 2 * same > len(whole) else failed(seen, NEWER)


def _alike(some: NDArray[Any], others: NDArray[Any]) -> int:
    """Number of rows that are equal."""
    return int((some == others).reshape(len(some), -1).all(1).sum())


# --- requests ------------------------------------------------------------------------------------

# Requests that end early.


@check("abort", "repeats the abort until the stream has ended")
def abort(notes: Notes) -> Verdict:
    """An abort without a pause gives all tokens at once; it is how rollouts move."""
    seconds = observed("aborts", notes.abort_seconds)
    reason: dict[str, Any] = (
        observed("aborts", notes.aborted or None)[-1]["meta_info"]["finish_reason"] or {}
    )
    kind = reason.get("type")
    seen = f"ended after {seconds * 1e3:.0f} ms with {kind!r}"
    if kind == "length":
        return warned(f"{seen}: it was over before the abort")
    return passed(seen) if kind == "abort" else failed(seen, NEWER)


@check("ids at an abort (hazard 2)", "takes ids from the logprobs, never by position")
def counts(notes: Notes) -> Verdict:
    """A stream can give one id more than logprobs when it is aborted."""
    last = observed("aborts", notes.aborted or None)[-1]
    ids = len(last.get("output_ids", []))
    known = len(last["meta_info"].get("output_token_logprobs") or [])
    seen = f"the last event has {ids} ids and {known} logprobs"
    return passed(seen) if ids == known else warned(seen)


@check("abort of nobody (hazard 11)", "repeats aborts without asking first")
def unknown(notes: Notes) -> Verdict:
    """Aborts may come late, and must be harmless then."""
    status = observed("aborts", notes.unknown_abort_status)
    seen = f"aborting an unknown rid answers {status}"
    return passed(seen) if status == 200 else failed(seen, NEWER)


@check(
    "duplicate rid (hazard 11)",
    "gives every attempt a new rid of one fixed length, since aborts match by prefix",
)
def duplicate(notes: Notes) -> Verdict:
    """A rid in use is refused; refused in a stream, it ends the first one after 2 s."""
    status = observed("aborts", notes.duplicate_status)
    seen = f"a second request of a running rid answers {status}"
    return passed(seen) if status == 400 else warned(seen)


@check("hanging up (hazard 9)", "aborts every stream that it leaves before its end")
def hanging_up(notes: Notes) -> Verdict:
    """A request whose client has disconnected may decode to its end."""
    if notes.others != 0:
        return warned("left out: others' requests are on it, or it does not report its load")
    if notes.left_seconds is None:
        if notes.paused_before or "hanging_up" in notes.trouble:
            raise _NotObserved("hanging_up")
        return warned("its request did not leave the server within 3 s")
    return passed(f"its request was gone after {notes.left_seconds * 1e3:.0f} ms")


# --- pausing -------------------------------------------------------------------------------------

# What a pause stops, keeps and holds back.


@check("pause retract", 'uses this pause for straggler="retract"')
def retract(notes: Notes) -> Verdict:
    """Stragglers wait inside the engine while new weights come in."""
    return _stops("retract", notes.retract, NO_STRAGGLERS)


def _stops(scenario: str, noted: PauseNotes, to_do: str) -> Verdict:
    """Whether the pause stopped a stream and kept it open."""
    tokens = observed(scenario, noted.tokens_during)
    seconds = observed(scenario, noted.pause_seconds)
    if tokens:
        return failed(f"{tokens} tokens arrived while it was paused", to_do)
    if noted.held_silent is False:
        return failed("a request sent while it was paused was generated", to_do)
    if noted.ended_during:
        seen = "a response of ours was over when the pause took effect"
        return warned(seen) if noted.ready_status == 503 else failed(seen, to_do)
    return passed(f"paused in {seconds * 1e3:.0f} ms, no token arrived meanwhile")


@check("continue after retract", "delivers the straggler in a later batch")
def goes_on(notes: Notes) -> Verdict:
    """A straggler's KV is recomputed and nothing of it is lost."""
    return _goes_on("retract", notes.retract, NO_STRAGGLERS)


def _goes_on(scenario: str, noted: PauseNotes, to_do: str) -> Verdict:
    """Whether a stream continued after the pause."""
    same_tokens = observed(scenario, noted.same_tokens)
    if noted.finish != "length":
        return failed(f"the stream ended with {noted.finish!r} after continue", to_do)
    if not same_tokens:
        return warned("the stream continued with other tokens than without a pause")
    return passed("the stream continued with the same tokens as without a pause")


@check("flush after retract (hazard 3)", "flushes between pause and update")
def flush(notes: Notes) -> Verdict:
    """Without a flush, tokens attend to keys of older weights."""
    status = observed("retract", notes.retract.flush_status)
    seen = f"flush_cache answers {status} after a retract"
    if status == 200:
        return passed(seen)
    return failed(seen, f'{NO_STRAGGLERS} with kv_after_refit="apart"')


@check(
    "held requests (hazard 4)",
    "sends none while paused, and closes the connection of one without a token",
)
def held(notes: Notes) -> Verdict:
    """A request sent during a pause is silent, and an abort of it is lost."""
    completed = observed("retract", notes.retract.held_completed)
    if not notes.retract.held_silent:
        return failed("answered while paused", NEWER)
    if not completed:
        return failed("lost after continue", NEWER)
    return passed("held silently, and answered after continue")


@check(
    "ready while paused (hazard 6)",
    "asks it before it probes with a request; routers and watchdogs should ask it too",
)
def ready(notes: Notes) -> Verdict:
    """/ready shows to other programs that a server is paused."""
    status = observed("retract", notes.retract.ready_status)
    seen = f"/ready answers {status} while paused"
    return passed(seen) if status == 503 else warned(seen)


@check("loads while paused (hazard 7)", "counts its own requests instead")
def loads(notes: Notes) -> Verdict:
    """The loads are those from before the pause."""
    observed("retract", notes.retract.tokens_during)
    return passed(f"/v1/loads reports {notes.retract.running_told} requests while paused")


@check("pause in_place", 'uses this pause only for straggler="in_place"')
def in_place(notes: Notes) -> Verdict:
    """The KV stays, so tokens after an update attend to keys of older weights."""
    return _stops("in_place", notes.in_place, _NOT_IN_PLACE)


@check("continue after in_place", "delivers the straggler in a later batch")
def goes_on_in_place(notes: Notes) -> Verdict:
    """Nothing is recomputed."""
    return _goes_on("in_place", notes.in_place, _NOT_IN_PLACE)


@check(
    "abort under in_place (hazard 5)",
    "repeats the abort until the stream ends, and trusts the spans for that token",
)
def abort_in_place(notes: Notes) -> Verdict:
    """Such an abort acts only after continue, with one token of the new version."""
    noted = notes.in_place
    finish = observed("in_place", noted.abort_finish)
    when = "before" if noted.abort_ended_during else "after"
    more = f"{noted.abort_tokens} more tokens arrived"
    seen = f"ended {when} continue with {finish!r}, {more}"
    return passed(seen) if finish == "abort" else warned(seen)


# --- weights -------------------------------------------------------------------------------------

# Updates of weights and adapters, of released memory, and of the KV cache.
#
# Only the cache keys are tried; the rest would change the server or kill it. A line passes if the
# server says that it has what is needed, or if the scheduler avoids the hazard on every server; a
# line warns if it depends on the server and is not tried.


@check("cache keys", 'sends a key for each version with kv_after_refit="apart"')
def cache_keys(notes: Notes) -> Verdict:
    """With a key for each version, new requests never use old KV that was not flushed."""
    _, again, other = observed("cache_keys", notes.cached if len(notes.cached) == 3 else None)
    seen = f"{again} cached tokens under the same key, {other} under another"
    if other:
        return failed(seen, 'do not use kv_after_refit="apart"')
    return passed(seen) if again else warned(f"{seen}: it shares no cache, so keys do not show")


@check("default of a pause", "always sends the mode")
def pause_default(notes: Notes) -> Verdict:
    """A bare pause_generation can end every request."""
    return _default(notes, "PauseGenerationReqInput", "mode", "abort")


@check("update outside of a pause (hazard 8)", "pauses the server first")
def update_outside_of_a_pause(_: Notes) -> Verdict:
    """Such an update waits for every running request."""
    return _NEVER_MET


@check(
    "flush within an update (hazard 3)",
    "flushes while paused, then updates with flush_cache=false; do the same by hand",
)
def flush_in_update(notes: Notes) -> Verdict:
    """An update with flush_cache=true, its default, kills a busy server or fails half-way."""
    # It warns: the scheduler never does it, but updates of the same server by hand may.
    if notes.simulated:
        return warned("not tried: the simulated server refuses it before it loads")
    if notes.version < _FLUSH_FAILS_SINCE:
        return warned(f"not tried: {notes.facts.capabilities.server} asserts that it is idle")
    return warned("not tried: a busy server answers 400, with new weights under the old label")


@check(
    "failed load from disk",
    "treats such weights as inconsistent and sends nothing there until a complete refit",
)
def failed_load(notes: Notes) -> Verdict:
    """Weights are written in place: what failed half-way is not rolled back."""
    # It warns: only some failures are answered at all.
    if notes.simulated:
        return warned("not tried: the simulated server keeps its old weights")
    return warned("not tried: it loads the same directory once more, and dies if that fails too")


_DIFFERENCE = 1e-3
"""Log-probabilities under the same weights differ by less: nothing else is on the server, and no
prefix is cached."""


@check("refit by its logprobs", "compares logprobs with the trainer's, if the trainer reports them")
def fresh(notes: Notes) -> Verdict:
    """Checksums see parameters, and not what the engine made of them at its start."""
    return proof(notes.refit)


def proof(noted: RefitNotes) -> Verdict:
    """Whether fresh responses show the weights that were loaded."""
    if noted.why_not is not None:
        return warned(f"not tried: {noted.why_not}")
    before, *after = observed("proofs", noted.responses if len(noted.responses) == 4 else None)
    changed = [_differ(before, each) for each in after]
    means = ", ".join(f"{each.logprobs.mean():.4f}" for each in noted.responses)
    seen = f"mean logprobs before, of its own folder, of the other, and of its own: {means}"
    if changed != [False, True, False]:
        return failed(seen, "give other weights than its own, or update it in another way")
    return passed(seen)


def _differ(one: Response, other: Response) -> bool:
    gap = np.abs(one.logprobs - other.logprobs).max() if one.ids == other.ids else np.inf
    return bool(gap > _DIFFERENCE)


@check(
    "rows after a retract",
    "with routed experts, calls unfinished responses back before an update",
)
def rows_after_a_retract(notes: Notes) -> Verdict:
    """After a retract with recompute, older tokens come with the new weights' routing."""
    if "routed_experts" not in notes.returns:
        return passed(_NO_ROWS)
    if len(notes.refit.rows) < 3:
        return _NEVER_MET
    came, new, old = notes.refit.rows
    return passed(
        f"after a retract with recompute the server returns the new weights' routing for older "
        f"tokens: {_alike(came, new)} of {len(came)} rows are the new ones, and "
        f"{_alike(came, old)} the old"
    )


@check("brackets of an update", "puts them there, and closes an update that a failure left open")
def brackets(notes: Notes) -> Verdict:
    """Tensor and distributed updates must stand between these calls where they exist."""
    if notes.facts.update_sessions:
        return passed("it has begin_weight_update and end_weight_update")
    if not notes.paths:
        return warned("it publishes no schema, so it is taken to have no begin_weight_update")
    return passed("it has no begin_weight_update")


@check(
    "default of a new label",
    "labels tensor and distributed updates by it with abort_all_requests=false; other updates "
    "carry a label",
)
def label_default(notes: Notes) -> Verdict:
    """A bare update_weight_version can end every request."""
    return _default(notes, "UpdateWeightVersionReqInput", "abort_all_requests", True)


def _default(notes: Notes, body: str, name: str, dangerous: object) -> Verdict:
    """It passes with every default, because the scheduler always gives the value."""
    field: dict[str, Any] = notes.schemas.get(body, {}).get(name, {})
    if "default" not in field:
        return passed(f"its schema does not give the default of {name}")
    found = field["default"]
    danger = " (every request ends)" if found == dangerous else ""
    return passed(f"the default of {name} is {found!r}{danger}")


@check("ranks", "counts them for the trainer's group (rank offsets) and sends a handle to each")
def ranks(notes: Notes) -> Verdict:
    """Each rank takes its own part of a tensor or distributed update."""
    count, copies = notes.facts.capabilities.ranks, notes.info.get("dp_size") or 1
    seen = f"{count} rank{'s' if count > 1 else ''} (tp_size times pp_size)"
    if copies > 1 and not notes.info.get("enable_dp_attention"):
        return warned(
            f"{seen}, dp_size {copies} without dp attention: updates from disk only",
            "start it with --attn-dp-size (before 0.5.22 --enable-dp-attention), or use a folder",
        )
    return passed(seen)


@check("LoRA adapters", "publishes adapters only where it is enabled")
def adapters(notes: Notes) -> Verdict:
    """Several adapters can be loaded while the server generates."""
    if notes.facts.capabilities.adapters:
        return passed("LoRA is enabled")
    return warned("LoRA is not enabled", "start it with --enable-lora if you train adapters")


@check(
    "unload of an adapter in use",
    "unloads an adapter only after the last request of the scheduler with it",
)
def unload_of_an_adapter(_: Notes) -> Verdict:
    """An unload waits for the adapter's last request; no other adapter loads meanwhile."""
    return _NEVER_MET


@check(
    "release while requests wait",
    "keeps them in the engine since 0.5.21; elsewhere takes them back before asleep()",
)
def release_of_memory(notes: Notes) -> Verdict:
    """Stragglers can stay in a sleeping engine only if it can release memory meanwhile."""
    # It is derived from the version, because an older server dies of it.
    if notes.facts.capabilities.release_while_paused:
        return warned("not tried: known to be possible since 0.5.21")
    return warned("not tried: 0.5.17 asserts that nothing waits, and dies")


@check(
    "released weights",
    "sends nothing to an engine whose weights were lost until it has had a refit",
)
def kept(notes: Notes) -> Verdict:
    """--enable-memory-saver frees memory; --enable-weights-cpu-backup keeps weights."""
    if not notes.info.get("enable_memory_saver"):
        return warned(
            "no memory saver: a release frees nothing, and the weights stay",
            "start it with --enable-memory-saver if the trainer shares its GPUs",
        )
    if notes.facts.capabilities.keeps_released_weights:
        return passed("a copy of the weights stays on the CPU")
    return warned("released weights are gone until an update brings new ones")


# --- not tried -----------------------------------------------------------------------------------

# Hazards whose trial takes too long or ends requests. Such a line passes if the scheduler's own
# behaviour avoids the hazard on every server; it warns if the result depends on the server, because
# that was not examined.


@check(
    "abort after retract (hazard 1)",
    "always streams, so at most the tokens of one interval are sampled again",
)
def abort_after_retract(_: Notes) -> Verdict:
    """A response that is not streamed keeps only a multiple of 50 tokens."""
    return _NEVER_MET


@check("time limits of clients (hazard 13)", "sets neither; only control calls have a time limit")
def time_limits(_: Notes) -> Verdict:
    """A total time limit, or a limit of 100 connections, cuts off stragglers."""
    return _NEVER_MET


@check("retries (hazard 14)", "repeats a generation only if nothing was sent, or after an abort")
def retries(_: Notes) -> Verdict:
    """A repeated generation decodes at the same time as the first one."""
    return _NEVER_MET


@check(
    "trickling requests (hazard 15)",
    "starts many groups together; a retry or a next turn still arrives alone",
)
def trickling_requests(_: Notes) -> Verdict:
    """Each arrival costs every running request a prefill pass."""
    return warned("not tried: every release up to 0.5.23 is known to have it")


# --- last ----------------------------------------------------------------------------------------

# Whether the server is left as it was found.


@check("left as found", "none")
def unchanged(notes: Notes) -> Verdict:
    """This command continues what it paused and ends what it began."""
    if notes.label_after is None or notes.paused_after is None:
        return failed("it did not answer after everything was taken back", _RESTART)
    wrong = [
        what
        for what, is_so in (
            (f"weight_version is {notes.label_after!r}", notes.label_after != notes.facts.label),
            ("it is paused", notes.paused_after and not notes.paused_before),
            (f"{notes.running_after} requests run", notes.others == 0 and notes.running_after),
        )
        if is_so
    ]
    if wrong:
        return failed(" and ".join(wrong), _RESTART)
    state = "still paused" if notes.paused_after else "not paused"
    idle = ", no request on it" if notes.running_after == 0 else ""
    return passed(f"weight_version {notes.label_after!r}, {state}{idle}")
