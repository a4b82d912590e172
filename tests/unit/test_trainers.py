"""Tests what the adapters for trainers share: settings, sessions and images."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprilsched import Prompt, SchedulerConfig
from aprilsched.config import Retries, Samples, Staleness
from aprilsched.errors import ConfigError
from aprilsched.kernel.shell import PromptQueue
from aprilsched.trainers.adapter import fitted, images_of, missing_prompts, one_placeholder_each
from aprilsched.trainers.by_session import BySession
from tests.support.table import each_row


def fit(**settings: Any) -> SchedulerConfig:
    """Settings of a trainer whose setting `its_bound` allows 2 versions."""
    config = SchedulerConfig(**settings)
    return fitted(config, "TRL", max_staleness=2, setting="its_bound", group_size=3, batch_groups=5)


def test_the_trainers_sizes_and_bound_replace_those_of_the_settings():
    assert (fit().group_size, fit().batch_groups, fit().max_staleness) == (3, 5, 2)
    assert fit(retries=Retries(member="drop_group")).retries.member == "drop_group"
    for stricter in (1, Staleness(2, rule="evict")):
        assert fit(max_staleness=stricter).max_staleness == stricter
    queue = PromptQueue()
    queue.put(Prompt(input_ids=np.array([5], dtype=np.int32)))
    assert missing_prompts(queue, fit()) == 3 * 5 - 1


def test_a_trainer_of_single_samples_has_batches_of_its_size():
    """Their groups may shrink, and another size of batches is refused."""
    few = SchedulerConfig(delivery="samples", group_size=8, retries=Retries(member="shrink"))
    sizes: dict[str, Any] = {
        "max_staleness": 2,
        "setting": "its_bound",
        "group_size": 3,
        "batch_groups": 5,
    }
    fit = fitted(few, "TRL", samples=True, **sizes)
    assert (fit.policies.stop.amount, fit.policies.siblings) == (15, 1)
    with pytest.raises(ConfigError, match="takes a fixed number of groups"):
        fitted(replace(few, stop=Samples(8)), "TRL", samples=True, **sizes)


@each_row(
    ("settings", "why"),
    [
        ({"max_staleness": None}, "max_staleness is None, and its_bound lets it be 2 at most"),
        ({"max_staleness": 3}, "its_bound lets it be 2 at most; raise its_bound"),
        ({"stop": Samples(8)}, 'TRL takes a fixed number of groups; leave it at "groups"'),
        ({"retries": Retries(member="shrink")}, 'TRL takes groups of one size; set "again" or'),
        ({"delivery": "samples", "group_size": 3}, 'TRL takes whole groups; leave it at "groups"'),
    ],
)
def test_settings_that_no_trainer_can_have_are_refused(settings: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        fit(**settings)


@each_row(
    ("settings", "why"),
    [
        ({"branches": "all"}, "TRL takes one sequence for each rollout"),
        ({"limits": {"hours": 1}}, "sessions.limits cannot be used"),
        ({"branch": 1}, "sessions.branch is not known"),
    ],
)
def test_sessions_that_no_trainer_can_have_are_refused(settings: dict[str, Any], why: str):
    nothing: Any = None
    with pytest.raises(ConfigError, match=why):
        BySession(nothing, nothing, settings, "TRL")


def test_an_image_is_sent_with_one_of_its_placeholders():
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 2))
    file = io.BytesIO()
    image.save(file, format="PNG")
    given = [image, {"bytes": b"1"}, {"bytes": None, "path": "a.png"}, "b.png"]
    assert [each.source for each in images_of(given)] == [file.getvalue(), b"1", "a.png", "b.png"]
    processor = SimpleNamespace(image_token_id=9)
    for ids, sent in (([5, 9, 9, 6, 9, 9], [5, 9, 6, 9]), ([9, 5, 9], [9, 5, 9])):
        assert np.array(ids)[one_placeholder_each(ids, 2, processor)].tolist() == sent
    with pytest.raises(ConfigError, match="2 images and 1 rows of the placeholder 9"):
        one_placeholder_each([5, 9, 9, 9], 2, processor)
