"""Trains the policy of examples/grpo with TRL's own trainer, on rollouts of one SGLang server.

    python experiments/trl_gpu/run.py MODEL                       # the policy with a tokenizer
    python experiments/trl_gpu/run.py MODEL --engine URL --weights ipc --out DIRECTORY
    python experiments/trl_gpu/run.py --draw                      # the picture, from raw/

See README.md in this folder. The server has MODEL, which the first command writes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(ROOT), str(ROOT / "examples" / "grpo")]

from countdown import EOS, PAD, problems, question, score  # noqa: E402

PROBLEMS = 2048
WORDS = 256
KEPT = {
    "reward": "reward", "rollout/off_policy_tokens": "off_policy",
    "sample/staleness_mean": "age", "sample/staleness_max": "oldest",
    "perf/weight_sync_transfer_s": "refit_s", "ratio": "ratio", "loss": "loss",
    "completions/mean_length": "length", "completions/clipped_ratio": "capped",
    "sample/dropped_stale_total": "dropped",
}  # fmt: skip
"""What is kept of TRL's log, and its name here."""


def write(model: Path) -> None:
    """Write the policy and a tokenizer of words: two special ones, and "t2" to "t255", each with
    that id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(ROOT / "examples" / "grpo" / "policy", model)
    ids = {"<pad>": PAD, "<eos>": EOS} | {f"t{index}": index for index in range(2, WORDS)}
    words = Tokenizer(WordLevel(ids, "<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    made = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    made.save_pretrained(model)


def solved(
    completion_ids: list[list[int]], numbers: list[list[int]], target: list[int], **_: Any
) -> list[float]:
    """1 for a response whose last attempt is right."""
    return [
        score(ids, (tuple(own), wanted))
        for ids, own, wanted in zip(completion_ids, numbers, target, strict=True)
    ]


def train(options: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        packing,
    )

    from aprilsched import SchedulerConfig, SGLangFleet
    from aprilsched.integrations.trl import RolloutWorker
    from aprilsched.weights.tensor import TensorPublisher
    from tests.support import trl_on_cpu

    gpu = torch.cuda.is_available()
    # FlashAttention's kernel comes from a hub, and these machines have no network.
    packing._flash_attn = trl_on_cpu.kernel
    if not gpu:
        async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    args = AsyncGRPOConfig(
        output_dir=str(options.out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=options.groups * 8 // 32,
        num_generations=8,
        max_completion_length=512,
        max_staleness=4,
        token_budget=0,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        bf16=gpu,
        use_cpu=not gpu,
        report_to=[],
        disable_tqdm=True,
    )
    told = islice(problems(1, held_out=False), PROBLEMS)
    rows = Dataset.from_list([
        {"prompt": " ".join(f"t{token}" for token in question(problem)),
         "numbers": list(problem[0]), "target": problem[1]}
        for problem in told
    ])  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    worker = RolloutWorker(
        SGLangFleet([options.engine]),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        reward_funcs=[solved],
        # SGLang 0.5.17 cannot flush its cache while requests wait inside.
        config=SchedulerConfig(over_provision="auto", straggler="abort", pace="asynchronous"),
        publisher={
            "ipc": TensorPublisher, "folder": str(options.out / "weights"),
        }[options.weights],
    )  # fmt: skip
    began = time.monotonic()

    class Kept(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            found = {name: logs[key] for key, name in KEPT.items() if key in logs}
            if "reward" not in found:
                return
            line = {"step": state.global_step, "seconds": time.monotonic() - began} | found
            with (options.out / "steps.jsonl").open("a") as file:
                file.write(json.dumps({"weights": options.weights, **line}) + "\n")
            print(line, flush=True)

    trainer = AsyncGRPOTrainer(
        str(options.model),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=worker,
        callbacks=[worker.callback, Kept()],
    )
    trainer.train()


def lines() -> list[dict[str, Any]]:
    """The steps of every run in raw/."""
    return [
        {"run": path.stem} | json.loads(line)
        for path in sorted((HERE / "raw").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def draw() -> None:
    """The reward of each step over the seconds of the run."""
    import numpy as np

    from aprilsched.analysis.style import PALETTE, new_figure, save

    figure = new_figure(7, 4)
    axes = figure.subplots()
    found = lines()
    for run, colour in zip(dict.fromkeys(line["run"] for line in found), PALETTE, strict=False):
        own = [line for line in found if line["run"] == run]
        seconds, rewards = ([line[name] for line in own] for name in ("seconds", "reward"))
        axes.plot(seconds, rewards, ".", color=colour, alpha=0.5)
        mean = [float(np.mean(rewards[max(0, at - 4) : at + 1])) for at in range(len(own))]
        axes.plot(seconds, mean, color=colour, label=f"weights by {own[0]['weights']}")
    axes.set(xlabel="seconds of the training", ylabel="problems solved, mean of five steps")
    axes.legend(frameon=False)
    save(figure, HERE / "reward.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--engine", help="URL of a SGLang server with MODEL")
    parser.add_argument("--weights", choices=("ipc", "folder"), default="folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=32, help="of 8 rollouts in a step")
    parser.add_argument("--out", type=Path, default=Path("runs/trl_gpu"))
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if options.draw:
        draw()
    elif not options.engine:
        write(options.model)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        train(options)


if __name__ == "__main__":
    main()
