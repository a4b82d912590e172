"""The parts of slime and miles that `aprilsched.trainers.slime` calls, for tests without them.

:func:`trainer_modules` gives the real modules if ``SLIME_ROOT`` or ``MILES_ROOT`` names a checkout,
so the tests that run with the stand-in hold it to the real ones.
"""

# pyright: basic
from __future__ import annotations

import ast
import asyncio
import copy
import importlib
import importlib.util
import inspect
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

__all__ = ["ROOTS", "train_data", "trainer_modules"]

ROOTS = {"slime": os.environ.get("SLIME_ROOT"), "miles": os.environ.get("MILES_ROOT")}
"""Checkouts of the real packages, or None."""


@contextmanager
def trainer_modules(name: str) -> Iterator[SimpleNamespace]:
    """The modules of slime or miles, the real ones if there is a checkout, and no others."""
    before = {key: value for key, value in sys.modules.items() if _of_a_trainer(key)}
    for key in before:
        del sys.modules[key]
    path = list(sys.path)
    try:
        if root := ROOTS[name]:
            sys.path.insert(0, root)
            _without_extras()
        else:
            sys.modules.update(_stand_in(name))
        parts = {part: importlib.import_module(f"{name}.{part}") for part in _CONTENT}
        yield SimpleNamespace(
            name=name,
            real=ROOTS[name] is not None,
            Sample=parts["utils.types"].Sample,
            base_types=parts["rollout.base_types"],
        )
    finally:
        sys.path[:] = path
        for key in [key for key in sys.modules if _of_a_trainer(key)]:
            del sys.modules[key]
        sys.modules.update(before)


def _of_a_trainer(module: str) -> bool:
    return module.partition(".")[0] in ROOTS


def _without_extras() -> None:
    """Replace what the trainers import and these tests never call, where it is not installed."""
    for name, parts in (("ray", ()), ("sglang_router", ()), ("pylatexenc", ("latex2text",))):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            made = sys.modules[name] = ModuleType(name)
            made.__dict__.update({part: ModuleType(part) for part in parts})


def train_data(trainer: SimpleNamespace, args: Any, groups: list[list[Any]]) -> dict[str, Any]:
    """What the trainer trains on: the result of its own conversion, if it is the real one."""
    samples = [sample for group in groups for sample in group]
    module = importlib.import_module(f"{trainer.name}.utils.misc")
    function = module.load_function(args.custom_reward_post_process_path)
    if not trainer.real:
        raw, rewards = function(args, samples)
        indices = [sample.index for sample in samples]
        return {"raw_reward": raw, "rewards": rewards, "sample_indices": indices}
    if trainer.name == "miles":
        convert = importlib.import_module("miles.ray.rollout.train_data_conversion")
        return convert.convert_samples_to_train_data(args, samples, {}, None, function)
    # Its module imports SGLang, so its two methods are compiled alone.
    root = Path(str(ROOTS["slime"]))
    tree = ast.parse((root / "slime/ray/rollout.py").read_text())
    wanted = {"_post_process_rewards", "_convert_samples_to_train_data"}
    methods: list[ast.stmt] = [
        each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name in wanted
    ]
    names = {"torch": importlib.import_module("torch"), "Sample": trainer.Sample}
    names["get_source"] = importlib.import_module("slime.utils.data").get_source
    exec(compile(ast.Module(methods, []), "rollout.py", "exec"), names)  # noqa: S102 (its own code)
    manager = SimpleNamespace(
        args=args,
        custom_reward_post_process_func=function,
        custom_convert_samples_to_train_data_func=None,
    )
    manager._post_process_rewards = MethodType(names["_post_process_rewards"], manager)
    return names["_convert_samples_to_train_data"](manager, samples)


class _Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
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
    rollout_top_p_token_ids: list[int] | None = None
    remove_sample: bool = False
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None

    Status = _Status

    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward


def _record(name: str, fields: str, **defaults: Any) -> type[Any]:
    """A dataclass with these fields, None by default, and these constants."""
    return make_dataclass(name, [(each, Any, None) for each in fields.split()], namespace=defaults)


RolloutFnTrainOutput = _record("RolloutFnTrainOutput", "samples metrics")
RolloutFnEvalOutput = _record("RolloutFnEvalOutput", "data metrics")
RolloutFnConstructorInput = _record("RolloutFnConstructorInput", "args data_source")
RolloutFnTrainInput = _record("RolloutFnTrainInput", "rollout_id weight_version", evaluation=False)
RolloutFnEvalInput = _record(
    "RolloutFnEvalInput", "rollout_id generate_state weight_version hf_dir", evaluation=True
)
GenerateFnInput = _record(
    "GenerateFnInput",
    "state sample sampling_params evaluation",
    args=property(lambda given: given.state.args),
)
GenerateFnOutput = _record("GenerateFnOutput", "samples")
DynamicFilterOutput = _record("DynamicFilterOutput", "keep reason keep_when_insufficient")


def load_generate_function(path: str) -> Any:
    function = load_function(path)
    names = list(inspect.signature(function).parameters)
    if names[0] == "input":
        return function

    async def legacy(given: Any) -> Any:
        more = {"evaluation": given.evaluation} if "evaluation" in names else {}
        made = await function(given.args, given.sample, given.sampling_params, **more)
        return GenerateFnOutput(samples=made)

    return legacy


def call_rollout_fn(function: Any, *args: Any, evaluation: bool) -> Any:
    return function(*args, evaluation=evaluation)


def call_dynamic_filter(function: Any, *args: Any) -> Any:
    return function(*args)


def should_drop_dynamic_filter_output(
    output: Any, *, remaining_batch_size: int, target_data_size: int
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
        load_function(path)(args, value, **kwargs)
    return value


_loop = SimpleNamespace(loop=None)


def get_async_loop() -> Any:
    if _loop.loop is None:
        _loop.loop = asyncio.new_event_loop()
        threading.Thread(target=_loop.loop.run_forever, daemon=True).start()
    return _loop


class Dataset:
    def __init__(self, path: str, *, prompt_key: str, label_key: str, **_: Any) -> None:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        self.samples = [Sample(prompt=row[prompt_key], label=row[label_key]) for row in rows]


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path)


class RolloutDataSourceWithBuffer:
    """Prompts of a file in their order, again and again, and a buffer in front of them."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.buffer: list[list[Sample]] = []
        self.offset = 0
        self.dataset = None
        if args.prompt_data is not None:
            self.dataset = Dataset(
                args.prompt_data, prompt_key=args.input_key, label_key=args.label_key
            )

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [self.buffer.pop(0) if self.buffer else self._group() for _ in range(num_samples)]

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
        path = Path(self.args.save) / f"rollout/position_{rollout_id}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(self.offset))

    def load(self, rollout_id: int | None = None) -> None:
        path = Path(self.args.load) / f"rollout/position_{rollout_id}"
        self.offset = int(path.read_text()) if path.exists() else 0

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset.samples)

    def get_buffer_length(self) -> int:
        return len(self.buffer)


_CONTENT: dict[str, tuple[Any, ...]] = {
    "rollout": (),
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
    "rollout.data_source": (RolloutDataSourceWithBuffer,),
    "rollout.filter_hub.base_types": (DynamicFilterOutput, MetricGatherer, call_dynamic_filter),
    "rollout.rm_hub": (async_rm, batched_async_rm),
    "utils.async_utils": (get_async_loop,),
    "utils.data": (Dataset,),
    "utils.misc": (load_function,),
    "utils.processing_utils": (load_tokenizer,),
    "utils.types": (Sample,),
}
_OWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "slime": {
        "rollout.sample_hooks": (apply_rollout_sample_hooks,),
        "rollout.filter_hub.base_types": (
            *_CONTENT["rollout.filter_hub.base_types"],
            should_drop_dynamic_filter_output,
        ),
    },
    "miles": {"rollout.inference_rollout.compatibility": (load_generate_function,)},
}


def _stand_in(name: str) -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    for part, content in {**_CONTENT, **_OWN[name]}.items():
        whole = f"{name}.{part}"
        parents = [whole[:place] for place, letter in enumerate(whole) if letter == "."]
        for each in (*parents, whole):
            if each not in modules:
                modules[each] = ModuleType(each)
                modules[each].__path__ = []
        vars(modules[whole]).update({each.__name__: each for each in content})
    return modules
