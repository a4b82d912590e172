"""Tests the recipe of docs/engines.md: a program that starts the server that it uses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import Prompt, SamplingParams, SchedulerConfig, SGLangFleet
from aprilsched.fronts.blocking import RolloutScheduler
from tests.sglang.server import HERE, free_port, server_environment, server_python
from tests.support.ray_cluster import runs

PAGE = HERE.parents[1] / "docs" / "engines.md"
ARGUMENTS = (
    "--device", "cpu",
    "--dtype", "float32",
    "--attention-backend", "torch_native",
    "--max-total-tokens", "65536",
    "--mem-fraction-static", "0.3",
    "--skip-tokenizer-init",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
)  # fmt: skip


@pytest.mark.long
def test_the_recipe_serves_a_scheduler_and_ends_its_server(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**server_environment(), "PYTHONPATH": ""}.items():
        monkeypatch.setenv(name, value)
    (recipe,) = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
        if "def server(" in block
    ]
    names: dict[str, Any] = {}
    exec(recipe, names)  # noqa: S102
    started = names["subprocess"].Popen
    processes: list[Any] = []

    def popen(*arguments: Any, **named: Any) -> Any:
        processes.append(started(*arguments, **named))
        return processes[-1]

    monkeypatch.setattr(names["subprocess"], "Popen", popen)
    command = (str(server_python()), str(HERE / "launch_cpu_server.py"))
    prompt = Prompt(
        input_ids=np.array([5, 6, 7], dtype=np.int32), sampling=SamplingParams(max_new_tokens=8)
    )
    with names["server"](
        "--model-path", str(models[0]), *ARGUMENTS, port=free_port(), command=command
    ) as url:
        config = SchedulerConfig(batch_groups=1, group_size=2)
        with RolloutScheduler(SGLangFleet([url]), [prompt], config=config) as rollouts:
            assert len(rollouts.next_batch().groups[0].rollouts) == 2
        (server,) = processes
        assert runs(server.pid)
    assert not runs(server.pid)
