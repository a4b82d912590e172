"""What the doctor checks of a server, by theme, and the table of all checks at the end.

Before them stand the lines of the report, and the notes of the scenarios on which they are based.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from aprilsched.core.policies.straggler import rules_that
from aprilsched.doctor.client import INTERVAL
from aprilsched.engines.sglang.probe import SPANS_SINCE, ServerFacts

# --- findings ------------------------------------------------------------------------------------

Status: TypeAlias = Literal["pass", "warn", "fail"]

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
    """The result of a check; the table of checks has the rest of the line."""

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
    def simulated(self) -> bool:
        """Whether the server says that it is a simulated engine."""
        return bool(self.info.get("simulated", False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the table of checks: `judge` gives the result, the rest is constant."""

    name: str
    judge: Callable[[Notes], Verdict]
    meaning: str
    action: str

    def finding(self, notes: Notes) -> Finding:
        """The line of the report."""
        try:
            verdict = self.judge(notes)
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


def left_out(notes: Notes, scenario: str, why: str = "") -> Verdict:
    """The result of a check whose scenario did not complete."""
    if why:
        return warned(f"left out: {why}")
    if notes.paused_before:
        return warned("left out: somebody else has paused the server")
    if scenario in notes.trouble:
        return failed(
            f"the probe {notes.trouble[scenario]}", "look at its log, and examine it again"
        )
    return warned("left out: the probe saw nothing")


def never_met(_: Notes) -> Verdict:
    """The result for a hazard that the scheduler never causes, on whatever server."""
    return passed("not tried: the scheduler never causes it")


def not_tried(_: Notes) -> Verdict:
    """The result for a hazard that depends on the server and was not tried."""
    return warned("not tried: every release up to 0.5.23 is known to have it")


# --- server --------------------------------------------------------------------------------------

# Checks of what the server is, and whether it is left as it was found.

_READ_UP_TO = (0, 5, 23)
"""The newest release whose source was read for the hazards."""
_RESTART = "look at its log, and restart it"


def release(notes: Notes) -> Verdict:
    """Which release it is, and whether its hazards are known."""
    seen = f"{notes.facts.capabilities.server}, model {notes.facts.model_path}"
    if notes.simulated:
        return warned(f"{seen}, simulated: no model is behind it")
    if notes.version < SPANS_SINCE:
        return warned(seen, NEWER)
    if notes.version > _READ_UP_TO:
        return warned(seen)
    return passed(seen)


def paused_before(notes: Notes) -> Verdict:
    """Whether somebody left it paused."""
    if notes.paused_before:
        return failed(
            "/ready answers 503: it is paused",
            "let whoever paused it continue it, or send POST /continue_generation; then examine it "
            "again",
        )
    return passed("it is not paused")


def others(notes: Notes) -> Verdict:
    """Whether it was idle, so that everything could be examined."""
    if notes.others is None:
        return warned("/v1/loads does not report how many requests are on it")
    if notes.others:
        return warned(
            f"{notes.others} requests of others were on it",
            "examine it again when it is idle, so that pauses are tried",
        )
    return passed("it was idle")


def vocabulary(notes: Notes) -> Verdict:
    """Whether token ids beyond the vocabulary can be refused in time."""
    size = notes.facts.vocab_size
    if size is None:
        return warned(
            "it does not report the size of its vocabulary; ids beyond it were not tried",
            "make sure that no prompt has a token id beyond the vocabulary",
        )
    return passed(f"{size} token ids; ids beyond it were not tried")


def room(notes: Notes) -> Verdict:
    """How much fits on it."""
    found = notes.facts.capabilities
    seen = f"{found.max_running_requests} running requests, {found.kv_tokens} tokens of KV"
    whole = found.max_running_requests is not None and found.kv_tokens is not None
    return passed(seen) if whole else warned(seen)


def label(notes: Notes) -> Verdict:
    """Whether its label of the weights is a version number."""
    found = notes.facts.label
    if found == "default" or (found.isascii() and found.isdigit()):
        return passed(f"weight_version is {found!r}")
    return warned(f"weight_version is {found!r}, which is not a number")


def health(notes: Notes) -> Verdict:
    """Whether it generates at all."""
    if notes.health_status is None:
        return left_out(notes, "health")
    seen = f"/health answers {notes.health_status} while it is not paused"
    return passed(seen) if notes.health_status == 200 else failed(seen, _RESTART)


def unchanged(notes: Notes) -> Verdict:
    """Whether the doctor left it unchanged."""
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


_OF_SERVER: Sequence[Check] = (
    Check(
        name="release",
        judge=release,
        meaning="The hazards were read or measured on SGLang 0.5.17 to 0.5.23.",
        action="asks each server what it can do, and does not use what it cannot",
    ),
    Check(
        name="left paused (hazard 12)",
        judge=paused_before,
        meaning="A client that stops between pause and continue leaves the server paused for ever.",
        action="follows every pause by a continue, and continues every server that it opens",
    ),
    Check(
        name="idle",
        judge=others,
        meaning="A server with others' requests is never paused or flushed by this command.",
        action="none",
    ),
    Check(
        name="vocabulary (hazard 3b)",
        judge=vocabulary,
        meaning="A token id beyond the vocabulary kills the scheduler of a real server.",
        action="refuses such a prompt before it is sent, where the size is known",
    ),
    Check(
        name="room",
        judge=room,
        meaning="A batch larger than this cannot run all at once.",
        action="leaves the rest in the server's queue; set dispatch.max_in_flight to bound it",
    ),
    Check(
        name="weight version",
        judge=label,
        meaning="Tokens are attributed to policy versions by this label.",
        action="labels each update with its number; any other label counts as version 0",
    ),
    Check(
        name="health (hazard 6)",
        judge=health,
        meaning="/health generates a token, so it hangs while paused; a router may eject it then.",
        action="never calls it, but /ready and /model_info; routers should do the same",
    ),
)
_LAST: Sequence[Check] = (
    Check(
        name="left as found",
        judge=unchanged,
        meaning="This command continues what it paused and ends what it began.",
        action="none",
    ),
)


# --- tokens --------------------------------------------------------------------------------------

# Checks that every token arrives once, with its logprob and its version.


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

_OF_TOKENS: Sequence[Check] = (
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


# --- requests ------------------------------------------------------------------------------------

# Checks of requests that end early, and of hazards of requests that are not tried.
#
# Hazards are not tried where a trial takes too long or ends requests. Such a line passes if the
# scheduler's own behaviour avoids the hazard on every server; it warns if the result depends on
# the server, because that was not examined.


def abort(notes: Notes) -> Verdict:
    """Whether an abort ends a running request."""
    if notes.abort_seconds is None or not notes.aborted:
        return left_out(notes, "aborts")
    reason: dict[str, Any] = notes.aborted[-1]["meta_info"]["finish_reason"] or {}
    kind = reason.get("type")
    seen = f"ended after {notes.abort_seconds * 1e3:.0f} ms with {kind!r}"
    if kind == "length":
        return warned(f"{seen}: it was over before the abort")
    return passed(seen) if kind == "abort" else failed(seen, NEWER)


def counts(notes: Notes) -> Verdict:
    """Whether an aborted stream has as many ids as logprobs."""
    if not notes.aborted:
        return left_out(notes, "aborts")
    last = notes.aborted[-1]
    ids = len(last.get("output_ids", []))
    known = len(last["meta_info"].get("output_token_logprobs") or [])
    seen = f"the last event has {ids} ids and {known} logprobs"
    return passed(seen) if ids == known else warned(seen)


def unknown(notes: Notes) -> Verdict:
    """Whether the abort of an unknown rid is harmless."""
    if notes.unknown_abort_status is None:
        return left_out(notes, "aborts")
    seen = f"aborting an unknown rid answers {notes.unknown_abort_status}"
    return passed(seen) if notes.unknown_abort_status == 200 else failed(seen, NEWER)


def duplicate(notes: Notes) -> Verdict:
    """Whether a rid in use is refused."""
    if notes.duplicate_status is None:
        return left_out(notes, "aborts")
    seen = f"a second request of a running rid answers {notes.duplicate_status}"
    if notes.duplicate_status == 400:
        return passed(seen)
    return warned(seen)


def hanging_up(notes: Notes) -> Verdict:
    """Whether the request of a disconnected client ends."""
    if notes.others != 0:
        return left_out(
            notes, "hanging_up", "others' requests are on it, or it does not report its load"
        )
    if notes.left_seconds is None:
        if notes.paused_before or "hanging_up" in notes.trouble:
            return left_out(notes, "hanging_up")
        return warned("its request did not leave the server within 3 s")
    return passed(f"its request was gone after {notes.left_seconds * 1e3:.0f} ms")


_OF_REQUESTS: Sequence[Check] = (
    Check(
        name="abort",
        judge=abort,
        meaning="An abort without a pause gives all tokens at once; it is how rollouts move.",
        action="repeats the abort until the stream has ended",
    ),
    Check(
        name="ids at an abort (hazard 2)",
        judge=counts,
        meaning="A stream can give one id more than logprobs when it is aborted.",
        action="takes ids from the logprobs, never by position",
    ),
    Check(
        name="abort of nobody (hazard 11)",
        judge=unknown,
        meaning="Aborts may come late, and must be harmless then.",
        action="repeats aborts without asking first",
    ),
    Check(
        name="duplicate rid (hazard 11)",
        judge=duplicate,
        meaning="A rid in use is refused; refused in a stream, it ends the first one after 2 s.",
        action="gives every attempt a new rid of one fixed length, since aborts match by prefix",
    ),
    Check(
        name="hanging up (hazard 9)",
        judge=hanging_up,
        meaning="A request whose client has disconnected may decode to its end.",
        action="aborts every stream that it leaves before its end",
    ),
)

_NOT_TRIED: Sequence[Check] = (
    Check(
        # It passes: the scheduler always streams.
        name="abort after retract (hazard 1)",
        judge=never_met,
        meaning="A response that is not streamed keeps only a multiple of 50 tokens.",
        action="always streams, so at most the tokens of one interval are sampled again",
    ),
    Check(
        # It passes: the limits are those of the scheduler's own connections.
        name="time limits of clients (hazard 13)",
        judge=never_met,
        meaning="A total time limit, or a limit of 100 connections, cuts off stragglers.",
        action="sets neither; only control calls have a time limit",
    ),
    Check(
        # It passes: repeating is up to the scheduler.
        name="retries (hazard 14)",
        judge=never_met,
        meaning="A repeated generation decodes at the same time as the first one.",
        action="repeats a generation only if nothing was sent, or after an abort",
    ),
    Check(
        # It warns: the cost of a prefill pass is the server's, and not all requests are refills.
        name="trickling requests (hazard 15)",
        judge=not_tried,
        meaning="Each arrival costs every running request a prefill pass.",
        action="starts many groups together; a retry or a next turn still arrives alone",
    ),
)


# --- pausing -------------------------------------------------------------------------------------

# Checks of what a pause stops, keeps and holds back.

_NOT_IN_PLACE = 'do not use straggler="in_place"'


def retract(notes: Notes) -> Verdict:
    """Whether pause(retract) stops a stream and keeps it open."""
    return _stops(notes, notes.retract, "retract", NO_STRAGGLERS)


def in_place(notes: Notes) -> Verdict:
    """Whether pause(in_place) stops a stream and keeps it open."""
    return _stops(notes, notes.in_place, "in_place", _NOT_IN_PLACE)


def _stops(notes: Notes, noted: PauseNotes, scenario: str, to_do: str) -> Verdict:
    if noted.tokens_during is None or noted.pause_seconds is None:
        return left_out(notes, scenario, noted.why_not or "")
    if noted.tokens_during:
        return failed(f"{noted.tokens_during} tokens arrived while it was paused", to_do)
    if noted.held_silent is False:
        return failed("a request sent while it was paused was generated", to_do)
    if noted.ended_during:
        seen = "a response of ours was over when the pause took effect"
        return warned(seen) if noted.ready_status == 503 else failed(seen, to_do)
    return passed(f"paused in {noted.pause_seconds * 1e3:.0f} ms, no token arrived meanwhile")


def goes_on(notes: Notes) -> Verdict:
    """Whether a stream continues after retract, flush and continue."""
    return _goes_on(notes, notes.retract, "retract", NO_STRAGGLERS)


def goes_on_in_place(notes: Notes) -> Verdict:
    """Whether a stream continues after in_place and continue."""
    return _goes_on(notes, notes.in_place, "in_place", _NOT_IN_PLACE)


def _goes_on(notes: Notes, noted: PauseNotes, scenario: str, to_do: str) -> Verdict:
    if noted.tokens_during is None or noted.same_tokens is None:
        return left_out(notes, scenario, noted.why_not or "")
    if noted.finish != "length":
        return failed(f"the stream ended with {noted.finish!r} after continue", to_do)
    if not noted.same_tokens:
        return warned("the stream continued with other tokens than without a pause")
    return passed("the stream continued with the same tokens as without a pause")


def flush(notes: Notes) -> Verdict:
    """Whether the cache can be flushed between retract and continue."""
    noted = notes.retract
    if noted.flush_status is None:
        return left_out(notes, "retract", noted.why_not or "")
    seen = f"flush_cache answers {noted.flush_status} after a retract"
    if noted.flush_status == 200:
        return passed(seen)
    return failed(seen, f'{NO_STRAGGLERS} with kv_after_refit="apart"')


def held(notes: Notes) -> Verdict:
    """Whether a request that is sent during a pause waits and is answered later."""
    noted = notes.retract
    if noted.held_completed is None:
        return left_out(notes, "retract", noted.why_not or "")
    if noted.held_silent and noted.held_completed:
        return passed("held silently, and answered after continue")
    return failed(
        "answered while paused" if not noted.held_silent else "lost after continue", NEWER
    )


def ready(notes: Notes) -> Verdict:
    """Whether /ready shows a pause."""
    noted = notes.retract
    if noted.ready_status is None:
        return left_out(notes, "retract", noted.why_not or "")
    seen = f"/ready answers {noted.ready_status} while paused"
    return passed(seen) if noted.ready_status == 503 else warned(seen)


def loads(notes: Notes) -> Verdict:
    """What the loads report during a pause."""
    noted = notes.retract
    if noted.tokens_during is None:
        return left_out(notes, "retract", noted.why_not or "")
    return passed(f"/v1/loads reports {noted.running_told} requests while paused")


def abort_in_place(notes: Notes) -> Verdict:
    """What happens to a stream that is aborted between pause(in_place) and continue."""
    noted = notes.in_place
    if noted.abort_finish is None:
        return left_out(notes, "in_place", noted.why_not or "")
    when = "before" if noted.abort_ended_during else "after"
    more = f"{noted.abort_tokens} more tokens arrived"
    seen = f"ended {when} continue with {noted.abort_finish!r}, {more}"
    return passed(seen) if noted.abort_finish == "abort" else warned(seen)


_OF_PAUSING: Sequence[Check] = (
    Check(
        name="pause retract",
        judge=retract,
        meaning="Stragglers wait inside the engine while new weights come in.",
        action='uses this pause for straggler="retract"',
    ),
    Check(
        name="continue after retract",
        judge=goes_on,
        meaning="A straggler's KV is recomputed and nothing of it is lost.",
        action="delivers the straggler in a later batch",
    ),
    Check(
        name="flush after retract (hazard 3)",
        judge=flush,
        meaning="Without a flush, tokens attend to keys of older weights.",
        action="flushes between pause and update",
    ),
    Check(
        name="held requests (hazard 4)",
        judge=held,
        meaning="A request sent during a pause is silent, and an abort of it is lost.",
        action="sends none while paused, and closes the connection of one without a token",
    ),
    Check(
        name="ready while paused (hazard 6)",
        judge=ready,
        meaning="/ready shows to other programs that a server is paused.",
        action="asks it before it probes with a request; routers and watchdogs should ask it too",
    ),
    Check(
        name="loads while paused (hazard 7)",
        judge=loads,
        meaning="The loads are those from before the pause.",
        action="counts its own requests instead",
    ),
    Check(
        name="pause in_place",
        judge=in_place,
        meaning="The KV stays, so tokens after an update attend to keys of older weights.",
        action='uses this pause only for straggler="in_place"',
    ),
    Check(
        name="continue after in_place",
        judge=goes_on_in_place,
        meaning="Nothing is recomputed.",
        action="delivers the straggler in a later batch",
    ),
    Check(
        name="abort under in_place (hazard 5)",
        judge=abort_in_place,
        meaning="Such an abort acts only after continue, with one token of the new version.",
        action="repeats the abort until the stream ends, and trusts the spans for that token",
    ),
)


# --- weights -------------------------------------------------------------------------------------

# Checks of updates of weights and adapters, of released memory, and of the KV cache.
#
# Only the cache keys are tried; the rest would change the server or kill it. A line passes if the
# server says that it has what is needed, or if the scheduler avoids the hazard on every server; a
# line warns if it depends on the server and is not tried.


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


def release_of_memory(notes: Notes) -> Verdict:
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


_OF_WEIGHTS: Sequence[Check] = (
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
        judge=release_of_memory,
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


# --- all ------------------------------------------------------------------------------------------

CHECKS: Sequence[Check] = (
    *_OF_SERVER,
    *_OF_TOKENS,
    *_OF_REQUESTS,
    *_OF_PAUSING,
    *_OF_WEIGHTS,
    *_NOT_TRIED,
    *_LAST,
)
"""The checks in the order of the report."""
