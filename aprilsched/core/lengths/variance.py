"""How much of the lengths' spread a group's members have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aprilsched.core.lengths.groups import GroupLengths, pooled

__all__ = ["shared_log_variance"]


def shared_log_variance(groups: Sequence[GroupLengths]) -> float | None:
    """Share of the log lengths' variance that lies between groups, 0 to 1; None if unknown.

    One-way analysis of variance with groups of random effect (Searle, Casella and McCulloch,
    1992, section 3.6), of the complete groups with members k, sizes g_i and N responses:

        share = b / (b + w),  w = SSW / (N - k),  b = max(0, (SSB / (k - 1) - w) / g0),
        g0 = (N - sum g_i**2 / N) / (k - 1)

    Groups that are not complete are left out, so while many are open the share is that of the
    shorter ones. At least 2 groups and one of 2 members are needed.
    """
    if not groups:
        return None
    tokens, finished = pooled(groups)
    ends = np.cumsum([len(group.tokens) for group in groups])
    starts = np.concatenate(([0], ends[:-1]))
    complete = np.logical_and.reduceat(finished, starts)
    sizes = (ends - starts)[complete].astype(np.float64)
    count, total = len(sizes), float(sizes.sum())
    if count < 2 or total <= count:
        return None
    logs = np.log(np.maximum(tokens, 1))
    means = np.add.reduceat(logs, starts)[complete] / sizes
    squares = np.add.reduceat(logs**2, starts)[complete]
    grand = float((sizes * means).sum()) / total
    within = max(0.0, float((squares - sizes * means**2).sum())) / (total - count)
    between = float((sizes * (means - grand) ** 2).sum()) / (count - 1)
    size = (total - float((sizes**2).sum()) / total) / (count - 1)
    shared = max(0.0, (between - within) / size)
    return shared / (shared + within) if shared + within > 0 else None
