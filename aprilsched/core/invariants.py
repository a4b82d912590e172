"""What must hold after every event. Cheap enough for every test, too dear for production.

What does not hold is put into words only then: the words cost more than the looking.
"""

from __future__ import annotations

from aprilsched.core.control import Mode
from aprilsched.core.lifecycle import GENERATING, TERMINAL, State
from aprilsched.core.records import GroupRecord, RequestRecord, RolloutRecord
from aprilsched.core.state import SchedulerState
from aprilsched.errors import InvariantViolation

__all__ = ["check"]

_OPEN = frozenset({State.RUNNING, State.HELD, State.RETURNING})


def check(state: SchedulerState) -> None:
    """Raises InvariantViolation naming what does not hold."""
    _conservation(state)
    for group in state.book.groups.values():
        _group(state, group)
    _counts(state)
    for rollout in state.book.rollouts.values():
        _rollout(state, rollout)
    _queue(state)
    _batches(state)
    _attempts(state)
    _engines(state)


def _conservation(state: SchedulerState) -> None:
    book = state.book
    known = book.counters.delivered + book.ledger.total + len(book.rollouts)
    if book.counters.launched != known:
        raise InvariantViolation(
            f"{book.counters.launched} rollouts launched, but {book.counters.delivered} delivered, "
            f"{book.ledger.total} in the ledger and {len(book.rollouts)} in flight"
        )


def _group(state: SchedulerState, group: GroupRecord) -> None:
    name = f"group {group.group_id}"
    generating = sum(member.state in GENERATING for member in group.members)
    if group.unfinished != generating:
        raise InvariantViolation(f"{name} counts {group.unfinished} unfinished")
    unscored = sum(member.state is not State.DONE for member in group.members)
    if group.unscored != unscored:
        raise InvariantViolation(f"{name} counts {group.unscored} unscored")
    listed = group in state.book.ready
    if listed != (group.complete and group.evaluation_id is None and not group.offered):
        raise InvariantViolation(f"{name} is {'' if listed else 'not '}among the ready")
    torn = [m for m in group.members if m.state in TERMINAL]
    if torn:
        raise InvariantViolation(f"{name} is torn: {len(torn)} of its rollouts have left")


def _counts(state: SchedulerState) -> None:
    book = state.book
    groups = list(book.training_groups())
    generating = sum(group.unfinished for group in groups)
    called_back = sum(request.aborting for request in book.open_requests())
    for what, counted, there in (
        ("training groups", book.training, len(groups)),
        ("generating rollouts", book.generating, generating),
        ("ready rollouts", book.ready.samples, sum(len(g.members) for g in book.ready)),
        ("ready tokens", book.ready.tokens, sum(g.tokens for g in book.ready)),
        ("attempts called back", book.called_back, called_back),
        ("tokens with engines", book.held_tokens, sum(map(_context, book.open_requests()))),
    ):
        if counted != there:
            raise InvariantViolation(f"{what} are booked as {counted} and are {there}")


def _batches(state: SchedulerState) -> None:
    waiting = [batch.index for batch in state.redelivery]
    unknown = [index for index in waiting if index not in state.unacknowledged]
    if unknown:
        raise InvariantViolation(f"batches {unknown} wait to be delivered again and are not kept")
    offered = [group for group in state.book.groups.values() if group.offered]
    if set(offered) != set(() if state.offer is None else state.offer.groups):
        raise InvariantViolation(
            f"{len(offered)} groups in flight are marked as offered, and {state.offered_groups} are"
        )
    if state.offer is not None and state.update is not None:
        raise InvariantViolation("a batch is offered while a version is on its way")
    for batch in state.unacknowledged.values():
        if not all(group.members for group in batch.groups):
            raise InvariantViolation(
                f"batch {batch.index} is not acknowledged and its groups are empty"
            )


def _context(request: RequestRecord) -> int:
    return len(request.rollout.prompt_ids) + len(request.rollout.log)


def _queue(state: SchedulerState) -> None:
    queue = state.book.queue
    places = list(queue.places())
    if len(places) != len(queue):
        raise InvariantViolation(f"{len(queue)} requests wait in {len(places)} places")
    for training in (True, False):
        waiting = [p for p in places if training or p[1].rollout.group.evaluation_id is not None]
        first = queue.first(training=training)
        expected = min(waiting, key=lambda p: (p[0], p[1].request_id), default=(None, None))[1]
        if first is not expected:
            raise InvariantViolation("the queue does not begin with its first request")


def _rollout(state: SchedulerState, rollout: RolloutRecord) -> None:
    name = f"rollout {rollout.rollout_id}"
    log, request = rollout.log, rollout.request
    if log.covered != len(log):
        raise InvariantViolation(f"{name}: versions cover {log.covered} of {len(log)} tokens")
    if rollout.undecided is not None and rollout.state is not State.THINKING:
        raise InvariantViolation(f"{name} is {rollout.state} and its last turn is undecided")
    if rollout.state in _OPEN:
        if request is None or not request.open:
            raise InvariantViolation(f"{name} is {rollout.state} with no attempt")
    elif request is not None:
        if request.open:
            raise InvariantViolation(f"{name} is {rollout.state} with an open attempt")
        queued = request.request_id in state.book.queue
        waits = rollout.state is State.QUEUED and rollout.due
        if queued != waits:
            raise InvariantViolation(f"{name}: the queue is wrong about it")


def _attempts(state: SchedulerState) -> None:
    counted: dict[str, int] = {}
    for request in state.book.open_requests():
        counted[request.engine] = counted.get(request.engine, 0) + 1
        if request.engine not in state.control.engines:
            raise InvariantViolation(
                f"request {request.request_id} is open on {request.engine}, which is lost"
            )
    booked = {engine: count for engine, count in state.book.open.items() if count}
    if booked != counted:
        raise InvariantViolation(f"open attempts are booked as {booked} and are {counted}")


def _engines(state: SchedulerState) -> None:
    if state.tracker.engines.keys() != state.control.engines.keys():
        raise InvariantViolation(
            "the tracker and the fleet control disagree about which engines there are"
        )
    for control in state.control.engines.values():
        version = state.tracker.engines[control.name]
        if version != state.tracker.trainer:
            raise InvariantViolation(
                f"{control.name} is in use with version {version}, not {state.tracker.trainer}"
            )
        if control.mode is Mode.REFITTING and state.update is None:
            raise InvariantViolation(f"{control.name} is refitting without an update")
        if control.mode is Mode.RUNNING and control.released:
            raise InvariantViolation(f"{control.name} runs without its {set(control.released)}")
    both = state.control.engines.keys() & state.control.standby.keys()
    if both:
        raise InvariantViolation(f"{both} are in use and on standby")
