"""Tests bodies with several prompts or responses, groups by a header, and bounded staleness."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aprilsched.agents.gateway import GatewaySettings
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.testing.contract import PROMPT, until
from tests.support.gateway import LONG, Front, Reader, front, spans
from tests.support.sim_http import INTERVAL, asked, two_weights

HEADER = "X-Aprilsched-Group"


@pytest.fixture
async def one() -> AsyncIterator[Front]:
    async with front() as opened:
        yield opened


def several(tokens: int, n: int, **body: Any) -> dict[str, Any]:
    given = asked(tokens, **body)
    return {**given, "sampling_params": {**given["sampling_params"], "n": n}}


# --- bodies ------------------------------------------------------------------------------------


async def test_n_responses_are_a_list_as_sglang_answers(one: Front):
    expected = await one.reference(40)
    answer = await one.raw.done("/generate", several(40, 3, rid="mine"))
    assert [each["output_ids"] for each in answer] == [expected] * 3
    assert [each["meta_info"]["id"] for each in answer] == ["mine_0", "mine_1", "mine_2"]
    assert [each["index"] for each in answer] == [0, 1, 2]
    assert len(one.gateway.service.responses) == 0


async def test_several_prompts_are_answered_in_their_order(one: Front):
    prompts = [PROMPT.tolist(), [7, 8, 9], [5]]
    alone = [
        (await one.raw.post("/generate", {**asked(20), "input_ids": ids}))[1]["output_ids"]
        for ids in prompts
    ]
    body = {**several(20, 2), "input_ids": prompts}
    answer = await one.raw.done("/generate", body)
    assert [each["output_ids"] for each in answer] == [ids for ids in alone for _ in range(2)]
    params = [{"max_new_tokens": n, "ignore_eos": True} for n in (1, 2, 3)]
    answer = await one.raw.done("/generate", {"input_ids": prompts, "sampling_params": params})
    assert [len(each["output_ids"]) for each in answer] == [1, 2, 3]
    assert len(await one.raw.done("/generate", {**asked(5), "input_ids": [[3, 4]]})) == 1


async def test_a_stream_of_several_responses_labels_each_event(one: Front):
    params = [{"max_new_tokens": n, "ignore_eos": True, "temperature": 0.0} for n in (20, 200)]
    events = await one.raw.events({"input_ids": [[3, 4], [3, 4]], "sampling_params": params})
    parts: dict[int, list[int]] = {0: [], 1: []}
    ended: list[int] = []
    for event in events:
        parts[event["index"]] += event["output_ids"]
        if event["meta_info"]["finish_reason"] is not None:
            ended.append(event["index"])
    assert ended == [0, 1], "the short one ends before the long one"
    assert [len(part) for part in parts.values()] == [20, 200]
    assert parts[1][:20] == parts[0]


async def test_one_of_several_that_fails_has_its_own_event(one: Front):
    params = [{"max_new_tokens": n, "ignore_eos": True} for n in (10**9, 30)]
    body = {"input_ids": [[3, 4], [3, 4]], "sampling_params": params}
    events = await one.raw.events(body)
    assert [event["index"] for event in events if "error" in event] == [0]
    assert sum(len(e["output_ids"]) for e in events if "error" not in e) == 30
    assert "refused" in await one.raw.refused("/generate", body)
    await until(lambda: not one.state.in_flight.groups)


async def test_an_abort_of_a_body_or_of_one_response_in_it(one: Front):
    reader = Reader(one.raw, {**several(LONG, 3, rid="mine"), "stream": True})
    await reader.reach(3 * INTERVAL)
    await one.raw.post("/abort_request", {"rid": "mine_1"})

    def aborted() -> list[int]:
        ends = [e for e in reader.events if e["meta_info"]["finish_reason"] is not None]
        return [e["index"] for e in ends]

    await until(lambda: aborted() == [1])
    await one.raw.post("/abort_request", {"rid": "mine"})
    await reader.end()
    assert sorted(aborted()) == [0, 1, 2]


# --- groups by a header ------------------------------------------------------------------------


async def test_a_group_shares_one_engine_and_is_aborted_together():
    async with front(engines=2) as two:
        for name in ("left", "right"):
            two.raw.session.headers[HEADER] = name
            for number in range(4):
                await two.stream(LONG, rid=f"{name}{number}").reach(1)
        engines: dict[str, set[str]] = {}
        for request in two.state.in_flight.open_requests():
            group = str(request.rollout.group.prompt.affinity)
            engines.setdefault(group, set()).add(request.engine)
        assert {name: len(found) for name, found in engines.items()} == {"left": 1, "right": 1}
        assert engines["left"] != engines["right"]
        await two.raw.post("/abort_request", {"rid": "left0"})
        await until(lambda: len(two.gateway.service.responses) == 7)
        await two.raw.post("/abort_request", {"group": "left"})
        await until(lambda: len(two.gateway.service.responses) == 4)
        long = "x" * 300
        two.raw.session.headers[HEADER] = long
        assert (await two.raw.post("/generate", asked(5)))[0] == 400


# --- staleness ---------------------------------------------------------------------------------


async def load(one: Front, weights: Path) -> None:
    await one.raw.done("/update_weights_from_disk", {"model_path": str(weights)})


async def test_a_response_that_becomes_too_old_ends_with_its_tokens(tmp_path: Path):
    weights = two_weights(tmp_path)
    async with front(max_staleness=1) as one:
        old = await one.stream(LONG).reach(INTERVAL)
        await load(one, weights[0])
        young = await one.stream(LONG).reach(INTERVAL)
        assert not old.done
        await load(one, weights[1])
        await old.end()
        reason = old.last["finish_reason"]
        assert (reason["type"], reason["message"]) == (
            "abort",
            "staleness above 1 at version 2",
        )
        assert spans(old.last)[0][:2] == ("default", 0)
        assert spans(old.last)[-1][2] == len(old.ids) == old.last["completion_tokens"]
        assert one.state.in_flight.ledger.rollouts == {Reason.STALE: 1}
        await young.end()
        assert [label for label, _, _ in spans(young.last)] == ["1", "2"]


async def test_new_responses_wait_if_the_version_limit_is_reached(tmp_path: Path):
    weights = two_weights(tmp_path)
    async with front(max_staleness=1, per_version=2) as one:
        await one.raw.done("/generate", asked(5))
        readers = [one.stream(20) for _ in range(3)]
        for reader in readers:
            await reader.end()
        late = one.stream(20)
        await until(lambda: one.gateway.service.waiting() == 1)
        assert not late.events
        await load(one, weights[0])
        await late.end()
        assert spans(late.last) == [("1", 0, 20)]


def test_a_number_for_each_version_needs_a_bound():
    with pytest.raises(ConfigError, match="set max_staleness too"):
        GatewaySettings(per_version=3)
