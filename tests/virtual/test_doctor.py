"""Tests ``aprilsched doctor`` on served embedded engines: healthy, busy, paused, broken."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from aprilsched.__main__ import main
from aprilsched.cli.doctor import REACHED
from aprilsched.doctor import Finding, examine, scenarios
from aprilsched.doctor.checks import CHECKS
from aprilsched.doctor.findings import left_out
from aprilsched.engines.base import Chunk
from aprilsched.errors import EngineProtocolError, EngineRejected, EngineUnreachable
from aprilsched.testing import SimServer
from aprilsched.testing.app import Answer
from aprilsched.testing.contract import PROMPT, until
from aprilsched.testing.served import ServedEngine
from tests.support.sim_http import Raw, served, two_weights

KEY = "an-admin-key"
NOBODY = "http://127.0.0.1:9"
UNSEEN = {"cache keys", "released weights", "stream interval (hazard 10)"}
"""Checks that the embedded engine cannot have: it shares no cache, has no memory to release, and
has one stream interval for all."""
UNTRIED = {"refit by its logprobs"}
"""What the doctor does not try unless it is asked to, because it changes the server."""


@pytest.fixture
async def server() -> AsyncIterator[SimServer]:
    async with served() as started:
        yield started


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def names(findings: list[Finding], status: str) -> set[str]:
    return {finding.check for finding in findings if finding.status == status}


async def test_a_healthy_server_passes_and_is_left_as_found(server: SimServer):
    findings = await examine(server.url)
    assert [finding.check for finding in findings] == [check.name for check in CHECKS]
    assert names(findings, "fail") == set()
    assert names(findings, "warn") == {"release", *UNSEEN, *UNTRIED}
    batcher = server.engine.batcher
    assert (batcher.version, batcher.paused, batcher.running + batcher.waiting) == (0, None, 0)


@pytest.mark.parametrize(("late", "warned"), [(2, False), (3, True)])
async def test_a_response_that_is_over_before_its_pause_is_tried_again(
    server: SimServer, monkeypatch: pytest.MonkeyPatch, late: int, warned: bool
):
    """Events that arrive late made a server that can pause look as if it could not."""
    pause, modes = scenarios._pause, list[str]()

    async def too_late(server: Any, mode: Any, *, beside: int = 0) -> Any:
        modes.append(mode)
        if modes.count(mode) <= late:
            raise scenarios.TooLate(left_out("too late").verdict)
        return await pause(server, mode, beside=beside)

    monkeypatch.setattr(scenarios, "_pause", too_late)
    found = by_name(await examine(server.url))
    for check in ("pause retract", "pause in_place"):
        assert (found[check].status == "warn") == warned, found[check].seen
    assert modes == ["retract"] * 3 + ["in_place"] * 3
    assert server.engine.batcher.paused is None


@pytest.mark.parametrize(("late", "warned"), [(2, False), (3, True)])
async def test_a_response_that_is_over_before_its_abort_is_tried_again(
    server: SimServer, monkeypatch: pytest.MonkeyPatch, late: int, warned: bool
):
    start, started = scenarios.Server.stream, list[int]()

    def stream(self: scenarios.Server, tokens: int) -> Any:
        if tokens == scenarios.LONG:
            started.append(tokens)
            if (len(started) - 1) % 3 < late:
                return start(self, 1)
        return start(self, tokens)

    monkeypatch.setattr(scenarios.Server, "stream", stream)
    found = by_name(await examine(server.url))
    for check in ("abort", "duplicate rid (hazard 11)", "hanging up (hazard 9)"):
        assert (found[check].status == "warn") == warned, found[check].seen
        assert ("was over" in found[check].seen) == warned


def test_every_hazard_has_a_line_or_is_told_of():
    told = {name for check in CHECKS for name in re.findall(r"hazard (\w+)", check.name)}
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    told |= set(re.findall(r"^\| (\d+), ", page, re.MULTILINE))
    assert told == {*map(str, range(1, 16)), "3b"}
    assert len({check.name for check in CHECKS}) == len(CHECKS)


async def test_others_requests_are_left_alone(server: SimServer):
    params = {"max_new_tokens": 20_000, "temperature": 0.0, "ignore_eos": True}
    async with Raw(server.url) as other, asyncio.TaskGroup() as tasks:
        call = tasks.create_task(
            other.post("/generate", {"input_ids": PROMPT.tolist(), "sampling_params": params})
        )
        await until(lambda: server.engine.batcher.running == 1)
        findings = by_name(await examine(server.url))
        assert not call.done()
        assert server.engine.counters.paused_seconds == 0.0
        await other.post("/abort_request", {"abort_all": True})
    assert call.result()[1]["meta_info"]["num_retractions"] == 0
    assert "fail" not in {finding.status for finding in findings.values()}
    for name in ("idle", "pause retract", "pause in_place", "flush after retract (hazard 3)"):
        assert findings[name].status == "warn"
    assert "others' requests" in findings["pause retract"].seen
    assert findings["abort"].status == "pass"


async def test_a_server_that_somebody_paused_stays_paused(server: SimServer):
    async with Raw(server.url) as other:
        await other.post("/pause_generation", {"mode": "retract"})
        findings = by_name(await examine(server.url))
        assert (await other.get("/ready"))[0] == 503
        await other.post("/continue_generation", {})
    assert names(list(findings.values()), "fail") == {"left paused (hazard 12)"}
    assert findings["pause retract"].status == "warn"
    assert findings["left as found"].status == "pass"


PAUSE = ServedEngine.pause


async def ignores(self: ServedEngine, mode: str) -> None:
    return


async def loses(self: ServedEngine, mode: Any) -> None:
    await self.abort_all()
    await PAUSE(self, mode)


async def crashes(self: ServedEngine, mode: str) -> None:
    self.engine.crash()


@pytest.mark.parametrize(
    ("pause", "fails"),
    [
        (ignores, {"pause retract", "pause in_place", "held requests (hazard 4)"}),
        (loses, {"continue after retract", "continue after in_place"}),
        (crashes, {"pause retract"}),
    ],
)
async def test_a_server_that_does_not_pause_fails(
    server: SimServer, monkeypatch: pytest.MonkeyPatch, pause: Any, fails: set[str]
):
    monkeypatch.setattr(ServedEngine, "pause", pause)
    failed = names(await examine(server.url), "fail")
    assert fails <= failed
    if pause is ignores:
        assert not failed & {"version spans", "left as found"}


@pytest.mark.parametrize(
    ("missing", "check"),
    [
        ("weight_versions", "version spans"),
        ("output_token_logprobs", "logprobs"),
        ("completion_tokens", "logprobs"),
    ],
)
async def test_a_server_without_them_fails_and_is_told_so(
    server: SimServer, monkeypatch: pytest.MonkeyPatch, missing: str, check: str
):
    event = Answer.event

    def without(self: Answer, chunk: Chunk) -> dict[str, Any]:
        found = event(self, chunk)
        found["meta_info"].pop(missing, None)
        return found

    monkeypatch.setattr(Answer, "event", without)
    findings = await examine(server.url)
    if missing == "completion_tokens":
        assert missing in by_name(findings)[check].seen
        assert by_name(findings)["left as found"].status == "pass"
    else:  # Rows are read as the scheduler reads them, with the tokens.
        assert names(findings, "fail") - {"rows at a seam"} == {check}


async def test_a_cumulative_server_fails(server: SimServer, monkeypatch: pytest.MonkeyPatch):
    event = Answer.event
    held: dict[int, dict[str, list[Any]]] = {}

    def cumulative(self: Answer, chunk: Chunk) -> dict[str, Any]:
        found = event(self, chunk)
        mine = held.setdefault(id(self), {"ids": [], "triples": []})
        mine["ids"] += found["output_ids"]
        mine["triples"] += found["meta_info"]["output_token_logprobs"]
        found["output_ids"] = list(mine["ids"])
        found["meta_info"]["output_token_logprobs"] = list(mine["triples"])
        if chunk.finish is not None:
            del held[id(self)]
        return found

    monkeypatch.setattr(Answer, "event", cumulative)
    findings = await examine(server.url)
    assert names(findings, "fail") == {"stream form (hazard 10)"}
    assert by_name(findings)["continue after retract"].status == "pass"


async def test_cancelled_it_leaves_the_server_as_it_was(server: SimServer):
    task = asyncio.create_task(examine(server.url))
    await until(lambda: server.engine.batcher.paused is not None, 20.0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    batcher = server.engine.batcher
    assert batcher.paused is None
    assert batcher.running + batcher.waiting == 0


async def test_keys_are_needed_and_used():
    async with served(admin_key=KEY) as server:
        with pytest.raises(EngineRejected, match="as admin_key"):
            await examine(server.url)
        findings = await examine(server.url, admin_key=KEY)
    assert names(findings, "fail") == set()
    assert KEY not in str(findings)


@pytest.fixture
async def two(server: SimServer, tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints, of which the server has the first as its own."""
    folders = two_weights(tmp_path)
    async with Raw(server.url) as raw:
        body = {"model_path": str(folders[0]), "weight_version": "default"}
        assert (await raw.post("/update_weights_from_disk", body))[0] == 200
    return folders


REFIT, AFTER_RETRACT = "refit by its logprobs", "rows after a retract"


async def test_a_refit_is_proved_and_taken_back(server: SimServer, two: tuple[Path, Path]):
    key = server.engine.batcher.weights_key
    found = by_name(await examine(server.url, refit=str(two[1])))
    assert {name for name, finding in found.items() if finding.status == "fail"} == set()
    assert found[REFIT].status == "pass"
    before, again, other, back = found[REFIT].seen.split(": ")[1].split(", ")
    assert before == again == back != other
    shown = re.search(
        r"new weights' routing .* (\d+) of (\d+) rows .* (\d+) the old", found[AFTER_RETRACT].seen
    )
    assert shown is not None
    assert int(shown[1]) == int(shown[2]) > int(shown[3])
    assert server.engine.batcher.weights_key == key
    assert "'default'" in found["left as found"].seen


@pytest.mark.parametrize(
    "label",
    [
        pytest.param("0", id="its own weights"),
        pytest.param("1", id="the other weights", marks=pytest.mark.long),
    ],
)
async def test_an_interrupted_refit_is_taken_back(
    server: SimServer, two: tuple[Path, Path], label: str
):
    async with Raw(server.url) as raw:
        key, batcher = server.engine.batcher.weights_key, server.engine.batcher
        task = asyncio.create_task(examine(server.url, refit=str(two[1])))
        while (await raw.get("/model_info"))[1]["weight_version"] != label:
            assert not task.done()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (await raw.get("/model_info"))[1]["weight_version"] == "default"
    assert (batcher.weights_key, batcher.paused) == (key, None)


async def test_a_refit_that_changes_no_token_fails(
    server: SimServer, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    """As where an engine computes with a copy that it made of the weights at its start."""

    async def stale(self: ServedEngine, body: Any) -> str:
        return await self.relabel(body.weight_version)

    monkeypatch.setattr(ServedEngine, "load", stale)
    found = by_name(await examine(server.url, refit=str(two[1])))
    assert names(list(found.values()), "fail") == {REFIT}
    assert "give other weights" in found[REFIT].to_do


async def test_weights_of_no_folder_are_not_risked(server: SimServer, two: tuple[Path, Path]):
    async with Raw(server.url) as raw:
        await raw.post("/update_weight_version", {"new_version": "7"})
    key = server.engine.batcher.weights_key
    found = by_name(await examine(server.url, refit=str(two[1])))
    assert found[REFIT].status == "warn"
    assert "version 7, and of no folder" in found[REFIT].seen
    assert server.engine.batcher.weights_key == key


async def test_a_server_whose_rows_do_not_join_fails(
    server: SimServer, monkeypatch: pytest.MonkeyPatch
):
    event = Answer.event

    def late(self: Answer, chunk: Chunk) -> dict[str, Any]:
        """Begin with the row after the one that was asked for."""
        rows = dict(chunk.context_rows or {})
        if any(start for _, start in self._call.request.companions):
            rows = {name: each.part(1) for name, each in rows.items()}
        return event(self, msgspec.structs.replace(chunk, context_rows=rows or None))

    monkeypatch.setattr(Answer, "event", late)
    found = by_name(await examine(server.url))
    assert names(list(found.values()), "fail") == {"rows at a seam"}


@pytest.mark.parametrize("claims", [False, True])
async def test_what_a_server_returns_is_told_by_its_flags_and_by_a_response(
    server: SimServer, monkeypatch: pytest.MonkeyPatch, claims: bool
):
    event, facts = Answer.event, ServedEngine.server_facts

    def without(self: Answer, chunk: Chunk) -> dict[str, Any]:
        return event(self, msgspec.structs.replace(chunk, context_rows=None))

    def told(self: ServedEngine) -> dict[str, Any]:
        return {**facts(self), "enable_return_routed_experts": claims}

    monkeypatch.setattr(Answer, "event", without)
    monkeypatch.setattr(ServedEngine, "server_facts", told)
    found = by_name(await examine(server.url))
    assert "routed_experts (--enable-return-routed-experts)" in found["companions"].seen
    assert "sampling_mask came" in found["companions"].seen
    assert found["companions"].status == "fail"  # it returns no rows of an indexer either
    assert ("indexer_topk, routed_experts" in found["companions"].seen) == claims
    assert (found["rows at a seam"].status == "pass") == (not claims)


@pytest.mark.parametrize(("mode", "asks"), [("full", True), ("last", "last")])
async def test_hidden_states_are_asked_for_as_far_as_the_server_gives_them(
    server: SimServer, monkeypatch: pytest.MonkeyPatch, mode: str, asks: Any
):
    """A server that gives those of the last token alone refuses a request for all."""
    event, facts = Answer.event, ServedEngine.server_facts

    def hidden(self: Answer, chunk: Chunk) -> dict[str, Any]:
        told = event(self, chunk)
        if self._call.request.sampling.request.get("return_hidden_states") == asks:
            told["meta_info"]["hidden_states"] = [[0.5]]
        return told

    def told(self: ServedEngine) -> dict[str, Any]:
        able = {"enable_return_hidden_states": True, "return_hidden_states_mode": mode}
        return {**facts(self), **able}

    monkeypatch.setattr(Answer, "event", hidden)
    monkeypatch.setattr(ServedEngine, "server_facts", told)
    found = by_name(await examine(server.url))["companions"]
    assert found.status == "pass"
    assert ("hidden_states of the last token alone" in found.seen) == (mode == "last")


async def test_what_is_no_sglang_is_refused():
    with pytest.raises(EngineUnreachable):
        await examine(NOBODY)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with pytest.raises(EngineProtocolError, match="like SGLang"):
        await examine(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()


@pytest.mark.parametrize(
    "arguments", [[], [NOBODY, "--admin-key-env", "NOT_SET_ANYWHERE"], [NOBODY, "ftp://nowhere"]]
)
def test_the_command_says_what_is_wrong_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


async def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """What the command prints on stdout."""
    assert await asyncio.to_thread(main, ["doctor", *arguments]) == code
    return capsys.readouterr().out


async def test_the_command_says_first_what_to_do_and_each_meaning_once(
    server: SimServer, capsys: pytest.CaptureFixture[str]
):
    async with served() as other:
        urls = (server.url, other.url)
        out = await said(capsys, *urls, code=0)
    result, to_do, consider, empty, *lines = out.splitlines()
    assert "no check fails on all 2 servers" in result
    assert to_do.split() == ["to", "do", "nothing"]
    assert "--enable-memory-saver" in consider
    assert "(all servers)" in consider
    assert empty == ""
    for url in urls:
        place = lines.index(url)
        section = lines[place + 1 : place + 1 + len(CHECKS)]
        assert [line.split("  ")[1].split(":")[0] for line in section] == [c.name for c in CHECKS]
    for check in CHECKS:
        assert out.count(check.meaning) == 1


async def test_a_dead_server_does_not_cost_the_findings_of_the_others(
    server: SimServer, capsys: pytest.CaptureFixture[str]
):
    out = await said(capsys, NOBODY, server.url, code=2)
    assert "1 of 2 not reached" in out.splitlines()[0]
    assert NOBODY in out.splitlines()[1]
    assert "pass  left as found" in out
    objects = json.loads(await said(capsys, NOBODY, server.url, "--json", code=2))
    keys = {"server", "check", "status", "seen", "meaning", "action", "to_do"}
    assert all(set(found) == keys for found in objects)
    dead, *alive = objects
    assert (dead["server"], dead["check"], dead["status"]) == (NOBODY, REACHED, "fail")
    assert "is the server up" in dead["seen"]
    assert [found["check"] for found in alive] == [check.name for check in CHECKS]
    assert {found["server"] for found in alive} == {server.url}


async def test_quiet_is_for_what_warns_or_fails_alone(
    server: SimServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def busy(self: ServedEngine) -> bool:
        return False

    monkeypatch.setattr(ServedEngine, "flush", busy)
    heading, *lines = (await said(capsys, server.url, "--quiet", code=1)).splitlines()
    assert heading == server.url
    assert {line.split("  ")[0] for line in lines} == {"warn", "fail"}
    (failed,) = [line for line in lines if line.startswith("fail")]
    assert "flush after retract (hazard 3)" in failed
    assert failed.endswith('-> use straggler="abort" with kv_after_refit="apart"')
    objects = json.loads(await said(capsys, server.url, "--quiet", "--json", code=1))
    assert {found["status"] for found in objects} == {"warn", "fail"}
