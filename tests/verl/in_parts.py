"""Trains with verl in a process of its own, which may end at any step without a word.

``python -m tests.verl.in_parts CONFIG OUT [KILLED_AT]`` runs the configuration in the file CONFIG.
Every trajectory that a step trained on is appended to OUT, and in step KILLED_AT the process kills
itself after that. A process that ends by itself also writes the uids of prompts that are still in
the TransferQueue.
"""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from aprilsched.kernel.core.state.saved import Stage
from aprilsched.kernel.store.sqlite_checkpoints import read_checkpoint
from aprilsched.trainers import verl as adapter
from tests.support.ray_cluster import patiently
from tests.verl import on_cpu
from tests.verl.on_cpu import Trainer
from tests.verl.server import HELD_STEP, is_held_row


def has_partials(manager: Any) -> bool:
    """Whether a checkpoint that is written now has tokens of a response that the server holds."""
    with tempfile.TemporaryDirectory() as folder:
        manager.save(Path(folder))
        *_, checkpoint = pickle.loads((Path(folder) / adapter._FILE).read_bytes())  # noqa: S301
        (Path(folder) / "scheduler").write_bytes(checkpoint)
        saved = read_checkpoint(Path(folder) / "scheduler")
    return any(
        len(saved.tokens[number].token_ids) and is_held_row(rollout.prompt_ids)
        for number, rollout in saved.rollouts.items()
        if rollout.stage is Stage.GENERATING and number in saved.tokens and rollout.prompt_ids
    )


def main(config: Path, out: Path, killed_at: int) -> None:
    class Recorded(Trainer):
        def _compute_metrics(self, *args: Any, **given: Any) -> None:
            before = len(self.trained)
            super()._compute_metrics(*args, **given)
            with out.open("ab") as file:
                pickle.dump(self.trained[before:], file)
            if self.global_steps == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

        def _save_checkpoint(self) -> None:
            while self.global_steps == HELD_STEP + 1 and not has_partials(self.agent_loop_manager):
                time.sleep(0.1)
            super()._save_checkpoint()

    on_cpu.make_server = on_cpu.make_holding_server
    TRAINER_REGISTRY["separate_async"] = Recorded
    patiently(lambda: ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False))
    runner = adapter._task_runner()()
    close = tq.close

    def closed() -> None:
        items = tq.kv_list("train").get("train", {})
        prompts = [key for key, tag in items.items() if tag.get("is_prompt")]
        rows = tq.kv_batch_get(keys=prompts, partition_id="train", select_fields=["index"])
        left = [int(row) for row in rows["index"]]
        with out.open("ab") as file:
            pickle.dump(left, file)
        close()

    tq.close = closed
    runner.run(OmegaConf.load(config))
    runner.agent_loop_manager.close()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
