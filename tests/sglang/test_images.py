"""Tests images on a real SGLang server: it expands a placeholder in each attempt anew."""

# pyright: basic
# The clients' types want messages as typed mappings.
from __future__ import annotations

import asyncio
import shutil
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
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
from aprilsched.testing.contract import until
from tests.sglang.conftest import INTERVAL
from tests.sglang.helpers import reset
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


async def by_openai(session: Session, pictures: AsyncIterator[str]) -> None:
    async with AsyncOpenAI(base_url=session.url, api_key=session.key, max_retries=0) as client:
        messages: list[Any] = []
        role = "user"
        async for data in pictures:
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            content = [{"type": "text", "text": "t40"}, image]
            messages.append({"role": role, "tool_call_id": "a", "content": content})
            answer = await client.chat.completions.create(model="any", messages=messages)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            role = "tool"


async def by_anthropic(session: Session, pictures: AsyncIterator[str]) -> None:
    # Here, because its import takes seconds in each process that collects tests.
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=session.url, api_key=session.key, max_retries=0) as client:
        messages: list[Any] = []
        is_tool = False
        async for data in pictures:
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
            is_tool = True


@pytest.mark.shows("sessions and agents", "images", engine="SGLang")
@pytest.mark.long
async def test_the_pictures_of_a_harness_are_seen_across_updates(
    vision_server: VisionServer, seeing: tuple[Path, Path], tmp_path: Path
) -> None:
    answered, refitted = set[str](), asyncio.Event()

    async def harness(session: Session, prompt: Prompt) -> None:
        async def pictures() -> AsyncGenerator[str]:
            """The second one follows an update."""
            first, second = (b64encode(each).decode() for each in PICTURES)
            yield first
            answered.add(session.id)
            await refitted.wait()
            yield second

        async with aclosing(pictures()) as shown:
            await (by_openai, by_anthropic)[session.index](session, shown)

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
        waiting = asyncio.ensure_future(rollouts.next_batch())
        counters = rollouts.state.in_flight.counters
        await until(lambda: counters.tokens_generated > 2 * TOKENS)
        await rollouts.update_weights(publisher)
        await until(lambda: len(answered) == 4)
        await rollouts.update_weights(publisher)
        refitted.set()
        await until(lambda: counters.tokens_generated > 6 * TOKENS)
        await rollouts.update_weights(publisher)
        batch = await waiting
        assert rollouts.state.in_flight.ledger.total == 0
    image, ends = [508, 509, 510], [8, 6]
    for rollout in batch.rollouts:
        assert rollout.prompt_ids.tolist() == [5, 40, *image, *ends]
        assert rollout.token_ids[TOKENS:-TOKENS].tolist() == [8, 7, 40, *image, *ends]
        assert len(set(rollout.versions[rollout.loss_mask].tolist())) > 1
    check_versions(list(batch.rollouts), PICTURES, KIND, seeing, tmp_path)
