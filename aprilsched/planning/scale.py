"""A trial of a smaller fleet that behaves like the whole one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aprilsched.kernel.core.messages.commands import Plan
from aprilsched.planning.step_times.model import StepTimeModel, share_of_experts

ENOUGH_ROLLOUTS = 256
"""Number of rollouts in a batch whose trial needs no scale and no fewer batches."""
_MOST_GROUPS = 128
"""A larger batch is tried out as an equal share of it on fewer engines, if each batch waits for its
longest response."""
_LEAST_GROUPS = 32
"""Otherwise a batch of more groups and of more than `ENOUGH_ROLLOUTS` rollouts is tried out as an
equal share of it, if necessary on a share of an engine. The same number of rollouts in more batches
scatters less, because fewer of them precede the count."""
_LEAST_RESPONSES = 16
"""Number of the longest responses that a share of an engine has room for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A trial of a smaller fleet that behaves like the whole one.

    Attributes:
        share: groups in a batch of the run, divided by groups in a batch of the trial.
        engines: number of engines in the trial.
        thinner: size of an engine of the run, divided by the size of an engine of the trial.
    """

    share: float
    engines: int
    thinner: float

    @classmethod
    def of_run(cls, command: Plan, max_running: int, *, whole_engines: bool) -> Scale:
        """Return the smallest trial of the run that `command` describes.

        With `whole_engines` only the number of engines shrinks, not their size.
        """
        if whole_engines:
            share = max(1.0, min(command.engines, command.batch_groups // _MOST_GROUPS))
        else:
            size = max(len(group.tokens) for group in command.ended)
            longest = max(int(group.tokens.max()) for group in command.ended)
            share = command.batch_groups / max(_LEAST_GROUPS, ENOUGH_ROLLOUTS / size)
            room = max_running * command.engines / _LEAST_RESPONSES
            if command.kv_tokens is not None:
                least = _LEAST_RESPONSES * (command.prompt_tokens + longest)
                room = min(room, command.kv_tokens / least)
            share = max(1.0, min(share, room))
        engines = max(1, round(command.engines / share))
        thinner = 1.0 if whole_engines else share * engines / command.engines
        return cls(share=share, engines=engines, thinner=thinner)

    def model(self, model: StepTimeModel) -> StepTimeModel:
        """Return the model of an engine of the trial, from the `model` of an engine of the run.

        Its step takes as long as one of the run with `thinner` times the responses, tokens and
        room.
        """
        thinner = self.thinner
        return replace(
            model,
            t1=model.t1 * thinner,
            t2=model.t2 * thinner,
            prefill_rate=model.prefill_rate / thinner,
            prefill_chunk=max(1, round(model.prefill_chunk / thinner)),
            wide_from=round(model.wide_from / thinner),
            fill=model.fill / thinner,
            expert_share=share_of_experts(model.expert_share, thinner),
            tokens_per_step=tuple((b / thinner, tokens) for b, tokens in model.tokens_per_step),
        )
