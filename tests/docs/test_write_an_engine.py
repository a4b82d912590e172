"""Tests the engine of the guide to engines: it keeps the contract, and broken ones do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.simulation.engine import run_virtual
from aprilsched.testing import contract
from aprilsched.testing.contract import CHECKS, REFIT_CHECKS, Check
from aprilsched.types import VersionSpan
from tests.docs.test_examples import blocks, compiled

PAGE = "guides/engine"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's program defines; its training run is left out."""
    pytest.importorskip("safetensors")
    names: dict[str, Any] = {}
    for block in blocks(PAGE):
        exec(compiled(block.replace("asyncio.run(train())", ""), PAGE), names)  # noqa: S102
    return names


@pytest.mark.parametrize("check", CHECKS + REFIT_CHECKS, ids=lambda check: check.__name__)
def test_the_engine_of_the_guide_keeps_the_contract(
    page: dict[str, Any], check: Check, tmp_path: Path
):
    run_virtual(page["check_toy_engine"](check, tmp_path))


Chunks = AsyncGenerator[Chunk, None]


async def loses_a_token_at_an_abort(chunks: Chunks) -> Chunks:
    """An engine that streams two tokens at a time, and whose abort loses the first of two."""
    held: Chunk | None = None
    async for chunk in chunks:
        if held is None and chunk.finish is None:
            held = chunk
            continue
        if held is not None and chunk.finish != "abort":
            yield held
        held = None
        yield chunk


async def goes_on_decoding_for_nobody(chunks: Chunks) -> Chunks:
    read: asyncio.Queue[Chunk] = asyncio.Queue()

    async def read_all() -> None:
        async for chunk in chunks:
            read.put_nowait(chunk)

    _READING.add(asyncio.create_task(read_all()))
    while True:
        chunk = await read.get()
        yield chunk
        if chunk.finish is not None:
            return


_READING: set[asyncio.Task[None]] = set()


async def tells_only_its_last_version(chunks: Chunks) -> Chunks:
    made = 0
    async for chunk in chunks:
        made += len(chunk.token_ids)
        if chunk.spans:
            last = VersionSpan(version=chunk.spans[-1].version, start=0, end=made)
            yield replace(chunk, spans=(last,))
        else:
            yield chunk


def broken(toy: type[Any], how: str | Callable[[Chunks], Chunks]) -> type[Any]:
    """Return the engine with a method that does nothing, or with other streams."""
    if isinstance(how, str):
        return type("Broken", (toy,), {how: nothing})

    def generate(self: Any, request: GenerationRequest) -> Chunks:
        return how(toy.generate(self, request))

    return type("Broken", (toy,), {"generate": generate})


async def nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("how", "check"),
    [
        ("pause", contract.retract_keeps_streams_open),
        ("flush", contract.spans_tell_the_version_of_every_token),
        ("abort", contract.abort_returns_the_partial),
        (loses_a_token_at_an_abort, contract.abort_after_retract_returns_the_partial),
        (goes_on_decoding_for_nobody, contract.leaving_a_stream_ends_its_request),
        (goes_on_decoding_for_nobody, contract.leaving_a_held_stream_ends_its_request),
        (tells_only_its_last_version, contract.spans_tell_the_version_of_every_token),
    ],
)
def test_a_broken_engine_does_not_pass(
    page: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    how: str | Callable[[Chunks], Chunks],
    check: Check,
):
    monkeypatch.setitem(page, "ToyEngine", broken(page["ToyEngine"], how))
    with pytest.raises(AssertionError):
        run_virtual(page["check_toy_engine"](check, tmp_path))
