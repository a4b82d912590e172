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
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from aprilsched.trainers import verl as adapter
from tests.verl.on_cpu import Trainer


def main(config: Path, out: Path, killed_at: int) -> None:
    class Recorded(Trainer):
        def _compute_metrics(self, *args: Any, **given: Any) -> None:
            before = len(self.trained)
            super()._compute_metrics(*args, **given)
            with out.open("ab") as file:
                pickle.dump(self.trained[before:], file)
            if self.global_steps == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    TRAINER_REGISTRY["separate_async"] = Recorded
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
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
