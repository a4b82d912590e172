"""Batches as tensordicts for TorchRL's losses, transforms and replay buffers.

TorchRL is a library, so the trainer's loop stays the user's own::

    buffer = ReplayBuffer(
        storage=LazyStackStorage(256), sampler=SamplerWithoutReplacement(), batch_size=32
    )
    buffer.append_transform(MCAdvantage(grpo_size=8, prompt_key="group_id"))
    loss = GRPOLoss(TransformersWrapper(model, input_mode="tokens", generate=False, ...))

    with RolloutScheduler(fleet, prompts, reward=score, config=config) as rollouts:
        for batch in rollouts:
            fill(buffer, batch)
            for data in buffer:
                ...  # loss(data), backward, step
            rollouts.update_weights(publisher)

It is written for TorchRL 0.14 and tensordict 0.14.
"""

# TorchRL has no stubs, and its types are not complete.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.extras import extra
from aprilsched.trainers.adapter import trained_advantages
from aprilsched.trainers.corrections import staleness
from aprilsched.trainers.tensors import RaggedTensor, pack
from aprilsched.types import NO_VERSION, Batch, Rollout, Sample

if TYPE_CHECKING:
    from tensordict import LazyStackedTensorDict, TensorDict
    from torchrl.data import ReplayBuffer


def to_tensordicts(batch: Batch) -> LazyStackedTensorDict:
    """The rollouts of a batch as one lazy stack [B] of tensordicts, in the order of the batch.

    Each rollout is a trajectory of one step, as TorchRL takes a whole response for one action. Its
    S tokens, prompt and response, are not padded: TorchRL's losses pad on the left when they read
    them (``data.get(key, as_padded_tensor=True, padding_side="left")``). A rollout has these
    entries:

    - ``("tokens", "full")``: int64 [S].
    - ``("log_probs", "full")``: float32 [S], the log-probability under the version that sampled
      the token; 0 for the prompt and for tokens of an environment.
    - ``("masks", "all_attention_mask")``: bool [S], True.
    - ``("masks", "all_assistant_mask")``: bool [S], the tokens that count in the loss: those of the
      response, without tokens of an environment and without tokens beyond the scheduler's bound on
      staleness.
    - ``("versions", "full")``: int64 [S], the policy version that sampled the token; -1 elsewhere.
    - ``("staleness", "full")``: int64 [S], number of versions from the token's to the batch's; 0
      elsewhere.
    - ``"version"``: int64 [1], the trainer's version when the batch was delivered.
    - ``"group_id"``, ``"rollout_id"``: int64 [1]. The group's id is equal for the rollouts of one
      prompt.
    - ``("next", "reward")``: float32 [1, 1]. It is left out of the whole batch if a rollout has no
      reward.
    - ``"advantage"``: float32 [1, 1], for single samples with rewards only: that of
      :func:`aprilsched.advantages`, or 0 without siblings. For groups a transform computes it.
    - ``("reward_parts", NAME)``: float32 [1, 1] for each name in the batch; NaN where a rollout
      does not have that part.
    - ``("companions", NAME)``: [S, ...] for each companion of the run, as in
      :class:`~aprilsched.trainers.tensors.PaddedTensors`. A sampling mask has two entries of its
      own, ``("companions", "sampling_mask", "values")`` [n] and ``"offsets"``, int64 [S + 1].
    - ``("companions_exact", NAME)``: bool [S], False for response tokens without the row of the
      pass that sampled them.
    - ``"media"``: the tuple of the prompt's :class:`~aprilsched.Media`, if a prompt of the batch
      has any. The tokens have one placeholder for each of them, as the prompt has.
    - ``("next", "done")``, ``("next", "terminated")``, ``("next", "truncated")``: bool [1]. Every
      rollout is done, and truncated if it has the largest allowed number of tokens.

    There is no ``("tokens", "prompt")``. With it, GRPOLoss takes every response token into the
    loss; without it, it follows the mask, with ``masking_strategy="sft"`` (its default) and with
    "rlhf".

    Raises:
        MissingExtra: if tensordict is not installed.
    """
    with extra("torchrl"):
        import tensordict

    untyped: Any = tensordict
    return untyped.lazy_stack(list(_tensordicts(batch)))


def fill(buffer: ReplayBuffer, batch: Batch) -> None:
    """Add the rollouts of a batch to a replay buffer that can hold entries of several lengths.

    The buffer's ``LazyStackStorage`` can. Whole groups are added, so that an ``MCAdvantage`` of the
    buffer completes each of them in this call. Single samples have their advantages already.

    Args:
        buffer: the buffer, whose transforms see the rollouts as :func:`to_tensordicts` makes them.
        batch: a batch of the scheduler.

    Raises:
        ConfigError: if an ``MCAdvantage`` of the buffer has a group size other than the
            scheduler's, with which it would wait forever or split a group in two. Also if its
            `prompt_key` is not "group_id", if a rollout lacks a reward that it needs, or if the
            batch has single samples. Nothing is added then.
        MissingExtra: if torchrl is not installed.
    """
    with extra("torchrl"):
        from torchrl.objectives.llm import MCAdvantage

    rewarded = _rewarded(batch)
    # TorchRL declares the type of any transform. A buffer has a Compose of them.
    untyped: Any = buffer
    for transform in untyped.transform.modules():
        if not isinstance(transform, MCAdvantage):
            continue
        if isinstance(batch.units[0], Sample):
            raise ConfigError(
                "MCAdvantage would wait for the rest of each group, and the batch has single "
                "samples, each with its advantage; leave MCAdvantage out of the buffer."
            )
        # It takes the first rollouts of a group as soon as these are enough.
        takes = {transform.candidate_selection_min_size, transform.candidate_group_size}
        sizes = {len(group.rollouts) for group in batch.groups}
        if len(takes | sizes) > 1:
            raise ConfigError(
                f"MCAdvantage takes {' to '.join(map(str, sorted(takes)))} rollouts for a group, "
                f"and the batch has groups of {', '.join(map(str, sorted(sizes)))}; set grpo_size, "
                "or candidate_group_size and candidate_selection_min_size if it is to choose among "
                "them, to the group_size of the scheduler."
            )
        if transform.prompt_key != "group_id":
            raise ConfigError(
                f"MCAdvantage has prompt_key={transform.prompt_key!r}; give it "
                'prompt_key="group_id", which is equal for the rollouts of one prompt and for no '
                "others."
            )
        if not rewarded and transform.rewards_key == ("next", "reward"):
            raise ConfigError(
                "MCAdvantage needs a reward of each rollout; give reward= to the scheduler, or set "
                '("next", "reward") yourself and call buffer.extend().'
            )
    untyped.extend(to_tensordicts(batch))


def _rewarded(batch: Batch) -> bool:
    return all(rollout.reward is not None for rollout in batch.rollouts)


def _tensordicts(batch: Batch) -> Iterator[TensorDict]:
    import torch
    from tensordict import NonTensorData, TensorDict

    shown = any(unit.prompt.media for unit in batch.units)
    media = [unit.prompt.media for unit in batch.units for _ in unit.rollouts]
    parts = sorted({name for rollout in batch.rollouts for name in rollout.reward_parts})
    rewarded = _rewarded(batch)
    single = rewarded and isinstance(batch.units[0], Sample)
    found = iter(trained_advantages(batch.units) if single else ())
    for rollout, seen in zip(batch.rollouts, media, strict=True):
        one = pack([rollout], no_version=NO_VERSION)
        entries: dict[str, Any] = {
            "tokens": {"full": one.input_ids},
            "log_probs": {"full": one.logprobs},
            "masks": {
                "all_attention_mask": torch.ones_like(one.loss_mask),
                "all_assistant_mask": one.loss_mask,
            },
            "versions": {"full": one.versions},
            "staleness": {"full": staleness(one.versions, version=batch.version)},
            "version": torch.tensor([batch.version]),
            "group_id": one.group_ids,
            "rollout_id": torch.tensor([rollout.rollout_id]),
            "next": _end(rollout),
        }
        if one.companions:
            entries["companions"] = {
                name: {"values": rows.values, "offsets": rows.offsets}
                if isinstance(rows, RaggedTensor)
                else rows
                for name, rows in one.companions.items()
            }
            entries["companions_exact"] = dict(one.companions_exact)
        if shown:
            entries["media"] = NonTensorData(seen)
        if (advantage := next(found, None)) is not None:
            entries["advantage"] = torch.tensor([[advantage]], dtype=torch.float32)
        if rewarded:
            entries["next"]["reward"] = one.rewards[:, None]
        if parts:
            entries["reward_parts"] = {
                name: torch.tensor([[rollout.reward_parts.get(name, np.nan)]]) for name in parts
            }
        yield TensorDict(entries)


def _end(rollout: Rollout) -> dict[str, Any]:
    import torch

    truncated = torch.tensor([rollout.finish_reason == "length"])
    return {"done": torch.tensor([True]), "terminated": ~truncated, "truncated": truncated}
