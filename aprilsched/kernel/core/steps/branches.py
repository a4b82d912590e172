"""Branches of a rollout: an episode may leave its context and return to it later.

A program that edits or compacts its history, or runs several agents, requests contexts that do not
extend each other. Each context extends an existing branch or forks a new one. Both sides of a fork
share the tokens of their common prefix, with log-probabilities and versions, and the log contains
these tokens once. At the end of the episode a rule decides which branches to keep.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import Answered, Branch, RolloutRecord
from aprilsched.kernel.core.state.state import Outbox
from aprilsched.kernel.core.state.token_log import Path, clipped, joined, moved
from aprilsched.kernel.core.steps.drop import discard
from aprilsched.types import BranchRule, Int32Array


def take_branch(in_flight: InFlight, rollout: RolloutRecord, input_ids: Int32Array) -> None:
    """Activate the branch that the context `input_ids` extends, or fork a new one.

    The branch with the longest common prefix is extended or forked.
    """
    branches = rollout.all_branches()
    # The active branch first, then the latest: among equals the episode means the most recent one.
    others = [number for number in reversed(range(len(branches))) if number != rollout.branch]
    best, most, whole = rollout.branch, -1, False
    for number in (rollout.branch, *others):
        branch = branches[number]
        known = len(branch.prompt_ids) + sum([b - a for a, b in branch.path])
        if known < most:
            continue
        same = _same(rollout, branch, input_ids)
        if (same, same == known) > (most, whole):
            best, most, whole = number, same, same == known
    if whole and best == rollout.branch:
        return
    if not whole:
        branches.append(_forked(rollout, branches[best], input_ids, most))
        best = len(branches) - 1
    rollout.branches, rollout.branch = branches, best
    branch = branches[best]
    rollout.prompt_ids = branch.prompt_ids
    rollout.log.go_on(branch.path)
    if branch.companions:
        rollout.log.companions = branch.companions
        # New rows are saved for the active branch, which has just changed.
        rollout.rewritten = True
    in_flight.journal.change(rollout)


def _same(rollout: RolloutRecord, branch: Branch, input_ids: Int32Array) -> int:
    """Return how many leading tokens `input_ids` shares with a branch."""
    same = _common(branch.prompt_ids, input_ids)
    if same < len(branch.prompt_ids):
        return same
    return same + _common(rollout.log.along(branch.path), input_ids[same:])


def _common(one: Int32Array, other: Int32Array) -> int:
    size = min(len(one), len(other))
    if np.array_equal(one[:size], other[:size]):
        return size
    return int(np.argmax(one[:size] != other[:size]))


def _forked(rollout: RolloutRecord, of: Branch, input_ids: Int32Array, same: int) -> Branch:
    """Return a branch with the first `same` tokens of another one.

    If these tokens end within its prompt, the whole context becomes a separate prompt.
    """
    shared = same - len(of.prompt_ids)
    path: Path = ()
    left = max(0, shared)
    for start, end in of.path:
        if left > 0:
            path += ((start, min(end, start + left)),)
            left -= end - start
    rows = {
        name: each.forked(same - 1 if each.companion.per == "context" else shared, shared)
        for name, each in of.companions.items()
    }
    return Branch(
        prompt_ids=of.prompt_ids if shared >= 0 else input_ids, path=path, companions=rows
    )


def settle(in_flight: InFlight, out: Outbox, rollout: RolloutRecord, rule: BranchRule) -> None:
    """Keep the branches of a finished episode that the rule selects.

    The tokens of the other branches are counted.
    """
    if not rollout.branches:
        return
    ends = _ends(rollout, range(len(rollout.answered)))
    chosen = rollout.answered[-1][3]
    if rule == "longest":
        branches, sampled = rollout.all_branches(), rollout.log.sampled()
        sizes = {
            number: sum([int(sampled[a:b].sum()) for a, b in clipped(branches[number].path, end)])
            for number, end in ends.items()
        }
        chosen = max(ends, key=lambda number: (sizes[number], number))
    kept = ends if rule == "all" else {chosen: ends[chosen]}
    _keep(in_flight, out, rollout, kept, Reason.OTHER_BRANCH)
    rollout.finish_reason = rollout.answered[-1][2]


def forget(
    in_flight: InFlight, out: Outbox, rollout: RolloutRecord, asked: Collection[int], reason: Reason
) -> None:
    """Keep only the `asked` turns of an episode, with the tokens before them.

    `asked` contains indices of answered turns.
    """
    _keep(in_flight, out, rollout, _ends(rollout, asked), reason)


def _ends(rollout: RolloutRecord, turns: Collection[int]) -> dict[int, int]:
    """Map the branch of each turn to the log position where the branch's last turn ends."""
    ends = {branch: end for _, end, _, branch in [rollout.answered[t] for t in sorted(turns)]}
    return dict(sorted(ends.items()))


def _keep(
    in_flight: InFlight, out: Outbox, rollout: RolloutRecord, ends: dict[int, int], reason: Reason
) -> None:
    """Keep only these branches, each up to its log position."""
    log, now = rollout.log, rollout.all_branches()
    paths = {number: clipped(now[number].path, end) for number, end in ends.items()}
    whole = joined(paths.values())
    answered: list[Answered] = []
    for start, end, why, branch in rollout.answered:
        own = branch if end <= ends.get(branch, -1) else _holder(paths, start, end)
        if own is not None:
            place = list(ends).index(own)
            answered.append((moved(start, whole), moved(end, whole), why, place))
    kept = [
        Branch(
            prompt_ids=now[number].prompt_ids,
            path=joined([[(moved(a, whole), moved(b, whole)) for a, b in path]]),
            companions=now[number].companions,
        )
        for number, path in paths.items()
    ]
    rollout.answered, rollout.turns = answered, len(answered)
    rollout.branches = kept if len(kept) > 1 else []
    rollout.branch = answered[-1][3] if answered else 0
    rollout.log = rest = log.part(whole)
    rest.companions = log.companions
    if kept:
        rollout.prompt_ids = kept[rollout.branch].prompt_ids
        rest.companions = kept[rollout.branch].companions
        rest.go_on(kept[rollout.branch].path)
    rest.truncate(rest.size, prompt=len(rollout.prompt_ids))
    # Rows are saved under the numbers of their branches.
    rollout.rewritten = rollout.rewritten or bool(log.companions)
    sampled = log.sampled_tokens - rest.sampled_tokens
    discard(in_flight, out, rollout, sampled, log.size - rest.size - sampled, reason)
    in_flight.journal.change(rollout)


def _holder(paths: dict[int, Path], start: int, end: int) -> int | None:
    """Return the first path that contains all tokens of another branch's turn, or None."""
    for number, path in paths.items():
        if start < end and any(a <= start and end <= b for a, b in path):
            return number
    return None
