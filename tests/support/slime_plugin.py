"""The rollout function for slime's own contract tests.

They call it without arguments of slime, and their data source gives the samples of one group
different prompts. slime's own data source gives a group one prompt, and aprilsched refuses others.
"""

# pyright: basic
from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aprilsched.trainers import slime
from tests.support.slime_loop import arguments

__all__ = ["generate_rollout"]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The function of aprilsched with the engines that the environment names."""
    folder = Path(os.environ["APRILSCHED_SLIME_FOLDER"])
    args = arguments(folder, os.environ["APRILSCHED_SLIME_ENGINES"].split(), n_samples_per_prompt=2)
    args.eval_datasets = [
        SimpleNamespace(
            name="one",
            path=str(folder / "one.jsonl"),
            input_key="question",
            label_key="answer",
            metadata_key="metadata",
            tool_key=None,
            temperature=0.0,
            top_p=1.0,
            top_k=-1,
            max_response_len=30,
            n_samples_per_eval_prompt=2,
            inject_metadata=lambda metadata: metadata,
        )
    ]
    return slime.generate_rollout(args, rollout_id, _OnePrompt(data_source), evaluation)


class _OnePrompt:
    def __init__(self, data_source: Any) -> None:
        self._groups = data_source.get_samples

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = self._groups(num_samples)
        for group in groups:
            for sample in group:
                sample.prompt = "w5 w6"
        return groups
