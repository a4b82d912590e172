"""What the adapter uses of slime or miles, whichever has loaded it."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Coroutine, Iterator, Mapping
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.companions import MOST_KEPT, Companion, routed_experts

T = TypeVar("T")


class TrainerParts:
    """The modules of slime, or of miles, which has the same ones."""

    def __init__(self) -> None:
        loaded = [name for name in ("slime", "miles") if f"{name}.rollout" in sys.modules]
        if not loaded:
            raise ConfigError(
                "neither slime nor miles is loaded; name this function in --rollout-function-path "
                "of theirs."
            )
        self.name = loaded[0]
        self.outputs = self._module("rollout.base_types")
        self.rewards = self._module("rollout.rm_hub")
        self.filters = self._module("rollout.filter_hub.base_types")
        self.sample = self._module("utils.types").Sample
        self._processor: Any = None
        self._loop = self._module("utils.async_utils").get_async_loop
        self._function = self._module("utils.misc").load_function
        self.torch: Any = importlib.import_module("torch")  # noqa: TID251 (a module of slime or miles)

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"{self.name}.{name}")  # noqa: TID251 (a module of slime or miles)

    def load(self, path: str | None) -> Any:
        """Return the function or class at `path`; None without a path."""
        return None if path is None else self._function(path)

    def tokenizer(self, args: Any) -> Any:
        """Return the tokenizer of the model."""
        template = {}
        if self.name == "miles":
            template = {"chat_template_path": args.chat_template_path}
        load = self._processing.load_tokenizer
        return load(args.hf_checkpoint, trust_remote_code=True, **template)

    @cached_property
    def _processing(self) -> Any:
        return self._module("utils.processing_utils")

    def processor(self, args: Any) -> Any:
        """Return the processor of the model's images."""
        if self._processor is None:
            load = self._processing.load_processor
            self._processor = load(args.hf_checkpoint, trust_remote_code=True)
        return self._processor

    def processed(self, args: Any, sample: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the processor, and what it makes of the text and the images of a sample."""
        processor, inputs = self.processor(args), sample.multimodal_inputs
        if (call := getattr(self._processing, "call_processor", None)) is not None:
            return processor, call(processor, sample.prompt, inputs)
        given = self._processing.build_processor_kwargs(inputs)
        return processor, processor(text=sample.prompt, **given)

    def dataset(self, args: Any, of: Any) -> Any:
        """Return a dataset of the evaluation."""

        def setting(name: str) -> Any:
            own = getattr(of, name, None)
            return getattr(args, name, None) if own is None else own

        return self._module("utils.data").Dataset(
            path=of.path,
            tokenizer=self.tokenizer(args),
            processor=self.processor(args) if setting("multimodal_keys") else None,
            max_length=args.eval_max_prompt_len,
            prompt_key=of.input_key,
            label_key=of.label_key,
            multimodal_keys=setting("multimodal_keys"),
            metadata_key=of.metadata_key,
            tool_key=of.tool_key,
            apply_chat_template=setting("apply_chat_template"),
            apply_chat_template_kwargs=setting("apply_chat_template_kwargs"),
        )

    @cached_property
    def generate_loader(self) -> Any:
        """What miles loads generate functions of any form with; None in slime."""
        if self.name != "miles":
            return None
        return self._module("rollout.inference_rollout.compatibility").load_generate_function

    async def hooked(self, args: Any, sample: Any, *, evaluation: bool) -> Any:
        """What the hooks of ``--rollout-sample-hook-path`` make of a sample; slime only."""
        if not getattr(args, "rollout_sample_hook_path", None):
            return sample
        hooks = self._module("rollout.sample_hooks")
        return await hooks.apply_rollout_sample_hooks(args, sample, evaluation=evaluation)

    async def on_its_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the trainer's own event loop, to which its HTTP sessions belong."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop().loop))


def check_trainer(args: Any, trainer: TrainerParts) -> None:
    """Refuse arguments that do not work here."""
    if _keeps_masks(args, trainer) and not 1 <= args.rollout_top_k <= MOST_KEPT:
        raise ConfigError(
            f"--rollout-top-p {args.rollout_top_p} needs the tokens that each token was sampled "
            f"from, which SGLang returns for a finite top-k; set --rollout-top-k, at most "
            f"{MOST_KEPT}."
        )


def _keeps_masks(args: Any, trainer: TrainerParts) -> bool:
    """Return whether the trainer's loss needs the tokens that each token was sampled from."""
    return args.rollout_top_p != 1.0 and hasattr(trainer.sample, "rollout_top_p_token_ids")


def companions_of(args: Any, trainer: TrainerParts) -> Iterator[Companion]:
    """Yield what engines return in addition to tokens, as the trainer's arguments require."""
    if getattr(args, "use_rollout_routing_replay", False):
        yield routed_experts(
            layers=args.num_layers,
            per_token=args.moe_router_topk,
            experts=args.num_experts,
            required=True,
        )
    if _keeps_masks(args, trainer):
        yield Companion("sampling_mask", required=True)


def _refuse(what: str, why: str) -> NoReturn:
    raise ConfigError(f"{what} does not work with aprilsched: {why}; leave it out.")


def check_sample(sample: Any) -> None:
    inputs: dict[str, Any] = sample.multimodal_inputs or {}
    if others := [name for name, each in inputs.items() if name != "images" and each is not None]:
        _refuse(f"sample {sample.index}", f"it has {others[0]}, and only images are carried")
    if getattr(sample, "adapter", None) is not None:
        _refuse(f"the adapter of sample {sample.index}", "every rollout is of one model")
