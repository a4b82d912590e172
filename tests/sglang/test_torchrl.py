"""TorchRL's loss on rollouts of a real server, and what its own synchronization leaves in the
server's cache."""

# pyright: basic
# The packages have no complete types.
from __future__ import annotations

import asyncio
import functools
import importlib.util
import itertools
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    DistributedPublisher,
    Prompt,
    Rollout,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.fronts.blocking import RolloutScheduler
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.testing.contract import greedy, whole
from aprilsched.trainers.torchrl import fill
from tests.sglang.server import CpuServer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchrl") is None, reason="could not import 'torchrl'"
)

TOLERANCE = 1e-4
SIZE = 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrl_grpo.py"


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    """torch in one thread."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(threads)


@pytest.fixture
def folder(torch: Any, models: tuple[Path, Path], tmp_path: Path) -> Path:
    """The server's model, with a tokenizer."""
    from tests.support.trl_on_cpu import tokenizer

    copy = Path(shutil.copytree(models[0], tmp_path / "model"))
    tokenizer().save_pretrained(copy)
    return copy


def score(rollout: Rollout, prompt: Prompt) -> float:
    return len(rollout) % 7 / 7


def logprobs(torch: Any, model: Any, ids: Any) -> Any:
    """The log-probability of each token given those before it; 0 for the first."""
    with torch.no_grad():
        scores = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return torch.cat([scores[:1, 0] * 0, scores.gather(1, ids[1:, None])[:, 0]])


@pytest.mark.shows("retract", "weights by broadcast", engine="SGLang", adapter="TorchRL")
@pytest.mark.long
def test_rollouts_losses_and_updates_in_a_loop(
    torch: Any, clean_server: CpuServer, folder: Path
) -> None:
    """Batches become tensordicts, TorchRL trains on them, and the broadcast weights sample the
    next ones. Each token has the log-probability that the weights of its version give it."""
    from torchrl.data import LazyStackStorage, ReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss, MCAdvantage
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    actor = TransformersWrapper(
        model,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
    )
    loss = GRPOLoss(actor, entropy_bonus=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(2 * SIZE), sampler=SamplerWithoutReplacement(), batch_size=2 * SIZE
    )
    buffer.append_transform(MCAdvantage(grpo_size=SIZE, prompt_key="group_id"))
    config = SchedulerConfig(
        batch_groups=2,
        group_size=SIZE,
        over_provision=2.0,
        straggler="retract",
        pace="asynchronous",
        max_staleness=3,
        sampling=SamplingParams(max_new_tokens=200),
    )
    prompts = (
        Prompt(input_ids=np.array([10 + number % 300, 11, 12], dtype=np.int32))
        for number in itertools.count()
    )
    publisher = DistributedPublisher(model.named_parameters, backend="gloo")
    weights: dict[int, dict[str, Any]] = {}
    taken: list[Any] = []
    several = False
    with RolloutScheduler(
        SGLangFleet([clean_server.url]), prompts, reward=score, config=config
    ) as rollouts:
        while len(taken) < 8 or not several:
            assert len(taken) < 50, "no response was interrupted by an update"
            weights[rollouts.version] = {
                name: tensor.clone() for name, tensor in model.state_dict().items()
            }
            batch = rollouts.next_batch()
            several |= any(len(set(each.versions.tolist())) > 1 for each in batch.rollouts)
            buffer.empty()
            fill(buffer, batch)
            (data,) = buffer
            taken.append(data)
            out = loss(data)
            if not any(row["staleness", "full"].any() for row in data.unbind(0)):
                # Everything is of the weights that are trained.
                assert out.kl_approx.abs() < TOLERANCE
                assert out.clip_fraction == 0
                assert abs(out.ESS.item() - 1) < TOLERANCE
            optimizer.zero_grad()
            out.loss_objective.backward()
            optimizer.step()
            rollouts.update_weights(publisher)
        rollouts._wait(publisher.aclose)
    ages: set[int] = set()
    for data in taken:
        for row in data.unbind(0):
            ids, versions = row["tokens", "full"], row["versions", "full"]
            counted = row["masks", "all_assistant_mask"]
            ages.update(row["staleness", "full"][counted].tolist())
            for version in set(versions[versions >= 0].tolist()):
                model.load_state_dict(weights[version])
                ratio = (logprobs(torch, model, ids) - row["log_probs", "full"]).exp()
                of_it = versions == version
                assert (ratio[of_it] - 1).abs().max() < TOLERANCE
    assert max(ages) <= 3
    assert len(ages) > 1


async def test_torchrls_own_synchronization_leaves_keys_of_old_weights(
    torch: Any, engine: SGLangEngine, models: tuple[Path, Path]
) -> None:
    """By default TorchRL pauses with "retract" and asks for no flush. A prompt that is in the cache
    then meets the keys that the old weights have computed."""
    from torchrl.weight_update.llm.sglang_nccl import SGLangCollectiveTransport

    transport = functools.partial(SGLangCollectiveTransport, engine.name, "127.0.0.1", 1, 0, 2)
    default = transport()
    assert default._effective_pause_mode() == "retract"
    asked = default._build_update_payload(["weight"], ["float32"], [[1]])
    assert asked["flush_cache"] is False
    assert "weight_version" not in asked
    assert transport(pause_mode="abort")._build_update_payload([], [], [])["flush_cache"] is True

    prompt = greedy(20, prompt=np.arange(100, 228, dtype=np.int32))
    await whole(engine, prompt)
    # Its order, with a file in the place of its NCCL broadcast.
    await engine.pause("retract")
    await engine.update_from_disk(models[1], 1)
    await engine.resume()
    theirs = await whole(engine, prompt)
    # Ours: the cache is flushed in the pause.
    await engine.pause("retract")
    await engine.flush()
    await engine.resume()
    right = await whole(engine, prompt)
    assert [stream.last.cached_tokens for stream in (theirs, right)] == [127, 0]
    assert np.abs(theirs.logprobs - right.logprobs).max() > 0.1


@pytest.mark.long
async def test_the_example_trains(
    torch: Any,
    clean_server: CpuServer,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--engine", clean_server.url, "--model", str(folder), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options, "--weights", str(tmp_path / "run")])
    main = runpy.run_path(str(EXAMPLE), run_name="example")["main"]
    assert await asyncio.to_thread(main) == 3  # the initial weights are version 1
