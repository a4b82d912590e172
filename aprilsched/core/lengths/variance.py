"""How much of the lengths' spread a group's members have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aprilsched.core.lengths.groups import GroupLengths

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
    logs = [np.log(np.maximum(group.tokens, 1)) for group in groups if group.complete]
    sizes = np.array([len(log) for log in logs], dtype=np.float64)
    total, count = float(sizes.sum()), len(logs)
    if count < 2 or total <= count:
        return None
    means = np.array([log.mean() for log in logs])
    grand = float((sizes * means).sum()) / total
    within = sum(float(((log - m) ** 2).sum()) for log, m in zip(logs, means, strict=True))
    within /= total - count
    between = float((sizes * (means - grand) ** 2).sum()) / (count - 1)
    size = (total - float((sizes**2).sum()) / total) / (count - 1)
    shared = max(0.0, (between - within) / size)
    return shared / (shared + within) if shared + within > 0 else None
