"""GRPO with SGLang servers, torch and transformers: a whole trainer to copy from.

    python -m sglang.launch_server --model-path examples/grpo/policy --skip-tokenizer-init \
        --port 30000
    python examples/grpo/train.py --engine http://127.0.0.1:30000 --out runs/grpo

It trains the policy in this folder on the task of countdown.py, evaluates it on problems that are
held out, and draws the curve. A run that was killed continues when it is started again with the
same ``--out``. `make example` does all this on a CPU, where tests/sglang/with_server.py starts the
server.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from countdown import EOS, problems, question, score
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from aprilsched import (
    Batch,
    DiskPublisher,
    Prompt,
    Rollout,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.fronts.blocking import RolloutScheduler
from aprilsched.kernel.store import SqliteStore
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.live import LiveView, RunFacts
from aprilsched.trainers.corrections import (
    clipped_loss,
    importance_weights,
    interpolated_proximal,
    staleness_mask,
)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--engine", action="extend", nargs="+", required=True, help="URL of a server"
    )
    parser.add_argument("--model", default=str(Path(__file__).parent / "policy"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--groups", type=int, default=8, help="prompts in a batch")
    parser.add_argument("--size", type=int, default=8, help="responses of a prompt")
    parser.add_argument("--cap", type=int, default=512, help="tokens of the longest response")
    parser.add_argument("--over-provision", type=float, default=1.0)
    parser.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True,
        help="train on each group as soon as it is complete, or on whole batches",
    )  # fmt: skip
    parser.add_argument("--micro", type=int, default=1, help="groups of a backward pass")
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps for a batch")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--evaluate-every", type=int, default=4, help="updates; 0 for never")
    parser.add_argument("--held-out", type=int, default=96, help="problems of an evaluation")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ends after them")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(given)


# --- the task ------------------------------------------------------------------------------------


def prompts(seed: int, *, held_out: bool = False) -> Iterator[Prompt]:
    for numbers, target in problems(seed, held_out=held_out):
        # A store keeps the metadata as JSON, which has lists and no tuples.
        problem = {"problem": [list(numbers), target]}
        yield Prompt(input_ids=question((numbers, target)), metadata=problem)


def reward(rollout: Rollout, prompt: Prompt) -> float:
    numbers, target = prompt.metadata["problem"]
    return score(rollout.token_ids.tolist(), (tuple(numbers), target))


# --- the loss ------------------------------------------------------------------------------------

CLIP = (0.2, 0.28)
"""How far the ratio to the proximal policy may fall below 1 and rise above it."""


def token_losses(
    logprobs: torch.Tensor,
    sampled: torch.Tensor,
    versions: torch.Tensor,
    advantages: torch.Tensor,
    counts: torch.Tensor,
    *,
    version: int,
    max_staleness: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoupled PPO: docs/off_policy.md says what each of these lines is for.

    Returns the loss of each token and the proximal policy's log-probabilities.
    """
    mask = staleness_mask(versions, counts, version=version, max_staleness=max_staleness)
    proximal = interpolated_proximal(logprobs, sampled, versions, proximal_version=version)
    weights = importance_weights(proximal, sampled, mask, high=2.0)
    losses = clipped_loss(
        logprobs, proximal, advantages, mask, weights=weights, clip_low=CLIP[0], clip_high=CLIP[1]
    )
    return losses, proximal


class Trainer:
    """The policy, its optimizer, and what is saved of them."""

    token_losses = staticmethod(token_losses)

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.updates = 0
        self.first_version = 0
        """The version of the initial weights."""
        self._file = options.out / "trainer.pt"
        if self._file.exists():
            saved = torch.load(self._file, map_location=self.device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.updates, self.first_version = saved["updates"], saved["first_version"]

    @property
    def version(self) -> int:
        """The version of the weights after the last update."""
        return self.first_version + self.updates

    def save(self) -> None:
        """Save the state of this update, as a whole or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "first_version": self.first_version,
        }
        torch.save(state, self._file.with_suffix(".new"))
        os.replace(self._file.with_suffix(".new"), self._file)

    def accumulate(self, part: Batch, share: float) -> dict[str, float]:
        """Add the gradient of some groups of one size to the others, each with this share in the
        mean."""
        x = part.to_torch(packed=True)
        rewards = x.rewards.to(self.device).view(len(part.groups), -1)
        lengths = x.cu_seqlens.diff().to(self.device)
        # A group whose responses are equally good has no advantages, and so no gradient.
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (
            rewards.std(1, keepdim=True) + 1e-4
        )
        advantages = advantages.flatten().repeat_interleave(lengths)
        sampled, versions = x.logprobs.to(self.device), x.versions.to(self.device)
        counts = x.loss_mask.to(self.device)
        with torch.set_grad_enabled(bool(advantages.any())):
            logprobs = self.logprobs(x.input_ids.to(self.device), x.position_ids.to(self.device))
        losses, proximal = self.token_losses(
            logprobs, sampled, versions, advantages, counts,
            version=part.version, max_staleness=self.options.max_staleness,
        )  # fmt: skip
        # The loss of a group is the mean over its tokens.
        of_group = torch.arange(len(part.groups), device=self.device).repeat_interleave(
            lengths.view(len(part.groups), -1).sum(1)
        )
        tokens = counts.new_zeros(len(part.groups), dtype=losses.dtype).index_add(
            0, of_group, counts.to(losses.dtype)
        )
        if logprobs.requires_grad:
            (share * (losses / tokens[of_group]).sum()).backward()
        return self._figures(part, logprobs.detach(), proximal, sampled, versions, counts)

    def _figures(
        self,
        part: Batch,
        logprobs: torch.Tensor,
        proximal: torch.Tensor,
        sampled: torch.Tensor,
        versions: torch.Tensor,
        counts: torch.Tensor,
    ) -> dict[str, float]:
        """Sums over what the part trains on; :meth:`Log.update` makes means of them."""
        staleness = (part.version - versions).clamp(min=0) * counts
        fresh = counts & (versions == part.version)
        ratio = torch.where(counts, (logprobs - sampled).clamp(-20, 20).exp(), 1.0)
        moved = torch.where(counts, (logprobs - proximal).clamp(-20, 20).exp(), 1.0)
        sums = {
            "tokens": counts.sum(),
            "stale": (staleness > 0).sum(),
            "staleness": staleness.sum(),
            "masked": (staleness > self.options.max_staleness).sum(),
            "surprise": -(sampled * counts).sum(),
            "fresh": fresh.sum(),
            "mismatch": ((logprobs - sampled).abs() * fresh).sum(),
            "ratio_squares": ((ratio - 1) ** 2).sum(),
            "truncated": (ratio > 2.0).sum(),
            "clipped": ((moved < 1 - CLIP[0]) | (moved > 1 + CLIP[1])).sum(),
        }
        values = torch.stack([value.double() for value in sums.values()]).tolist()
        rollouts = list(part.rollouts)
        return {
            **dict(zip(sums, values, strict=True)),
            "rollouts": len(rollouts),
            "reward": sum(rollout.reward or 0.0 for rollout in rollouts),
            "length": sum(map(len, rollouts)),
            "capped": sum(rollout.finish_reason == "length" for rollout in rollouts),
            "inexact": sum(not rollout.versions_exact for rollout in rollouts),
        }

    def logprobs(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Log-probability of each token [N] of packed sequences, which the positions separate."""
        output = self.model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False
        )
        following = output.logits[0, :-1].log_softmax(-1)
        found = following.gather(-1, input_ids[1:, None])[:, 0]
        return torch.cat([found.new_zeros(1), found])

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


# --- the run -------------------------------------------------------------------------------------


def train(rollouts: RolloutScheduler, trainer: Trainer, publisher: DiskPublisher, log: Log) -> None:
    options = trainer.options
    per_step = max(1, options.groups // options.steps)
    if not trainer.updates:
        if not rollouts.state.resumed:
            # The servers may have the weights of an earlier run.
            rollouts.update_weights(publisher)
        trainer.first_version = rollouts.version
    if rollouts.version < trainer.version or not rollouts.state.fleet.control.engines:
        # The run was killed between save() and update_weights(), or the servers were restarted.
        rollouts.update_weights(publisher, version=trainer.version)
    while trainer.updates < options.updates and log.seconds < options.seconds:
        if options.evaluate_every and trainer.updates % options.evaluate_every == 0:
            log.evaluation(rollouts, trainer.updates)
        found, waits, done, began = list[dict[str, float]](), 0.0, 0, time.monotonic()
        asked = began
        for part in rollouts.stream() if options.stream else [mixed(rollouts.next_batch())]:
            waits += time.monotonic() - asked
            if part.index < trainer.updates:
                part.acknowledge()  # it was trained on before the run was killed
            else:
                for first in range(0, len(part.units), options.micro):
                    units = part.units[first : first + options.micro]
                    found.append(trainer.accumulate(replace(part, units=units), 1 / per_step))
                    done += len(units)
                    # The first steps are taken while the last responses are generated.
                    if done % per_step < len(units):
                        trainer.step()
            asked = time.monotonic()
        if not found:
            continue
        trainer.updates += 1
        trainer.save()
        trained = time.monotonic()
        rollouts.update_weights(publisher, version=trainer.version)
        log.update(trainer.updates, found, began=began, trained=trained, waits=waits)
    if options.evaluate_every:
        log.evaluation(rollouts, trainer.updates)


def mixed(batch: Batch) -> Batch:
    """A batch in random order: the units that were complete first are the short ones."""
    units = list(batch.units)
    random.Random(batch.index).shuffle(units)
    return replace(batch, units=tuple(units))


class Log:
    """One line for each update and each evaluation, in the run's folder."""

    def __init__(self, options: argparse.Namespace, *, prints: bool) -> None:
        self.path = options.out / "log.jsonl"
        self._problems = list(islice(prompts(10_007, held_out=True), options.held_out))
        self._prints = prints
        self.seconds = max((line["seconds"] for line in self.lines()), default=0.0)
        """Seconds of generation and training, without evaluations."""

    def lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def update(
        self,
        number: int,
        found: list[dict[str, float]],
        *,
        began: float,
        trained: float,
        waits: float,
    ) -> None:
        ended = time.monotonic()
        self.seconds += ended - began
        sums = {key: sum(each[key] for each in found) for key in found[0]}
        tokens, rollouts = sums["tokens"], sums["rollouts"]
        # After the first step the trainer's policy is not the engine's any more.
        first = next((each for each in found if each["fresh"]), None)
        mismatch = None if first is None else first["mismatch"] / first["fresh"]
        self._write(
            update=number,
            reward=sums["reward"] / rollouts,
            tokens=tokens,
            length=sums["length"] / rollouts,
            capped=sums["capped"] / rollouts,
            inexact=sums["inexact"],
            mismatch=mismatch,
            off_policy=sums["stale"] / tokens,
            staleness=sums["staleness"] / tokens,
            masked=sums["masked"] / tokens,
            entropy=sums["surprise"] / tokens,
            ratio_sd=(sums["ratio_squares"] / tokens) ** 0.5,
            truncated=sums["truncated"] / tokens,
            clipped=sums["clipped"] / tokens,
            waits_s=waits,
            trains_s=trained - began - waits,
            refit_s=ended - trained,
        )

    def evaluation(self, rollouts: RolloutScheduler, number: int) -> None:
        """Evaluate the policy on the same engines; the time that this takes does not count."""
        held = list(rollouts.evaluate(self._problems).rollouts)
        self._write(
            update=number,
            held_out=sum(rollout.reward or 0.0 for rollout in held) / len(held),
            length=sum(map(len, held)) / len(held),
        )

    def _write(self, **figures: Any) -> None:
        figures = {"seconds": self.seconds, **figures}
        line = json.dumps(
            {key: round(x, 7) if isinstance(x, float) else x for key, x in figures.items()}
        )
        with self.path.open("a") as file:
            file.write(line + "\n")
        if self._prints:
            print(line, file=sys.stderr, flush=True)

    def draw(self, path: Path) -> None:
        """Held-out reward over time, and the reward of each batch."""
        from aprilsched.observe.report.style import GREY, PALETTE, finish, new_figure, save

        lines = self.lines()
        held = [line for line in lines if "held_out" in line]
        trained = [line for line in lines if "reward" in line]
        figure = new_figure(7, 4)
        axes = figure.subplots()
        axes.plot([x["seconds"] / 60 for x in held], [x["held_out"] for x in held], "o-",
                  color=PALETTE[5], label="held-out problems")  # fmt: skip
        axes.plot([x["seconds"] / 60 for x in trained], [x["reward"] for x in trained],
                  color=GREY, linewidth=1, label="training batches")  # fmt: skip
        axes.set_ylim(0, 1)
        axes.legend()
        finish(axes, title="", x="minutes of generation and training", y="share solved")
        save(figure, path)


def configuration(options: argparse.Namespace) -> SchedulerConfig:
    return SchedulerConfig(
        batch_groups=options.groups,
        group_size=options.size,
        over_provision=options.over_provision,
        max_staleness=options.max_staleness,
        sampling=SamplingParams(max_new_tokens=options.cap, stop_token_ids=(EOS,)),
    )


def main() -> None:
    options = arguments()
    disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options)
    publisher = DiskPublisher(options.out / "weights", save=trainer.model.save_pretrained)
    console = Console(stderr=True)
    facts = RunFacts(title="grpo", batches=options.updates, batch_units=options.groups)
    view = LiveView(console, facts, LiveFigures(batch_units=options.groups))
    log = Log(options, prints=not console.is_terminal)
    with (
        view if console.is_terminal else nullcontext(),
        RolloutScheduler(
            SGLangFleet(options.engine, stream_interval=16),
            prompts(options.seed),
            reward=reward,
            config=configuration(options),
            store=SqliteStore(options.out / "rollouts.sqlite"),
            listeners=view.listeners,
        ) as rollouts,
    ):
        known = rollouts.state.in_flight
        view.start(known.counters, known.ledger, batches=trainer.updates)
        train(rollouts, trainer, publisher, log)
    log.draw(options.out / "curve.png")


if __name__ == "__main__":
    main()
