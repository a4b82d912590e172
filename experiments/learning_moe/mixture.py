"""Trains a larger policy under several schedules: the campaign of experiments/learning with a
mixture of experts, or a dense policy of the same size, on the task of task.py.

    python experiments/learning_moe/mixture.py --kind moe --out DIRECTORY --work DIRECTORY \
        --model POLICY --cells sync:1,april-kept:1,april-kept-own:1 …

The arguments are those of experiments/learning/campaign.py. The trainer of a mixture replays the
routing under which each token was sampled. An arm whose name ends in "-own" has the same rows,
looks at them, and trains with its own routing. One whose name ends in "-half" has half the rate,
and one with "-clip" has PPO's clip around the policy that sampled each token, without weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(ROOT / folder) for folder in ("examples/grpo", "examples/moe")]
sys.path += [str(HERE.parent / "learning")]

import campaign  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import train  # noqa: E402
from policy import LONGEST, with_every_expert, write  # noqa: E402
from replay import replay  # noqa: E402
from task import problems, question, score  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402

from aprilsched import Batch, Prompt, SchedulerConfig  # noqa: E402
from aprilsched.kernel.values.companions import routed_experts  # noqa: E402
from aprilsched.trainers.corrections import staleness_mask  # noqa: E402

PADDED = 49_152
"""Most tokens of a forward pass, with padding."""
EDGES = np.geomspace(1e-3, 10, 49)
"""Between these lies the distance of a ratio's logarithm from 0 in a class of the histograms."""
OLDEST = 8
READY = 4096
"""Problems that are drawn when a cell begins; it takes one to three thousand."""
ROWS = "routed_experts"


class LargerTrainer(train.Trainer):
    """The trainer of examples/grpo in bfloat16, which replays routing and measures ratios.

    Of the first groups of each update, before any step, it keeps how far the ratio of its own
    probability to the engine's is from 1, with replayed and with own routing, by the staleness of
    the token, by whether the engine had kept older keys, and by whether its own routers choose
    other experts than the engine's did.
    """

    def __init__(self, options: argparse.Namespace, *, replays: bool, clips: bool = False) -> None:
        self._states = [options.out / f"trainer-{number}.bin" for number in range(2)]
        self._known = options.out / "trainer.json"
        super().__init__(options)
        with_every_expert(self.model)
        self._replays = replays
        if clips:
            self.token_losses = clipped_around_sampled
        self._rows: torch.Tensor | None = None
        self._path = options.out / "ratios.jsonl"
        self._seconds = {"save": 0.0, "measure": 0.0}
        self._last = -1
        # A parameter without a gradient so far has a state too, so that all states have one size.
        for parameter in self._parameters:
            self.optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        if self._known.exists():
            self._load(json.loads(self._known.read_text()))

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

    def _tensors(self) -> list[torch.Tensor]:
        """Everything that a state consists of, but the number of steps."""
        states = [self.optimizer.state[parameter] for parameter in self._parameters]
        return [*self._parameters, *(s["exp_avg"] for s in states),
                *(s["exp_avg_sq"] for s in states)]  # fmt: skip

    @torch.no_grad()
    def _load(self, known: dict[str, Any]) -> None:
        self.updates = known["updates"]
        path = self._states[self.updates % 2]
        saved = torch.from_file(str(path), shared=True, size=known["size"])
        parts = saved.split([tensor.numel() for tensor in self._tensors()])
        for tensor, part in zip(self._tensors(), parts, strict=True):
            tensor.copy_(part.view_as(tensor))
        for state, steps in zip(self.optimizer.state.values(), known["steps"], strict=True):
            state["step"].fill_(steps)

    def save(self) -> None:
        """Save the state, in turn in two files that stay mapped: a new file of 370 MB for each
        update would take as long as the update of the engine."""
        started_at = time.monotonic()
        flat = torch.cat([tensor.detach().flatten() for tensor in self._tensors()])
        mapped = torch.from_file(str(self._states[self.updates % 2]), shared=True, size=len(flat))
        mapped.copy_(flat)
        steps = [float(state["step"]) for state in self.optimizer.state.values()]
        known = {"updates": self.updates, "size": len(flat), "steps": steps}
        self._known.with_suffix(".new").write_text(json.dumps(known))
        os.replace(self._known.with_suffix(".new"), self._known)
        self._seconds["save"] += time.monotonic() - started_at

    def accumulate(self, part: Batch, share: float) -> dict[str, float]:
        x = part.to_torch(packed=True)
        rows = x.companions.get(ROWS)
        if self._last != self.updates:
            self._last, started_at = self.updates, time.monotonic()
            self._measure(part, x)
            self._seconds["measure"] += time.monotonic() - started_at
        if rows is not None and self._replays:
            self._rows = rows.to(self.device)
        try:
            return super().accumulate(part, share)
        finally:
            self._rows = None

    def logprobs(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self._forwarded(input_ids, position_ids, self._rows)[0]

    def _forwarded(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probability of each token [N] of packed sequences, and, with `rows`, how many layers'
        routers would choose other experts in the pass over the token."""
        starts = (positions == 0).nonzero()[:, 0].tolist()
        ends = [*starts[1:], len(ids)]
        by_length = sorted(zip(starts, ends, strict=True), key=lambda each: each[1] - each[0])
        found = ids.new_zeros(len(ids), dtype=torch.float32)
        flipped = None if rows is None else ids.new_zeros(len(ids))
        while by_length:
            # Padded to the longest: nothing masks the padding, which comes after all tokens.
            width = by_length[-1][1] - by_length[-1][0]
            taken = by_length[-max(1, PADDED // width) :]
            del by_length[-len(taken) :]
            place = torch.cat([torch.arange(a, b, device=ids.device) for a, b in taken])
            padded = pad_sequence([ids[a:b] for a, b in taken], batch_first=True)
            counts = pad_sequence(
                [torch.ones_like(ids[a:b]) for a, b in taken], batch_first=True
            ).bool()  # fmt: skip
            passes: Any = nullcontext([])
            if rows is not None:
                chosen = rows.new_zeros(*padded.shape, *rows.shape[1:])
                chosen[counts] = rows[place]
                passes = replay(self.model, chosen.flatten(0, 1))
            # The CPU's server computes in float32.
            mixed = torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")
            with passes as flips, mixed:
                logits = self.model(input_ids=padded, use_cache=False).logits
            following = logits[:, :-1].float().log_softmax(-1)
            received = following.gather(-1, padded[:, 1:, None])[..., 0]
            received = torch.cat([torch.zeros_like(received[:, :1]), received], 1)
            found = found.index_put((place,), received[counts])
            if flipped is not None:
                flipped[place] = torch.stack(flips).sum(0).view(padded.shape)[counts]
        return found, flipped

    @torch.no_grad()
    def _measure(self, part: Batch, x: Any) -> None:
        """Add a line of histograms to ratios.jsonl."""
        ids, positions = x.input_ids.to(self.device), x.position_ids.to(self.device)
        counts = x.loss_mask
        # A token has stale keys if its rollout kept them and it was sampled after a refit.
        lengths = x.cu_seqlens.diff()
        first = torch.tensor([
            rollout.segments[0].version if rollout.stale_keys else part.version
            for rollout in part.rollouts
        ])  # fmt: skip
        kept = x.versions > first.repeat_interleave(lengths)
        ages = (part.version - x.versions).clamp(0, OLDEST)
        flipped = torch.zeros_like(ages)
        distances = {"own": self._forwarded(ids, positions, None)[0]}
        if ROWS in x.companions:
            counts = counts & x.companions_exact[ROWS]
            replayed, layers = self._forwarded(ids, positions, x.companions[ROWS].to(self.device))
            assert layers is not None
            distances["replayed"] = replayed
            # The pass over a token sampled the next one.
            flipped = torch.cat([flipped[:1], layers.cpu()[:-1]])
        line: dict[str, Any] = {
            "update": self.updates,
            "inexact": int((x.loss_mask & ~counts).sum()),
        }
        for name, logprobs in distances.items():
            off = (logprobs.cpu() - x.logprobs)[counts].double().numpy()
            classes = np.digitize(np.abs(off), EDGES)
            keys = np.stack([ages[counts], kept[counts], flipped[counts] > 0, classes])
            kinds, number = np.unique(keys, axis=1, return_counts=True)
            line[name] = np.concatenate([kinds, number[None]]).T.tolist()
        layers = flipped[counts].double()
        line["flips"] = [
            [int(age), int(key), int(same.sum()), float(layers[same].sum())]
            for age in range(OLDEST + 1) for key in (0, 1)
            if (same := (ages[counts] == age) & (kept[counts] == key)).any()
        ]  # fmt: skip
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def measured(self) -> dict[str, Any]:
        """The histograms of all updates together: [staleness, stale keys, routed otherwise, class,
        tokens] for each routing, and [staleness, stale keys, tokens, layers routed otherwise]."""
        lines = [json.loads(line) for line in self._path.read_text().splitlines()]
        # A batch that was trained on again after a kill was measured twice.
        lines = list({line["update"]: line for line in lines}.values())
        found: dict[str, Any] = {"inexact_rows": sum(line["inexact"] for line in lines)}
        for name, values, keys in (("own", 1, 4), ("replayed", 1, 4), ("flips", 2, 2)):
            sums: dict[tuple[int, ...], list[float]] = {}
            for line in lines:
                for row in line.get(name, ()):
                    into = sums.setdefault(tuple(row[:keys]), [0] * values)
                    into[:] = [a + b for a, b in zip(into, row[keys:], strict=True)]
            found[name] = [[*key, *each] for key, each in sorted(sums.items())]
        return {"measured": found, "trainer_s": self._seconds}


def clipped_around_sampled(
    logprobs: torch.Tensor,
    sampled: torch.Tensor,
    versions: torch.Tensor,
    advantages: torch.Tensor,
    counts: torch.Tensor,
    **given: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's loss of each token, however old it is: the trainer's decoupled one, as if every token
    were of the version that the step begins with."""
    claimed, counts = (
        torch.full_like(versions, given["version"]),
        staleness_mask(versions, counts, **given),
    )
    return train.token_losses(logprobs, sampled, claimed, advantages, counts, **given)


def prompts(seed: int, *, held_out: bool = False) -> Iterator[Prompt]:
    source = problems(seed, held_out=held_out)
    # Drawn before the clock runs: on a GPU whoever asks for them waits for the trainer's kernels.
    ready = list(islice(source, READY if torch.cuda.is_available() and not held_out else 0))
    return (
        Prompt(input_ids=question(problem), metadata={"problem": [list(problem[0]), problem[1]]})
        for problem in chain(ready, source)
    )


def study(kind: str, rate: float) -> campaign.Study:
    """The study of one kind of policy."""
    from policy import CONFIGS

    config = CONFIGS[kind]
    mixed = config.model_type == "qwen3_moe"

    def configured(given: SchedulerConfig, arm: str) -> SchedulerConfig:
        if not mixed:
            return given
        rows = routed_experts(layers=config.num_hidden_layers, experts=config.num_experts,
                              per_token=config.num_experts_per_tok)  # fmt: skip
        return replace(given, companions=(rows,))

    return campaign.Study(
        trainer=lambda options, arm: LargerTrainer(
            options, replays=not arm.endswith(campaign.OWN), clips=arm.endswith("-clip")
        ),
        prompts=prompts,
        score=score,
        configured=configured,
        write=write,
        measured=LargerTrainer.measured,
        arguments=lambda arm: ("--lr", str(rate / 2 if arm.endswith("-half") else rate)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--kind", default="moe")
    parser.add_argument("--lr", type=float, default=1.5e-4)
    given, rest = parser.parse_known_args()
    # What is given later counts. Without this a stretch ran with the campaign's own limit.
    sys.argv[1:] = ["--cap", str(LONGEST), *rest]
    if given.kind != "dense":
        sys.argv.append("--server-flag=--enable-return-routed-experts")
    campaign.main(study(given.kind, given.lr))


if __name__ == "__main__":
    main()
