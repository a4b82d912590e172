"""verl's trainer with a real SGLang or vLLM server on the CPU, in which requests wait in updates.

The weights of two steps are very different, so the log-probability of each token proves which of
them sampled it.
"""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched.trainers import verl as adapter
from tests.sglang.recorded import TOLERANCE, sequence_scores
from tests.sglang.server import CpuServer, server_python, write_model
from tests.verl.server import SGLangServer, VLLMServer
from tests.vllm import server as of_vllm

pytest.importorskip("verl", reason="verl is not installed; use make test-verl")

STEPS = 4
KINDS = {"sglang": (CpuServer, SGLangServer), "vllm": (of_vllm.VLLMServer, VLLMServer)}


@pytest.mark.shows(
    "retract", "weights that the trainer moves", engine=("SGLang", "vLLM"), adapter="verl"
)
@pytest.mark.parametrize("name", list(KINDS))
def test_each_token_is_of_its_version(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    import ray

    from tests.verl import on_cpu

    try:
        python = of_vllm.server_python() if name == "vllm" else server_python()
    except RuntimeError as error:
        pytest.skip(str(error))
    if python is None:
        pytest.skip("needs vLLM: run `make .venv-vllm`")
    models = tuple(write_model(tmp_path / str(seed), seed=seed, python=python) for seed in (0, 1))
    started, of_verl = KINDS[name]
    with started(models[0], tmp_path / "server.log") as server:
        server.wait_ready()
        made = ray.remote(of_verl).options(num_cpus=0)
        monkeypatch.setattr(on_cpu, "make_server", lambda: made.remote(server.url, models))
        trainer, labels = run(
            adapter._task_runner(),
            f"actor_rollout_ref.rollout.name={name}",
            "actor_rollout_ref.rollout.free_cache_engine=False",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "actor_rollout_ref.rollout.temperature=1.0",
            "data.max_response_length=400",
            f"trainer.total_training_steps={STEPS}",
        )
    assert labels == [str(STEPS)]
    trained = trainer.trained
    assert len({each.key for each in trained}) == len(trained) == 16 * STEPS
    pairs = [(each.prompts.astype(np.int32), each.responses.astype(np.int32)) for each in trained]
    scored = sequence_scores(models, pairs, tmp_path, python=python)
    mixed = 0
    for at, each in enumerate(trained):
        errors = np.abs([own[at] - each.rollout_log_probs for own in scored])
        assert errors.min(0).max() < TOLERANCE
        # Tokens whose two log-probabilities happen to be alike show nothing.
        shown = errors.argmin(0)[errors.max(0) > 100 * TOLERANCE]
        first, last = each.tag["min_global_steps"], each.tag["max_global_steps"]
        assert [shown[0], shown[-1]] == [first % 2, last % 2]
        assert np.count_nonzero(np.diff(shown)) == last - first
        mixed += last > first
    assert mixed
