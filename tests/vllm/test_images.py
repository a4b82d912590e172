"""Tests images on a real vLLM server: every attempt sends placeholders as the template does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from aprilsched import Prompt
from aprilsched.kernel.core.policies.straggler import StragglerRule
from tests.sglang.recorded import Run, record
from tests.sglang.seeing import check_seen, write_seeing
from tests.vllm.conftest import fleet, reset
from tests.vllm.server import VLLMServer

KIND = "idefics3"


class VisionServer(VLLMServer):
    """A server with the tokenizer, which vLLM needs to find placeholders."""

    def _arguments(self) -> list[str]:
        given = [part for part in super()._arguments() if part != "--skip-tokenizer-init"]
        return ["--enable-scale-out" if part == "--tokens-only" else part for part in given]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, vllm_python: Path) -> tuple[Path, Path]:
    return write_seeing(KIND, tmp_path_factory.mktemp("seeing"), vllm_python)


@pytest.fixture(scope="module")
def vision_server(
    seeing: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VisionServer]:
    with VisionServer(seeing[0], tmp_path_factory.mktemp("vision") / "log.txt") as server:
        server.wait_ready()
        yield server


@pytest.mark.shows("abort", "retract", "images", engine="vLLM")
@pytest.mark.long
@pytest.mark.parametrize("rule", ["abort", "retract"])
async def test_each_token_sees_the_image_under_its_weights(
    vision_server: VisionServer,
    seeing: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
    rule: StragglerRule,
) -> None:
    async def once(prompts: Sequence[Prompt]) -> Run:
        await reset(vision_server.url, seeing[0])
        return await record(
            [vision_server.url], seeing, rule, prompts=prompts, batches=5, fleet=fleet
        )

    await check_seen(once, KIND, seeing, tmp_path, vllm_python)
