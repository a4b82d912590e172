"""Tests images on a real SGLang server: it expands a placeholder in each attempt anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from aprilsched import Prompt
from aprilsched.core.policies.straggler import StragglerRule
from tests.sglang.helpers import reset
from tests.sglang.recorded import Run, record
from tests.sglang.seeing import check_seen, write_seeing
from tests.sglang.server import CpuServer

KIND = "qwen2_vl"


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
    server = VisionServer(seeing[0], tmp_path_factory.mktemp("vision") / "log.txt")
    try:
        server.start()
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.mark.long
@pytest.mark.parametrize("rule", ["abort", "retract"])
async def test_each_token_sees_the_image_under_the_weights_of_its_version(
    vision_server: VisionServer, seeing: tuple[Path, Path], tmp_path: Path, rule: StragglerRule
) -> None:
    async def once(prompts: Sequence[Prompt]) -> Run:
        await reset(vision_server.url, seeing[0])
        return await record([vision_server.url], seeing, rule, prompts=prompts, batches=5)

    await check_seen(once, KIND, seeing, tmp_path)
