"""Tests images on a real vLLM server: every attempt sends placeholders as the template does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from PIL import Image

from aprilsched import Media, SamplingParams
from aprilsched.core.policies.straggler import StragglerRule
from tests.sglang.recorded import TOLERANCE, Run, crossing, long_tail, record
from tests.sglang.server import run_with_server_packages
from tests.sglang.tiny_vision import IMAGE, PROMPT
from tests.vllm.conftest import reset
from tests.vllm.held import TRIES, fleet
from tests.vllm.server import VLLMServer

run = partial(run_with_server_packages, "tiny_vision")


class VisionServer(VLLMServer):
    """A server that has the tokenizer, which vLLM needs to find placeholders."""

    def _arguments(self) -> list[str]:
        given = [part for part in super()._arguments() if part != "--skip-tokenizer-init"]
        return ["--enable-scale-out" if part == "--tokens-only" else part for part in given]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, vllm_python: Path) -> tuple[Path, Path]:
    """Two models that understand images, with very different weights."""
    folder = tmp_path_factory.mktemp("seeing")
    for seed in range(2):
        run("write", folder / str(seed), seed, python=vllm_python)
    return folder / "0", folder / "1"


@pytest.fixture(scope="module")
def vision_server(
    seeing: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VisionServer]:
    with VisionServer(seeing[0], tmp_path_factory.mktemp("vision") / "log.txt") as server:
        server.wait_ready()
        yield server


@pytest.mark.long
@pytest.mark.parametrize("rule", ["abort", "retract"])
async def test_each_token_sees_the_image_under_the_weights_of_its_version(
    vision_server: VisionServer,
    seeing: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
    rule: StragglerRule,
) -> None:
    noise = np.random.default_rng(3).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    (tmp_path / "image.png").write_bytes(file.getvalue())
    # The placeholder is no token of a response: the server would expand it too.
    no_placeholder = {"logit_bias": {str(IMAGE): -100}}
    prompts = [
        replace(
            prompt,
            input_ids=np.array(PROMPT, np.int32),
            media=(Media("image", file.getvalue()),),
            sampling=tuple(
                replace(sampling, extra=no_placeholder)
                for sampling in cast("tuple[SamplingParams, ...]", prompt.sampling)
            ),
        )
        for prompt in long_tail(80, longest=400, every=2)
    ]

    async def once() -> Run:
        await reset(vision_server.url, seeing[0])
        return await record(
            [vision_server.url], seeing, rule, prompts=prompts, batches=5, fleet=fleet
        )

    found, tries = await once(), 1
    while not crossing(found) and tries < TRIES:
        found, tries = await once(), tries + 1
    assert crossing(found), "no response outlived an update"
    responses = [np.concatenate([r.prompt_ids, r.token_ids]) for r in found.rollouts]
    whole = {str(i): ids.astype(np.int64) for i, ids in enumerate(responses)}
    np.savez(tmp_path / "in.npz", **whole)  # type: ignore[arg-type]
    targets = [tmp_path / f"out-{model.name}.npz" for model in seeing]
    pairs = [part for pair in zip(seeing, targets, strict=True) for part in pair]
    run("score", tmp_path / "in.npz", tmp_path / "image.png", *pairs, python=vllm_python)
    by_model = [np.load(target) for target in targets]
    for index, rollout in enumerate(found.rollouts):
        assert rollout.versions_exact
        score = np.stack([scored[str(index)] for scored in by_model])
        of, at = rollout.versions % 2, np.arange(len(rollout))
        assert np.abs(rollout.logprobs - score[of, at]).max() < TOLERANCE
        assert np.median(np.abs(rollout.logprobs - score[1 - of, at])) > 0.5
