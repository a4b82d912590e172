"""Examines one vLLM server: what it is, short generations of ours, and the hazards of 0.32.

A server is paused only while no request of others is on it. Weights are never loaded: what depends
on a load is derived from the server's settings, or warned of.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path

from aprilsched.doctor.checks import (
    NO_STRAGGLERS,
    Finding,
    Verdict,
    failed,
    passed,
    proof,
    warned,
)
from aprilsched.doctor.proofs import REFIT_SECONDS, RefitNotes, Response, prove
from aprilsched.engines.base import PauseMode
from aprilsched.engines.http import HttpLimits
from aprilsched.engines.server import release
from aprilsched.engines.stream import version_number
from aprilsched.engines.vllm import VLLMEngine
from aprilsched.errors import EngineError

_LIMITS = HttpLimits(control_timeout=20.0)
_READ_UP_TO = (0, 32)
"""The newest release whose source was read for the hazards."""
_TOKENS = 192
_SECONDS = 40.0
_WATCH_S = 0.5


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
        return await _examined(engine, refit)
    finally:
        await engine.close()


async def _examined(engine: VLLMEngine, refit: str | None) -> list[Finding]:
    paused, load = await engine.is_paused(), await engine.load()
    others = load.running + load.queued
    found = [
        _finding(
            "release",
            _release(engine),
            "The hazards were read and measured on vLLM 0.32.",
            "asks each server what it can do",
        ),
        _finding(
            "left paused",
            failed("it is paused", "let whoever paused it continue it, or send POST /resume")
            if paused
            else passed("it is not paused"),
            "A client that stops between pause and resume leaves the server paused for ever.",
            "follows every pause by a resume, and resumes every server that it opens",
        ),
        _finding(
            "idle",
            warned(f"{others} requests of others were on it", "examine it again when it is idle")
            if others
            else passed("it was idle"),
            "A server with others' requests is never paused by this command.",
            "none",
        ),
        _finding(
            "logprobs",
            _logprobs(engine),
            "By default logprobs are those from before temperature, top-p and top-k.",
            "refuses a temperature other than 1 where the server does not apply it to logprobs",
        ),
        _finding(
            "process",
            passed("it tells when it was started")
            if engine.facts.process
            else warned("it does not tell when it was started"),
            "A restarted server has its first weights under the label of version 0.",
            "compares the time of the start before it trusts a version",
        ),
    ]
    tries = {
        "abort": (_abort, "Tokens so far come with an abort, under the id that vLLM gave it."),
        "pause retract": (_retract, "Stragglers wait inside the engine while new weights come in."),
        "pause in_place": (_in_place, "Kept KV makes tokens attend to keys of older weights."),
    }
    for name, (scenario, meaning) in tries.items():
        if paused or others:
            verdict = warned("left out: the server is not ours alone")
        else:
            verdict = await _tried(scenario(engine))
        found.append(_finding(name, verdict, meaning, "does the same, and aborts until it ends"))
    return [*found, *_told(engine), *await _last(engine, None if paused or others else refit)]


async def _last(engine: VLLMEngine, refit: str | None) -> list[Finding]:
    """What a refit shows, and whether the server is left as it was found."""
    return [
        _finding(
            "refit by its logprobs",
            await _tried(_refit(engine, refit), REFIT_SECONDS),
            "Checksums see parameters, and not what the engine made of them at its start.",
            "compares logprobs with the trainer's, if the trainer reports them",
        ),
        _finding(
            "left as found",
            await _tried(_unchanged(engine)),
            "This command resumes what it paused and ends what it began.",
            "none",
        ),
    ]


def _told(engine: VLLMEngine) -> list[Finding]:
    """What follows from the server's release and settings, without a try."""
    return [
        _finding(
            "tied embeddings",
            _tied(engine),
            "On a CPU the output layer of such a model keeps its old weights at a refit.",
            "cannot see it: checksums are those of the new weights",
        ),
        _finding(
            "incomplete checkpoints",
            warned("not tried: vLLM 0.32 logs missing tensors, and reports success"),
            "Such weights are a mixture of two versions.",
            "loads what the trainer writes; write every tensor",
        ),
        _finding(
            "failed load",
            warned("not tried: it leaves a server without weights, which ends at the next token"),
            "vLLM gives up the old weights before it reads the new ones.",
            "loads the folder from before again",
        ),
        _finding(
            "LoRA adapters",
            passed("it takes adapters")
            if engine.capabilities.adapters
            else warned(
                "it takes no adapters",
                "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True if you "
                "train adapters",
            ),
            "Several adapters can be loaded while the server generates.",
            "publishes adapters only where it is possible",
        ),
    ]


def _finding(check: str, verdict: Verdict, meaning: str, action: str) -> Finding:
    return Finding(
        check=check,
        status=verdict.status,
        seen=verdict.seen,
        meaning=meaning,
        action=action,
        to_do=verdict.to_do,
    )


def _release(engine: VLLMEngine) -> Verdict:
    able = engine.capabilities
    seen = (
        f"{able.server}, model {engine.facts.model_path}, {able.max_running_requests} running "
        f"requests, {able.kv_tokens} tokens of KV"
    )
    newer = release(able.server.removeprefix("vLLM "))[:2] > _READ_UP_TO
    return warned(seen) if newer else passed(seen)


def _logprobs(engine: VLLMEngine) -> Verdict:
    mode = engine.facts.logprobs_mode
    if mode.startswith("processed"):
        return passed(mode)
    return warned(mode, "start it with --logprobs-mode processed_logprobs")


def _tied(engine: VLLMEngine) -> Verdict:
    try:
        config = json.loads((Path(engine.facts.model_path) / "config.json").read_text())
        tied = bool(config.get("tie_word_embeddings"))
    except (OSError, ValueError, AttributeError):
        return warned("its config.json cannot be read from here")
    if not tied:
        return passed("the embeddings are not tied")
    if engine.facts.device == "cpu":
        return failed("the embeddings are tied, on a CPU", "do not refit it; use an untied model")
    return warned(f"the embeddings are tied; not tried on {engine.facts.device}")


async def _refit(engine: VLLMEngine, folder: str | None) -> Verdict:
    noted = RefitNotes()
    if folder is not None:
        await prove(engine, folder, noted)
    return proof(noted)


async def _tried(scenario: Awaitable[Verdict], seconds: float = _SECONDS) -> Verdict:
    try:
        async with asyncio.timeout(seconds):
            return await scenario
    except (EngineError, TimeoutError) as error:
        return failed(f"the probe broke off ({str(error) or 'no answer'})", "look at its log")


async def _abort(engine: VLLMEngine) -> Verdict:
    stream = Response(engine, _TOKENS)
    try:
        await stream.begun.wait()
        while not stream.task.done():
            await engine.abort(stream.request.request_id)
            await asyncio.wait([stream.task], timeout=0.25)
        await stream.task
    finally:
        await stream.leave()
    last = stream.chunks[-1]
    spans = sum(span.end - span.start for span in last.spans or ())
    seen = f"{len(stream.ids)} tokens, of which {spans} have a version, ended with {last.finish!r}"
    return passed(seen) if spans == len(stream.ids) else failed(seen, "use vLLM 0.32 or later")


async def _retract(engine: VLLMEngine) -> Verdict:
    return await _paused(engine, "retract")


async def _in_place(engine: VLLMEngine) -> Verdict:
    return await _paused(engine, "in_place")


async def _paused(engine: VLLMEngine, mode: PauseMode) -> Verdict:
    reference = Response(engine, _TOKENS)
    try:
        await reference.task
    finally:
        await reference.leave()
    stream = Response(engine, _TOKENS)
    try:
        await stream.begun.wait()
        try:
            await engine.pause(mode)
            held = len(stream.ids)
            await asyncio.sleep(_WATCH_S)
            late = len(stream.ids) - held
            if mode == "retract":
                await engine.flush()
        finally:
            await engine.resume()
        await stream.task
    finally:
        await stream.leave()
    if late:
        return failed(f"{late} tokens arrived while it was paused", NO_STRAGGLERS)
    if stream.ids != reference.ids:
        return warned("the stream continued with other tokens than without a pause")
    return passed("no token arrived meanwhile, and the stream continued with the same tokens")


async def _unchanged(engine: VLLMEngine) -> Verdict:
    facts = engine.facts
    label, paused = await engine.ask_label(), await engine.is_paused()
    if version_number(label) != version_number(facts.label) or paused:
        return failed(f"its label is {label!r}, paused: {paused}", "look at its log")
    return passed(f"its label is {label!r}, and it is not paused")
