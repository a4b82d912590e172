"""What the scheduler writes into verl's TransferQueue when it has formed a batch."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprilsched.trainers.verl import _Scheduler
from aprilsched.types import NO_VERSION

pytest.importorskip("verl", reason="verl is not installed; use make test-verl")


async def test_tokens_beyond_the_bound_are_masked_in_each_trajectory(
    cluster: None, configure: Callable[..., Any]
):
    """The second trajectory continues the first one after a token of the environment."""
    import torch
    import transfer_queue as tq
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    tq.init(configure().transfer_queue)
    try:
        rows = [
            {"prompts": [1, 2], "responses": [3, 4, 5], "response_mask": [1, 1, 1], "uid": "u"},
            {
                "prompts": [1, 2, 3, 4, 5, 9],
                "responses": [6, 8, 7],
                "response_mask": [1, 0, 1],
                "uid": "u",
            },
        ]
        tensors = [
            {name: each if name == "uid" else torch.tensor(each) for name, each in row.items()}
            for row in rows
        ]
        keys = ["u_0_0", "u_0_1"]
        fields = list_of_dict_to_tensordict(tensors)
        await tq.async_kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{}, {}])
        rollout = SimpleNamespace(
            prompt_ids=np.array([1, 2]),
            versions=np.array([0, 0, 1, NO_VERSION, 1, NO_VERSION, 1]),
            loss_mask=np.array([False, False, True, False, True, False, True]),
        )
        fresh = SimpleNamespace(
            prompt_ids=np.array([1]), versions=np.array([1]), loss_mask=np.array([True])
        )
        scheduler: Any = SimpleNamespace(_outputs={"u_0": 2, "u_1": 1})
        scheduler._masks = _Scheduler._masks.__get__(scheduler)
        batch: Any = SimpleNamespace(rollouts=[rollout, fresh])
        await _Scheduler._write(scheduler, batch, ["u_0", "u_1"], named=False)
        found = tq.kv_batch_get(
            keys=keys, partition_id="train", select_fields=["response_mask", "loss_mask", "uid"]
        )
        for name in ("response_mask", "loss_mask"):
            assert [row.tolist() for row in found[name]] == [[0, 0, 1], [1, 0, 1]]
        assert list(found["uid"]) == ["u", "u"]
    finally:
        tq.close()
