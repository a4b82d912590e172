"""Live progress of a run: one line that changes on a terminal, one line a batch elsewhere."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.live import Live
from rich.text import Text

from aprilsched.core import commands as do
from aprilsched.core import events as ev
from aprilsched.telemetry.dispatching import DispatchingListener
from aprilsched.types import NO_VERSION, Batch

__all__ = ["Progress"]

_REFRESH_HZ = 4


class Progress(DispatchingListener):
    """Shows a run on `console`; use it as ``with progress:`` around the run.

    Args:
        title: begins every line.
        batches: how many the run will deliver.
        batch_groups, group_size: those of the scheduler.
    """

    def __init__(
        self, console: Console, *, title: str, batches: int, batch_groups: int, group_size: int
    ) -> None:
        super().__init__()
        self._console = console
        self._title = title
        self._batches = batches
        self._batch_groups = batch_groups
        self._group_size = group_size
        self._live: Live | None = None
        self._batch = 0
        self._version = 0
        self._carried = 0
        self._staleness = 0.0
        self._tokens = 0
        self._tokens_before = 0
        """In the batch before this one."""
        self._began = 0.0
        """When the batch in work began."""
        self._rate_since = 0.0
        """When the one before it began."""
        self._open: dict[int, int] = {}
        """Groups of the open attempts, by request."""
        self._done: Counter[int] = Counter()
        """Finished rollouts of groups that are not delivered."""
        self._handlers = {
            ev.Opened: self._opened,
            ev.Progress: self._progress,
            ev.Finished: self._finished,
            ev.Interrupted: self._closed,
            ev.Failed: self._closed,
            do.Send: self._send,
            do.CancelWork: self._cancel_work,
            do.FinishUpdate: self._finish_update,
            do.Deliver: self._deliver,
            do.Redeliver: self._deliver,
        }

    def skip(self, batches: int) -> None:
        """So many were delivered before, in the same run."""
        self._batch = batches

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self.line,
                console=self._console,
                refresh_per_second=_REFRESH_HZ,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self) -> Text:
        """What is shown now."""
        done = sum(n >= self._group_size for n in list(self._done.values()))
        # Over the batch before and this one: a pause brings many tokens in an instant.
        elapsed = self._now - self._rate_since
        rate = (self._tokens_before + self._tokens) / elapsed if elapsed > 0 else 0.0
        return Text(
            f"{self._title} {min(self._batch + 1, self._batches)}/{self._batches}"
            f" | groups {min(done, self._batch_groups)}/{self._batch_groups}"
            f" | {len(self._open)} in flight ({self._carried} carried)"
            f" | {rate / 1000:.1f}k tokens/s | v{self._version} | stale {self._staleness:.2f}",
            no_wrap=True,
            overflow="ellipsis",
        )

    # --- what happens --------------------------------------------------------------------------

    def _opened(self, event: ev.Opened) -> None:
        self._open.clear()
        self._done.clear()
        self._began = self._rate_since = self._now
        self._version = max((engine.version or 0 for engine in event.engines), default=0)

    def _progress(self, event: ev.Progress) -> None:
        self._tokens += len(event.token_ids)

    def _send(self, command: do.Send) -> None:
        self._open[command.request_id] = command.group_id

    def _finished(self, event: ev.Finished) -> None:
        group = self._open.pop(event.request_id, None)
        if group is not None:
            self._done[group] += 1

    def _closed(self, event: ev.Interrupted | ev.Failed) -> None:
        self._open.pop(event.request_id, None)

    def _cancel_work(self, command: do.CancelWork) -> None:
        self._done.pop(command.group_id, None)

    def _finish_update(self, command: do.FinishUpdate) -> None:
        if not command.cause:
            self._version = command.version

    def _deliver(self, command: do.Deliver | do.Redeliver) -> None:
        batch = command.batch
        self._staleness = _mean_staleness(batch)
        if self._live is None:
            self._console.print(self._delivered_line(batch), soft_wrap=True, highlight=False)
        for group in batch.groups:
            self._done.pop(group.group_id, None)
        self._batch = batch.index + 1
        self._carried = len(self._open)
        self._tokens, self._tokens_before = 0, self._tokens
        self._began, self._rate_since = self._now, self._began

    def _delivered_line(self, batch: Batch) -> str:
        return (
            f"{self._title}  batch {batch.index + 1}/{self._batches}"
            f"  {self._now - self._began:.1f} s  {batch.tokens:,} tokens"
            f"  {len(self._open)} carried  version {batch.version}"
            f"  staleness {self._staleness:.2f}"
        )


def _mean_staleness(batch: Batch) -> float:
    """Over sampled tokens, from the runs of equal version: a batch has hundreds of thousands."""
    tokens = total = 0
    for rollout in batch.rollouts:
        for segment in rollout.segments:
            if segment.version != NO_VERSION:
                tokens += segment.end - segment.start
                total += (segment.end - segment.start) * (batch.version - segment.version)
    return total / tokens if tokens else 0.0
