"""Steps in the order of slime's train.py, with rollouts by aprilsched and no training.

    pip install aprilsched && export PYTHONPATH=/path/to/slime
    python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --port 30000
    python examples/slime_steps.py --engine http://127.0.0.1:30000 --model Qwen/Qwen3-0.6B \
        --prompts prompts.jsonl

It shows what the two flags of docs/trainers/slime.md load, and when slime calls it, without Ray,
Megatron and GPUs. What slime trains is left out: :func:`main` loads the same weights again in the
place of new ones, so only their label changes. The calls to the engines are those of slime's
SGLangEngine. Each line of the file of prompts is ``{"input": "...", "label": "..."}``.
"""

from __future__ import annotations

import argparse
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import requests
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn
from slime.utils.misc import load_function


async def right(args: Namespace, sample: Any, **_: Any) -> float:
    """What ``--custom-rm-path`` names: 1 for a response with the label in it."""
    return float(sample.label in sample.response)


def call(url: str, path: str, body: Any) -> None:
    requests.post(f"{url}/{path}", json=body, timeout=600).raise_for_status()


def flush(url: str) -> None:
    """Flush the cache; an engine refuses while it has requests."""
    while not requests.get(f"{url}/flush_cache", timeout=60).ok:
        time.sleep(1)


def update_weights(engines: Sequence[str], folder: str, version: int) -> None:
    """What slime does between two steps: pause, flush, load with a label, continue."""
    for url in engines:
        call(url, "pause_generation", {})
    for url in engines:
        flush(url)
    for url in engines:
        loaded = {"model_path": folder, "weight_version": str(version)}
        call(url, "update_weights_from_disk", loaded)
    for url in engines:
        call(url, "continue_generation", {})


def arguments(options: Namespace) -> Namespace:
    """The arguments of slime that its data source and a rollout function read."""
    return Namespace(
        rollout_function_path="aprilsched.trainers.slime.generate_rollout",
        data_source_path="aprilsched.trainers.slime.DataSource",
        # --custom-config-path sets this from its file.
        aprilsched={"over_provision": 2.0, "max_staleness": 4},
        rollout_external_engine_addrs=options.engine,
        hf_checkpoint=options.model,
        prompt_data=options.prompts,
        input_key="input",
        label_key="label",
        metadata_key="metadata",
        tool_key=None,
        multimodal_keys=None,
        apply_chat_template=options.chat,
        apply_chat_template_kwargs={},
        rollout_global_dataset=True,
        rollout_shuffle=True,
        rollout_seed=42,
        rollout_max_prompt_len=None,
        dump_details=None,
        buffer_filter_path=None,
        rollout_batch_size=4,
        over_sampling_batch_size=4,
        n_samples_per_prompt=4,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=options.longest,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=True,
        custom_generate_function_path=None,
        custom_rm_path=f"{__name__}.right",
        group_rm=False,
        reward_key=None,
        dynamic_sampling_filter_path=None,
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        save=options.out,
        load=options.out,
    )


def main() -> list[RolloutFnTrainOutput]:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--engine", action="extend", nargs="+", required=True, help="URL of an SGLang server"
    )
    parser.add_argument("--model", required=True, help="the model of the servers")
    parser.add_argument("--prompts", required=True, help="a file with a JSON object in each line")
    parser.add_argument("--chat", action="store_true", help="prompts are conversations")
    parser.add_argument("--longest", type=int, default=1024, help="most tokens of a response")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--begin", type=int, default=0, help="first step; load the one before")
    parser.add_argument("--out", default="runs/slime", help="folder of the checkpoints")
    options = parser.parse_args()
    args = arguments(options)

    # RolloutManager.__init__() and create_training_models()
    data_source = load_function(args.data_source_path)(args)
    generate_rollout = load_function(args.rollout_function_path)
    data_source.load(options.begin - 1)
    update_weights(options.engine, options.model, version=1)

    outputs: list[RolloutFnTrainOutput] = []
    for step in range(options.steps):
        rollout_id = options.begin + step
        output = call_rollout_fn(generate_rollout, args, rollout_id, data_source, evaluation=False)
        samples = [sample for group in output.samples for sample in group]
        reward = sum(sample.reward for sample in samples) / len(samples)
        versions = sorted({int(each) for sample in samples for each in sample.weight_versions})
        print(f"step {rollout_id}: {len(samples)} samples, reward {reward:.2f}, {versions=}")
        outputs.append(output)
        # Here slime trains.
        data_source.save(rollout_id)
        update_weights(options.engine, options.model, version=2 + step)
    return outputs


if __name__ == "__main__":
    main()
