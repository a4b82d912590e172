"""An agent that looks for a code in a folder of files. It knows OpenAI's API, and nothing of
aprilsched.

A folder has notes. One is named in the question, says "look in NAME", and so on, until a note says
"the code is 47". The other notes say wrong codes. The agent reads notes by a tool, and its answer
is right if it is the code at the end of the row.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from openai import AsyncOpenAI

__all__ = ["CODES", "NAMES", "TOOLS", "TURNS", "Task", "question", "read", "solve", "task", "write"]

NAMES = (
    "apple", "birch", "cedar", "daisy", "elder", "fern", "grape", "hazel", "iris", "jasmine",
    "kelp", "lilac", "maple", "nettle", "olive", "peach",
)  # fmt: skip
CODES = tuple(str(code) for code in range(10, 100))
TURNS = 7
"""Answers of an agent; the last one must say the code."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a note.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]


class Task(NamedTuple):
    """A folder of notes, by their names; `first` is named in the question."""

    notes: dict[str, str]
    first: str
    code: str


def task(draw: random.Random) -> Task:
    """A row of three notes, among eight."""
    names, codes = draw.sample(NAMES, 8), draw.sample(CODES, 6)
    one, two, three, *others = names
    notes = {one: f"look in {two}", two: f"look in {three}", three: f"the code is {codes[0]}"}
    notes |= {name: f"the code is {code}" for name, code in zip(others, codes[1:], strict=True)}
    return Task(notes, one, codes[0])


def write(folder: Path, notes: dict[str, str]) -> None:
    """Put the notes into the folder."""
    for name, text in notes.items():
        (folder / name).write_text(text)


def question(first: str) -> str:
    """What the agent is asked."""
    return f"Find the code. Begin with {first}."


def read(folder: Path, arguments: str) -> str:
    """What the tool answers to the arguments of a call."""
    try:
        name = json.loads(arguments)["path"]
    except (ValueError, TypeError, KeyError):
        name = None
    # The policy chooses the name, so it must be none outside of the folder.
    return next((e.read_text() for e in folder.iterdir() if e.name == name), "no such note")


async def solve(client: AsyncOpenAI, folder: Path, first: str) -> str | None:
    """Ask and use the tool until there is an answer; None if there is none after some turns."""
    messages: list[Any] = [{"role": "user", "content": question(first)}]
    for _ in range(TURNS):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            arguments = call.function.arguments if call.type == "function" else ""
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": read(folder, arguments)}
            )
    return None
