"""Decides whether a turn that finds no KV of its session may start on an engine.

While an agent is at its tool, the engine keeps the KV of its context, and evicts the least recently
used KV when running requests need the room. If more sessions are open than fit, each evicts the
next one, and nearly every turn prefills its whole context.

A turn that finds its KV is sent at once. Any other turn, of a new session or of one whose KV was
evicted, displaces the KV of other sessions unless there is room, so it waits for room. Three things
decide what room is:

- Sessions grow, so there must also be room for the next turns of every session in the pool.
- KV is kept for as long as it takes to prefill the pool (the rule of Gray and Putzolu, 1987, for
  pages of a disk). Sessions that are longer at their tools give their room away.
- A turn does not wait while few requests run. A decode step takes ``t0`` seconds whatever the batch
  is. So a request of ``n`` tokens in addition to ``b`` others saves ``n * t0 / b`` seconds of
  engine time, and displacing ``c`` tokens costs ``c / r`` seconds of prefill later. It pays if
  ``b <= n * t0 * r / c``.

Preemptions show that the pool is fuller than estimated. Each report of new ones lowers the share of
the pool that may be used, and each other report raises it.
"""

from __future__ import annotations

from aprilsched.kernel.core.policies.repack import Prices

TURNS_AHEAD = 5
"""Number of turns of every session in the pool for which room is left. In simulations 3 and 8
differ by 5 % at most, and without this room short tools cost a quarter of the throughput."""
LEAST_SHARE = 0.5
"""Share of the pool that may be used however many requests are preempted."""
_FALL, _RISE = 0.9, 0.01


def may_start(
    *, context: float, room: float, running: int, turn_tokens: float, prices: Prices
) -> bool:
    """Return whether a turn that prefills its whole context may start on an engine.

    Args:
        context: number of tokens of its context.
        room: number of tokens that neither running requests nor sessions at their tools use or
            will need; negative if there are too few.
        running: number of open requests on the engine.
        turn_tokens: mean number of tokens that a turn generates.
        prices: the fixed seconds of a decode step, and the prefill rate.
    """
    saved = turn_tokens * prices.step_seconds * prices.prefill_tokens_per_s
    return context <= room or running * context <= saved


def share_after(share: float, *, preempted: bool) -> float:
    """Return the usable share of a pool after a report."""
    return max(LEAST_SHARE, share * _FALL) if preempted else min(1.0, share + _RISE)
