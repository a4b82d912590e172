"""Tests images on a real SGLang server: it expands a placeholder in each attempt anew."""

# pyright: basic
# The clients' types want messages as typed mappings.
from __future__ import annotations

import shutil
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from aprilsched import (
    DiskPublisher,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.agents.chat.tokenizer import load_tokenizer
from aprilsched.agents.sessions import Session, Sessions
from aprilsched.kernel.core.policies.straggler import StragglerRule
from tests.sglang.conftest import INTERVAL
from tests.sglang.helpers import batch_through_updates, reset
from tests.sglang.recorded import Run, record
from tests.sglang.seeing import check_seen, check_versions, picture, write_seeing
from tests.sglang.server import CpuServer
from tests.sglang.tiny_vision import KINDS

KIND = "qwen2_vl"
CHAT = (
    "{% for message in messages %} {{ {'user': 't5', 'assistant': 't6', 'tool': 't7'}"
    "[message['role']] }}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    " <|vision_start|> <|image_pad|> <|vision_end|>{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} t8{% endfor %}{% if add_generation_prompt %} t6{% endif %}"
)
PICTURES = [picture(3), picture(4)]
TOKENS = 250


class VisionServer(CpuServer):
    """A server that has the tokenizer and the processor. Its warm-up would need a chat template.

    With its cache of embeddings it would show images as the vision tower of older weights sees
    them.
    """

    def _arguments(self) -> list[str]:
        given = [part for part in super()._arguments() if part != "--skip-tokenizer-init"]
        return [*given, "--skip-server-warmup"]

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "SGLANG_VLM_CACHE_SIZE_MB": "0"}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_seeing(KIND, tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def vision_server(
    seeing: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VisionServer]:
    with VisionServer(seeing[0], tmp_path_factory.mktemp("vision") / "log.txt") as server:
        server.wait_ready()
        yield server


@pytest.mark.shows("abort", "retract", "images", engine="SGLang")
@pytest.mark.long
@pytest.mark.parametrize("rule", ["abort", "retract"])
async def test_each_token_sees_the_image_under_its_weights(
    vision_server: VisionServer, seeing: tuple[Path, Path], tmp_path: Path, rule: StragglerRule
) -> None:
    async def once(prompts: Sequence[Prompt]) -> Run:
        await reset(vision_server.url, seeing[0])
        return await record([vision_server.url], seeing, rule, prompts=prompts, batches=5)

    await check_seen(once, KIND, seeing, tmp_path)


async def by_openai(session: Session, pictures: Sequence[str]) -> None:
    async with AsyncOpenAI(base_url=session.url, api_key=session.key, max_retries=0) as client:
        messages: list[Any] = []
        for role, data in zip(("user", "tool"), pictures, strict=True):
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            content = [{"type": "text", "text": "t40"}, image]
            messages.append({"role": role, "tool_call_id": "a", "content": content})
            answer = await client.chat.completions.create(model="any", messages=messages)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))


async def by_anthropic(session: Session, pictures: Sequence[str]) -> None:
    # Here, because its import takes seconds in each process that collects tests.
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=session.url, api_key=session.key, max_retries=0) as client:
        messages: list[Any] = []
        for is_tool, data in enumerate(pictures):
            source = {"type": "base64", "media_type": "image/png", "data": data}
            content: list[Any] = [
                {"type": "text", "text": "t40"},
                {"type": "image", "source": source},
            ]
            if is_tool:
                content = [{"type": "tool_result", "tool_use_id": "a", "content": content}]
            messages.append({"role": "user", "content": content})
            answer = await client.messages.create(model="any", max_tokens=9999, messages=messages)
            messages.append({"role": "assistant", "content": answer.content})


@pytest.mark.shows("sessions and agents", "images", engine="SGLang")
@pytest.mark.long
async def test_the_pictures_of_a_harness_are_seen_across_updates(
    vision_server: VisionServer, seeing: tuple[Path, Path], tmp_path: Path
) -> None:
    async def harness(session: Session, prompt: Prompt) -> None:
        pictures = [b64encode(each).decode() for each in PICTURES]
        await (by_openai, by_anthropic)[session.index](session, pictures)

    await reset(vision_server.url, seeing[0])
    tokenizer = load_tokenizer(seeing[0])
    tokenizer.wrapped.chat_template = CHAT
    sampling = SamplingParams(
        max_new_tokens=TOKENS, ignore_eos=True, extra={"logit_bias": KINDS[KIND].never}
    )
    config = SchedulerConfig(
        batch_groups=2, group_size=2, over_provision=1.0, pace="asynchronous", sampling=sampling
    )
    prompts = [Prompt(input_ids=np.array([5], dtype=np.int32)) for _ in range(2)]
    turns = iter((1, 0, 1))

    def save(to: Path) -> None:
        shutil.copytree(seeing[next(turns)], to, dirs_exist_ok=True)

    async with (
        Sessions(harness, tokenizer=tokenizer) as sessions,
        RolloutScheduler(
            SGLangFleet([vision_server.url], stream_interval=INTERVAL),
            prompts,
            episode=sessions,
            config=config,
        ) as rollouts,
    ):
        publisher = DiskPublisher(tmp_path / "weights", save=save)
        batch = await batch_through_updates(rollouts, publisher)
    image, ends = [508, 509, 510], [8, 6]
    for rollout in batch.rollouts:
        assert rollout.prompt_ids.tolist() == [5, 40, *image, *ends]
        assert rollout.token_ids[TOKENS:-TOKENS].tolist() == [8, 7, 40, *image, *ends]
        assert len(set(rollout.versions[rollout.loss_mask].tolist())) > 1
    check_versions(list(batch.rollouts), PICTURES, KIND, seeing, tmp_path)
