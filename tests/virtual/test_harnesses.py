"""Two frameworks' agents against sessions: a scripted model calls their tools.

The tests run in scaled wall time, because real sockets and a virtual clock do not fit together.
"""

# pyright: basic
from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprilsched import (
    DiskPublisher,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
    Turn,
)
from aprilsched.agents.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.agents.sessions import Session, Sessions
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.testing import SimServer
from aprilsched.testing.contract import until
from aprilsched.types import NO_VERSION, Prompt
from tests.support.checking import Checking
from tests.support.harnesses import HARNESSES, SYSTEM, Harness, scripted
from tests.support.sim_http import two_weights
from tests.support.tiny_tokenizer import ODD_CALLS, TEMPLATE_TOOLS_FIRST, THOUGHT, bytes_tokenizer
from tests.virtual.test_sessions import END, by, prompts, tokens_of
from tests.virtual.test_sessions_http import events_of, posted, received

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "agents.md"
VOCABULARY = 261
WEATHER = {"Zürich": "rain", "Oslo": "snow"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = bytes_tokenizer(
        tmp_path_factory.mktemp("bytes"), parses=True, chat_template=TEMPLATE_TOOLS_FIRST
    )
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [0, {END}]}}')
    return load_tokenizer(folder)


def called(name: str, *, odd: bool, **arguments: Any) -> str:
    """A call as the template writes it, or `odd`: as only the policy does."""
    call: Any = {"name": name, "arguments": arguments}
    text = json.dumps(call, ensure_ascii=False)
    if odd:
        text = json.dumps(dict(reversed(call.items())), ensure_ascii=True, separators=(",", " : "))
    return f"<tool_call>{text}</tool_call>"


def answer_of(odd: bool) -> Callable[[str], str]:
    """Return the scripted model, which looks up two cities, packs for them, and ends."""

    def answer(text: str) -> str:
        results = [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>tool\n")[1:]]
        if not results:
            calls = [called("weather", odd=odd, city=city) for city in WEATHER]
            return "I look." + "".join(calls)
        if len(results) == len(WEATHER):
            return called("pack", odd=odd, things=results, days=3)
        return f"It is {results[-1]}."

    return answer


class Tools:
    """The tools of one agent; the first one waits until the policy has changed."""

    def __init__(self, refitted: asyncio.Event | None = None) -> None:
        self.looking = 0
        self._refitted = refitted

    async def weather(self, city: str) -> str:
        """Tell the weather."""
        self.looking += 1
        if self._refitted is not None:
            await self._refitted.wait()
        return WEATHER[city]

    async def pack(self, things: list[str], days: int) -> str:
        """Pack for the weather."""
        return f"packed for {days} days of {' and '.join(things)}"


def as_coroutine(tokenizer: ModelTokenizer, tools: str) -> Callable[[Turn, Prompt], Any]:
    """Return the same conversation as a token-level episode; `tools` defines them."""
    start = "<|im_start|>assistant\n"

    def text(role: str, *contents: str) -> str:
        return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for content in contents)

    async def episode(turn: Turn, prompt: Prompt) -> float:
        task = prompt.metadata["task"]
        more = text("system", tools, SYSTEM) + text("user", task) + start
        context: list[int] = []
        for results in (("rain", "snow"), ("packed for 3 days of rain and snow",), ()):
            context += tokenizer.encode(more, special=False)
            output = await turn.generate(context)
            context += output.token_ids.tolist()
            more = "\n" + text("tool", *results) + start
        return 1.0

    return episode


def scheduler(url: str, episode: Any) -> RolloutScheduler:
    checking = Checking()
    config = SchedulerConfig(
        batch_groups=2,
        group_size=2,
        pace="asynchronous",
        over_provision=1.0,
        sampling=SamplingParams(max_new_tokens=300, temperature=0.0, stop_token_ids=(0, END)),
    )
    checking.scheduler = RolloutScheduler(
        SGLangFleet([url]), prompts(2), episode=episode, config=config, listeners=[checking]
    )
    return checking.scheduler


def server_of(tokenizer: ModelTokenizer, answer: Callable[[str], str]) -> SimServer:
    config = SimConfig(
        stream_at_pause=False,
        stream_interval=8,
        vocab_size=VOCABULARY,
        model=scripted(tokenizer, answer),
    )
    return SimServer(config, time_scale=0.05)


@pytest.mark.parametrize("odd", [False, True], ids=["as the template", "in a spelling of its own"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("run", HARNESSES)
async def test_an_agent_of_a_framework_has_the_tokens_of_a_coroutine(
    tokenizer: ModelTokenizer, tmp_path: Path, run: Harness, stream: bool, odd: bool
):
    refitted = asyncio.Event()
    agents: list[Tools] = []

    async def harness(session: Session, prompt: Prompt) -> float:
        tools = Tools(refitted)
        agents.append(tools)
        printed = await run(
            session, prompt.metadata["task"], [tools.weather, tools.pack], stream=stream
        )
        assert printed == "It is packed for 3 days of rain and snow."
        return float(tools.looking)

    _, second = two_weights(tmp_path)

    def save(to: Path) -> None:
        shutil.copytree(second, to, dirs_exist_ok=True)

    async with server_of(tokenizer, answer_of(odd)) as server:
        async with (
            Sessions(harness, tokenizer=tokenizer) as sessions,
            scheduler(server.url, sessions) as rollouts,
        ):
            waiting = asyncio.ensure_future(rollouts.next_batch())
            await until(lambda: len(agents) == 4 and all(each.looking for each in agents))
            await rollouts.update_weights(DiskPublisher(tmp_path / "weights", save=save))
            refitted.set()
            batch = await waiting
            assert rollouts.state.in_flight.ledger.total == 0
        prompt_ids = next(iter(batch.rollouts)).prompt_ids.tolist()
        received = tokenizer.decode(prompt_ids, skip_special=False)
        tools = received.removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0]
        names = [each["function"]["name"] for each in json.loads(tools)]
        assert names == ["weather", "pack"]
        async with scheduler(server.url, as_coroutine(tokenizer, tools)) as rollouts:
            expected = await rollouts.next_batch()
    assert tokens_of(batch) == tokens_of(expected)
    for rollout in batch.rollouts:
        assert (rollout.turns, rollout.reward) == (3, 2.0)
        figures = rollout.info["session"]
        assert figures["branches"] == 1
        # Text in the policy's own spelling is kept, and counted.
        assert (figures["drift"] > 0) == odd
        sampled = rollout.versions != NO_VERSION
        assert rollout.loss_mask.tolist() == sampled.tolist()
        end = rollout.token_ids.tolist().index(END) + 1
        assert set(rollout.versions[:end].tolist()) == {0}
        assert set(rollout.versions[end:].tolist()) == {1, NO_VERSION}


ODD_ANSWERS = ["", THOUGHT, *(f"{THOUGHT}Look: {call}" for call in ODD_CALLS if len(call) < 250)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_a_malformed_call_is_content_and_keeps_its_tokens(
    tokenizer: ModelTokenizer, path: str, stream: bool
):
    async def harness(session: Session, prompt: Prompt) -> float:
        messages = [by("user", "0")]
        for number, answer in enumerate(ODD_ANSWERS):
            body: Any = {"messages": messages, "max_tokens": 300}
            if path == "messages":
                content = await _blocks(session, body, stream)
                text = "".join([each.get("text", "") for each in content])
                messages.append({"role": "assistant", "content": content})
            else:
                text = await _content(session, body, stream)
                messages.append(by("assistant", text))
            assert text == answer.removeprefix(THOUGHT)
            messages.append(by("user", f"{number + 1}"))
        return 1.0

    def answer(text: str) -> str:
        return ODD_ANSWERS[text.count("<|im_start|>user") - 1]

    async with (
        server_of(tokenizer, answer) as server,
        Sessions(harness, tokenizer=tokenizer) as sessions,
        scheduler(server.url, sessions) as rollouts,
    ):
        batch = await rollouts.next_batch()
        assert rollouts.state.in_flight.ledger.total == 0
    for rollout in batch.rollouts:
        assert rollout.info["session"]["branches"] == 1
        sampled = rollout.token_ids[rollout.loss_mask].tolist()
        expected = "".join([f"{answer}<|im_end|>" for answer in ODD_ANSWERS])
        assert tokenizer.decode(sampled, skip_special=False) == expected


async def _blocks(session: Session, body: Any, stream: bool) -> list[dict[str, Any]]:
    """The content of an answer in Anthropic's API."""
    if stream:
        return received(await events_of(session, "messages", body))
    status, answer = await posted(session, "messages", body)
    assert status == 200, answer
    return answer["content"]


async def _content(session: Session, body: Any, stream: bool) -> str:
    """The content of an answer in OpenAI's API."""
    if stream:
        events = await events_of(session, "chat/completions", body)
        deltas = [event["choices"][0]["delta"] for _, event in events]
        return "".join([each.get("content", "") for each in deltas])
    status, answer = await posted(session, "chat/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"] or ""


async def test_the_agents_of_the_guide_run(tokenizer: ModelTokenizer):
    def answer(text: str) -> str:
        if "<|im_start|>tool" not in text:
            return "".join(called("weather", odd=False, city=city) for city in WEATHER)
        return "It is rain and snow."

    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for block in blocks:
        if "pydantic_ai" in block or "anthropic" in block:
            exec(block, names)  # noqa: S102

    async def harness(session: Session, prompt: Prompt) -> float:
        name = ("openai_harness", "anthropic_harness")[session.index]
        return await names[name](session, prompt)

    async with (
        server_of(tokenizer, answer) as server,
        Sessions(harness, tokenizer=tokenizer) as sessions,
        scheduler(server.url, sessions) as rollouts,
    ):
        batch = await rollouts.next_batch()
    for rollout in batch.rollouts:
        assert (rollout.turns, rollout.reward) == (2, 1.0)
