"""Runs examples/grpo/train.py, notes every rollout that it trains on, and dies at a given point.

    recorded_grpo.py NOTES DIES ARGUMENTS ...

DIES is "never", or "before 2" or "after 2" for a kill before or after the state of the second
update is saved. The rewards are not those of the task, which a random model never gets.
"""

# pyright: basic
# The checker does not find the example as a module.
from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "grpo"))

import train  # pyright: ignore[reportMissingImports]


def main() -> None:
    notes, dies = Path(sys.argv[1]), sys.argv[2].split()
    sys.argv[1:] = sys.argv[3:]
    trainer: Any = train.Trainer
    accumulate, save = trainer.accumulate, trainer.save

    def noted(self: Any, group: Any, share: float) -> Any:
        with notes.open("a") as file:
            for rollout in group.rollouts:
                arrays = (rollout.token_ids, rollout.logprobs, rollout.versions)
                content = hashlib.sha256(b"".join(array.tobytes() for array in arrays))
                line = [group.index, rollout.rollout_id, content.hexdigest()]
                file.write(json.dumps([*line, rollout.versions_exact, len(rollout)]) + "\n")
        return accumulate(self, group, share)

    def saved(self: Any) -> None:
        for when in ("before", "after"):
            if when == "after":
                save(self)
            if dies == [when, str(self.updates)]:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer.accumulate, trainer.save = noted, saved
    train.score = lambda response, problem: sum(response) % 7 / 7
    train.main()


if __name__ == "__main__":
    main()
