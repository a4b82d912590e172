"""Invariants that hold after every event. Tests check them; production cannot afford it.

Each function yields a message per violation. Messages are formatted only then, because they cost
more than the checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.policies.placement import EngineLoads
from aprilsched.kernel.core.state.engine_control import Mode
from aprilsched.kernel.core.state.engine_index import Kind
from aprilsched.kernel.core.state.records import (
    GENERATING,
    TERMINAL,
    GroupRecord,
    RequestRecord,
    RolloutRecord,
    State,
)
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.state.token_log import common, joined

_OPEN = frozenset({State.RUNNING, State.HELD, State.RETURNING})


def check(state: SchedulerState) -> None:
    """Raise InvariantViolation if an invariant does not hold."""
    for broken in _broken(state):
        raise InvariantViolation(broken)


def _broken(state: SchedulerState) -> Iterator[str]:
    yield from _conservation(state)
    for group in state.in_flight.groups.values():
        yield from _group(state, group)
    yield from _counts(state)
    for rollout in state.in_flight.rollouts.values():
        yield from _rollout(state, rollout)
    for broken in (_queue, _batches, _attempts, _engines, _indexes):
        yield from broken(state)


def _conservation(state: SchedulerState) -> Iterator[str]:
    in_flight = state.in_flight
    known = in_flight.counters.delivered + in_flight.ledger.total + len(in_flight.rollouts)
    if in_flight.counters.launched != known:
        yield (
            f"{in_flight.counters.launched} rollouts launched, but "
            f"{in_flight.counters.delivered} delivered, {in_flight.ledger.total} in the "
            f"ledger and {len(in_flight.rollouts)} in flight"
        )


def _group(state: SchedulerState, group: GroupRecord) -> Iterator[str]:
    name = f"group {group.group_id}"
    generating = sum(member.state in GENERATING for member in group.members)
    if group.unfinished != generating:
        yield f"{name} counts {group.unfinished} unfinished"
    listed = group in state.in_flight.ready
    splits = state.in_flight.splits(group)
    whole = group.complete and group.evaluation_id is None and not group.offered
    if listed != (whole and not splits):
        yield f"{name} is {'' if listed else 'not '}among the ready"
    own_size = group.prompt.group_size
    if own_size is not None and group.source is None and group.size + group.lost != own_size:
        yield f"{name} delivers {group.size} of {own_size} members and has lost {group.lost}"
    there = {member.rollout_id for member in group.members}
    if len(there | group.ended.keys()) != group.size:
        yield f"{name} of {group.size} has {len(group.members)} members"
    samples = [g for g in state.in_flight.groups.values() if splits and g.source == group.group_id]
    if group.samples != len(samples):
        yield f"{name} counts {group.samples} samples in flight, and {len(samples)} are"
    if splits and not group.members and not samples:
        yield f"{name} has nothing in flight"
    for member in group.members if splits else ():
        first = [e for e in group.ended.values() if e.rollout_id != member.rollout_id]
        first = first[: state.in_flight.siblings]
        known = len(first) == state.in_flight.siblings or group.complete
        if member.state is State.DONE and known and all(each.scored for each in first):
            yield f"{name} keeps rollout {member.rollout_id}, whose siblings are known"
    left = [m for m in group.members if m.state in TERMINAL]
    if left:
        yield f"{name} is in flight and {len(left)} of its rollouts have left"


def _counts(state: SchedulerState) -> Iterator[str]:
    in_flight = state.in_flight
    groups = list(in_flight.training_groups())
    generating = sum(group.unfinished for group in groups)
    called_back = sum(request.aborting for request in in_flight.open_requests())
    for what, counted, there in (
        ("training groups", in_flight.training, len(groups)),
        ("rollouts of training", in_flight.training_rollouts, sum(len(g.members) for g in groups)),
        ("generating rollouts", in_flight.generating, generating),
        ("ready rollouts", in_flight.ready.samples, sum(len(g.members) for g in in_flight.ready)),
        ("ready tokens", in_flight.ready.tokens, sum(g.tokens for g in in_flight.ready)),
        ("accepted", len(in_flight.ready.accepted), sum(bool(g.accepted) for g in in_flight.ready)),
        (
            "accepted tokens",
            in_flight.ready.accepted.tokens,
            sum(g.tokens for g in in_flight.ready if g.accepted),
        ),
        ("attempts called back", in_flight.called_back, called_back),
        (
            "tokens with each engine",
            {name: held for name, held in in_flight.held_on.items() if held},
            _held_on(state),
        ),
        (
            "tokens of sessions at their tools",
            [pool.tokens for pool in state.fleet.session_kv.pools.values()],
            [sum(pool.contexts.values()) for pool in state.fleet.session_kv.pools.values()],
        ),
    ):
        if counted != there:
            yield f"{what} are counted as {counted} and are {there}"


def _held_on(state: SchedulerState) -> dict[str, int]:
    held: dict[str, int] = {}
    for request in state.in_flight.open_requests():
        context = request.rollout.context_tokens + request.media_tokens
        held[request.engine] = held.get(request.engine, 0) + context
    return held


def _batches(state: SchedulerState) -> Iterator[str]:
    waiting = [batch.index for batch in state.delivery.batches_again]
    unknown = [index for index in waiting if index not in state.delivery.unacknowledged]
    if unknown:
        yield f"batches {unknown} wait to be delivered again and are not kept"
    offered = [group for group in state.in_flight.groups.values() if group.offered]
    delivery = state.delivery
    if set(offered) != set(() if delivery.offer is None else delivery.offer.groups):
        count = delivery.offered_groups
        yield f"{len(offered)} groups in flight are marked as offered, and {count} are"
    if state.weights.update is not None and (delivery.offer or delivery.fresh.taken):
        yield ("a batch is offered while a version is on its way")
    ready = {group.group_id for group in (*state.in_flight.ready, *offered)}
    if state.delivery.fresh.taken.keys() - ready:
        yield ("the trainer has groups of a batch that are not ready any more")
    for batch in state.delivery.unacknowledged.values():
        if not all(group.members for group in batch.groups):
            yield f"batch {batch.index} is not acknowledged and its groups are empty"


def _queue(state: SchedulerState) -> Iterator[str]:
    queue = state.in_flight.queue
    places = list(queue.places())
    if len(places) != len(queue):
        yield f"{len(queue)} requests wait in {len(places)} places"
    for version in queue.versions():
        if queue.count_of(version) != len(queue.of_version(version)):
            yield f"{queue.count_of(version)} requests wait for {version}"
    for training in (True, False):
        waiting = [p for p in places if training or p[1].rollout.group.evaluation_id is not None]
        first = queue.first(training=training)
        expected = min(waiting, key=lambda p: (p[0], p[1].request_id), default=(None, None))[1]
        if first is not expected:
            yield ("the queue does not begin with its first request")


def _rollout(state: SchedulerState, rollout: RolloutRecord) -> Iterator[str]:
    name = f"rollout {rollout.rollout_id}"
    log, request = rollout.log, rollout.request
    if log.covered != log.size:
        yield f"{name}: versions cover {log.covered} of {log.size} tokens"
    yield from _branches(rollout, name)
    if rollout.undecided is not None and rollout.state is not State.THINKING:
        yield f"{name} is {rollout.state} and its last turn is undecided"
    if rollout.state in _OPEN:
        if request is None or not request.open:
            yield f"{name} is {rollout.state} with no attempt"
    elif request is not None:
        if request.open:
            yield f"{name} is {rollout.state} with an open attempt"
        queued = request.request_id in state.in_flight.queue
        waits = rollout.state is State.QUEUED and rollout.eligible
        if queued != waits:
            yield f"{name}: the queue is wrong about it"


def _branches(rollout: RolloutRecord, name: str) -> Iterator[str]:
    size = rollout.log.size
    paths = [branch.path for branch in rollout.all_branches()]
    if joined(paths) != (((0, size),) if size else ()):
        yield f"{name}: its branches have {joined(paths)} of {size} tokens"
    for number, path in enumerate(paths):
        empty = any(start >= end for start, end in path)
        if empty or any(end > start for (_, end), (start, _) in pairwise(path)):
            yield f"{name}: branch {number} has the parts {path}"
        for other in paths[:number]:
            same = common(path, other)
            together = sum([b - a for a, b in joined([path, other])])
            if together + same != sum([b - a for a, b in (*path, *other)]):
                yield f"{name}: branch {number} has {path}, and another one {other}"
    for start, end, _, branch in rollout.answered:
        within = branch < len(paths) and any(a <= start and end <= b for a, b in paths[branch])
        if start < end and not within:
            yield f"{name}: an answered turn of branch {branch} is not on its path"


def _attempts(state: SchedulerState) -> Iterator[str]:
    counted: dict[str, int] = {}
    for request in state.in_flight.open_requests():
        counted[request.engine] = counted.get(request.engine, 0) + 1
        if request.engine not in state.fleet.control.engines:
            yield f"request {request.request_id} is open on {request.engine}, which is lost"
        if state.rolling and not request.crossed:
            yield from _one_version(state, request)
    noted = {engine: count for engine, count in state.in_flight.open.items() if count}
    if noted != counted:
        yield f"open attempts are noted as {noted} and are {counted}"


def _one_version(state: SchedulerState, request: RequestRecord) -> Iterator[str]:
    """Check that each request runs only on an engine of the version of its rollout's tokens."""
    has = state.weights.versions.engines[request.engine]
    if request.version != has:
        yield (
            f"request {request.request_id} is pinned to version {request.version} and runs on "
            f"{request.engine}, which has {has}"
        )
    if state.pinned_version(request) not in (None, has):
        yield (
            f"rollout {request.rollout.rollout_id} has tokens of other versions than {has}, which "
            f"{request.engine} has"
        )


def _indexes(state: SchedulerState) -> Iterator[str]:
    """Check incrementally maintained indexes against the data that they derive from."""
    in_flight, versions, index = state.in_flight, state.weights.versions, state.fleet.index
    must, groups = state.delivery.must_deliver, in_flight.groups
    due = [group for group in groups.values() if must.has(group, versions.trainer)]
    waiting = {group.group_id for group in due if not group.accepted}
    index.refresh()
    index.leave_out(set())
    kinds: dict[Kind, set[str]] = {}
    accepting: dict[str, float] = {}
    busy: dict[str, int] = {}
    requests: dict[tuple[int, bool], int] = {}
    for name, control in state.fleet.control.engines.items():
        opened = in_flight.open[name]
        kind = Kind(versions.engines[name], control.catching_up, control.mode, not opened)
        kinds.setdefault(kind, set()).add(name)
        requests[kind[:2]] = requests.get(kind[:2], 0) + opened
        if kind.mode is Mode.RUNNING and not kind.leaves:
            accepting[name] = opened
        if kind.generates:
            busy[name] = opened
    for what, kept, there in (
        ("growing", must.grows(groups, versions.trainer), any(not g.complete for g in due)),
        ("due", must.waits(groups, versions.trainer), bool(waiting)),
        ("waiting", {g.group_id for g in must.waiting(groups, versions.trainer)}, waiting),
        ("versions", set(versions.present), set(versions.engines.values())),
        ("engines", {kind: set(names) for kind, names in index.kinds.items()}, kinds),
        ("requests", dict(index.requests), {key: n for key, n in requests.items() if n}),
        ("accepting", _loads(index.accepting(v) for v in versions.present), accepting),
        ("busy", _loads(index.busy(v) for v in versions.present), busy),
    ):
        if kept != there:
            yield f"{what} is kept as {kept} and is {there}"


def _loads(engines: Iterable[EngineLoads]) -> dict[str, float]:
    return {name: load for each in engines for name, load in each.loads.items()}


def _engines(state: SchedulerState) -> Iterator[str]:
    if state.weights.versions.engines.keys() != state.fleet.control.engines.keys():
        yield ("the tracker and the fleet control disagree about which engines there are")
    for control in state.fleet.control.engines.values():
        version = state.weights.versions.engines[control.name]
        newest = state.weights.versions.trainer
        if version > newest or (version < newest and not state.rolling):
            yield (
                f"{control.name} is in use with version {version}, not "
                f"{state.weights.versions.trainer}"
            )
        alone = state.rolling and control.catching_up
        # An engine may still be answering a version check when it has to leave.
        stopped = control.mode not in (Mode.RUNNING, Mode.VERIFYING)
        if alone and stopped and state.in_flight.open[control.name]:
            yield f"{control.name} is refitted alone and has open requests"
        if control.mode is Mode.REFITTING and state.weights.update is None and not alone:
            yield f"{control.name} is refitting without an update"
        if control.mode is Mode.RUNNING and control.released:
            yield f"{control.name} runs without its {set(control.released)}"
    for control in state.fleet.control.all():
        # The table CHANGES of the fleet control guarantees that it was paused before.
        if control.mode is Mode.REFITTING and not state.fleet.control.prepared(control):
            yield f"{control.name} is refitting before it is flushed or without its memory"
    both = state.fleet.control.engines.keys() & state.fleet.control.standby.keys()
    if both:
        yield f"{both} are in use and on standby"
