"""Tests ``aprilsched doctor`` on served embedded engines: healthy, busy, paused, broken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprilsched.__main__ import main
from aprilsched.cli.commands import doctor as cli
from aprilsched.cli.commands.doctor import REACHED
from aprilsched.cli.doctor import ROWS, SCORES, Finding, Row, checks, examine
from aprilsched.cli.doctor.server import MAX_ATTEMPTS, Server, kept
from aprilsched.cli.runs.more_room import gains
from aprilsched.cli.runs.settings import WorkloadSettings
from aprilsched.config import SchedulerConfig
from aprilsched.errors import EngineRejected, EngineUnreachable
from aprilsched.kernel.engines.base import Chunk
from aprilsched.kernel.engines.control import graph_requests
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.values.capabilities import Capabilities, Reservation
from aprilsched.testing import SimServer
from aprilsched.testing.contract import CHECKS, PROMPT, EndedTooSoon, OtherTokens, Subject, until
from aprilsched.testing.generate_answers import Answer
from aprilsched.testing.served import ServedEngine
from tests.support.sim_http import CONFIG, Raw, served, two_weights

KEY = "an-admin-key"
UNREACHABLE = "http://127.0.0.1:9"
REFIT = "refit by its logprobs"


@pytest.fixture
async def server() -> AsyncIterator[SimServer]:
    async with SimServer(CONFIG, time_scale=0.2) as started:
        yield started


def rows(*names: str) -> list[Row]:
    """Return the lines of these checks."""
    found = [row for row in ROWS if row.name in names]
    assert len(found) == len(names)
    return found


def statuses(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.status for finding in findings}


async def test_a_healthy_server_passes_and_is_left_as_found(server: SimServer):
    findings = await examine(server.url)
    of_vllm = {"logprobs", "tied embeddings"}
    expected = {row.name: "pass" for row in ROWS if row.name not in of_vllm}
    assert statuses(findings) == {**expected, REFIT: "warn"}
    batcher = server.engine.batcher
    assert (batcher.version, batcher.paused, batcher.running + batcher.waiting) == (0, None, 0)


def test_every_check_of_the_contract_is_in_the_table():
    meanings = {row.meaning for row in ROWS}
    assert all(" ".join((check.__doc__ or "").split()) in meanings for check in CHECKS)
    assert len(meanings) == len({row.name for row in ROWS}) == len(ROWS)


async def test_requests_of_other_clients_are_left_alone(server: SimServer):
    params = {"max_new_tokens": 50_000, "temperature": 0.0, "ignore_eos": True}
    async with Raw(server.url) as other, asyncio.TaskGroup() as tasks:
        call = tasks.create_task(
            other.post("/generate", {"input_ids": PROMPT.tolist(), "sampling_params": params})
        )
        await until(lambda: server.engine.batcher.running == 1)
        findings = await examine(server.url)
        assert not call.done()
        assert server.engine.counters.paused_seconds == 0.0
        await other.post("/abort_request", {"abort_all": True})
    found = statuses(findings)
    assert "fail" not in found.values()
    assert (found["tokens"], found["abort"]) == ("pass", "pass")
    left_out = {f.check for f in findings if "requests of other clients are on it" in f.seen}
    assert {"idle", "pause retract", "flush after retract", "hanging up"} <= left_out


async def test_an_idle_server_with_an_owner_is_not_paused(
    server: SimServer, monkeypatch: pytest.MonkeyPatch
):
    async def is_claimed_by_another(_: SGLangEngine) -> bool:
        return False

    monkeypatch.setattr(SGLangEngine, "claim", is_claimed_by_another)
    findings = await examine(server.url, rows=rows("tokens", "pause retract", "self-check"))
    assert statuses(findings) == {"tokens": "pass", "pause retract": "warn", "self-check": "warn"}
    assert "owns it" in findings[-1].seen


async def test_a_server_that_another_client_paused_stays_paused(server: SimServer):
    async with Raw(server.url) as other:
        await other.post("/pause_generation", {"mode": "retract"})
        found = statuses(await examine(server.url))
        assert (await other.get("/ready"))[0] == 503
        await other.post("/continue_generation", {})
    assert {name for name, status in found.items() if status == "fail"} == {"left paused"}
    assert (found["tokens"], found["pause retract"]) == ("warn", "warn")
    assert found["left as found"] == "pass"


PAUSE = ServedEngine.pause


async def ignores(self: ServedEngine, mode: str) -> None:
    return


async def loses(self: ServedEngine, mode: Any) -> None:
    await self.abort_all()
    await PAUSE(self, mode)


async def crashes(self: ServedEngine, mode: str) -> None:
    self.engine.crash()


async def refuses(self: ServedEngine) -> bool:
    return False


@pytest.mark.parametrize(
    ("method", "replacement", "seen"),
    [
        (
            "pause",
            ignores,
            {
                "pause retract": "tokens arrive while it is paused",
                "held request": "answered a request while it was paused",
            },
        ),
        ("pause", loses, {"pause in_place": "ended while it was paused"}),
        ("pause", crashes, {"pause retract": "the connection broke"}),
        ("flush", refuses, {"flush after retract": "flush"}),
    ],
)
async def test_a_server_that_does_not_pause_or_flush_fails(
    server: SimServer,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    replacement: Any,
    seen: dict[str, str],
):
    monkeypatch.setattr(ServedEngine, method, replacement)
    monkeypatch.setattr(checks, "LIMITS", HttpLimits(flush_timeout=0.5))
    findings = await examine(server.url, rows=rows(*seen))
    for finding in findings:
        assert finding.status == "fail"
        assert seen[finding.check] in finding.seen
        assert "straggler=" in finding.to_do


async def test_a_server_without_a_field_of_responses_fails(
    server: SimServer, monkeypatch: pytest.MonkeyPatch
):
    event, missing = Answer.event, list[str]()

    def without(self: Answer, chunk: Chunk) -> dict[str, Any]:
        found = event(self, chunk)
        found["meta_info"].pop(missing[-1], None)
        return found

    monkeypatch.setattr(Answer, "event", without)
    for field, seen in {
        "weight_versions": "version spans did not come",
        "output_token_logprobs": "every token needs one",
        "completion_tokens": "completion_tokens",
    }.items():
        missing.append(field)
        findings = await examine(server.url, rows=rows("tokens", "left as found"))
        assert [finding.status for finding in findings] == ["fail", "pass"]
        assert seen in findings[0].seen


async def test_an_early_end_or_other_tokens_do_not_fail_the_check(
    server: SimServer,
):
    attempts = 0

    async def late(subject: Subject) -> None:
        nonlocal attempts
        attempts += 1
        if attempts % MAX_ATTEMPTS != 0 or attempts > MAX_ATTEMPTS:
            raise EndedTooSoon

    async def differs(subject: Subject) -> None:
        raise OtherTokens("other tokens")

    table = [Row(check.__name__, kept(check, "nothing")) for check in (late, late, differs)]
    first, second, other = await examine(server.url, rows=table)
    assert (first.status, second.status, attempts) == ("pass", "warn", 2 * MAX_ATTEMPTS)
    assert "was over before anything was done to it" in second.seen
    assert (other.status, other.seen) == ("warn", "other tokens")


async def test_cancelled_it_leaves_the_server_as_it_was(server: SimServer):
    task = asyncio.create_task(examine(server.url, rows=rows("pause retract")))
    await until(lambda: server.engine.batcher.paused is not None)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    batcher = server.engine.batcher
    await until(lambda: batcher.running + batcher.waiting == 0)
    assert batcher.paused is None


async def test_keys_are_needed_and_used():
    with pytest.raises(EngineUnreachable):
        await examine(UNREACHABLE)
    async with served(admin_key=KEY) as server:
        with pytest.raises(EngineRejected, match="as admin_key"):
            await examine(server.url)
        findings = await examine(server.url, admin_key=KEY, rows=rows("server", "repeated calls"))
    assert set(statuses(findings).values()) == {"pass"}
    assert KEY not in str(findings)


async def test_an_ability_that_the_server_reports_is_judged():
    able = Capabilities(version_spans=True, flush_while_paused=True)
    for name, has, status in (
        ("KV tier", able, "pass"),
        ("KV tier", replace(able, kv_tier="keyed"), "warn"),
        ("KV tier", replace(able, kv_tier="unkeyed"), "fail"),
        ("version spans", replace(able, version_spans=False), "fail"),
    ):
        server: Any = SimpleNamespace(facts=SimpleNamespace(capabilities=has))
        finding = await rows(name)[0].finding(server)
        assert finding is not None
        assert finding.status == status


@pytest.mark.parametrize(
    ("drafter", "own_draft", "running", "status", "words"),
    [
        ("", False, 48, "pass", "does not draft"),
        ("NGRAM", False, 48, "warn", "set --max-running-requests"),
        ("NGRAM", False, 256, "pass", "NGRAM"),
        ("EAGLE3", True, 256, "warn", "keeps its weights"),
    ],
)
async def test_a_server_that_drafts_is_judged(
    drafter: str, own_draft: bool, running: int, status: str, words: str
):
    able = Capabilities(version_spans=True, flush_while_paused=True, max_running_requests=running)
    facts = SimpleNamespace(drafter=drafter, own_draft=own_draft, capabilities=able)
    server: Any = SimpleNamespace(facts=facts)
    finding = await rows("drafts")[0].finding(server)
    assert finding is not None
    assert finding.status == status
    assert words in f"{finding.seen} {finding.to_do}"


def test_the_size_of_cuda_graphs_is_that_of_all_ranks():
    def size(backend: str, ranks: int) -> int | None:
        config = {"decode": {"backend": backend, "max_bs": 32}}
        return graph_requests(config, "decode", "max_bs", ranks=ranks)

    assert (size("full", 1), size("full", 2), size("disabled", 1)) == (32, 64, None)
    assert graph_requests("no table", "decode", ranks=1) is None


async def test_the_room_of_a_server_is_reported_with_what_makes_it_small():
    able = Capabilities(
        version_spans=True,
        flush_while_paused=True,
        max_running_requests=48,
        kv_tokens=9_000,
        reservation=Reservation(),
    )
    facts = {"graph_requests": 48, "conservativeness": 1.0, "drafter": "", "capabilities": able}
    for changes, status, words in (
        ({}, "pass", "9000 tokens of KV, 48 running requests, CUDA graphs to 48 requests"),
        ({}, "pass", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"),
        ({"graph_requests": 32}, "warn", "CUDA graphs to 32"),
        ({"graph_requests": None}, "pass", "no size of CUDA graphs"),
        ({"drafter": "EAGLE3"}, "pass", "speculation EAGLE3"),
        ({"capabilities": replace(able, reservation=None)}, "pass", "speculation off"),
    ):
        server: Any = SimpleNamespace(facts=SimpleNamespace(**{**facts, **changes}))
        finding = await rows("room")[0].finding(server)
        assert finding is not None
        assert finding.status == status
        assert words in finding.seen


async def test_more_room_is_forecast_for_a_schedule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cli, "ROWS", ())
    config = replace(CONFIG, kv_tokens=12_000, max_running=64)
    asked = "--policy pool@1.75 --batches 5 --batch-groups 8 --group-size 4 --median 150 --cap 2000"
    async with served(config=config) as server:
        code = await asyncio.to_thread(main, ["doctor", server.url, "--json", *asked.split()])
    assert code == 0
    found = {each["check"]: each for each in json.loads(capsys.readouterr().out)}
    speed, *changes = found["more room"]["seen"].split(", ")
    assert speed.endswith(" tokens/s")
    gains = {name: int(gain[:-1]) for name, gain in (each.split(": ") for each in changes)}
    assert gains["18000 tokens of KV"] > 5
    assert gains["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION=256"] > 5
    assert found["more room"]["to_do"].startswith("start it with SGLANG_CLIP")


def test_less_is_reserved_where_updates_recompute():
    able = Capabilities(
        version_spans=True,
        flush_while_paused=True,
        max_running_requests=64,
        kv_tokens=12_000,
    )
    command = cli.DoctorCommand(
        policy="april", batches=5, workload=WorkloadSettings(cap=2000, median=150.0)
    )
    share: dict[tuple[str, float], float] = {}
    base = SchedulerConfig(batch_groups=8, group_size=4)
    for config in (replace(base, straggler="abort"), replace(base, straggler="in_place")):
        for factor in (1.0, 0.14):
            rule = Reservation(fixed_in_full=False, conservativeness=factor)
            last = gains([command.settings(config, seed=0)], replace(able, reservation=rule))[-1]
            assert last.name == "--schedule-conservativeness 0.14"
            assert last.is_setting
            share[str(config.straggler), factor] = last.share
    assert share["abort", 0.14] == share["in_place", 0.14] == 0.0
    assert share["abort", 1.0] > 2 * share["in_place", 1.0] > 0.0


def test_more_room_is_a_mean_over_seeds():
    able = Capabilities(
        version_spans=True, flush_while_paused=True, max_running_requests=16, kv_tokens=4_000
    )
    workload = WorkloadSettings(cap=200, median=60.0)
    command = cli.DoctorCommand(policy="april", batches=3, workload=workload)
    config = SchedulerConfig(batch_groups=2, group_size=2)
    settings = [command.settings(config, seed=seed) for seed in (0, 1)]
    first, second, both = (gains(each, able) for each in (settings[:1], settings[1:], settings))
    assert first[0].tokens_per_s != second[0].tokens_per_s
    for one, other, mean in zip(first, second, both, strict=True):
        assert mean.name == one.name
        assert mean.tokens_per_s == pytest.approx((one.tokens_per_s + other.tokens_per_s) / 2)


@pytest.fixture
async def two(server: SimServer, tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints; the server starts with the first."""
    folders = two_weights(tmp_path)
    async with Raw(server.url) as raw:
        body = {"model_path": str(folders[0]), "weight_version": "default"}
        assert (await raw.post("/update_weights_from_disk", body))[0] == 200
    return folders


async def test_a_model_that_transformers_cannot_load_is_not_scored(
    server: SimServer, two: tuple[Path, Path]
):
    (found,) = await examine(server.url, rows=[SCORES])
    assert found.status == "warn"
    assert f"transformers cannot run {two[0]}" in found.seen


@pytest.mark.parametrize("works", [True, False])
async def test_a_refit_is_proved_and_taken_back(
    server: SimServer, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, works: bool
):
    """An engine that computes with a copy of its first weights never changes its tokens, so the
    check fails."""

    async def stale(self: ServedEngine, body: Any) -> str:
        return await self.relabel(body.weight_version)

    if not works:
        monkeypatch.setattr(ServedEngine, "load", stale)
    key = server.engine.batcher.weights_key
    refit, left = await examine(server.url, refit=str(two[1]), rows=rows(REFIT, "left as found"))
    assert (refit.status, left.status) == ("pass" if works else "fail", "pass")
    before, again, other, back = refit.seen.split(": ")[1].split(", ")
    assert before == again == back
    assert (other != before) == works
    assert server.engine.batcher.weights_key == key


async def test_an_interrupted_refit_is_taken_back(server: SimServer, two: tuple[Path, Path]):
    async with Raw(server.url) as raw:
        key, batcher = server.engine.batcher.weights_key, server.engine.batcher
        task = asyncio.create_task(examine(server.url, refit=str(two[1]), rows=rows(REFIT)))
        while (await raw.get("/model_info"))[1]["weight_version"] != "0":
            assert not task.done()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (await raw.get("/model_info"))[1]["weight_version"] == "default"
        assert (batcher.weights_key, batcher.paused) == (key, None)
        await raw.post("/update_weight_version", {"new_version": "7"})
        (finding,) = await examine(server.url, refit=str(two[1]), rows=rows(REFIT))
    assert (finding.status, batcher.weights_key) == ("warn", key)
    assert "version 7, and of no folder" in finding.seen


def test_the_command_reports_a_wrong_argument_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
):
    wrong: list[list[str]] = [
        [],
        [UNREACHABLE, "--admin-key-env", "NOT_SET"],
        [UNREACHABLE, "ftp://nowhere"],
    ]
    for arguments in wrong:
        assert main(["doctor", *arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)


async def test_the_command_prints_each_server_and_exits_with_worst(
    server: SimServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    async def printed(*arguments: str, code: int) -> str:
        assert await asyncio.to_thread(main, ["doctor", *arguments]) == code
        return capsys.readouterr().out

    few = tuple(rows("server", "version spans", REFIT))
    monkeypatch.setattr(cli, "ROWS", few)
    result, to_do, consider, empty, *lines = (await printed(server.url, code=0)).splitlines()
    assert result == "ready: servers 1, failures 0, warnings 1"
    assert (to_do, consider, empty, lines[0]) == (
        "to do: nothing",
        "consider: nothing",
        "",
        server.url,
    )
    assert [line.split("  ")[1].split(":")[0] for line in lines[1:4]] == [row.name for row in few]
    assert lines[5:] == ["What the checks mean", *(f"{row.name}: {row.meaning}" for row in few)]

    out = await printed(UNREACHABLE, server.url, "--quiet", code=2)
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        UNREACHABLE,
        "fail",
        server.url,
        "warn",
    ]
    dead, *alive = json.loads(await printed(UNREACHABLE, server.url, "--json", code=2))
    assert set(dead) == {"server", "check", "status", "seen", "meaning", "to_do"}
    assert (dead["server"], dead["check"], dead["status"]) == (UNREACHABLE, REACHED, "fail")
    assert "is the server up" in dead["seen"]
    assert [found["check"] for found in alive] == [row.name for row in few]

    async def unknown(_: Server) -> Any:
        raise EngineUnreachable("the server", "ended.")

    monkeypatch.setattr(cli, "ROWS", (Row("broken", unknown),))
    assert "fail  broken: the server: ended -> look at its log" in await printed(server.url, code=1)
