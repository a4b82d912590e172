"""Tools and environments of TRL's AsyncGRPOTrainer, as a harness of sessions.

The loop is the same as in TRL's own worker: the policy answers, its calls are executed, and their
results return as messages, until an answer contains no call. TRL retokenizes the whole conversation
in each turn; a session keeps the sampled tokens.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import msgspec

from aprilsched.agents.sessions import Session
from aprilsched.errors import ConfigError
from aprilsched.trainers.adapter import package
from aprilsched.types import Prompt

Message: TypeAlias = dict[str, Any]
Factories: TypeAlias = Callable[[], object] | Mapping[str, Callable[[], object]]


class Conversation(msgspec.Struct):
    """The conversation of one rollout.

    Attributes:
        prompt: first messages, including what the environment's reset returned.
        completion: messages after the prompt.
        calls: number of tool calls, including the `failures`.
        reward: class name of the environment, and its reward; None if it returns no reward.
    """

    prompt: list[Message]
    completion: list[Message] = []
    calls: int = 0
    failures: int = 0
    reward: tuple[str, float | None] | None = None


class ToolHarness:
    """Drives rollouts by TRL's loop.

    Args:
        tools: functions that every conversation may call, with docstrings as TRL needs them.
        environments: makes an environment, or one for each name in the column "environment".
        rows: the dataset.
        options: variables of the chat template.
        most: turns of calls in a conversation; None for any number.

    Attributes:
        reward_names: the classes of environments that give rewards.
        ended: the conversations by the number of their rollout.

    Raises:
        ConfigError: if an environment has no `reset`.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        environments: Factories | None,
        *,
        rows: Any,
        options: Mapping[str, Any],
        most: int | None,
    ) -> None:
        utils = package("trl", "transformers.utils.chat_template_utils")
        self._schema: Callable[[Any], dict[str, Any]] = utils.get_json_schema
        self._tools, self._rows = list(tools), rows
        self._options, self._most = options, most
        self._named = isinstance(environments, Mapping)
        several: Any = environments or {}
        named = several if self._named or not several else {"": several}
        self._factories = cast("Mapping[str, Callable[[], Any]]", named)
        self._free: dict[str, list[Any]] = {}
        self.reward_names: list[str] = []
        self.ended: dict[int, Conversation] = {}
        for name, factory in self._factories.items():
            made = factory()
            kind = type(made).__name__
            if not callable(getattr(made, "reset", None)):
                raise ConfigError(f"the environment {kind} has no reset(); give it one.")
            if hasattr(made, "get_reward") and kind not in self.reward_names:
                self.reward_names.append(kind)
            self._free[name] = [made]

    def prompt_of(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the first messages of a row of the dataset.

        Raises:
            ConfigError: if it has none, or an environment that there is not.
        """
        if self._factories and self._name(row) not in self._factories:
            raise ConfigError(
                f"a row of the dataset has the environment {row.get('environment')!r}; give one of "
                f"{', '.join(self._factories)}."
            )
        prompt = row.get("prompt", [{"role": "user", "content": ""}] if self._factories else None)
        if isinstance(prompt, str) or not prompt:
            raise ConfigError(
                "a row of the dataset has a prompt that is no conversation, and only conversations "
                "have tools; give a list of messages."
            )
        return list(prompt)

    def _name(self, row: Mapping[str, Any]) -> str:
        return str(row.get("environment")) if self._named else ""

    async def __call__(self, session: Session, prompt: Prompt) -> None:
        """Drive a rollout."""
        row: Mapping[str, Any] = self._rows[prompt.key]
        messages = self.prompt_of(row)
        if not self._factories:
            found = Conversation(prompt=messages)
            await self._converse(session, found, self._tools)
        else:
            # Environments are made once and reset often, as TRL promises.
            free = self._free[name := self._name(row)]
            environment: Any = free.pop() if free else self._factories[name]()
            try:
                given = {k: v for k, v in row.items() if not self._named or k != "environment"}
                opening = await called(partial(environment.reset, **given))
                found = Conversation(prompt=_with(messages, opening))
                await self._converse(session, found, [*self._tools, *_methods(environment)])
                if hasattr(environment, "get_reward"):
                    reward = await called(environment.get_reward)
                    kind = type(environment).__name__
                    found.reward = kind, None if reward is None else float(reward)
            finally:
                free.append(environment)
        self.ended[int(session.id)] = found

    async def _converse(
        self, session: Session, found: Conversation, tools: Sequence[Callable[..., Any]]
    ) -> None:
        named = {tool.__name__: tool for tool in tools}
        schemas = [self._schema(tool) for tool in tools]
        turn = 0
        while True:
            asked = [*found.prompt, *found.completion]
            reply = await session.chat(asked, tools=schemas or None, options=self._options)
            found.completion.append({k: v for k, v in reply.message.items() if v is not None})
            calls: Sequence[Any] = reply.message.get("tool_calls") or ()
            if not calls or turn == self._most:
                return
            for call in calls:
                function = call["function"]
                answer = await self._result(found, named, function["name"], function["arguments"])
                tool_message = {"role": "tool", "name": function["name"], "content": answer}
                found.completion.append(tool_message)
            turn += 1

    async def _result(
        self,
        found: Conversation,
        tools: Mapping[str, Callable[..., Any]],
        name: str,
        arguments: str,
    ) -> str:
        """Return a call's result as text; a tool's error becomes the text, for the policy."""
        found.calls += 1
        try:
            if name not in tools:
                raise ValueError(f"unknown tool {name}")
            answer = str(await called(partial(tools[name], **json.loads(arguments))))
            # Half of a surrogate pair, which a tool may make of its arguments, has no tokens.
            return answer.encode("utf-8", "replace").decode()
        except Exception as error:
            found.failures += 1
            return str({"error": str(error)})


async def called(function: Callable[[], Any]) -> Any:
    """Call a plain function of the user in a thread, and an asynchronous one on the event loop.

    A coroutine that a thread makes would never be awaited if the scheduler closed at that moment.
    """
    target: Any = getattr(function, "func", function)
    if any(inspect.iscoroutinefunction(each) for each in (target, type(target).__call__)):
        return await function()
    made = await asyncio.to_thread(function)
    return await made if inspect.isawaitable(made) else made


def _methods(environment: object) -> list[Callable[..., Any]]:
    """Return the methods of an environment that are tools."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    hidden = ("reset", "get_reward")
    return [
        getattr(environment, name)
        for name, _ in members
        if name not in hidden and not name.startswith("_")
    ]


def _with(messages: list[Message], opening: Any) -> list[Message]:
    """Return the messages with what `reset` has returned, at the end of the last one."""
    if opening is None:
        return messages
    *before, last = messages
    content: Any = last["content"]
    if isinstance(opening, str) != isinstance(content, str):
        content, opening = (
            [{"type": "text", "text": each}] if isinstance(each, str) else each
            for each in (content, opening)
        )
    return [*before, {**last, "content": content + opening}]
