"""When new groups are started: over-provisioning, refill, the staleness gate, back-pressure."""

from __future__ import annotations

from aprilsched.core.batches import full
from aprilsched.core.commands import FetchPrompts, Launch, StartEpisode
from aprilsched.core.events import EvaluationRequested, PromptsArrived
from aprilsched.core.policies.refill import PoolView
from aprilsched.core.policies.rounds import Rounds
from aprilsched.core.records import GroupRecord
from aprilsched.core.state import SchedulerState
from aprilsched.core.target import refill_now, retarget
from aprilsched.types import Prompt, SamplingParams

__all__ = ["launch", "on_evaluation_requested", "on_prompts_arrived"]


def on_evaluation_requested(state: SchedulerState, event: EvaluationRequested) -> None:
    state.evaluations[event.evaluation_id] = [
        _launch_group(state, prompt, event.group_size, evaluation_id=event.evaluation_id)
        for prompt in event.prompts
    ]


def on_prompts_arrived(state: SchedulerState, event: PromptsArrived) -> None:
    state.fetching = False
    state.stock.extend(event.prompts)
    state.exhausted = state.exhausted or event.last


def launch(state: SchedulerState) -> None:
    """Start the groups that the refill rule asks for, as far as prompts are there."""
    if not state.control.engines or state.given_up or not _may_launch(state):
        return
    count = _count(state)
    missing = count - len(state.stock)
    if missing > 0 and not state.exhausted:
        # Launched only when all are here: a wave must reach the engines together.
        if not state.fetching:
            state.fetching = True
            state.commands.append(FetchPrompts(count=missing))
        return
    for _ in range(min(count, len(state.stock))):
        prompt = state.stock.popleft()
        state.cursor += 1
        _launch_group(state, prompt, state.rules.group_size, evaluation_id=None)


def _may_launch(state: SchedulerState) -> bool:
    if not state.asynchronous:
        return state.wanted
    rules = state.rules
    return len(state.book.ready) < rules.ready_batches * rules.batch_groups


def _count(state: SchedulerState) -> int:
    rules = state.rules
    if not state.target_groups:
        retarget(state)
    count = refill_now(state).launches(_pool_view(state))
    admissible = rules.staleness.admissible(
        batch_groups=rules.batch_groups,
        outstanding=state.book.training,
        delivered_since_update=state.delivered_since_update,
        wanted=state.wanted,
    )
    if admissible is not None and count > admissible:
        # A wave cut short by the gate stays due: the next update admits the rest.
        return admissible
    state.wave_due = state.wave_due and count > len(state.stock) and not state.exhausted
    return count


def _pool_view(state: SchedulerState) -> PoolView:
    rules, book = state.rules, state.book
    return PoolView(
        batch_groups=rules.batch_groups,
        group_size=rules.group_size,
        target_groups=state.target_groups,
        open_groups=book.training - len(book.ready),
        ready_groups=len(book.ready),
        in_flight=book.generating,
        wave_due=state.wave_due,
        batch_open=not full(state),
        asynchronous=state.asynchronous,
    )


def _launch_group(
    state: SchedulerState, prompt: Prompt, size: int, *, evaluation_id: int | None
) -> GroupRecord:
    episodes = state.rules.episodes
    group = state.book.add_group(
        prompt,
        _samplings(prompt, state.rules.sampling, size),
        evaluation_id=evaluation_id,
        episodes=episodes,
        parked=evaluation_id is None and isinstance(state.schedule.refill, Rounds),
    )
    state.expectations.note_limit(max(m.sampling.max_new_tokens for m in group.members))
    state.commands.append(
        Launch(
            group_id=group.group_id,
            rollout_ids=tuple(member.rollout_id for member in group.members),
            prompt=prompt,
            evaluation_id=evaluation_id,
        )
    )
    if episodes:
        state.commands.extend(
            StartEpisode(
                rollout_id=member.rollout_id,
                index=member.index,
                prompt=prompt,
                sampling=member.sampling,
            )
            for member in group.members
        )
    return group


def _samplings(prompt: Prompt, default: SamplingParams, size: int) -> tuple[SamplingParams, ...]:
    sampling = prompt.sampling
    if isinstance(sampling, tuple):
        return sampling
    return (sampling or default,) * size
