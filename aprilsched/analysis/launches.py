"""The lines of a run, put together by what was launched: members of groups, and batches.

Invariant: a member's tokens are those that are known at the last line, whatever was interrupted,
failed and sent again before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aprilsched.analysis.lines import EngineLine, Line, RestoredLine

__all__ = ["Launches", "Member", "RecordedBatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedBatch:
    """A delivered batch: the lengths of its prompts and its responses, one for each rollout."""

    prompts: Sequence[int]
    lengths: Sequence[int]


@dataclass(kw_only=True, slots=True)
class Member:
    """A rollout as far as the log has been read; `prompt` and `tokens` are lengths."""

    group_id: int
    prompt: int
    tokens: int = 0
    finished: bool = False


class Launches:
    """Takes the lines of a run in their order."""

    def __init__(self) -> None:
        self.batches: list[RecordedBatch] = []
        self.episodes = False
        """The run was driven by them."""
        self.updates = 0
        """New versions that came into the engines."""
        self.kv_tokens: int | None = None
        """Of the smallest engine's KV pool; None where one does not say."""
        self.fetched = 0
        """Prompts that came from their source."""
        self.ended = False
        """No more were there."""
        self._members: dict[int, Member] = {}
        self._requests: dict[int, int] = {}
        """The rollout of each request."""
        self._evaluated: set[int] = set()
        self._settled: set[int] = set()
        """Groups that were delivered or dropped."""

    def add(self, line: Line) -> None:
        """One more line.

        Raises:
            ValueError: if it belongs to a request that was never sent.
        """
        match line.event or line.command:
            case "Launch" if line.evaluation_id is None:
                self._launch(line)
            case "Send":
                self._send(line)
            case "Progress":
                self._member(line).tokens += line.tokens
            case "Finished":
                self._member(line).finished = True
            case "Deliver":
                self._deliver(line)
            case "DeliverEvaluation":
                self._evaluated.update(rollout.group_id for rollout in line.rollouts)
                self._settled.update(rollout.group_id for rollout in line.rollouts)
            case "Opened":
                self.kv_tokens = _smallest_pool(line)
            case "PromptsArrived":
                self.fetched += line.prompts
                self.ended = self.ended or line.last
            case "FinishUpdate" if not line.cause:
                self.updates += 1
            case "CancelWork":
                self._settled.add(line.group_id)
            case "Resumed":
                self._forget_open()
            case "StartEpisode":
                self.episodes = True
            case _:
                pass

    def members(self) -> list[Member]:
        """Those that were sent, in the order of their ids, without those only evaluated."""
        return [m for _, m in sorted(self._members.items()) if m.group_id not in self._evaluated]

    def by_group(self, size: int) -> list[list[Member]]:
        """Groups of `size`, in the order of launches, without those that were only evaluated.
        A member that was launched and never sent has no tokens."""
        groups: dict[int, list[Member]] = {}
        for member in self.members():
            groups.setdefault(member.group_id, []).append(member)
        for group_id, group in groups.items():
            missing = size - len(group)
            group.extend(Member(group_id=group_id, prompt=group[0].prompt) for _ in range(missing))
        return [group[:size] for _, group in sorted(groups.items())]

    def _member(self, line: Line) -> Member:
        rollout_id = self._requests.get(line.request_id)
        if rollout_id is None:
            raise ValueError(f"request {line.request_id} was never sent")
        return self._members[rollout_id]

    def _send(self, line: Line) -> None:
        self._requests[line.request_id] = line.rollout_id
        member = self._members.setdefault(
            line.rollout_id, Member(group_id=line.group_id, prompt=line.tokens)
        )
        # Sent again, a request carries what is known; what was lost on the way is not in it.
        member.tokens = line.tokens - member.prompt
        member.finished = False

    def _forget_open(self) -> None:
        """What was in flight is launched again, as restored or, where it was not saved, anew."""
        kept = {id_: m for id_, m in self._members.items() if m.group_id in self._settled}
        self._members = kept
        self._requests.clear()
        self.fetched = len({member.group_id for member in kept.values()} - self._evaluated)

    def _launch(self, line: Line) -> None:
        # Ids that were not saved are given again.
        self._evaluated.discard(line.group_id)
        self._settled.discard(line.group_id)
        if line.restored is not None:
            self._restore(line, line.restored)

    def _restore(self, line: Line, lengths: RestoredLine) -> None:
        self.fetched += 1
        ended = zip(line.rollout_ids, lengths.tokens, lengths.finished, strict=True)
        for rollout_id, tokens, finished in ended:
            self._members[rollout_id] = Member(
                group_id=line.group_id,
                prompt=int(line.prompt_tokens),
                tokens=tokens,
                finished=finished,
            )

    def _deliver(self, line: Line) -> None:
        self._settled.update(rollout.group_id for rollout in line.rollouts)
        for rollout in line.rollouts:
            # What was begun before the log was is in no Send, or with tokens in its context.
            self._members[rollout.rollout_id] = Member(
                group_id=rollout.group_id,
                prompt=rollout.prompt_tokens,
                tokens=rollout.tokens,
                finished=True,
            )
        self.batches.append(
            RecordedBatch(
                prompts=[rollout.prompt_tokens for rollout in line.rollouts],
                lengths=[rollout.tokens for rollout in line.rollouts],
            )
        )


def _smallest_pool(line: Line) -> int | None:
    engines = line.engines if isinstance(line.engines, tuple) else ()
    sizes = [engine.kv_tokens for engine in engines if isinstance(engine, EngineLine)]
    known = [size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None
