"""Tests the doctor's checks as pure functions, for servers that are not available."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprilsched.doctor.checks import CHECKS, Finding, Notes
from aprilsched.doctor.proofs import RefitNotes
from aprilsched.engines.base import Capabilities
from aprilsched.engines.sglang.probe import ServerFacts
from aprilsched.engines.sglang.wire import ServerProcess

BARE = Capabilities(version_spans=False, flush_while_paused=False, server="SGLang 0.5.17")


def notes(able: Capabilities = BARE, *, sessions: bool = False, **seen: Any) -> Notes:
    facts = ServerFacts(
        model_path="a-model",
        label="default",
        capabilities=able,
        vocab_size=None,
        incremental=None,
        stream_interval=True,
        torch_empty_cache=False,
        update_sessions=sessions,
        pipelined=False,
        metrics=False,
        shares_bodies=True,
        process=ServerProcess(),
    )
    return Notes(facts=facts, version=(0, 5, 17), **seen)


def finding(name: str, of: Notes) -> Finding:
    (check,) = (check for check in CHECKS if check.name == name)
    return check.finding(of)


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
    found = finding("ranks", notes(replace(BARE, ranks=4), info=info))
    assert found.status == status
    assert "4 ranks" in found.seen


@pytest.mark.parametrize(
    ("cached", "status", "word"),
    [
        ([0, 256, 0], "pass", "256 cached"),
        ([0, 0, 0], "warn", "shares no cache"),
        ([0, 256, 256], "fail", "256 under another"),
        ([], "warn", "saw nothing"),
    ],
)
def test_a_cache_that_mixes_keys_fails(cached: list[int], status: str, word: str):
    found = finding("cache keys", notes(cached=cached))
    assert found.status == status
    assert word in found.seen


@pytest.mark.parametrize(
    ("saver", "kept", "status", "word"),
    [
        (True, True, "pass", "stays on the CPU"),
        (True, False, "warn", "are gone"),
        (False, True, "warn", "frees nothing"),
    ],
)
def test_what_becomes_of_released_weights(saver: bool, kept: bool, status: str, word: str):
    able = replace(BARE, keeps_released_weights=kept)
    found = finding("released weights", notes(able, info={"enable_memory_saver": saver}))
    assert found.status == status
    assert word in found.seen


def test_what_a_flush_within_an_update_does_is_told_from_the_version():
    name = "flush within an update (hazard 3)"
    assert "asserts" in finding(name, notes()).seen
    newer = replace(notes(), version=(0, 5, 22))
    assert "old label" in finding(name, newer).seen


def test_a_release_under_waiting_requests_is_told_from_the_version():
    name = "release while requests wait"
    assert "dies" in finding(name, notes()).seen
    able = replace(BARE, release_while_paused=True)
    assert "since 0.5.21" in finding(name, notes(able)).seen


@pytest.mark.parametrize(
    ("logprobs", "status"),
    [
        ((-1.0, -1.0, -2.0, -1.0), "pass"),
        ((-1.0, -2.0, -2.0, -1.0), "fail"),  # its folder has other weights
        ((-1.0, -1.0, -1.0, -1.0), "fail"),  # new weights change nothing
        ((-1.0, -1.0, -2.0, -2.0), "fail"),  # its own did not come back
        ((-1.0, -1.0), "warn"),  # it broke off
    ],
)
def test_fresh_responses_change_with_the_weights_and_come_back(
    logprobs: tuple[float, ...], status: str
):
    responses: Any = [SimpleNamespace(ids=[1, 2], logprobs=np.full(2, each)) for each in logprobs]
    refit = RefitNotes(why_not=None, responses=responses)
    assert finding("refit by its logprobs", notes(refit=refit)).status == status


@pytest.mark.parametrize(("alike", "status"), [(8, "pass"), (5, "pass"), (4, "fail")])
def test_rows_of_a_seam_are_mostly_those_of_one_pass(alike: int, status: str):
    able = replace(BARE, companions=frozenset({"routed_experts"}))
    whole = np.arange(8)[:, np.newaxis]
    came = np.where(whole < alike, whole, -1)
    found = finding("rows at a seam", notes(able, seam=[came[:3], came[3:], whole]))
    assert (found.status, f"{alike} are those of one pass" in found.seen) == (status, True)


def test_brackets_are_told_from_the_schema():
    name = "brackets of an update"
    assert finding(name, notes()).status == "warn"
    assert finding(name, notes(paths=frozenset({"/generate"}))).status == "pass"
    found = finding(name, notes(sessions=True, paths=frozenset({"/begin_weight_update"})))
    assert (found.status, "end_weight_update" in found.seen) == ("pass", True)


def test_adapters_are_told_from_the_arguments():
    assert finding("LoRA adapters", notes()).status == "warn"
    assert finding("LoRA adapters", notes(replace(BARE, adapters=True))).status == "pass"


def test_nothing_untried_fails_and_every_line_is_whole():
    for check in CHECKS:
        found = check.finding(notes())
        assert not (found.status == "fail" and found.seen.startswith("not tried"))
        assert found.meaning.endswith(".")
        assert not found.action.endswith(".")
