"""Holds responses that real servers give to an image to the scores of transformers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image

from aprilsched import Media, Prompt, SamplingParams
from aprilsched.types import NO_VERSION, Rollout
from tests.sglang.recorded import TOLERANCE, Run, long_tail, until_crossing
from tests.sglang.server import run_with_server_packages
from tests.sglang.tiny_vision import KINDS, SIDE


def write_seeing(kind: str, folder: Path, python: Path | None = None) -> tuple[Path, Path]:
    """Two models that understand images, with very different weights."""
    for seed in range(2):
        run_with_server_packages(
            "tiny_vision", "write", kind, folder / str(seed), seed, python=python
        )
    return folder / "0", folder / "1"


def picture(seed: int) -> bytes:
    """A picture of noise, as a PNG."""
    noise = np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def check_versions(
    rollouts: Sequence[Rollout],
    pictures: Sequence[bytes],
    kind: str,
    models: tuple[Path, Path],
    folder: Path,
    python: Path | None = None,
) -> None:
    """Check that each sampled token sees the pictures before it under the weights of its version:
    version v has ``models[v % 2]``."""
    images = folder / "images"
    images.mkdir(exist_ok=True)
    for place, content in enumerate(pictures):
        (images / f"{place}.png").write_bytes(content)
    responses = [np.concatenate([r.prompt_ids, r.token_ids]) for r in rollouts]
    whole = {str(i): ids.astype(np.int64) for i, ids in enumerate(responses)}
    np.savez(folder / "in.npz", **whole)  # type: ignore[arg-type]
    targets = [folder / f"out-{model.name}.npz" for model in models]
    pairs = [part for pair in zip(models, targets, strict=True) for part in pair]
    given = kind, folder / "in.npz", images, *pairs
    run_with_server_packages("tiny_vision", "score", *given, python=python)
    by_model = [np.load(target) for target in targets]
    for index, rollout in enumerate(rollouts):
        assert rollout.versions_exact
        sampled = np.flatnonzero(rollout.versions != NO_VERSION)
        score = np.stack([own[str(index)][-len(rollout) :][sampled] for own in by_model])
        of, at = rollout.versions[sampled] % 2, np.arange(len(sampled))
        logprobs = rollout.logprobs[sampled]
        assert np.abs(logprobs - score[of, at]).max() < TOLERANCE
        assert np.median(np.abs(logprobs - score[1 - of, at])) > 0.5


async def check_seen(
    once: Callable[[Sequence[Prompt]], Awaitable[Run]],
    kind: str,
    models: tuple[Path, Path],
    folder: Path,
    python: Path | None = None,
) -> None:
    """Let `once` run prompts with an image until a response has outlived an update, and check that
    each token sees the image under the weights of its version: version v has ``models[v % 2]``."""
    image = picture(3)
    prompts = [
        replace(
            prompt,
            input_ids=np.array(KINDS[kind].prompt, np.int32),
            media=(Media("image", image),),
            sampling=tuple(
                replace(sampling, extra={"logit_bias": KINDS[kind].never})
                for sampling in cast("tuple[SamplingParams, ...]", prompt.sampling)
            ),
        )
        for prompt in long_tail(80, longest=400, every=2)
    ]
    found = await until_crossing(lambda _: once(prompts))
    check_versions(found.rollouts, [image], kind, models, folder, python)
