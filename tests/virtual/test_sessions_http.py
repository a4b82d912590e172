"""Tests the address of sessions: what clients of OpenAI and Anthropic, and launchers, see of it.

The tests run in scaled wall time, because real sockets and a virtual clock do not fit together.
"""

# pyright: basic
# The client's types do not know the fields that are added to OpenAI's.
from __future__ import annotations

import asyncio
import functools
import io
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from aprilsched import (
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
    SqliteStore,
)
from aprilsched.agents.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.agents.sessions import Limits, Session, Sessions
from aprilsched.errors import ConfigError
from aprilsched.testing.contract import until
from aprilsched.types import Batch
from tests.support.checking import Checking
from tests.support.tiny_tokenizer import WORDS, bytes_tokenizer, calling_tokenizer
from tests.virtual.test_sessions import ASCII, END, by, left_behind, prompts

LOOK = {"type": "object", "properties": {"where": {"type": "string"}}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load_tokenizer(bytes_tokenizer(tmp_path_factory.mktemp("bytes"), parses=True))


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """A tokenizer whose random tokens contain tool calls."""
    return load_tokenizer(calling_tokenizer(tmp_path_factory.mktemp("calling"), every=3))


def scheduler(sessions: Sessions, *, tokens: int = 30, vocab: int = ASCII, **more: Any):
    checking = Checking()
    config = SchedulerConfig(
        batch_groups=1,
        group_size=2,
        pace="asynchronous",
        over_provision=1.0,
        straggler="abort",
        save_interval_s=0.05,
        sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True, temperature=0.0),
    )
    fleet = more.pop("fleet", None) or SimFleet(
        2, stream_interval=4, vocab_size=vocab, eos_token_id=END, time_scale=0.2
    )
    checking.scheduler = RolloutScheduler(
        fleet, prompts(1), episode=sessions, config=config, listeners=[checking], **more
    )
    return checking.scheduler


async def batch_of(
    harness: Callable[[Session, Prompt], Awaitable[Any]], tokenizer: ModelTokenizer, **more: Any
) -> Batch:
    async with (
        Sessions(harness, tokenizer=tokenizer, limits=more.pop("limits", None)) as sessions,
        scheduler(sessions, **more) as rollouts,
    ):
        return await rollouts.next_batch()


def client(session: Session, path: str = "", key: str | None = None) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=session.url + path, api_key=session.key if key is None else key, max_retries=0
    )


async def posted(
    session: Session, path: str, body: Any, *, key: str | None = None, name: str = "x-api-key"
) -> tuple[int, Any]:
    headers = {name: session.key if key is None else key}
    content = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{session.url}/{path}", data=content) as answer,
    ):
        return answer.status, await answer.json()


async def events_of(session: Session, path: str, body: Any) -> list[tuple[str, Any]]:
    """The events of a stream, each with its name."""
    found: list[tuple[str, Any]] = []
    async with (
        aiohttp.ClientSession(headers={"x-api-key": session.key}) as http,
        http.post(f"{session.url}/{path}", json={**body, "stream": True}) as answer,
    ):
        assert answer.status == 200
        name = ""
        async for line in answer.content:
            kind, _, value = line.decode().rstrip("\n").partition(": ")
            if kind == "event":
                name = value
            elif kind == "data" and value != "[DONE]":
                found.append((name, json.loads(value)))
    return found


# --- dialects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/v1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_has_a_chat_of_several_turns(
    plain: ModelTokenizer, path: str, stream: bool
):
    async def harness(session: Session, prompt: Prompt) -> float:
        messages: Any = [by("user", prompt.metadata["task"])]
        async with client(session, path) as api:
            for number in range(3):
                asked: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 20}
                if stream:
                    options: Any = {"include_usage": True}
                    events = [
                        event
                        async for event in await api.chat.completions.create(
                            **asked, stream=True, stream_options=options
                        )
                    ]
                    assert events[-1].usage is not None
                    assert events[-1].usage.completion_tokens == 20
                    deltas = [event.choices[0] for event in events[:-1]]
                    text = "".join(each.delta.content or "" for each in deltas)
                    assert deltas[-1].finish_reason == "length"
                else:
                    answer = await api.chat.completions.create(**asked)
                    text = answer.choices[0].message.content
                    assert answer.choices[0].finish_reason == "length"
                    assert answer.usage.completion_tokens == 20
                assert text == session.messages[-1]["content"]
                messages = [*messages, by("assistant", text), by("user", f"{number}?")]
        return 1.0

    batch = await batch_of(harness, plain)
    for rollout in batch.rollouts:
        assert (rollout.turns, int(rollout.loss_mask.sum())) == (3, 60)
        assert rollout.info["session"]["branches"] == 1


async def test_a_completion_continues_the_text_before_it(plain: ModelTokenizer):
    async def harness(session: Session, prompt: Prompt) -> float:
        async with client(session) as api:
            first = await api.completions.create(model="m", prompt="once", max_tokens=9)
            text = "once" + first.choices[0].text
            stream = await api.completions.create(
                model="m", prompt=text + " and", max_tokens=9, stream=True
            )
            second = "".join([event.choices[0].text async for event in stream])
        assert second
        return 1.0

    batch = await batch_of(harness, plain)
    for rollout in batch.rollouts:
        assert (rollout.turns, int(rollout.loss_mask.sum())) == (2, 18)
        assert plain.decode(rollout.prompt_ids.tolist()) == "once"


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_messages_call_tools_and_get_their_results(
    calling: ModelTokenizer, stream: bool
):
    async def harness(session: Session, prompt: Prompt) -> float:
        tools = [{"name": "look", "description": "looks", "input_schema": LOOK}]
        body: dict[str, Any] = {
            "model": "m",
            "max_tokens": 12,
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "x"}}],
            "tools": tools,
            "messages": [by("user", "what now")],
        }
        calls = 0
        for _ in range(3):
            if stream:
                content = received(await events_of(session, "v1/messages", body))
            else:
                status, answer = await posted(session, "v1/messages", body)
                assert status == 200
                assert answer["usage"]["output_tokens"] == 12
                content = answer["content"]
            uses = [block for block in content if block["type"] == "tool_use"]
            assert all(block["input"]["where"] == "Zürich" for block in uses)
            calls += len(uses)
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "rain"}
                for block in uses
            ]
            body["messages"] += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
            ]
        return float(calls)

    batch = await batch_of(harness, calling, vocab=WORDS)
    for rollout in batch.rollouts:
        assert rollout.reward is not None
        assert rollout.reward > 3
        assert (rollout.turns, int(rollout.loss_mask.sum())) == (3, 36)
        assert rollout.info["session"]["branches"] == 1


def received(events: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Return the content that Anthropic's clients assemble from the events of a stream."""
    assert all(name == event["type"] for name, event in events)
    events = [event for event in events if event[0] != "ping"]
    assert events[0][0] == "message_start"
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    given = ""
    for name, event in events[1:-2]:
        if name == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            given = ""
        elif name == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                blocks[-1]["text"] += delta["text"]
            elif delta["type"] == "input_json_delta":
                given += delta["partial_json"]
        elif blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(given)
    return blocks


async def test_openais_tools_are_called_and_answered(calling: ModelTokenizer):
    async def harness(session: Session, prompt: Prompt) -> float:
        tools: Any = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
        messages: Any = [by("user", "what now")]
        calls = 0
        async with client(session) as api:
            for _ in range(3):
                stream = await api.chat.completions.create(
                    model="m", messages=messages, tools=tools, max_tokens=12, stream=True
                )
                called: list[Any] = []
                text = ""
                async for event in stream:
                    delta = event.choices[0].delta
                    text += delta.content or ""
                    called += [each.model_dump() for each in delta.tool_calls or ()]
                calls += len(called)
                messages.append({**by("assistant", text), "tool_calls": called})
                messages += [
                    {"role": "tool", "tool_call_id": each["id"], "content": "rain"}
                    for each in called
                ]
        return float(calls)

    batch = await batch_of(harness, calling, vocab=WORDS)
    for rollout in batch.rollouts:
        assert rollout.reward is not None
        assert rollout.reward > 3
        assert rollout.info["session"]["branches"] == 1


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("form", ["ids", "text"])
async def test_sglangs_generate_continues_its_previous_answer(
    plain: ModelTokenizer, form: str, raw: bool
):
    async def harness(session: Session, prompt: Prompt) -> float:
        sampling = {"max_new_tokens": 9, "skip_special_tokens": not raw, "no_stop_trim": raw}
        text, ids = "once", plain.encode("once", special=False)
        for stream in (False, True, False):
            body = {"sampling_params": sampling, "return_logprob": True, "rid": "mine"}
            body |= {"text": text} if form == "text" else {"input_ids": ids}
            path = f"{session.open_url}/generate"
            # Clients of SGLang send no key.
            async with (
                aiohttp.ClientSession() as http,
                http.post(path, json={**body, "stream": stream}) as answer,
            ):
                assert answer.status == 200
                received = (await answer.text()).partition("\n\n")[0].removeprefix("data: ")
            found = json.loads(received)
            meta = found["meta_info"]
            assert meta["finish_reason"] == {"type": "length", "length": 9}
            assert [each[1] for each in meta["output_token_logprobs"]] == found["output_ids"]
            assert (meta["prompt_tokens"], meta["weight_version"]) == (len(ids), "0")
            if raw:
                assert found["text"] == plain.decode(found["output_ids"], skip_special=False)
            text += found["text"] + " and"
            ids += [*found["output_ids"], *plain.encode(" and", special=False)]
        assert session.branched == 1
        await session.complete("a")
        with pytest.raises(ConfigError, match="2 branches"):
            await session.complete("b")
        return 1.0

    batch = await batch_of(harness, plain, limits=Limits(branches=2))
    for rollout in batch.rollouts:
        assert (rollout.turns, rollout.info["session"]["branches"]) == (1, 2)
        assert int(rollout.loss_mask.sum()) == 30


# --- what goes wrong -----------------------------------------------------------------------------


async def test_a_stream_hides_a_refit_and_a_dead_engine(
    plain: ModelTokenizer,
):
    fleet = SimFleet(2, stream_interval=4, vocab_size=ASCII, time_scale=0.2)

    async def harness(session: Session, prompt: Prompt) -> float:
        async with client(session) as api:
            stream = await api.chat.completions.create(
                model="m", messages=[by("user", "go on")], stream=True
            )
            events = [event async for event in stream]
        assert events[-1].choices[0].finish_reason == "length"
        return float(session.tokens)

    async with (
        Sessions(harness, tokenizer=plain) as sessions,
        scheduler(sessions, tokens=2000, fleet=fleet) as rollouts,
    ):
        waiting = asyncio.ensure_future(rollouts.next_batch())
        state = rollouts.state
        await until(lambda: state.in_flight.counters.tokens_generated > 100)
        await rollouts.update_weights(SimPublisher())
        await until(lambda: state.in_flight.counters.tokens_generated > 800)
        fleet.engines[0].crash()
        batch = await waiting
        assert state.in_flight.ledger.total == 0
        assert fleet.engines[0].name in {s.engine for r in batch.rollouts for s in r.segments}
    for rollout in batch.rollouts:
        assert rollout.reward == 2000
        assert set(rollout.versions.tolist()) == {0, 1}
        assert rollout.versions_exact


async def test_a_leaving_client_ends_its_turn_and_nothing_else(plain: ModelTokenizer):
    async def harness(session: Session, prompt: Prompt) -> float:
        body = {"messages": [by("user", "go on")]}
        for stream in (False, True):
            leaving = asyncio.ensure_future(
                events_of(session, "chat/completions", body)
                if stream
                else posted(session, "chat/completions", body)
            )
            await asyncio.sleep(0.1)
            leaving.cancel()
        short = {**body, "max_tokens": 7}
        status, answer = await posted(session, "chat/completions", short)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 7
        return 1.0

    batch = await batch_of(harness, plain, tokens=20_000)
    for rollout in batch.rollouts:
        assert (rollout.turns, int(rollout.loss_mask.sum())) == (1, 7)


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(900), None)
CHAT, TEXT, IDS, CLAUDE = "chat/completions", "completions", "generate", "v1/messages"
LOOKS = [{"type": "function", "function": {"name": "look"}}]


def block(role: str, **content: Any) -> dict[str, Any]:
    """Anthropic's body with one message of one block."""
    return {"messages": [{"role": role, "content": [content]}]}


def calling_with(arguments: Any) -> dict[str, Any]:
    """Return OpenAI's body with a tool call."""
    call = {"function": {"name": "a", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


REFUSED: list[tuple[str, Any, str]] = [
    (CHAT, {"messages": []}, "at least one message, got none"),
    (CHAT, {"messages": [{"content": "x"}]}, "role"),
    (CHAT, {"messages": [by("king", "x")]}, "refuses"),
    (CHAT, {"n": 3}, "one answer"),
    (CHAT, {"logprobs": True}, "logprobs"),
    (CHAT, {"sing": 1}, "sing"),
    (CHAT, {"max_tokens": -1}, "max_tokens"),
    (CHAT, {"stop": ["two"]}, "stop"),
    (CHAT, {"stop": ["x"] * 65}, "at most 64"),
    (CHAT, {"messages": [by("user", "x" * (2**23 + 1))]}, "at most 8388608"),
    (CHAT, {"messages": [], "user": [[]] * 2**21}, "quotes and opening brackets"),
    (CHAT, {"tool_choice": "look"}, "tool_choice"),
    (CHAT, {"tool_choice": "required", "tools": LOOKS}, "nothing makes the policy call"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, [1], "array"),
    (CHAT, calling_with(DEEP), "no JSON"),
    (TEXT, {"prompt": "x", "stop": "x" * 4097}, "at most 4096 characters"),
    (TEXT, {"prompt": []}, "empty"),
    (TEXT, {"prompt": ["a", "b"]}, "one text"),
    (TEXT, {"prompt": [-5, 2**40]}, "token ids"),
    (IDS, {"text": "x" * (2**23 + 1)}, "at most 8388608 characters"),
    (IDS, {"sampling_params": {}}, "text, input_ids"),
    (IDS, {"text": "x", "sampling_params": {"n": 2}}, "must be 1, got 2"),
    (IDS, {"text": "x", "image_data": "data:,"}, "images"),
    (IDS, {"text": "x", "lora_path": "x"}, "no adapter is served"),
    *[
        (IDS, {"text": "x", "sampling_params": {name: value}}, name)
        for name, values in {
            "stop": (5, [5], {"a": 1}, [["a"]]),
            "max_new_tokens": ("5", [1], 1.5),
            "n": ([1],),
            "skip_special_tokens": ("x",),
        }.items()
        for value in values
    ],
    (CLAUDE, {"messages": [by("user", "x"), by("assistant", "I th")]}, "of the user"),
    (CLAUDE, {"messages": []}, "must end with a message of the user"),
    (CLAUDE, {"max_tokens": None}, "max_tokens"),
    (CLAUDE, {"messages": [by("tool", "x")]}, "role"),
    (CLAUDE, {"thread": {"type": "create"}}, "thread"),
    (CLAUDE, block("user", type="song"), "'song' - at `$.messages[0].content[0].type`"),
    (CLAUDE, {"tools": [{"type": "bash"}]}, "tool"),
    (CLAUDE, {"tools": [{"name": "x", "input_schema": {}, "description": 5}]}, "description"),
    (
        CLAUDE,
        block("user", type="tool_result", tool_use_id="a", content=[{}]),
        "`type` - at `$.messages[0].content[0].content[0]`",
    ),
]
"""Bodies that are refused, and a part of the error message. A chat without messages gets one."""
TWICE = b'{"messages": [], "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}'
ANSWERED: list[tuple[str, Any]] = [
    (CHAT, TWICE),
    (CLAUDE, TWICE),
    (IDS, {"text": ["x"]}),
    (IDS, {"input_ids": [[5]]}),
]
"""Unusual bodies that the servers of these APIs answer: a name twice, a list of one prompt."""


async def test_what_cannot_be_answered_is_refused_in_a_sentence(plain: ModelTokenizer):
    async def harness(session: Session, prompt: Prompt) -> float:
        usual = {CHAT: {"messages": [by("user", "x")]}, TEXT: {}, IDS: {}}
        usual[CLAUDE] = usual[CHAT] | {"max_tokens": 5}
        for path, body, part in REFUSED:
            body = usual[path] | body if isinstance(body, dict) else body
            status, answer = await posted(session, path, body)
            assert status == 400, (path, body, answer)
            assert part in answer["error"]["message"]
            assert (answer.get("type") == "error") == (path == CLAUDE)
        for path, body in ANSWERED:
            status, answer = await posted(session, path, body)
            assert status == 200, (path, body, answer)
            assert isinstance(answer, list) == (path == IDS)
        async with client(session) as api:
            with pytest.raises(openai.BadRequestError, match="one answer"):
                await api.chat.completions.create(model="m", messages=[by("user", "x")], n=2)
            await api.chat.completions.create(model="m", messages=[by("user", "x")])
        return 1.0

    batch = await batch_of(harness, plain)
    assert all(rollout.turns == 1 for rollout in batch.rollouts)


@pytest.mark.parametrize("large", ["tools", "answers"])
async def test_long_computations_run_outside_the_event_loop(
    plain: ModelTokenizer, monkeypatch: pytest.MonkeyPatch, large: str
):
    threads: dict[str, set[str]] = {}

    def noted(name: str) -> None:
        call = getattr(plain, name)

        def noting(*args: Any, **more: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name[:15])
            return call(*args, **more)

        monkeypatch.setattr(plain, name, noting)

    async def harness(session: Session, prompt: Prompt) -> float:
        tools = [{"type": "function", "function": {"name": "look", "description": "x" * 20_000}}]
        reply = await session.chat([by("user", "x")], tools=tools if large == "tools" else None)
        await session.chat([by("user", "x"), reply.message, by("user", "y")])
        return 1.0

    if large == "answers":
        monkeypatch.setattr("aprilsched.agents.chat.tokenizer._QUICK", 0)
    noted("render" if large == "tools" else "parser")
    await batch_of(harness, plain)
    found = threads.popitem()[1]
    assert "aprilsched-text" in found
    assert large == "tools" or found == {"aprilsched-text"}


async def test_a_key_is_good_for_its_session_alone(plain: ModelTokenizer):
    async with Sessions(tokenizer=plain) as sessions, scheduler(sessions) as rollouts:
        one, two = await sessions.next(), await sessions.next()
        assert one.key != two.key
        body = {"messages": [by("user", "x")]}
        for key in ("", "none", two.key, sessions.launcher_key, one.key[:-1], "ü" + one.key):
            for name in ("x-api-key", "Authorization"):
                given = key if name == "x-api-key" else f"Bearer {key}"
                status, answer = await posted(
                    one, "chat/completions", body, key=given or "x", name=name
                )
                assert status == 401
                assert "key" in answer["error"]["message"]
        async with aiohttp.ClientSession(sessions.url) as http:
            for path in ("/launcher/next", f"/launcher/sessions/{one.id}/done"):
                for key in (one.key, "none", ""):
                    headers = {"Authorization": f"Bearer {key}"}
                    async with http.post(path, json={}, headers=headers) as answer:
                        assert answer.status == 401
            async with http.post("/sessions/x/y", json={}) as answer:
                assert answer.status == 404
        for session in (one, two):
            await session.chat([by("user", "x")])
            session.done(1.0)
        await rollouts.next_batch()
        status, answer = await posted(one, "chat/completions", body)
        assert status == 410
        assert "has ended, and no other" in answer["error"]["message"]


# --- launchers -----------------------------------------------------------------------------------


async def test_a_launcher_elsewhere_takes_sessions_and_reports(plain: ModelTokenizer):
    async with Sessions(tokenizer=plain) as sessions, scheduler(sessions) as rollouts:
        headers = {"Authorization": f"Bearer {sessions.launcher_key}"}
        async with aiohttp.ClientSession(sessions.url, headers=headers) as http:

            async def call(path: str, body: Any) -> tuple[int, Any]:
                async with http.post(f"/launcher/{path}", json=body) as answer:
                    return answer.status, await answer.json() if answer.status != 204 else None

            async def taken() -> Any:
                status, session = await call("next", {"wait_s": 60})
                assert status == 200
                assert session["prompt"]["metadata"] == {"task": "task 0"}
                async with AsyncOpenAI(base_url=session["url"], api_key=session["key"]) as api:
                    await api.chat.completions.create(model="m", messages=[by("user", "x")])
                return session

            first, second = await taken(), await taken()
            assert (await call("next", {"wait_s": 0}))[0] == 204
            assert (await call(f"sessions/{first['id']}/lost", {"why": "evicted"}))[0] == 200
            assert (await call(f"sessions/{second['id']}/score", {}))[0] == 400
            assert (await call(f"sessions/{second['id']}/done", {"score": "x"}))[0] == 400
            assert (await call(f"sessions/{second['id']}/done", {"later": True}))[0] == 200
            third = await taken()
            body = {"score": 0.5, "info": {"why": "half"}}
            assert (await call(f"sessions/{third['id']}/done", body))[0] == 200
            assert (await call(f"sessions/{second['id']}/score", {"score": 2.0}))[0] == 200
            batch = await rollouts.next_batch()
            assert (await call(f"sessions/{second['id']}/done", {}))[0] == 410
        (entry,) = rollouts.state.in_flight.ledger.entries
        assert "evicted" in entry.cause
    assert sorted(rollout.reward or 0.0 for rollout in batch.rollouts) == [0.5, 2.0]
    assert [r.info.get("why") for r in batch.rollouts if r.reward == 0.5] == ["half"]


async def test_a_harness_finds_its_session_again_at_the_same_address(
    plain: ModelTokenizer, tmp_path: Path
):
    store = SqliteStore(tmp_path / "store", inline=True)
    fixed: dict[str, Any] = {"tokenizer": plain, "secret": b"0123456789abcdef"}
    found: dict[str, list[Any]] = {}

    async def step(url: str, key: str, messages: list[Any]) -> None:
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as api:
            answer = await api.chat.completions.create(model="m", messages=messages)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), by("user", "on")]

    async with Sessions(**fixed) as sessions, scheduler(sessions, store=store):
        port = int(sessions.url.rpartition(":")[2])
        for _ in range(2):
            session = await sessions.next()
            messages = found[session.key] = [session.url, by("user", "go")]
            await step(session.url, session.key, messages[1:])
            url, *said_so = messages
            for _ in range(2):
                await step(url, session.key, said_so)
            found[session.key] = [url, *said_so]
        await asyncio.sleep(1.0)
        killed = left_behind(store, tmp_path / "killed")
    limits = Limits(idle_s=3600)
    async with (
        Sessions(**fixed, port=port, limits=limits) as sessions,
        scheduler(sessions, store=killed) as rollouts,
    ):
        before = rollouts.state.in_flight.counters.tokens_generated
        for key, (url, *messages) in found.items():
            await step(url, key, messages)
            name = url.rpartition("/")[2]
            session = sessions.get(name)
            assert session is not None
            assert session.turns == 3
            session.done(1.0)
        assert rollouts.state.in_flight.counters.tokens_generated == before + 2 * 30
        batch = await rollouts.next_batch()
    for rollout in batch.rollouts:
        assert int(rollout.loss_mask.sum()) == 3 * 30
        assert np.count_nonzero(rollout.versions == 0) == 3 * 30


@pytest.mark.parametrize("stored", [True, False])
async def test_a_session_may_go_on_later_while_no_scheduler_is_open(
    plain: ModelTokenizer, tmp_path: Path, stored: bool
):
    store = SqliteStore(tmp_path / "store", inline=True) if stored else None
    body = {"messages": [by("user", "x")]}

    async def heard(session: Session, http: aiohttp.ClientSession) -> set[tuple[int, str | None]]:
        """Return the answers that an agent and a reporting launcher get."""
        found: set[tuple[int, str | None]] = set()
        calls = [
            (f"{session.url}/chat/completions", session.key, body),
            (f"{session.url}/v1/messages", session.key, {**body, "max_tokens": 5, "stream": True}),
            (f"/launcher/sessions/{session.id}/done", sessions.launcher_key, {}),
        ]
        for path, key, content in calls:
            async with http.post(
                path, json=content, headers={"Authorization": f"Bearer {key}"}
            ) as answer:
                found.add((answer.status, answer.headers.get("Retry-After")))
        return found

    async def asks(http: aiohttp.ClientSession) -> tuple[int, str | None]:
        headers = {"Authorization": f"Bearer {sessions.launcher_key}"}
        async with http.post("/launcher/next", json={"wait_s": 0}, headers=headers) as answer:
            return answer.status, answer.headers.get("Retry-After")

    async with Sessions(tokenizer=plain) as sessions, aiohttp.ClientSession(sessions.url) as http:
        assert await asks(http) == (503, "5")
        async with scheduler(sessions, store=store, tokens=100_000):
            taken = await sessions.next()
            assert (await posted(taken, "chat/completions", {**body, "max_tokens": 5}))[0] == 200
            open_one = asyncio.ensure_future(posted(taken, "chat/completions", body))
            await until(lambda: bool(taken._asking))
        again = (503, "5") if stored else (410, None)
        assert (await open_one)[0] == again[0]
        assert await heard(taken, http) == {again}
        if stored:
            async with scheduler(sessions, store=store):
                status, answer = await posted(taken, "chat/completions", {**body, "max_tokens": 5})
                assert (status, answer["usage"]["completion_tokens"]) == (200, 5)


async def test_a_refusal_of_an_engine_is_an_answer_with_its_status(plain: ModelTokenizer):
    async def harness(session: Session, prompt: Prompt) -> float:
        long = [by("user", "x" * 600)]
        for path in ("chat/completions", "v1/messages"):
            for stream in (False, True):
                body = {"messages": long, "max_tokens": 5, "stream": stream}
                status, answer = await posted(session, path, body)
                assert status == 400
                assert "the engine refuses this request: prompt and" in answer["error"]["message"]
        async with client(session) as api:
            with pytest.raises(openai.BadRequestError, match="KV cache"):
                await api.chat.completions.create(model="m", messages=long, stream=True)
            await api.chat.completions.create(model="m", messages=[by("user", "x")])
        return 1.0

    fleet = SimFleet(2, kv_tokens=500, vocab_size=ASCII, eos_token_id=END, time_scale=0.2)
    batch = await batch_of(harness, plain, fleet=fleet)
    assert all(rollout.turns == 1 for rollout in batch.rollouts)


@pytest.mark.parametrize("how", ["waits", "reads nothing", "resets", "has asked"])
async def test_a_session_its_launcher_missed_is_offered_again(plain: ModelTokenizer, how: str):
    async with Sessions(tokenizer=plain) as sessions, scheduler(sessions) as rollouts:
        held = [await sessions.next() for _ in range(2)]
        port = int(sessions.url.rpartition(":")[2])
        call = (
            f"POST /launcher/next HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            f'{sessions.launcher_key}\r\nContent-Length: 13\r\n\r\n{{"wait_s": 5}}'
        )
        # Without its stream, asyncio does not read the answer.
        broken = socket.create_connection(("127.0.0.1", port))
        if how == "waits":
            broken.sendall(call.encode())
            await asyncio.sleep(0.1)
            broken.close()
            await asyncio.sleep(0.1)
            sessions.offer_again(held[0])
        else:
            sessions.offer_again(held[0])
            assert not held[0].taken
            broken.sendall(call.encode())
            if how != "reads nothing":
                await until(lambda: held[0].taken)
                await asyncio.sleep(0.1)
            if how == "has asked":
                await held[0].chat([by("user", "x")])
            # An unread answer in the buffer resets the connection on close().
            broken.close()
        if how == "has asked":
            with pytest.raises(TimeoutError):
                await sessions.next(0.3)
        else:
            assert await sessions.next(30) is held[0]
            await held[0].chat([by("user", "x")])
        await held[1].chat([by("user", "x")])
        for session in held:
            session.done(1.0)
        await rollouts.next_batch()
