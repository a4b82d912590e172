"""Agents of two frameworks that know nothing of aprilsched, and a model that calls their tools.

:func:`pydantic_ai` asks by OpenAI's API, and :func:`anthropic_sdk` by Anthropic's. Both loop over
the tools of the policy's answers until one has no call.
"""

# pyright: basic
# The clients' types want messages as typed mappings.
from __future__ import annotations

import functools
import importlib.util
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from aprilsched.agents.chat.tokenizer import ModelTokenizer
from aprilsched.agents.sessions import Session
from aprilsched.simulation.engine.toy_model import ContextState, ToyModel
from aprilsched.types import Float32Array, Int32Array

# They are slow to import, so the agents do it. An agent that cannot is started again and again, and
# its test would wait until its time limit.
for _name in ("anthropic", "openai", "pydantic_ai"):
    if importlib.util.find_spec(_name) is None:
        raise ImportError(f"the tests of agents need {_name}: run make venv")

SYSTEM = "Use the tools."
Tool = Callable[..., Awaitable[str]]
Harness = Callable[..., Awaitable[str]]


async def pydantic_ai(
    session: Session, task: str, tools: Sequence[Tool], *, stream: bool = False, requests: int = 50
) -> str:
    """Run a pydantic-ai agent; return its last text, or an empty one after `requests` requests."""
    from openai import AsyncOpenAI
    from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def heard(_: Any, events: AsyncIterable[Any]) -> None:
        async for _ in events:
            pass

    async with AsyncOpenAI(base_url=session.url, api_key=session.key, max_retries=0) as client:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, instructions=SYSTEM, tools=list(tools))
        try:
            result = await agent.run(
                task,
                event_stream_handler=heard if stream else None,
                usage_limits=UsageLimits(request_limit=requests),
            )
        except UsageLimitExceeded:
            return ""
    return result.output


async def anthropic_sdk(
    session: Session, task: str, tools: Sequence[Tool], *, stream: bool = False, requests: int = 50
) -> str:
    """The tool runner of Anthropic's own package; returns the text of the last message."""
    from anthropic import AsyncAnthropic, beta_async_tool

    async with AsyncAnthropic(base_url=session.url, api_key=session.key, max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="policy",
            max_tokens=4096,
            system=SYSTEM,
            tools=[beta_async_tool(tool) for tool in tools],
            messages=[{"role": "user", "content": task}],
            max_iterations=requests,
            stream=stream,
        )
        message: Any = None
        async for each in runner:
            message = each
            if stream:
                message = await message.get_final_message()
    return "".join([block.text for block in message.content if block.type == "text"])


HARNESSES: tuple[Harness, ...] = (pydantic_ai, anthropic_sdk)


def scripted(tokenizer: ModelTokenizer, answer: Callable[[str], str]) -> Callable[[int], ToyModel]:
    """Return a toy model that continues each context with `answer` of its text, and then ends.

    The text is the part of the context before the answer.
    """
    start = _letters(tokenizer.encode("<|im_start|>assistant\n", special=False))
    end = _letters(tokenizer.encode("<|im_end|>", special=False))

    @functools.cache
    def answered(context: str) -> str:
        text = tokenizer.decode([ord(letter) for letter in context], skip_special=False)
        return _letters(tokenizer.encode(answer(text), special=False)) + end

    class Scripted(ToyModel):
        """Knows by its hash which context each request has, with a letter for each token."""

        def __init__(self, vocab_size: int) -> None:
            super().__init__(vocab_size)
            self._contexts: dict[int, str] = {0: ""}

        def absorb(self, state: int, tokens: Int32Array, key: int) -> int:
            absorbed = super().absorb(state, tokens, key)
            self._contexts[absorbed] = self._contexts[state] + _letters(tokens.tolist())
            return absorbed

        def sample(
            self, states: Sequence[ContextState], counts: Sequence[int], key: int
        ) -> list[tuple[Int32Array, Float32Array]]:
            return [self._say(s, n, key) for s, n in zip(states, counts, strict=True)]

        def _say(
            self, state: ContextState, count: int, key: int
        ) -> tuple[Int32Array, Float32Array]:
            printed: list[int] = []
            for _ in range(count):
                state.hash = self.absorb(state.hash, np.array([state.last], np.int32), key)
                context = self._contexts[state.hash]
                place = context.rindex(start)
                so_far = len(context) - place - len(start)
                # Tokens sampled past the end before the engine notices are never returned.
                state.last = ord((answered(context[:place])[so_far:] or end)[0])
                state.length += 1
                printed.append(state.last)
            logprobs = np.full(count, -0.5, dtype=np.float32)
            return np.array(printed, dtype=np.int32), logprobs

    return Scripted


def _letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))
