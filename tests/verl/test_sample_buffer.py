"""The buffer of single rollouts pushes prompts for lost ones, also before any was delivered."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aprilsched.trainers.pushed import NOT_TOKENIZED, GroupLost
from aprilsched.trainers.verl import _Scheduler, sample_buffer
from aprilsched.types import Prompt

pytest.importorskip("verl", reason="verl is not installed; use make test-verl")

SIZE = 2


def test_prompts_are_replaced_if_all_of_the_first_fail(monkeypatch: pytest.MonkeyPatch):
    import transfer_queue

    items: dict[str, dict[str, Any]] = {}
    pushed: list[int] = []

    async def put(*, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        items.setdefault(key, {}).update(tag)

    def clear(*, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del items[key]

    def refill(prompts: int) -> None:
        pushed.append(prompts)
        for member in range(SIZE):
            name = f"new_{member}"
            tag = {"rollout": name, "global_steps": 0, "baseline": 0.5, "size": SIZE}
            items[f"{name}_0"] = tag

    monkeypatch.setattr(transfer_queue, "async_kv_put", put)
    monkeypatch.setattr(transfer_queue, "kv_list", lambda *_: {"train": dict(items)})
    monkeypatch.setattr(transfer_queue, "kv_clear", clear)
    scheduler: Any = SimpleNamespace(_samples=True, _keys={}, _sessions={})
    for name in ("_end", "_report"):
        setattr(scheduler, name, getattr(_Scheduler, name).__get__(scheduler))
    items["old"] = {"is_prompt": True, "status": "running", "global_steps": 0}
    given = {"trajectory": {"validate": False}, "delivered": 0}
    prompt = Prompt(input_ids=NOT_TOKENIZED, key="old", metadata=given, group_size=SIZE)
    asyncio.run(_Scheduler._ended(scheduler, prompt, GroupLost()))

    def empty(*_: Any) -> float:
        pytest.fail("the buffer waits, and no prompt generates")

    buffer = sample_buffer(
        trainer_mode="separate_async",
        trainer_config=None,
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=None,
        poll_interval=0.0,
        refill_fn=refill,
    )
    buffer._wait_for_next_poll = empty
    batch, _ = buffer.sample(0, "train", 1)
    assert pushed == [1]
    assert sorted(batch.keys) == ["new_0_0", "new_1_0"]
