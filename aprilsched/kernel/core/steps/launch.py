"""Starts new groups: over-provisioning, the refill rule, the staleness gate and back-pressure.

Evaluations start here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.policies.refill import PoolView
from aprilsched.kernel.core.policies.staleness import Staleness
from aprilsched.kernel.core.state.assembly import launched
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import GroupRecord
from aprilsched.kernel.core.state.state import Plan, PromptSupply, SchedulerState
from aprilsched.kernel.core.steps.batch import awaits_scores, full
from aprilsched.kernel.core.steps.drop import drop, refuse
from aprilsched.kernel.core.steps.target import retarget
from aprilsched.kernel.core.steps.turns import start_episode
from aprilsched.types import Prompt, RefusedPrompt, SamplingParams


def on_evaluation_requested(state: SchedulerState, event: ev.EvaluationRequested) -> None:
    state.out.tell(
        facts.EvaluationRequested(
            evaluation_id=event.evaluation_id,
            prompts=len(event.prompts),
            group_size=event.group_size,
        )
    )
    state.evaluations.waiting.append(event)


def on_evaluation_withdrawn(state: SchedulerState, event: ev.EvaluationWithdrawn) -> None:
    state.out.tell(facts.EvaluationWithdrawn(evaluation_id=event.evaluation_id))
    state.evaluations.waiting = [
        waiting
        for waiting in state.evaluations.waiting
        if waiting.evaluation_id != event.evaluation_id
    ]
    for group in state.evaluations.running.pop(event.evaluation_id, ()):
        if group.dropped is None:
            drop(state, group, Reason.WITHDRAWN, "the call of evaluate() was cancelled")


def begin_evaluations(state: SchedulerState) -> None:
    """Start the requested evaluations, unless an update is under way.

    The update waits for earlier evaluations, and later ones use its version. If evaluations could
    start before the engines are paused, a trainer that evaluates often would keep an update waiting
    forever.
    """
    if state.weights.update is not None:
        return
    waiting, state.evaluations.waiting = state.evaluations.waiting, []
    for event in waiting:
        state.evaluations.running[event.evaluation_id] = [
            _launch_group(
                state,
                prompt,
                prompt.group_size or event.group_size,
                evaluation_id=event.evaluation_id,
            )
            for prompt in event.prompts
        ]


def launch_again(state: SchedulerState, group: GroupRecord) -> None:
    """Generate the prompt of a dropped evaluation group again, in its place."""
    if group.evaluation_id is None or group.evaluation_id not in state.evaluations.running:
        return
    groups = state.evaluations.running[group.evaluation_id]
    groups[groups.index(group)] = _launch_group(
        state, group.prompt, group.size + group.lost, evaluation_id=group.evaluation_id
    )


def begin_again(state: SchedulerState, group: GroupRecord, cause: str) -> None:
    """Discard the tokens of a group, and generate its prompt again.

    The new group inherits the age of the old one, so a rule that defers groups defers or runs it as
    it would have done with the old one.
    """
    drop(state, group, Reason.BEGUN_AGAIN, cause)
    size = group.size + group.lost
    _launch_group(state, group.prompt, size, evaluation_id=None, before=group)


def on_prompts_arrived(state: SchedulerState, event: ev.PromptsArrived) -> None:
    state.out.tell(
        facts.PromptsReceived(
            prompts=len(event.prompts),
            last=event.last,
            partial=event.partial,
            asked=_asked(event.prompts) if state.tells_tokens else None,
        )
    )
    state.prompts.fetching = state.prompts.dry = event.partial
    state.prompts.stock.extend(event.prompts)
    state.prompts.exhausted = state.prompts.exhausted or event.last


def launch(state: SchedulerState) -> None:
    """Start the groups that the refill rule requests, as far as prompts are available."""
    if not state.fleet.control.engines or state.given_up or not _may_launch(state):
        return
    count = _count(state)
    # Most events start nothing, and the available prompts are counted one by one.
    missing = state.prompts.missing(count) if count else 0
    if missing:
        if not state.prompts.fetching:
            state.prompts.fetching = True
            state.out.announce(facts.PromptsRequested(count=missing))
        if state.prompts.waits:
            return
    while state.prompts.stock and not state.given_up:
        prompt = state.prompts.stock[0]
        if isinstance(prompt, Prompt):
            if not count:
                return
            count -= 1
        state.prompts.stock.popleft()
        state.prompts.cursor += 1
        if isinstance(prompt, Prompt):
            size = prompt.group_size or state.config.group_size
            state.prompts.note_size(size, state.config.group_size)
            _launch_group(state, prompt, size, evaluation_id=None)
        else:
            refuse(state, prompt.cause)


def _may_launch(state: SchedulerState) -> bool:
    collecting = state.delivery.collecting
    if not (state.asynchronous or (collecting and awaits_scores(state))):
        return collecting
    return not state.stop.enough(state.in_flight.ready, batches=state.config.ready_batches)


def _count(state: SchedulerState) -> int:
    if not state.plan.target_groups:
        retarget(state)
    view = _pool_view(state)
    count = max(0, launches := state.plan.schedule.refill.launches(view))
    if not count and _starves(state):
        name = state.plan.schedule.refill.name
        error = ConfigError(
            f"launches() of refill {name!r} must be at least 1 while the trainer waits and nothing "
            f"generates, got {launches}."
        )
        state.out.commands.append(do.GiveUp(error=error))
    if count and state.stop.learns:
        # The number of groups per batch can be estimated better now than at the start of the batch.
        retarget(state)
        view = _pool_view(state)
        count = state.plan.schedule.refill.launches(view)
    return admitted(
        state.plan,
        state.prompts,
        state.staleness,
        view,
        count,
        # An offered batch counts as taken.
        batches_since_update=state.delivery.batches_since_update
        + (state.delivery.offered_groups > 0),
        wanted=state.delivery.collecting,
    )


def _starves(state: SchedulerState) -> bool:
    """Return whether the trainer waits for more than all that is in flight, which is accepted."""
    ready, prompts = state.in_flight.ready, state.prompts
    return (
        state.delivery.trainer_waits
        and state.delivery.offer is None
        and state.in_flight.training_rollouts == ready.accepted.samples
        and not state.stop.enough(ready)
        and not (prompts.exhausted and not prompts.stock)
    )


def admitted(
    plan: Plan,
    prompts: PromptSupply,
    staleness: Staleness,
    view: PoolView,
    count: int,
    *,
    batches_since_update: int,
    wanted: bool,
) -> int:
    """Return how many of the `count` requested groups the staleness gate admits."""
    if count:
        admissible = staleness.admissible(
            batch_groups=view.batch_groups,
            outstanding=view.open_groups + view.ready_groups,
            batches_since_update=batches_since_update,
            wanted=wanted,
        )
        if admissible is not None and count > admissible:
            # A wave that the gate cuts short stays pending: the next update admits the rest.
            return admissible
    plan.wave_due = plan.wave_due and count > prompts.usable and not prompts.exhausted
    return count


def _pool_view(state: SchedulerState) -> PoolView:
    in_flight = state.in_flight
    return PoolView(
        batch_groups=state.batch_groups,
        group_size=state.prompts.usual_size,
        target_groups=state.plan.target_groups,
        open_groups=state.open_groups,
        ready_groups=state.ready_groups,
        in_flight=in_flight.generating,
        put_aside=_put_aside(state),
        wave_due=state.plan.wave_due,
        batch_open=not full(state),
        asynchronous=state.asynchronous or awaits_scores(state),
    )


def _put_aside(state: SchedulerState) -> int:
    if not (state.plan.wave_due and state.plan.schedule.refill.defers):
        return 0
    groups = state.in_flight.training_groups()
    return sum(
        g.first_run is not None and g.first_run < state.batch_number for g in groups if g.unfinished
    )


def _launch_group(
    state: SchedulerState,
    prompt: Prompt,
    size: int,
    *,
    evaluation_id: int | None,
    before: GroupRecord | None = None,
) -> GroupRecord:
    """Launch a group; `before` is the group of the same prompt that it replaces."""
    episodes = state.caller.episodes
    group = state.in_flight.add_group(
        prompt,
        _samplings(prompt, state.config.sampling, size),
        evaluation_id=evaluation_id,
        episodes=episodes,
        opened=state.batch_number if before is None else before.opened,
        size=size,
        deferred=evaluation_id is None and state.plan.schedule.refill.defers,
    )
    if before is not None:
        group.again, group.first_run = before.group_id, before.first_run
        state.in_flight.journal.change_group(group)
    state.expectations.note_limit(max(m.sampling.max_new_tokens for m in group.members))
    state.expectations.ignores_ends = all(m.sampling.ignore_eos for m in group.members)
    state.out.tell(launched(group, tokens=state.tells_tokens))
    for member in group.members if episodes else ():
        start_episode(state.out, member)
    return group


def _asked(prompts: Iterable[Prompt | RefusedPrompt]) -> list[dict[str, Any]]:
    return [
        {"key": prompt.key, "input_ids": prompt.input_ids.tolist()}
        | ({} if prompt.group_size is None else {"group_size": prompt.group_size})
        for prompt in prompts
        if isinstance(prompt, Prompt)
    ]


def _samplings(prompt: Prompt, default: SamplingParams, count: int) -> tuple[SamplingParams, ...]:
    """Return the sampling parameters of `count` rollouts.

    A prompt with separate parameters for each rollout may yield fewer, because none can be invented
    for further rollouts.
    """
    sampling = prompt.sampling
    if isinstance(sampling, tuple):
        return sampling[:count]
    return (sampling or default,) * count
