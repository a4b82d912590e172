"""The types of slime and miles that `aprilsched.trainers.slime` uses, for tests without them.

:func:`trainer_modules` gives the real modules if ``SLIME_ROOT`` or ``MILES_ROOT`` names a checkout,
so the tests that run with the stand-in hold it to the real ones. Names, fields and arguments are
theirs; what a test does not look at is left out.
"""

# pyright: basic
from __future__ import annotations

import asyncio
import copy
import importlib.util
import inspect
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["ROOTS", "trainer_modules", "without_extras"]

ROOTS = {"slime": os.environ.get("SLIME_ROOT"), "miles": os.environ.get("MILES_ROOT")}
"""Checkouts of the real packages, or None."""

_PARTS = (
    "rollout",
    "rollout.base_types",
    "rollout.data_source",
    "rollout.filter_hub.base_types",
    "rollout.rm_hub",
    "utils.async_utils",
    "utils.data",
    "utils.misc",
    "utils.processing_utils",
    "utils.types",
)


@contextmanager
def trainer_modules(name: str) -> Iterator[SimpleNamespace]:
    """The modules of slime or miles, the real ones if they are there; the only ones meanwhile."""
    before = {key: value for key, value in sys.modules.items() if _of_a_trainer(key)}
    for key in before:
        del sys.modules[key]
    path = list(sys.path)
    try:
        if root := ROOTS[name]:
            sys.path.insert(0, root)
            without_extras()
        else:
            sys.modules.update(_stand_in(name))
        modules = {part: importlib.import_module(f"{name}.{part}") for part in _PARTS}
        yield SimpleNamespace(
            name=name,
            real=ROOTS[name] is not None,
            Sample=modules["utils.types"].Sample,
            base_types=modules["rollout.base_types"],
            data_source=modules["rollout.data_source"],
            load_function=modules["utils.misc"].load_function,
        )
    finally:
        sys.path[:] = path
        for key in [key for key in sys.modules if _of_a_trainer(key)]:
            del sys.modules[key]
        sys.modules.update(before)


def _of_a_trainer(module: str) -> bool:
    return module.partition(".")[0] in ROOTS


def without_extras() -> None:
    """Replace what the trainers import and these tests never call, where it is not installed."""
    for name, parts in (("ray", ()), ("sglang_router", ()), ("pylatexenc", ("latex2text",))):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            made = sys.modules[name] = ModuleType(name)
            made.__dict__.update({part: ModuleType(part) for part in parts})


# --- the stand-in --------------------------------------------------------------------------------


@dataclass
class Sample:
    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    args: Any
    data_source: Any


@dataclass(frozen=True)
class RolloutFnTrainInput:
    rollout_id: int
    weight_version: int | None = None
    evaluation = False


@dataclass(frozen=True)
class RolloutFnEvalInput:
    rollout_id: int
    generate_state: Any = None
    weight_version: str | None = None
    hf_dir: str | None = None
    evaluation = True


@dataclass(frozen=True)
class GenerateFnInput:
    state: Any
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool

    @property
    def args(self) -> Any:
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    samples: Any


def load_generate_function(path: str) -> Any:
    fn = load_function(path)
    names = list(inspect.signature(fn).parameters)
    if names[0] == "input":
        return fn

    async def legacy(input: GenerateFnInput) -> GenerateFnOutput:
        received = {"evaluation": input.evaluation} if "evaluation" in names else {}
        made = await fn(input.args, input.sample, input.sampling_params, **received)
        return made if isinstance(made, GenerateFnOutput) else GenerateFnOutput(samples=made)

    return legacy


def call_rollout_fn(fn: Any, *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    return fn(*args, **kwargs, evaluation=evaluation)


@dataclass
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Any, *args: Any) -> DynamicFilterOutput:
    text = fn(*args)
    return text if isinstance(text, DynamicFilterOutput) else DynamicFilterOutput(keep=text)


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    short = remaining_batch_size <= target_data_size
    return not output.keep and not (output.keep_when_insufficient and short)


class MetricGatherer:
    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        if reason:
            self._reasons[reason] += 1

    def collect(self) -> dict[str, int]:
        return {f"rollout/dynamic_filter/drop_{why}": n for why, n in self._reasons.items()}


def load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


async def async_rm(args: Any, sample: Sample) -> Any:
    return await load_function(sample.custom_rm_path or args.custom_rm_path)(args, sample)


async def batched_async_rm(args: Any, samples: list[Sample]) -> Any:
    return await load_function(args.custom_rm_path)(args, samples)


async def apply_rollout_sample_hooks(args: Any, value: Sample, **kwargs: Any) -> Sample:
    for path in args.rollout_sample_hook_path:
        made = load_function(path)(args, value, **kwargs)
        value = (await made if inspect.isawaitable(made) else made) or value
    return value


class _LoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()


_loop: list[_LoopThread] = []


def get_async_loop() -> _LoopThread:
    if not _loop:
        _loop.append(_LoopThread())
    return _loop[0]


class Dataset:
    def __init__(self, path: str, *, prompt_key: str, label_key: str | None, **_: Any) -> None:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        self.samples = [
            Sample(prompt=row[prompt_key], label=row[label_key] if label_key else None)
            for row in rows
        ]


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path)


class RolloutDataSourceWithBuffer:
    """Prompts of a file in their order, again and again, and a buffer in front of them."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.buffer: list[list[Sample]] = []
        self.offset = 0
        given = args.prompt_data is not None
        self.dataset = (
            Dataset(args.prompt_data, prompt_key=args.input_key, label_key=args.label_key)
            if given
            else None
        )

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        found = [self.buffer.pop(0) for _ in range(min(num_samples, len(self.buffer)))]
        while len(found) < num_samples:
            found.append(self._group())
        return found

    def _group(self) -> list[Sample]:
        prompts = self.dataset.samples if self.dataset else [Sample()]
        size, number = self.args.n_samples_per_prompt, self.offset
        self.offset += 1
        group = [copy.deepcopy(prompts[number % len(prompts)]) for _ in range(size)]
        for index, sample in enumerate(group):
            sample.group_index, sample.index = number, number * size + index
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.buffer += samples

    def save(self, rollout_id: int) -> None:
        path = self._file(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(self.offset))

    def load(self, rollout_id: int | None = None) -> None:
        path = self._file(self.args.load, rollout_id)
        if path.exists():
            self.offset = int(path.read_text())

    def _file(self, folder: str, rollout_id: int | None) -> Path:
        return Path(folder) / f"rollout/global_dataset_state_dict_{rollout_id}.pt"

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset.samples)

    def get_buffer_length(self) -> int:
        return len(self.buffer)


_CONTENT: dict[str, tuple[Any, ...]] = {
    "rollout.base_types": (
        RolloutFnTrainOutput,
        RolloutFnEvalOutput,
        RolloutFnConstructorInput,
        RolloutFnTrainInput,
        RolloutFnEvalInput,
        GenerateFnInput,
        GenerateFnOutput,
        call_rollout_fn,
    ),
    "rollout.inference_rollout.compatibility": (load_generate_function,),
    "rollout.data_source": (RolloutDataSourceWithBuffer,),
    "rollout.filter_hub.base_types": (
        DynamicFilterOutput,
        MetricGatherer,
        call_dynamic_filter,
        should_drop_dynamic_filter_output,
    ),
    "rollout.rm_hub": (async_rm, batched_async_rm),
    "rollout.sample_hooks": (apply_rollout_sample_hooks,),
    "utils.async_utils": (get_async_loop,),
    "utils.data": (Dataset,),
    "utils.misc": (load_function,),
    "utils.processing_utils": (load_tokenizer,),
    "utils.types": (Sample,),
}
_SLIME_ALONE = {"rollout.sample_hooks", "should_drop_dynamic_filter_output"}


def _stand_in(name: str) -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    packages = ("", ".rollout", ".utils", ".rollout.filter_hub", ".rollout.inference_rollout")
    for each in packages:
        modules[name + each] = ModuleType(name + each)
        modules[name + each].__path__ = []
    for part, content in _CONTENT.items():
        if name == "miles" and part in _SLIME_ALONE:
            continue
        made = modules[f"{name}.{part}"] = ModuleType(f"{name}.{part}")
        for each in content:
            if name == "slime" or each.__name__ not in _SLIME_ALONE:
                setattr(made, each.__name__, each)
    return modules
