"""Examines one vLLM server: what it is, short generations of ours, and the hazards of 0.32.

A server is paused only while no request of others is on it. Weights are never loaded without
``--refit``: what depends on a load is derived from the server's settings, or warned of.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

from aprilsched.doctor.findings import (
    NO_STRAGGLERS,
    Check,
    Examined,
    Finding,
    LeftOut,
    Verdict,
    add_check,
    failed,
    left_out,
    passed,
    warned,
)
from aprilsched.doctor.proofs import (
    NOT_ASKED,
    REFIT_SECONDS,
    TIER_ACTION,
    kv_tier,
    proof,
    prove,
    reading,
    whole,
)
from aprilsched.engines.base import PauseMode
from aprilsched.engines.http import HttpLimits
from aprilsched.engines.server import release
from aprilsched.engines.stream import version_number
from aprilsched.engines.vllm import VLLMEngine
from aprilsched.testing.contract import until

_LIMITS = HttpLimits(control_timeout=20.0)
_READ_UP_TO = (0, 32)
"""The newest release whose source was read for the hazards."""
_TOKENS = 192
_WATCH_S = 0.5
_SAME = "does the same, and aborts until it ends"

CHECKS: list[Check] = []
"""The checks in the order of the report, which is the order in which they are written here."""

check = partial(add_check, CHECKS)


class _Server(Examined):
    """One vLLM server, as it was found."""

    def __init__(self, engine: VLLMEngine, refit: str | None, *, paused: bool, others: int) -> None:
        super().__init__()
        self.engine, self.refit = engine, refit
        self.paused, self.others = paused, others


async def examine_vllm(
    url: str, *, api_key: str | None = None, refit: str | None = None
) -> list[Finding]:
    """Run every check on the vLLM server at `url`; `refit` is a folder of other weights.

    Raises:
        EngineError: if it cannot be reached or used; the message says what to change.
        ConfigError: if `url` or the key is not valid.
    """
    engine = VLLMEngine(url, api_key=api_key, limits=_LIMITS, stream_interval=4)
    await engine.open()
    try:
        paused, load = bool(await engine.is_paused()), await engine.load()
        server = _Server(engine, refit, paused=paused, others=load.running + load.queued)
        return [await each.finding(server) for each in CHECKS]
    finally:
        await engine.close()


@check("release", "asks each server what it can do")
async def newest(server: _Server) -> Verdict:
    """The hazards were read and measured on vLLM 0.32."""
    able = server.engine.capabilities
    seen = (
        f"{able.server}, model {server.engine.facts.model_path}, {able.max_running_requests} "
        f"running requests, {able.kv_tokens} tokens of KV"
    )
    newer = release(able.server.removeprefix("vLLM "))[:2] > _READ_UP_TO
    return warned(seen) if newer else passed(seen)


@check("left paused", "follows every pause by a resume, and resumes every server that it opens")
async def paused_before(server: _Server) -> Verdict:
    """A client that stops between pause and resume leaves the server paused for ever."""
    if server.paused:
        return failed("it is paused", "let whoever paused it continue it, or send POST /resume")
    return passed("it is not paused")


@check("idle", "none")
async def others(server: _Server) -> Verdict:
    """A server with others' requests is never paused by this command."""
    if server.others:
        seen = f"{server.others} requests of others were on it"
        return warned(seen, "examine it again when it is idle")
    return passed("it was idle")


@check("logprobs", "refuses a temperature other than 1 where the server does not apply it to them")
async def logprobs(server: _Server) -> Verdict:
    """By default logprobs are those from before temperature, top-p and top-k."""
    mode = server.engine.facts.logprobs_mode
    if mode.startswith("processed"):
        return passed(mode)
    return warned(mode, "start it with --logprobs-mode processed_logprobs")


@check("process", "compares the time of the start before it trusts a version")
async def process(server: _Server) -> Verdict:
    """A restarted server has its first weights under the label of version 0."""
    if server.engine.facts.process:
        return passed("it tells when it was started")
    return warned("it does not tell when it was started")


@check("abort", _SAME)
async def abort(server: _Server) -> Verdict:
    """Tokens so far come with an abort, under the id that vLLM gave it."""
    _check_alone(server)
    async with reading(server.engine, _TOKENS) as stream:
        await stream.cut(1)
    told = sum(span.end - span.start for span in stream.last.spans or ())
    seen = (
        f"{len(stream)} tokens, of which {told} have a version, ended with {stream.last.finish!r}"
    )
    return passed(seen) if told == len(stream) else failed(seen, "use vLLM 0.32 or later")


@check("pause retract", _SAME)
async def retract(server: _Server) -> Verdict:
    """Stragglers wait inside the engine while new weights come in."""
    return await _paused(server, "retract")


@check("pause in_place", _SAME)
async def in_place(server: _Server) -> Verdict:
    """Kept KV makes tokens attend to keys of older weights."""
    return await _paused(server, "in_place")


def _check_alone(server: _Server) -> None:
    if server.paused or server.others:
        raise left_out("the server is not ours alone")


async def _paused(server: _Server, mode: PauseMode) -> Verdict:
    _check_alone(server)
    engine = server.engine
    reference = await whole(engine, _TOKENS)
    async with reading(engine, _TOKENS) as stream:
        await until(lambda: len(stream) > 0 or stream.done)
        try:
            await engine.pause(mode)
            held = len(stream)
            await asyncio.sleep(_WATCH_S)
            late = len(stream) - held
            if mode == "retract":
                await engine.flush()
        finally:
            await engine.resume()
        await stream.end()
    if late:
        return failed(f"{late} tokens arrived while it was paused", NO_STRAGGLERS)
    if stream.ids != reference.ids:
        return warned("the stream continued with other tokens than without a pause")
    return passed("no token arrived meanwhile, and the stream continued with the same tokens")


@check("KV tier", TIER_ACTION)
async def tier(server: _Server) -> Verdict:
    """A connector's store may survive a flush, and give later requests keys of older weights."""
    return kv_tier(server.engine.capabilities)


@check("tied embeddings", "cannot see it: checksums are those of the new weights")
async def tied(server: _Server) -> Verdict:
    """On a CPU the output layer of such a model keeps its old weights at a refit."""
    facts = server.engine.facts
    try:
        config = json.loads((Path(facts.model_path) / "config.json").read_text())
        is_tied = bool(config.get("tie_word_embeddings"))
    except (OSError, ValueError, AttributeError):
        return warned("its config.json cannot be read from here")
    if not is_tied:
        return passed("the embeddings are not tied")
    if facts.device == "cpu":
        return failed("the embeddings are tied, on a CPU", "do not refit it; use an untied model")
    return warned(f"the embeddings are tied; not tried on {facts.device}")


@check("LoRA adapters", "publishes adapters only where it is possible")
async def adapters(server: _Server) -> Verdict:
    """Several adapters can be loaded while the server generates."""
    if server.engine.capabilities.adapters:
        return passed("it takes adapters")
    return warned(
        "it takes no adapters",
        "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True if you train "
        "adapters",
    )


@check(
    "refit by its logprobs",
    "compares logprobs with the trainer's, if the trainer reports them",
    REFIT_SECONDS,
)
async def refitted(server: _Server) -> Verdict:
    """Checksums see parameters, and not what the engine made of them at its start."""
    if server.refit is None or server.paused or server.others:
        raise LeftOut(NOT_ASKED)
    responses, _ = await prove(server.engine, server.refit)
    return proof(responses)


@check("left as found", "none")
async def unchanged(server: _Server) -> Verdict:
    """This command resumes what it paused and ends what it began."""
    before, label = server.engine.facts.label, await server.engine.ask_label()
    paused = await server.engine.is_paused()
    if version_number(label) != version_number(before) or paused:
        return failed(f"its label is {label!r}, paused: {paused}", "look at its log")
    return passed(f"its label is {label!r}, and it is not paused")
