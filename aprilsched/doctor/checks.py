"""What the doctor checks of an SGLang server, by theme and in the order of the report.

A hazard that no experiment may show, because that would change the server, kill it or take too
long, has no line; docs/doctor.md tells of it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.policies.straggler import rules_that
from aprilsched.doctor.client import INTERVAL, LIMITS, RETURNED, Server, ids_of
from aprilsched.doctor.findings import (
    NO_STRAGGLERS,
    Check,
    Finding,
    LeftOut,
    Verdict,
    add_check,
    failed,
    left_out,
    passed,
    warned,
)
from aprilsched.doctor.proofs import REFIT_SECONDS, TIER_ACTION, kv_tier, proof
from aprilsched.doctor.scenarios import (
    LEFT_SECONDS,
    SAW_NOTHING,
    Paused,
    aborted,
    cached,
    in_place,
    left,
    refit,
    retract,
    returned,
    seam,
    streamed,
    whole,
)
from aprilsched.doctor.vllm import examine_vllm
from aprilsched.engines.addresses import VLLM
from aprilsched.engines.http import ServerAddress, Transport
from aprilsched.engines.server import despite_cancellation
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.engines.sglang.probe import SPANS_SINCE
from aprilsched.errors import EngineError

_LAST_SECONDS = 30.0

CHECKS: list[Check] = []
"""The checks in the order of the report, which is the order in which they are written here."""

check = partial(add_check, CHECKS)


async def examine(
    url: str, *, admin_key: str | None = None, api_key: str | None = None, refit: str | None = None
) -> list[Finding]:
    """Run every check on the server at `url`; the findings are in the order of the table.

    With `refit`, a folder of other weights of the model that the server can read, a server that
    nobody else uses is refitted with them and back.

    Raises:
        EngineError: if it cannot be reached or used, is another program than its URL says, or does
            not accept the key.
        ConfigError: if `url` or a key is not valid.
    """
    if url.startswith(VLLM):
        return await examine_vllm(url.removeprefix(VLLM), api_key=api_key, refit=refit)
    engine = SGLangEngine(
        url, admin_key=admin_key, api_key=api_key, limits=LIMITS, stream_interval=INTERVAL
    )
    address = ServerAddress.parse(url)
    keys = {"admin_key": admin_key, "api_key": api_key}
    transport = Transport(address.name, address.url, limits=LIMITS, **keys)
    await engine.open()
    try:
        await transport.open()
        server = Server(engine, transport, refit=refit)
        try:
            with suppress(LeftOut):
                await server.seen(Server.describe)
            return [await each.finding(server) for each in CHECKS]
        finally:
            await despite_cancellation(_end(server))
    finally:
        await transport.close()
        await engine.close()


async def _end(server: Server) -> None:
    with suppress(EngineError, TimeoutError):
        async with asyncio.timeout(_LAST_SECONDS):
            await server.take_back()


# Constants of several checks.

NEWER = "update SGLang to 0.5.21 or later"
_READ_UP_TO = (0, 5, 23)
"""The newest release whose source was read for the hazards."""
_RESTART = "look at its log, and restart it"
_INTERVAL = "start it with --stream-interval 64"
_SPANS = f"{NEWER}, {NO_STRAGGLERS}, or set allow_inexact_versions"
_MIXING = " or ".join(f'"{name}"' for name in rules_that(lambda rule: rule.needs_spans))
_NOT_IN_PLACE = 'do not use straggler="in_place"'
_NO_ROWS = "it returns no routed experts"


# --- server --------------------------------------------------------------------------------------

# What the server is.


@check("release", "asks each server what it can do, and does not use what it cannot")
async def release(server: Server) -> Verdict:
    """The hazards were read or measured on SGLang 0.5.17 to 0.5.23."""
    seen = f"{server.facts.capabilities.server}, model {server.facts.model_path}"
    if server.simulated:
        return warned(f"{seen}, simulated: no model is behind it")
    if server.version < SPANS_SINCE:
        return warned(seen, NEWER)
    if server.version > _READ_UP_TO:
        return warned(seen)
    return passed(seen)


@check(
    "left paused (hazard 12)",
    "follows every pause by a continue, and continues every server that it opens",
)
async def paused_before(server: Server) -> Verdict:
    """A client that stops between pause and continue leaves the server paused for ever."""
    if server.paused_before:
        return failed(
            "/ready answers 503: it is paused",
            "let whoever paused it continue it, or send POST /continue_generation; then examine it "
            "again",
        )
    return passed("it is not paused")


@check("idle", "none")
async def others(server: Server) -> Verdict:
    """A server with others' requests is never paused or flushed by this command."""
    if server.others is None:
        return warned("/v1/loads does not report how many requests are on it")
    if server.others:
        return warned(
            f"{server.others} requests of others were on it",
            "examine it again when it is idle, so that pauses are tried",
        )
    return passed("it was idle")


@check("vocabulary (hazard 3b)", "refuses such a prompt before it is sent, where the size is known")
async def vocabulary(server: Server) -> Verdict:
    """A token id beyond the vocabulary kills the scheduler of a real server."""
    size = server.facts.vocab_size
    if size is None:
        return warned(
            "it does not report the size of its vocabulary; ids beyond it were not tried",
            "make sure that no prompt has a token id beyond the vocabulary",
        )
    return passed(f"{size} token ids; ids beyond it were not tried")


@check("room", "leaves the rest in the server's queue; set dispatch.max_in_flight to bound it")
async def room(server: Server) -> Verdict:
    """A batch larger than this cannot run all at once."""
    found = server.facts.capabilities
    seen = f"{found.max_running_requests} running requests, {found.kv_tokens} tokens of KV"
    whole = found.max_running_requests is not None and found.kv_tokens is not None
    return passed(seen) if whole else warned(seen)


@check("weight version", "labels each update with its number; any other label counts as version 0")
async def label(server: Server) -> Verdict:
    """Tokens are attributed to policy versions by this label."""
    found = server.facts.label
    if found == "default" or (found.isascii() and found.isdigit()):
        return passed(f"weight_version is {found!r}")
    return warned(f"weight_version is {found!r}, which is not a number")


@check(
    "health (hazard 6)", "never calls it, but /ready and /model_info; routers should do the same"
)
async def health(server: Server) -> Verdict:
    """/health generates a token, so it hangs while paused; a router may eject it then."""
    server.check_unpaused()
    status = (await server.get("health")).status
    seen = f"/health answers {status} while it is not paused"
    return passed(seen) if status == 200 else failed(seen, _RESTART)


# --- tokens --------------------------------------------------------------------------------------

# Every token must arrive once, with its logprob and its version.


@check("stream form (hazard 10)", "reads both forms")
async def form(server: Server) -> Verdict:
    """Cumulative events cost the square of a response's length."""
    events = await server.seen(streamed)
    sizes = [len(event.get("output_ids", [])) for event in events]
    total = events[-1]["meta_info"]["completion_tokens"]
    seen = f"events of {', '.join(map(str, sizes))} tokens for {total}"
    if sum(sizes) == total:
        if len(sizes) > 1 or server.facts.incremental:
            return passed(seen)
        return warned(f"{seen}: one event shows no form")
    return failed(
        f"{seen}: each event repeats all tokens", "start it with --incremental-streaming-output"
    )


@check("stream interval (hazard 10)", "asks for 64 tokens where it can")
async def interval(server: Server) -> Verdict:
    """Long intervals are cheap; a lost server loses the tokens of one interval."""
    events = await server.seen(streamed)
    total = events[-1]["meta_info"]["completion_tokens"]
    seen = f"asked for {INTERVAL}, {total} tokens came in {len(events)} events"
    return passed(seen) if len(events) * INTERVAL >= total else warned(seen, _INTERVAL)


@check("logprobs", "refuses a response whose tokens and logprobs do not match")
async def logprobs(server: Server) -> Verdict:
    """A token without its own logprob cannot be trained on."""
    found = await server.seen(whole)
    meta, ids = found["meta_info"], found["output_ids"]
    triples: list[Any] = meta.get("output_token_logprobs") or []
    seen = f"{len(triples)} logprobs for {len(ids)} tokens"
    agree = [triple[1] for triple in triples] == ids and len(ids) == meta["completion_tokens"]
    return passed(seen) if agree else failed(f"{seen}; they do not match", NEWER)


@check("version spans", f"refuses straggler={_MIXING} without them")
async def spans(server: Server) -> Verdict:
    """Without spans, nobody knows which policy sampled a straggler's tokens."""
    found = await server.seen(whole)
    versions = found["meta_info"].get("weight_versions")
    if versions is None:
        return failed("a finished response has no weight_versions", _SPANS)
    tokens = len(found["output_ids"])
    if _covered(versions) != tokens:
        return failed(f"weight_versions cover {_covered(versions)} of {tokens} tokens", _SPANS)
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
async def same(server: Server) -> Verdict:
    """Without determinism a re-sent prefix continues with other, equally valid tokens."""
    if ids_of(await server.seen(streamed)) == (await server.seen(whole))["output_ids"]:
        return passed("the same greedy response twice")
    return warned("two greedy responses differ")


@check("companions", "refuses a run that asks for what a server does not return")
async def companions(server: Server) -> Verdict:
    """Routed experts and sampling masks are data of the sampling pass; no later pass has them."""
    told = await server.seen(returned)
    came = {name for name in RETURNED if told.get(name) or told.get(f"output_token_{name}")}
    lacks = ", ".join(f"{name} ({needs})" for name, needs in RETURNED.items() if name not in came)
    seen = f"{', '.join(sorted(came)) or 'nothing'} came" + (f", not {lacks}" if lacks else "")
    if server.last_hidden:
        seen += "; hidden_states of the last token alone (--return-hidden-states-mode)"
    if missing := server.returns - came:
        return failed(f"{seen}: it says that it returns {', '.join(sorted(missing))}", _RESTART)
    return passed(seen)


@check("rows at a seam", "asks each attempt for the rows from the first missing one on")
async def rows_at_a_seam(server: Server) -> Verdict:
    """A last token was not forwarded, so its row comes with the continuation of the response."""
    if "routed_experts" not in server.returns:
        return passed(_NO_ROWS)
    first, more, once = await server.seen(seam)
    seen = f"{len(first)} rows of an abort and {len(more)} after it, for {len(once)} positions"
    if len(first) + len(more) != len(once):
        return failed(seen, NEWER)
    same = _alike(np.concatenate((first, more)), once)
    seen += f"; {same} are those of one pass"
    # Rounding decides between experts that are nearly as good.
    return passed(seen) if 2 * same > len(once) else failed(seen, NEWER)


def _alike(some: NDArray[Any], others: NDArray[Any]) -> int:
    """Number of rows that are equal."""
    return int((some == others).reshape(len(some), -1).all(1).sum())


# --- requests ------------------------------------------------------------------------------------

# Requests that end early.


@check("abort", "repeats the abort until the stream has ended")
async def abort(server: Server) -> Verdict:
    """An abort without a pause gives all tokens at once; it is how rollouts move."""
    found = await server.seen(aborted)
    reason: dict[str, Any] = found.last["meta_info"]["finish_reason"] or {}
    kind = reason.get("type")
    seen = f"ended after {found.seconds * 1e3:.0f} ms with {kind!r}"
    if kind == "length":
        return warned(f"{seen}: it was over before the abort")
    return passed(seen) if kind == "abort" else failed(seen, NEWER)


@check("ids at an abort (hazard 2)", "takes ids from the logprobs, never by position")
async def counts(server: Server) -> Verdict:
    """A stream can give one id more than logprobs when it is aborted."""
    last = (await server.seen(aborted)).last
    ids = len(last.get("output_ids", []))
    known = len(last["meta_info"].get("output_token_logprobs") or [])
    seen = f"the last event has {ids} ids and {known} logprobs"
    return passed(seen) if ids == known else warned(seen)


@check("abort of nobody (hazard 11)", "repeats aborts without asking first")
async def unknown(server: Server) -> Verdict:
    """Aborts may come late, and must be harmless then."""
    status = (await server.post("abort_request", {"rid": "0" * 32})).status
    seen = f"aborting an unknown rid answers {status}"
    return passed(seen) if status == 200 else failed(seen, NEWER)


@check(
    "duplicate rid (hazard 11)",
    "gives every attempt a new rid of one fixed length, since aborts match by prefix",
)
async def duplicate(server: Server) -> Verdict:
    """A rid in use is refused; refused in a stream, it ends the first one after 2 s."""
    status = (await server.seen(aborted)).duplicate
    seen = f"a second request of a running rid answers {status}"
    return passed(seen) if status == 400 else warned(seen)


@check("hanging up (hazard 9)", "aborts every stream that it leaves before its end")
async def hanging_up(server: Server) -> Verdict:
    """A request whose client has disconnected may decode to its end."""
    seconds = await server.seen(left)
    if seconds is None:
        return warned("its request did not leave the server within 3 s")
    return passed(f"its request was gone after {seconds * 1e3:.0f} ms")


# --- pausing -------------------------------------------------------------------------------------

# What a pause stops, keeps and holds back.


@check("pause retract", 'uses this pause for straggler="retract"')
async def stops_by_retract(server: Server) -> Verdict:
    """Stragglers wait inside the engine while new weights come in."""
    found = await server.seen(retract)
    if not found.pause.tokens and not found.held_silent:
        return failed("a request sent while it was paused was generated", NO_STRAGGLERS)
    return _stops(found.pause, NO_STRAGGLERS)


def _stops(pause: Paused, to_do: str) -> Verdict:
    """Whether the pause stopped a stream and kept it open."""
    if pause.tokens:
        return failed(f"{pause.tokens} tokens arrived while it was paused", to_do)
    if pause.ended:
        seen = "a response of ours was over when the pause took effect"
        return warned(seen) if pause.ready == 503 else failed(seen, to_do)
    return passed(f"paused in {pause.seconds * 1e3:.0f} ms, no token arrived meanwhile")


@check("continue after retract", "delivers the straggler in a later batch")
async def goes_on(server: Server) -> Verdict:
    """A straggler's KV is recomputed and nothing of it is lost."""
    return _goes_on((await server.seen(retract)).pause, NO_STRAGGLERS)


def _goes_on(pause: Paused, to_do: str) -> Verdict:
    """Whether a stream continued after the pause."""
    if pause.finish != "length":
        return failed(f"the stream ended with {pause.finish!r} after continue", to_do)
    if not pause.same:
        return warned("the stream continued with other tokens than without a pause")
    return passed("the stream continued with the same tokens as without a pause")


@check("flush after retract (hazard 3)", "flushes between pause and update")
async def flush(server: Server) -> Verdict:
    """Without a flush, tokens attend to keys of older weights."""
    status = (await server.seen(retract)).flush
    seen = f"flush_cache answers {status} after a retract"
    if status == 200:
        return passed(seen)
    if server.facts.tiered:
        return warned(f"{seen}, because it still copied KV; the scheduler lets it end its copies")
    return failed(seen, f'{NO_STRAGGLERS} with kv_after_refit="apart"')


@check(
    "held requests (hazard 4)",
    "sends none while paused, and closes the connection of one without a token",
)
async def held(server: Server) -> Verdict:
    """A request sent during a pause is silent, and an abort of it is lost."""
    found = await server.seen(retract)
    if not found.held_silent:
        return failed("answered while paused", NEWER)
    if not found.held_completed:
        return failed("lost after continue", NEWER)
    return passed("held silently, and answered after continue")


@check(
    "ready while paused (hazard 6)",
    "asks it before it probes with a request; routers and watchdogs should ask it too",
)
async def ready(server: Server) -> Verdict:
    """/ready shows to other programs that a server is paused."""
    status = (await server.seen(retract)).pause.ready
    seen = f"/ready answers {status} while paused"
    return passed(seen) if status == 503 else warned(seen)


@check("loads while paused (hazard 7)", "counts its own requests instead")
async def loads(server: Server) -> Verdict:
    """The loads are those from before the pause."""
    told = (await server.seen(retract)).pause.running
    return passed(f"/v1/loads reports {told} requests while paused")


@check("pause in_place", 'uses this pause only for straggler="in_place"')
async def stops_in_place(server: Server) -> Verdict:
    """The KV stays, so tokens after an update attend to keys of older weights."""
    return _stops((await server.seen(in_place)).pause, _NOT_IN_PLACE)


@check("continue after in_place", "delivers the straggler in a later batch")
async def goes_on_in_place(server: Server) -> Verdict:
    """Nothing is recomputed."""
    return _goes_on((await server.seen(in_place)).pause, _NOT_IN_PLACE)


@check(
    "abort under in_place (hazard 5)",
    "repeats the abort until the stream ends, and trusts the spans for that token",
)
async def abort_in_place(server: Server) -> Verdict:
    """Such an abort acts only after continue, with one token of the new version."""
    abort = (await server.seen(in_place)).abort
    if abort is None:
        raise left_out(SAW_NOTHING)
    during, finish, more = abort
    when = "before" if during else "after"
    seen = f"ended {when} continue with {finish!r}, {more} more tokens arrived"
    if finish == "length":
        return warned(f"{seen}: it was over before the abort")
    return passed(seen) if finish == "abort" else warned(seen)


# --- weights -------------------------------------------------------------------------------------

# Updates of weights and adapters, of released memory, and of the KV cache. Most would change the
# server or kill it, so what it says of itself is judged.


@check(
    "cache keys",
    'sends a key for each version with kv_after_refit="apart", and where KV may survive a flush',
)
async def cache_keys(server: Server) -> Verdict:
    """With a key for each version, new requests never use old KV that was not flushed."""
    _, again, other = await server.seen(cached)
    seen = f"{again} cached tokens under the same key, {other} under another"
    if other:
        return failed(seen, 'do not use kv_after_refit="apart"')
    return passed(seen) if again else warned(f"{seen}: it shares no cache, so keys do not show")


@check("KV tier", TIER_ACTION)
async def tier(server: Server) -> Verdict:
    """A storage for KV survives a flush, and gives later requests keys of older weights."""
    return kv_tier(server.facts.capabilities)


@check(
    "refit by its logprobs",
    "compares logprobs with the trainer's, if the trainer reports them",
    REFIT_SECONDS,
)
async def fresh(server: Server) -> Verdict:
    """Checksums see parameters, and not what the engine made of them at its start."""
    responses, _ = await server.seen(refit, REFIT_SECONDS)
    return proof(responses)


@check(
    "rows after a retract",
    "with routed experts, calls unfinished responses back before an update",
)
async def rows_after_a_retract(server: Server) -> Verdict:
    """After a retract with recompute, older tokens come with the new weights' routing."""
    if "routed_experts" not in server.returns:
        return passed(_NO_ROWS)
    with suppress(LeftOut):
        _, rows = await server.seen(refit, REFIT_SECONDS)
        if rows:
            came, new, old = rows
            return passed(
                "after a retract with recompute the server returns the new weights' routing for "
                f"older tokens: {_alike(came, new)} of {len(came)} rows are the new ones, and "
                f"{_alike(came, old)} the old"
            )
    return passed("not tried: the scheduler never causes it")


@check("brackets of an update", "puts them there, and closes an update that a failure left open")
async def brackets(server: Server) -> Verdict:
    """Tensor and distributed updates must stand between these calls where they exist."""
    if server.facts.update_sessions:
        return passed("it has begin_weight_update and end_weight_update")
    if not server.paths:
        return warned("it publishes no schema, so it is taken to have no begin_weight_update")
    return passed("it has no begin_weight_update")


@check("ranks", "counts them for the trainer's group (rank offsets) and sends a handle to each")
async def ranks(server: Server) -> Verdict:
    """Each rank takes its own part of a tensor or distributed update."""
    count, copies = server.facts.capabilities.ranks, server.info.get("dp_size") or 1
    seen = f"{count} rank{'s' if count > 1 else ''} (tp_size times pp_size)"
    if copies > 1 and not server.info.get("enable_dp_attention"):
        return warned(
            f"{seen}, dp_size {copies} without dp attention: updates from disk only",
            "start it with --attn-dp-size (before 0.5.22 --enable-dp-attention), or use a folder",
        )
    return passed(seen)


@check("LoRA adapters", "publishes adapters only where it is enabled")
async def adapters(server: Server) -> Verdict:
    """Several adapters can be loaded while the server generates."""
    if server.facts.capabilities.adapters:
        return passed("LoRA is enabled")
    return warned("LoRA is not enabled", "start it with --enable-lora if you train adapters")


@check(
    "released weights",
    "sends nothing to an engine whose weights were lost until it has had a refit",
)
async def kept(server: Server) -> Verdict:
    """--enable-memory-saver frees memory; --enable-weights-cpu-backup keeps weights."""
    if not server.info.get("enable_memory_saver"):
        return warned(
            "no memory saver: a release frees nothing, and the weights stay",
            "start it with --enable-memory-saver if the trainer shares its GPUs",
        )
    if server.facts.capabilities.keeps_released_weights:
        return passed("a copy of the weights stays on the CPU")
    return warned("released weights are gone until an update brings new ones")


# --- last ----------------------------------------------------------------------------------------

# Whether the server is left as it was found.


@check("left as found", "none")
async def unchanged(server: Server) -> Verdict:
    """This command continues what it paused and ends what it began."""
    await server.take_back()
    if server.others == 0:
        await server.idle(LEFT_SECONDS)
    label, paused = await server.engine.ask_label(), await server.engine.is_paused()
    running = await server.running()
    wrong = [
        what
        for what, is_so in (
            (f"weight_version is {label!r}", label != server.facts.label),
            ("it is paused", paused and not server.paused_before),
            (f"{running} requests run", server.others == 0 and running),
        )
        if is_so
    ]
    if wrong:
        return failed(" and ".join(wrong), _RESTART)
    state = "still paused" if paused else "not paused"
    idle = ", no request on it" if running == 0 else ""
    return passed(f"weight_version {label!r}, {state}{idle}")
