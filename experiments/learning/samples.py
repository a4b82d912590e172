"""Trains one policy on whole groups and on single samples, with the campaign of this folder.

    PYTHONPATH=.:examples/grpo python experiments/learning/samples.py --out DIRECTORY \
        --work DIRECTORY --cells april-kept:1,samples:1,samples-1.5:1,samples-naive:1

The arguments are those of campaign.py. The trainer differs from that of examples/grpo in two ways,
for all arms alike. A rollout's advantage is ``batch.to_torch().advantage``, its reward minus the
mean reward of its siblings, and is not divided by a standard deviation. The loss is a sum over
tokens, divided by a constant, so that the gradient has no bias by length of its own.

The control, ``samples-naive``, takes the same batches and uses the mean reward of all others of the
group that are scored at delivery. A long response then sees more of them than a short one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import campaign
import torch
import train

from aprilsched import Batch, Prompt, Rollout, SchedulerConfig

LENGTH = 128
"""Tokens of a response by which its loss is divided; about their mean number at the start."""
NAIVE = "samples-naive"


@dataclass(frozen=True, kw_only=True)
class SampleStudy(campaign.Study):
    """A study that remembers the rewards of each group's rollouts that have ended."""

    ended: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])

    def reward(self, rollout: Rollout, prompt: Prompt) -> float:
        found = super().reward(rollout, prompt)
        self.ended.setdefault(rollout.group_id, {})[rollout.rollout_id] = found
        return found


class SampleTrainer(train.Trainer):
    """The trainer of examples/grpo with the advantages of single samples.

    Args:
        options: of examples/grpo.
        ended: the rewards of each group's rollouts that have ended, for the control.
    """

    def __init__(
        self, options: argparse.Namespace, ended: Mapping[int, Mapping[int, float]] | None = None
    ) -> None:
        super().__init__(options)
        self._ended = ended
        self._taken = -1
        self._known: dict[int, dict[int, float]] = {}
        """The rewards that were known when the batch was taken."""

    def accumulate(self, part: Batch, share: float) -> dict[str, float]:
        """Add the gradient of some units, each with this share in the mean."""
        x = part.to_torch(packed=True)
        lengths = x.cu_seqlens.diff().to(self.device)
        own = x.advantage if self._ended is None else self._naive(part)
        advantages = own.to(self.device).repeat_interleave(lengths)
        sampled, versions = x.logprobs.to(self.device), x.versions.to(self.device)
        counts = x.loss_mask.to(self.device)
        with torch.set_grad_enabled(bool(advantages.any())):
            logprobs = self.logprobs(x.input_ids.to(self.device), x.position_ids.to(self.device))
        losses, proximal = self.token_losses(
            logprobs, sampled, versions, advantages, counts,
            version=part.version, max_staleness=self.options.max_staleness,
        )  # fmt: skip
        if logprobs.requires_grad:
            of_unit = LENGTH * len(lengths) / len(part.units)
            (share * losses.sum() / of_unit).backward()
        return self._figures(part, logprobs.detach(), proximal, sampled, versions, counts)

    def _naive(self, part: Batch) -> torch.Tensor:
        """Return the advantages [B] over all others of the group that had ended at delivery."""
        if part.index != self._taken and self._ended is not None:
            self._taken = part.index
            self._known = {group: dict(rewards) for group, rewards in self._ended.items()}
        return torch.tensor([naive_advantage(sample, self._known) for sample in part.samples])


def naive_advantage(sample: Any, known: Mapping[int, Mapping[int, float]]) -> float:
    """Return the reward minus the mean of all others of the group that are known.

    The siblings are among them also after a restart, which forgets the others.
    """
    others = {each.rollout_id: each.reward for each in sample.siblings}
    others |= known.get(sample.group_id, {})
    others.pop(sample.rollout.rollout_id, None)
    return sample.reward - sum(others.values()) / len(others)


def study(groups: int, size: int, micro: int) -> SampleStudy:
    """The policy and the task of examples/grpo, with groups or samples."""
    made: SampleStudy

    def trainer(options: argparse.Namespace, arm: str) -> SampleTrainer:
        made.ended.clear()
        return SampleTrainer(options, made.ended if arm == NAIVE else None)

    def configured(config: SchedulerConfig, arm: str) -> SchedulerConfig:
        if config.delivery == "groups":
            return config
        return replace(config, batch_groups=config.batch_groups // config.group_size)

    def arguments(arm: str) -> list[str]:
        """The trainer counts the units of a batch, which are samples or groups."""
        if not arm.startswith("samples"):
            return []
        return ["--groups", str(groups * size), "--micro", str(micro * size)]

    made = SampleStudy(
        trainer=trainer, prompts=train.prompts, score=campaign.GRPO.score, configured=configured,
        write=campaign.GRPO.write, arguments=arguments,
    )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    for name, default in (("groups", 32), ("size", 8), ("micro", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given, _ = parser.parse_known_args()
    campaign.main(study(given.groups, given.size, given.micro))


if __name__ == "__main__":
    main()
