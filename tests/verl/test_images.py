"""Images of verl's agent loops go to the engine, with one placeholder for each."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, SimFleet, Turn
from aprilsched.errors import ConfigError
from aprilsched.simulation.engine.sequence import MEDIA_TOKENS
from aprilsched.trainers.verl import _Client

pytest.importorskip("verl", reason="verl is not installed; use make test-verl")

IMAGE = 31_999
ROLLOUT = SimpleNamespace(prompt_length=64, response_length=64, max_model_len=None)


@pytest.mark.shows("images", engine="embedded", adapter="verl")
async def test_each_turn_sends_the_images_that_it_shows() -> None:
    """As verl's ToolAgentLoop does it: a tool answers with a second image."""
    from PIL import Image

    client = _Client(ROLLOUT)
    client.processor = SimpleNamespace(image_token_id=IMAGE)
    picture = Image.new("RGB", (2, 2))
    outputs: list[Any] = []

    async def loop(turn: Turn, prompt: Prompt) -> float:
        client.enter(turn)
        given = {"logprobs": True, "temperature": 1.0, "max_tokens": 5}
        ids = [5, *[IMAGE] * 4, 6]
        first = await client.generate(
            "1", prompt_ids=ids, sampling_params=given, image_data=[picture], video_data=None
        )
        ids += [*first.token_ids, 7, *[IMAGE] * 3, 8]
        second = await client.generate(
            "2", prompt_ids=ids, sampling_params=given, image_data=[picture, picture]
        )
        outputs.extend((first, second))
        with pytest.raises(ConfigError, match="the agent loop sends video_data"):
            await client.generate("3", prompt_ids=ids, sampling_params=given, video_data=[1])
        with pytest.raises(ConfigError, match="1 images and 2 rows of the placeholder 31999"):
            await client.generate("3", prompt_ids=ids, sampling_params=given, image_data=[picture])
        return 1.0

    kept = SamplingParams(
        max_new_tokens=5, temperature=0.0, ignore_eos=True, keep=("prompt_tokens",)
    )
    prompt = Prompt(input_ids=np.array([0], dtype=np.int32), sampling=kept)
    client._sampling = lambda given, context: kept
    settings = SchedulerConfig(batch_groups=1, group_size=1)
    async with RolloutScheduler(
        SimFleet(1, vocab_size=32_000, time_scale=0.01), [prompt], episode=loop, config=settings
    ) as rollouts:
        (rollout,) = (await rollouts.next_batch()).rollouts
    assert [len(output.token_ids) for output in outputs] == [5, 5]
    assert rollout.prompt_ids.tolist() == [5, IMAGE, 6]
    assert rollout.token_ids[5:8].tolist() == [7, IMAGE, 8]
    received = [answer.values["prompt_tokens"] for answer in rollout.answers]
    assert received == [3 + MEDIA_TOKENS, 3 + 5 + 3 + 2 * MEDIA_TOKENS]
