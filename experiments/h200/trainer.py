"""Trains a policy of 0.6B parameters on one GPU, with engines on the others; see engines.md.

    PYTHONPATH=.:examples/grpo python experiments/h200/trainer.py --out DIRECTORY --list 0,1

The list has the numbers of the GPUs, the trainer's first, and may name arms (0,1=sync,auto). On one
GPU the engine shares it, and the
weights go by CUDA IPC in the place of NCCL. The trainer is examples/grpo's with the advantages of
experiments/learning/samples.py, and saves no checkpoints. The weights are random and as small as
those of ``--load-format dummy``, so stop tokens end a response as in the other experiments here.
Each arm is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import train
from cells import SHAPES, Server, arguments, known, note
from engines import ended, options_of
from model import TINY
from samples import SampleTrainer
from schedules import BURN_IN, CLIP, KV_TOKENS, MAX_RUNNING, VOCABULARY, Cell, Meter
from schedules import Server as Kind
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from aprilsched import DistributedPublisher, Prompt, Rollout, SGLangFleet, TensorPublisher
from aprilsched.fronts.blocking import RolloutScheduler
from aprilsched.kernel.core.messages import facts
from aprilsched.observe.figures.engine_time import PARTS
from aprilsched.observe.figures.run_state import RunState
from aprilsched.planning import Planner

ARMS = ("sync", "wave@2.0", "auto", "samples@2.0", "auto-samples")
UPDATES = 20
"""Of an arm that are counted."""
MOST_SECONDS = 85.0
"""Of an arm, without its start."""
_START_SECONDS = 35.0
"""For the start of an arm's process and its last update at most."""
KIND = Kind(shape="0.6B", kv_tokens=KV_TOKENS // 2, clip=CLIP // 2, max_running=MAX_RUNNING)


PADDED_TOKENS = 4096
"""Of a forward pass at most."""


class Trainer(SampleTrainer):
    """The trainer in bfloat16 with weights in float32, without checkpoints, which would take longer
    than its updates."""

    def save(self) -> None:
        """Save nothing."""

    def logprobs(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Log-probability of each token [N] of packed sequences.

        Sequences of about equal length run together. Causal attention needs no mask if the ends are
        padded, so that it takes the fastest kernel.
        """
        sequences = input_ids.tensor_split((position_ids == 0).nonzero()[1:, 0].cpu())
        hidden: dict[int, torch.Tensor] = {}
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            for places in rows_of([len(each) for each in sequences]):
                rows = pad_sequence([sequences[place] for place in places], batch_first=True)
                found = self.model.model(input_ids=rows, use_cache=False).last_hidden_state
                hidden |= {place: row[: len(sequences[place])]
                           for place, row in zip(places, found, strict=True)}  # fmt: skip
            logits = self.model.lm_head(torch.cat([hidden[n] for n in range(len(hidden))])[:-1])
        found = logits.float().log_softmax(-1).gather(-1, input_ids[1:, None])[:, 0]
        return torch.cat([found.new_zeros(1), found])

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights in the engines' type."""
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        for name, tensor in self.model.named_parameters():
            yield name, tensor.detach().to(dtype)


def rows_of(lengths: Sequence[int]) -> list[list[int]]:
    """Return the places of sequences that are padded together, shortest first."""
    batches: list[list[int]] = [[]]
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[place] > PADDED_TOKENS:
            batches.append([])
        batches[-1].append(place)
    return batches


class Updates:
    """A listener that measures the parts of each update, in seconds."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._times: dict[str, float] = {}

    def on_facts(self, new: Sequence[facts.Fact], now: float) -> None:
        for fact in new:
            if isinstance(fact, facts.UpdateBegun):
                self._times = {"begun": now}
            elif isinstance(fact, facts.RefitBegun | facts.EngineRefitted):
                self._times.setdefault("refit", now)
                self._times["refitted"] = now
            elif isinstance(fact, facts.UpdateFinished) and "refit" in self._times:
                times = self._times
                refit_s = times["refitted"] - times["refit"]
                self.rows.append({
                    "refit_s": round(refit_s, 4),
                    "pause_s": round(now - times["begun"] - refit_s, 4),
                })  # fmt: skip


def reward(rollout: Rollout, prompt: Prompt) -> float:
    """Return 0 or 1 by chance, so that responses of a group have advantages."""
    return float(rollout.token_ids[-1] % 2)


def policy(folder: Path, cpu: bool) -> Path:
    """Write the policy's random weights, once."""
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(1)
        with torch.device("cpu" if cpu else "cuda"):
            model = Qwen3ForCausalLM(Qwen3Config(**(TINY if cpu else SHAPES["0.6B"])))
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.uniform_(-1e-3, 1e-3)
        model.to(torch.float32 if cpu else torch.bfloat16).save_pretrained(folder)
    return folder


def run(arm: str, urls: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm until :data:`UPDATES` updates are counted."""
    groups = options.groups
    cell = Cell.of(f"{len(urls)}x{groups}:{arm}:s0")
    of_samples = cell.config.delivery == "samples"
    units, micro = (groups * 8, 64) if of_samples else (groups, 8)
    # The last row has no tokens of its own (engines_tables.aligned).
    wanted = options.updates + max(BURN_IN, cell.burn_in) + 1
    folder = options.out.parent / f"arm-{arm}"
    folder.mkdir(exist_ok=True)
    trainer = Trainer(train.arguments([
        "--engine", *urls, "--model", str(policy(options.out.parent / "policy", options.cpu)),
        "--out", str(folder), "--updates", str(wanted), "--groups", str(units),
        "--micro", str(micro), "--steps", "1", "--lr", "1e-6", "--no-stream",
        "--max-staleness", "64", "--evaluate-every", "0",
        "--seconds", str(options.seconds),
    ]))  # fmt: skip
    shared = not options.cpu and set(options.places) == {options.trainer_gpu}
    publisher: Any = (
        TensorPublisher(trainer.named, bucket_bytes=2 * 2**30) if shared
        else DistributedPublisher(trainer.named, backend="gloo" if options.cpu else "nccl",
                                  bucket_bytes=2 * 2**30, timeout_s=30.0)
    )  # fmt: skip
    (folder / "log.jsonl").unlink(missing_ok=True)
    log = train.Log(trainer.options, prints=False)
    meter, state, updates = Meter(cell), RunState(), Updates()
    vocabulary = TINY["vocab_size"] if options.cpu else VOCABULARY
    cpu_s = time.process_time()
    with RolloutScheduler(
        SGLangFleet(urls, stream_interval=64), cell.workload(vocabulary, options.scale),
        reward=reward, config=cell.config, planner=Planner(max_running=KIND.max_running),
        listeners=[meter, state, updates],
    ) as rollouts:  # fmt: skip
        train.train(rollouts, trainer, publisher, log)
        cpu_s = time.process_time() - cpu_s
    lines = log.lines()
    rows = meter.rows()[: len(lines)]
    # The first update brings the initial weights.
    parts = updates.rows[-len(lines) :]
    engines = {
        name: dict(zip(PARTS, (round(s, 3) for s in engine.seconds), strict=True))
        for name, engine in state.engines.items()
    }
    return {
        "arm": arm, "groups": groups, "engines": engines, "schedule": meter.chosen[-1:],
        "cpu_s": round(cpu_s, 2), "events": meter.events,
        "updates": [line | part | row for line, part, row in zip(lines, parts, rows, strict=False)],
        "parameters": sum(each.numel() for each in trainer.model.parameters()),
    }  # fmt: skip


def measure(options: argparse.Namespace) -> None:
    """Start the engines, and train each arm in a process of its own."""
    started_at = time.time()
    numbers, _, arms = options.list.partition("=")
    gpus = numbers.split(",")
    results = options.out / "arms.jsonl"
    servers = [
        Server(options.out / f"server-{gpu}", KIND, options, gpu) for gpu in gpus[1:] or gpus
    ]
    try:
        for server in servers:
            server.wait(max(1.0, min(300.0, options.until - time.time())))
            server.warm_up(2 if options.cpu else 60)
        print(f"{len(servers)} servers: up after {time.time() - started_at:.0f} s", flush=True)
        for arm in arms.split(",") if arms else ARMS:
            left = options.until - time.time()
            if arm in {line["arm"] for line in known(results)} or left < 60.0:
                print(f"{arm}: measured, or {left:.0f} s left", flush=True)
                continue
            for server in servers:
                server.reset()
            seconds = min(left - _START_SECONDS, options.seconds or MOST_SECONDS)
            limit = seconds + _START_SECONDS
            command = [
                sys.executable, __file__, "--arm", arm, "--out", str(results),
                "--urls", *(each.url for each in servers), "--places", *(gpus[1:] or gpus),
                "--trainer-gpu", gpus[0], "--groups", str(options.groups),
                "--updates", str(options.updates), *options_of(options), "--seconds", str(seconds),
            ]  # fmt: skip
            if not ended(command, limit):
                print(f"{arm}: ended after {limit:.0f} s", flush=True)
    finally:
        for server in servers:
            server.stop()


def main() -> None:
    parser = arguments(description=__doc__)
    parser.add_argument("--list", help="GPU,GPU or GPU,GPU=ARM,ARM")
    parser.add_argument("--arm", help="train one arm on running servers")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--urls", nargs="+", help="their addresses")
    parser.add_argument("--places", nargs="+", help="their GPUs")
    parser.add_argument("--trainer-gpu", help="the trainer's")
    options = parser.parse_args()
    if options.arm is None:
        options.out.mkdir(parents=True, exist_ok=True)
        measure(options)
        return
    line = run(options.arm, options.urls, options)
    note(options.out, **line, code=options.code, gpu=options.gpu)
    print(f"{line['arm']}: {len(line['updates'])} updates, {line['updates'][-1]}", flush=True)
    os._exit(0)  # A thread that hangs in a collective must not keep the process.


if __name__ == "__main__":
    main()
