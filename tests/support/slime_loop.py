"""What the rest of slime does around the rollout function, in its own order and by its own calls.

A :class:`Loop` takes the places of train.py, of the RolloutManager and of the weight updater: it
loads the data source and the function by their paths, pauses, flushes, loads, labels and lets the
engines continue between two calls, and counts its labels from 1 in each process. It does not train:
slime's training needs Megatron and GPUs.
"""

# pyright: basic
from __future__ import annotations

import importlib
import inspect
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from aprilsched.trainers import slime

__all__ = ["Loop", "arguments", "numbers", "write_prompts"]

FUNCTION = "aprilsched.trainers.slime.generate_rollout"


def arguments(folder: Path, urls: Sequence[str], **changes: Any) -> SimpleNamespace:
    """The arguments of slime, and of miles, that a rollout function and a data source read."""
    values: dict[str, Any] = {
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "aprilsched": {"over_provision": 2.0},
        "buffer_filter_path": None,
        "chat_template_path": None,
        "custom_generate_function_path": None,
        "custom_rm_path": f"{__name__}.length_reward",
        "data_source_path": "aprilsched.trainers.slime.DataSource",
        "dump_details": None,
        "dynamic_sampling_filter_path": None,
        "eval_datasets": [],
        "eval_function_path": FUNCTION,
        "eval_max_prompt_len": None,
        "eval_reward_key": None,
        "group_rm": False,
        "hf_checkpoint": str(folder / "model"),
        "input_key": "input",
        "label_key": "label",
        "load": str(folder / "checkpoints"),
        "mask_offpolicy_in_partial_rollout": False,
        "metadata_key": "metadata",
        "multimodal_keys": None,
        "n_samples_per_prompt": 4,
        "over_sampling_batch_size": 2,
        "partial_rollout": True,
        "prompt_data": str(folder / "prompts.jsonl"),
        "reward_key": None,
        "rm_type": None,
        "rollout_all_samples_process_path": None,
        "rollout_batch_size": 2,
        "rollout_external_engine_addrs": [url.removeprefix("http://") for url in urls],
        "rollout_function_path": FUNCTION,
        "rollout_global_dataset": True,
        "rollout_max_prompt_len": None,
        "rollout_max_response_len": 200,
        "rollout_sample_filter_path": None,
        "rollout_seed": 42,
        "rollout_shuffle": False,
        "rollout_skip_special_tokens": False,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_temperature": 1.0,
        "rollout_top_k": -1,
        "rollout_top_p": 1.0,
        "save": str(folder / "checkpoints"),
        "tool_key": None,
        "use_rollout_routing_replay": False,
    }
    return SimpleNamespace(**{**values, **changes})


def write_prompts(folder: Path, count: int = 200) -> None:
    """Write prompts of the words "w5" to "w60", whose ids are 5 to 60, each prompt another one."""
    rows = [{"input": f"w{5 + i % 50} w{5 + i // 50} w7", "label": str(i)} for i in range(count)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


async def length_reward(args: Any, sample: Any, **_: Any) -> float:
    """The default reward of :func:`arguments`."""
    return 1 / (1 + sample.response_length)


def numbers(samples: Sequence[Sequence[Any]]) -> list[int]:
    """The indices of all samples."""
    return [sample.index for group in samples for sample in group]


class Loop:
    """One process of the training; `weights` of version v are ``weights[v % len(weights)]``."""

    def __init__(
        self,
        args: Any,
        weights: Sequence[Path],
        *,
        urls: Sequence[str] | None = None,
        admin_key: str | None = None,
        pause: dict[str, str] | None = None,
    ) -> None:
        self.args = args
        external = args.rollout_external_engine_addrs or []
        self.urls = [f"http://{each}" for each in external] if urls is None else urls
        self.version = 0
        self._weights = weights
        self._key = admin_key
        self._pause = pause or {}
        self.data_source = _loaded(args.data_source_path)(args)
        self._function: Any = _loaded(args.rollout_function_path)
        self._made: Any = None
        if isinstance(self._function, type):
            types = importlib.import_module("miles.rollout.base_types")
            self._types: Any = types
            self._made = cast(Any, self._function)(
                types.RolloutFnConstructorInput(args=args, data_source=self.data_source)
            )

    def start(self, start_rollout_id: int = 0) -> Loop:
        """create_training_models(), and the first update of the weights."""
        self.data_source.load(start_rollout_id - 1)
        self.update()
        return self

    def generate(self, rollout_id: int) -> Any:
        """RolloutManager.generate()."""
        if inspect.isclass(self._function):
            received = self._types.RolloutFnTrainInput(
                rollout_id=rollout_id, weight_version=self.version
            )
            return self._made(received)
        return self._function(self.args, rollout_id, self.data_source, evaluation=False)

    def evaluate(self, rollout_id: int) -> Any:
        """RolloutManager.eval()."""
        if inspect.isclass(self._function):
            return self._made(self._types.RolloutFnEvalInput(rollout_id=rollout_id))
        return self._function(self.args, rollout_id, self.data_source, evaluation=True)

    def save(self, rollout_id: int) -> None:
        """RolloutManager.save()."""
        self.data_source.save(rollout_id)

    def update(self, urls: Sequence[str] | None = None, *, label: str | None = None) -> None:
        """RayTrainGroup.update_weights() and the calls of SGLangEngine: pause, flush, load with the
        label, continue, each on all engines."""
        self.version += 1
        urls = self.urls if urls is None else urls
        for url in urls:
            self.call(url, "pause_generation", self._pause)
        for url in urls:
            self._flush(url)
        for url in urls:
            self.call(
                url,
                "update_weights_from_disk",
                {
                    "model_path": str(self._weights[self.version % len(self._weights)]),
                    "weight_version": label or str(self.version),
                },
            )
        for url in urls:
            self.call(url, "continue_generation", {})

    def _flush(self, url: str) -> None:
        for _ in range(60):
            try:
                self.call(url, "flush_cache", None)
                return
            except urllib.error.HTTPError:
                time.sleep(1)
        raise TimeoutError("Timeout while flushing cache.")

    def call(self, url: str, path: str, body: Any) -> Any:
        """A call of the trainer; without a body it is a GET."""
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{url}/{path}", data=data, headers={**headers, "Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read()

    def end(self) -> None:
        """The end of the process."""
        slime.close()


def _loaded(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
