"""Companions of simulated engines, whose rows show which weights forwarded a token, and where."""

from __future__ import annotations

import numpy as np

from aprilsched import Rollout
from aprilsched.kernel.values.companions import Companion
from aprilsched.simulation.engine.toy_model import toy_masks, toy_rows, weights_key_of_version
from aprilsched.types import NO_VERSION

EXPERTS = Companion("routed_experts", "uint8", (3, 2))
MASK = Companion("sampling_mask")


def check_rows(rollout: Rollout) -> None:
    """Compare every row with that of the weights that sampled its token."""
    prompt, tokens = len(rollout.prompt_ids), len(rollout)
    experts, masks = rollout.companions["routed_experts"], rollout.companions["sampling_mask"]
    assert len(experts.rows) == prompt + tokens - 1
    assert len(masks.rows) == tokens
    sampled = rollout.versions != NO_VERSION
    assert experts.exact.all()
    assert masks.exact.all()
    keys = [weights_key_of_version(int(version)) for version in rollout.versions[sampled]]
    positions = np.arange(prompt - 1, prompt + tokens - 1)[sampled]
    expected = toy_rows(EXPERTS, positions, np.array(keys, dtype=np.uint64))
    assert np.array_equal(experts.rows.values[prompt - 1 :][sampled], expected.values)
    for index in range(tokens):
        kept = toy_masks(MASK, rollout.token_ids[index : index + 1]).values
        assert masks.rows.row(index).tolist() == (kept.tolist() if sampled[index] else [])
