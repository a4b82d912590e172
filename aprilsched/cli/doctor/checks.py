"""The table of findings: what a server reports about itself, the contract, and a refit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from aprilsched.cli.doctor.server import Finding, LeftOut, Row, Server, Verdict, kept, one_line
from aprilsched.errors import EngineProtocolError, MissingExtra
from aprilsched.kernel.engines.addresses import VLLM
from aprilsched.kernel.engines.generations import despite_cancellation
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.self_check import pause_during
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.engines.stream import version_number
from aprilsched.kernel.engines.vllm import VLLMEngine
from aprilsched.kernel.engines.vllm.server_info import ServerFacts as VLLMFacts
from aprilsched.kernel.values.extras import extra
from aprilsched.testing import contract

LIMITS = HttpLimits(control_timeout=20.0, flush_timeout=5.0)
STREAM_INTERVAL = 8
"""Tokens between two events of a response."""
_DRAFTING_REQUESTS = 48
"""SGLang's limit on running requests with speculative decoding, unless it is set."""
MAX_LOGPROB_GAP = 1e-3
"""Difference of logprobs under the same weights on an idle server without a cached prefix."""
_MAX_MEAN_GAP = 0.1
"""Mean difference of a server's logprobs from those of transformers in float32. A server in
bfloat16 differs by some hundredths, and one that loads a layer wrongly by whole units."""
_SCORED_PROMPT, _SCORED_TOKENS = 1024, 64
"""Tokens of the scored prompt, which fill cached blocks, and of its response."""
CLIP = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"

ABORT = 'use straggler="abort"'
NOT_IN_PLACE = 'do not use straggler="in_place"'
NO_FLUSH = f'{ABORT} with kv_after_refit="apart"'
NO_KEYS = 'do not use kv_after_refit="apart"'
UPDATE = "update the server"
NO_SPANS = f"{UPDATE}, {ABORT}, or set allow_inexact_versions"


async def release(server: Server) -> Verdict:
    """What the server is and can do."""
    facts, able = server.facts, server.facts.capabilities
    can = [*able.companions, *(["adapters"] if able.adapters else [])]
    return Verdict(
        "pass",
        f"{able.server}, model {facts.model_path}, weights {facts.label!r}, {facts.vocab_size} "
        f"token ids; {', '.join(sorted(can)) or 'no adapters and no companions'}",
    )


async def room(server: Server) -> Verdict:
    """Requests wait for room in the KV pool and among the running requests, before any schedule."""
    facts, able = server.facts, server.facts.capabilities
    running, graphs = able.max_running_requests, facts.graph_requests
    seen = [f"{able.kv_tokens} tokens of KV", f"{running} running requests"]
    seen.append("no size of CUDA graphs" if graphs is None else f"CUDA graphs to {graphs} requests")
    to_do: list[str] = []
    if graphs is not None and running is not None and graphs < running:
        to_do.append(f"let CUDA graphs cover {running} requests")
    if able.reservation is not None:
        usual = able.reservation.clip
        seen.append(f"conservativeness {facts.conservativeness or 'unknown'}")
        seen.append(f"the clip is not reported ({CLIP} of its environment, else {usual})")
    seen.append(f"speculation {facts.drafter or 'off'}")
    return Verdict("warn" if to_do else "pass", ", ".join(seen), "; ".join(to_do))


async def paused_before(server: Server) -> Verdict:
    """A client that stops between pause and continue leaves the server paused forever."""
    if server.is_paused:
        return Verdict("fail", "it is paused", "POST /continue_generation (vLLM: /resume)")
    return Verdict("pass", "it is not paused")


async def idle(server: Server) -> Verdict:
    """A server with requests of other clients is never paused or flushed by this command."""
    if server.others is None:
        return Verdict("warn", "it does not report its load")
    if server.others:
        seen = f"{server.others} requests of other clients are on it"
        return Verdict("warn", seen, "examine it again when it is idle, so that pauses are tried")
    return Verdict("pass", "it is idle")


async def spans(server: Server) -> Verdict:
    """Without spans, the version that sampled a straggler's tokens is unknown."""
    if server.facts.capabilities.version_spans:
        return Verdict("pass", "it reports the version of each token")
    return Verdict("fail", "it does not report which version sampled a token", NO_SPANS)


async def kv_tier(server: Server) -> Verdict:
    """A storage for KV survives a flush, and gives later requests keys of older weights."""
    tier = server.facts.capabilities.kv_tier
    if tier == "none":
        return Verdict("pass", "no KV survives a flush")
    if tier == "keyed":
        return Verdict("warn", "KV may survive a flush, found by requests with its cache key alone")
    to_do = 'start it without a storage for KV, or use kv_after_refit="keep"'
    return Verdict("fail", "KV survives a flush, and is found under any cache key", to_do)


async def logprobs_mode(server: Server) -> Verdict | None:
    """By default logprobs are those from before temperature, top-p and top-k."""
    if not isinstance(server.facts, VLLMFacts):
        return None
    mode = server.facts.logprobs_mode
    if mode.startswith("processed"):
        return Verdict("pass", mode)
    return Verdict("warn", mode, "start it with --logprobs-mode processed_logprobs")


async def tied_embeddings(server: Server) -> Verdict | None:
    """On a CPU the output layer of a tied model keeps its old weights at a refit."""
    facts = server.facts
    if not isinstance(facts, VLLMFacts) or facts.device != "cpu":
        return None
    try:
        config = json.loads((Path(facts.model_path) / "config.json").read_text())
        is_tied = bool(config.get("tie_word_embeddings"))
    except (OSError, ValueError, AttributeError):
        return Verdict("warn", "its config.json cannot be read from here")
    if is_tied:
        return Verdict("fail", "the embeddings are tied", "do not refit it; use an untied model")
    return Verdict("pass", "the embeddings are not tied")


async def drafts(server: Server) -> Verdict:
    """With speculative decoding the limit of SGLang falls to 48, and a draft model ages."""
    facts, room = server.facts, server.facts.capabilities.max_running_requests
    if not facts.drafter:
        return Verdict("pass", "it does not draft")
    if room == _DRAFTING_REQUESTS and not isinstance(facts, VLLMFacts):
        seen = f"it drafts with {facts.drafter} and runs {room} requests, SGLang's default then"
        return Verdict("warn", seen, "set --max-running-requests")
    if facts.own_draft:
        seen = f"it drafts with {facts.drafter}, whose model keeps its weights at an update"
        return Verdict("warn", seen, "watch the acceptance in its metrics, or draft by n-grams")
    return Verdict("pass", f"it drafts with {facts.drafter}")


async def refit(server: Server) -> Verdict:
    """What an engine made of new weights shows in what it generates, and in no checksum."""
    if server.refit is None:
        raise LeftOut("it changes the weights; examine an idle server with --refit FOLDER")
    own, label = Path(server.facts.model_path), server.facts.label
    await server.check_free()
    if version_number(label):
        raise LeftOut(f"its weights are those of version {label}, and of no folder")
    fresh = [await _fresh(server)]
    try:
        for folder, version in ((own, 0), (Path(server.refit), 1)):
            await _load(server, folder, version)
            fresh.append(await _fresh(server))
    finally:
        await despite_cancellation(_take_back(server, own))
    fresh.append(await _fresh(server))
    gaps = [_gap(fresh[0], each) for each in fresh[1:]]
    means = ", ".join(f"{each.logprobs.mean():.4f}" for each in fresh)
    seen = f"mean logprobs before, of its own folder, of the other, and of its own: {means}"
    if [gap > MAX_LOGPROB_GAP for gap in gaps] != [False, True, False]:
        return Verdict("fail", seen, "use other weights than its own, or update it in another way")
    return Verdict("pass", seen)


async def _fresh(server: Server) -> contract.Stream:
    # A new cache key: a prefix cached by another request was computed in a different order.
    request = contract.greedy(24)
    return await server.subject.whole(replace(request, cache_key=request.request_id))


def _gap(one: contract.Stream, other: contract.Stream) -> float:
    return float(np.abs(one.logprobs - other.logprobs).max()) if one.ids == other.ids else np.inf


async def _load(server: Server, folder: Path, version: int) -> None:
    async with pause_during(server.engine):
        await server.engine.flush()
        await server.engine.update_from_disk(folder, version)


async def _take_back(server: Server, own: Path) -> None:
    await _load(server, own, 0)
    await server.engine.set_label(server.facts.label)


async def scores(server: Server) -> Verdict:
    """A server that drops a layer of its checkpoint, or loses a cached state, agrees with itself,
    and not with transformers."""
    await server.check_free(alone=False)
    if version_number(server.facts.label):
        raise LeftOut(f"its weights are those of version {server.facts.label}, and of no folder")
    context = server.facts.context_tokens or 2 * _SCORED_PROMPT
    prompt = np.resize(contract.PROMPT, min(_SCORED_PROMPT, context - _SCORED_TOKENS))
    first = await server.subject.whole(contract.greedy(_SCORED_TOKENS, prompt=prompt))
    # As after an abort: the prompt and half of the response come from the prefix cache, if any.
    known = np.concatenate([prompt, np.array(first.ids[: _SCORED_TOKENS // 2], np.int32)])
    second = await server.subject.whole(contract.greedy(_SCORED_TOKENS // 2, prompt=known))
    contexts = [[*each.request.input_ids.tolist(), *each.ids] for each in (first, second)]
    model_path = server.facts.model_path
    try:
        scored = await asyncio.to_thread(logprobs_by_transformers, model_path, contexts)
    except (MissingExtra, OSError, ValueError, RuntimeError, KeyError) as error:
        raise LeftOut(f"transformers cannot run {model_path}: {one_line(error)}") from error
    gaps = [
        float(np.abs(stream.logprobs - np.array(own[-len(stream) :])).mean())
        for stream, own in zip((first, second), scored, strict=True)
    ]
    seen = f"mean difference {gaps[0]:.4f} for a response, {gaps[1]:.4f} for its continuation"
    if max(gaps) > _MAX_MEAN_GAP:
        return Verdict("fail", seen, f"{UPDATE}, or do not train with this model on it")
    return Verdict("pass", seen)


def logprobs_by_transformers(
    model_path: str, contexts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the log-probability of each token but the first given those before it, in float32.

    Raises:
        MissingExtra: if torch or transformers is not installed.
        OSError, ValueError, RuntimeError, KeyError: if transformers cannot load or run the model.
    """
    with extra("torch"):
        import torch
    with extra("gateway"):
        from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = [torch.tensor(ids) for ids in contexts]
        found = [model(row[None]).logits[0, :-1].log_softmax(-1) for row in rows]
    pairs = zip(found, rows, strict=True)
    return [logprobs.gather(1, row[1:, None])[:, 0].tolist() for logprobs, row in pairs]


async def left_as_found(server: Server) -> Verdict:
    """This command continues what it paused and ends what it started."""
    found, paused = await server.engine.ask_label(), bool(await server.engine.is_paused())
    wrong = [f"its label is {found!r}"] if found != server.facts.label else []
    wrong += ["it is paused"] if paused and not server.is_paused else []
    wrong += ["requests are on it"] if server.others == 0 and not await server.is_idle() else []
    if wrong:
        to_do = "if no other client updates it, look at its log, and restart it"
        return Verdict("fail", " and ".join(wrong), to_do)
    return Verdict(
        "pass", f"its label is {found!r}, and it is {'still' if paused else 'not'} paused"
    )


def _kept(name: str, check: contract.Check, to_do: str, *, alone: bool = True) -> Row:
    return Row(name, kept(check, to_do, alone=alone))


ROWS: tuple[Row, ...] = (
    Row("server", release),
    Row("room", room),
    Row("left paused", paused_before),
    Row("idle", idle),
    Row("version spans", spans),
    Row("KV tier", kv_tier),
    Row("logprobs", logprobs_mode),
    Row("tied embeddings", tied_embeddings),
    Row("drafts", drafts),
    _kept("tokens", contract.every_token_arrives_once, UPDATE, alone=False),
    _kept("abort", contract.abort_returns_the_partial, UPDATE, alone=False),
    _kept("continuation", contract.a_re_sent_prefix_continues_the_response, UPDATE, alone=False),
    _kept("cache keys", contract.cache_keys_keep_prefixes_apart, NO_KEYS, alone=False),
    _kept("requests together", contract.requests_of_one_turn_end_each_by_itself, UPDATE),
    _kept("hanging up", contract.leaving_a_stream_ends_its_request, UPDATE),
    _kept("self-check", contract.passes_the_self_check, UPDATE),
    _kept("pause retract", contract.retract_keeps_streams_open, ABORT),
    _kept("flush after retract", contract.retract_and_flush_keep_greedy_tokens, NO_FLUSH),
    _kept("abort after retract", contract.abort_after_retract_returns_the_partial, ABORT),
    _kept("held request", contract.a_request_sent_during_a_pause_is_held, ABORT),
    _kept("abort of a held request", contract.a_held_request_can_be_aborted, ABORT),
    _kept("held together", contract.held_requests_of_one_turn_are_aborted_or_whole, ABORT),
    _kept("hanging up while held", contract.leaving_a_held_stream_ends_its_request, ABORT),
    _kept("pause in_place", contract.in_place_keeps_streams_open, NOT_IN_PLACE),
    _kept("repeated calls", contract.repeated_and_unknown_calls_are_harmless, UPDATE),
    Row("refit by its logprobs", refit),
    Row("left as found", left_as_found),
)
"""The lines of a report, in their order. All checks of :data:`contract.CHECKS` are among them."""

SCORES = Row("logprobs by transformers", scores)
"""A line for a model that fits into the memory of this machine."""


async def examine(
    url: str,
    *,
    admin_key: str | None = None,
    api_key: str | None = None,
    refit: str | None = None,
    rows: Sequence[Row] = ROWS,
    gateways: bool = True,
) -> list[Finding]:
    """Run every check of the server at `url`, and return the findings in the order of the table.

    `refit` is a folder with other weights of the model, readable by the server; an idle server is
    refitted with them and back. `rows` replaces the table. Without `gateways` a gateway is refused.

    Raises:
        EngineError: if the server cannot be reached or used, is not the program that its URL
            names, or rejects the key.
        ConfigError: if `url` or a key is not valid.
    """
    program = VLLMEngine if url.startswith(VLLM) else SGLangEngine
    engine = program(
        url.removeprefix(VLLM),
        admin_key=admin_key,
        api_key=api_key,
        limits=LIMITS,
        stream_interval=STREAM_INTERVAL,
    )
    await engine.open()
    server = Server(engine, refit)
    try:
        if engine.facts.is_gateway and not gateways:
            raise EngineProtocolError(engine.name, "is a gateway; name its servers instead.")
        await server.look()
        found = [await row.finding(server) for row in rows]
        return [finding for finding in found if finding is not None]
    finally:
        await despite_cancellation(server.take_back())
        await engine.close()
