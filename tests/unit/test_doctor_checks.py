"""Tests what the doctor's checks make of experiments on servers that are not available."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aprilsched.doctor import Finding, scenarios
from aprilsched.doctor.checks import CHECKS
from aprilsched.doctor.client import Server
from aprilsched.doctor.findings import left_out
from aprilsched.engines.base import Capabilities
from aprilsched.engines.sglang.probe import ServerFacts
from aprilsched.engines.sglang.wire import ServerProcess

BARE = Capabilities(version_spans=False, flush_while_paused=False, server="SGLang 0.5.17")


class Unavailable(Server):
    """A server whose experiments have shown this; those that are not named have shown nothing."""

    def __init__(self, able: Capabilities, *, sessions: bool, shown: dict[Any, Any]) -> None:
        self._shown = shown
        facts = ServerFacts(
            model_path="a-model",
            label="default",
            capabilities=able,
            vocab_size=None,
            incremental=None,
            update_sessions=sessions,
            pipelined=False,
            metrics=False,
            tiered=False,
            shares_bodies=True,
            process=ServerProcess(),
        )
        engine: Any = SimpleNamespace(facts=facts, capabilities=able)
        super().__init__(engine, cast("Any", None))

    async def seen(self, experiment: Any, seconds: float = 0.0) -> Any:
        if getattr(experiment, "__module__", "") == scenarios.__name__:
            if experiment not in self._shown:
                raise left_out("the probe saw nothing")
            return self._shown[experiment]
        return await super().seen(experiment)


def found(
    name: str,
    able: Capabilities = BARE,
    *,
    sessions: bool = False,
    shown: dict[Any, Any] | None = None,
    **facts: Any,
) -> Finding:
    """What a check says of a server whose experiments have shown `shown`."""
    server = Unavailable(able, sessions=sessions, shown=shown or {})
    for fact, value in facts.items():
        setattr(server, fact, value)
    (check,) = (check for check in CHECKS if check.name == name)
    return asyncio.run(check.finding(server))


@pytest.mark.parametrize(
    ("info", "status"),
    [
        ({}, "pass"),
        ({"dp_size": 1}, "pass"),
        ({"dp_size": 2}, "warn"),
        ({"dp_size": 2, "enable_dp_attention": True}, "pass"),
        ({"dp_size": 1, "attn_dp_size": 2, "enable_dp_attention": True}, "pass"),
    ],
)
def test_data_parallel_copies_take_no_distributed_update(info: dict[str, Any], status: str):
    finding = found("ranks", replace(BARE, ranks=4), info=info)
    assert (finding.status, "4 ranks" in finding.seen) == (status, True)


RELEASED, SAVER = "released weights", {"enable_memory_saver": True}
BRACKETS, SESSIONS = "brackets of an update", frozenset({"/begin_weight_update"})


@pytest.mark.parametrize(
    ("name", "facts", "status", "words"),
    [
        (RELEASED, {"info": SAVER, "able": {"keeps_released_weights": True}}, "pass", "on the CPU"),
        (RELEASED, {"info": SAVER}, "warn", "are gone"),
        (RELEASED, {"able": {"keeps_released_weights": True}}, "warn", "frees nothing"),
        (BRACKETS, {}, "warn", "no schema"),
        (BRACKETS, {"paths": frozenset({"/generate"})}, "pass", "it has no begin_weight_update"),
        (BRACKETS, {"sessions": True, "paths": SESSIONS}, "pass", "end_weight_update"),
        ("LoRA adapters", {}, "warn", "not enabled"),
        ("LoRA adapters", {"able": {"adapters": True}}, "pass", "enabled"),
    ],
)
def test_what_is_not_tried_is_told_from_what_the_server_says(
    name: str, facts: dict[str, Any], status: str, words: str
):
    able = replace(BARE, **facts.get("able", {}))
    finding = found(name, able, **{key: each for key, each in facts.items() if key != "able"})
    assert (finding.status, words in finding.seen) == (status, True)


@pytest.mark.parametrize(
    ("cached", "status", "word"),
    [
        ([0, 256, 0], "pass", "256 cached"),
        ([0, 0, 0], "warn", "shares no cache"),
        ([0, 256, 256], "fail", "256 under another"),
        (None, "warn", "saw nothing"),
    ],
)
def test_a_cache_that_mixes_keys_fails(cached: list[int] | None, status: str, word: str):
    finding = found("cache keys", shown={scenarios.cached: cached} if cached else {})
    assert (finding.status, word in finding.seen) == (status, True)


@pytest.mark.parametrize(
    ("logprobs", "status"),
    [
        ((-1.0, -1.0, -2.0, -1.0), "pass"),
        ((-1.0, -2.0, -2.0, -1.0), "fail"),  # its folder has other weights
        ((-1.0, -1.0, -1.0, -1.0), "fail"),  # new weights change nothing
        ((-1.0, -1.0, -2.0, -2.0), "fail"),  # its own did not come back
        ((), "warn"),  # it broke off
    ],
)
def test_fresh_responses_change_with_the_weights_and_come_back(
    logprobs: tuple[float, ...], status: str
):
    responses: Any = [SimpleNamespace(ids=[1, 2], logprobs=np.full(2, each)) for each in logprobs]
    shown: dict[Any, Any] = {scenarios.refit: (responses, [])} if logprobs else {}
    assert found("refit by its logprobs", shown=shown).status == status


@pytest.mark.parametrize(("alike", "status"), [(8, "pass"), (5, "pass"), (4, "fail")])
def test_rows_of_a_seam_are_mostly_those_of_one_pass(alike: int, status: str):
    able = replace(BARE, companions=frozenset({"routed_experts"}))
    whole = np.arange(8)[:, np.newaxis]
    came = np.where(whole < alike, whole, -1)
    finding = found("rows at a seam", able, shown={scenarios.seam: [came[:3], came[3:], whole]})
    assert (finding.status, f"{alike} are those of one pass" in finding.seen) == (status, True)


def test_every_line_is_whole():
    for check in CHECKS:
        assert check.meaning.endswith(".")
        assert not check.action.endswith(".")
