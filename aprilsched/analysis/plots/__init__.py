"""Pictures of runs, for people who have not read the code. Each function gives a figure.

A figure is shown by a notebook as the last thing in a cell, and written by :func:`save`.
"""

from aprilsched.extras import extra

with extra("plots"):
    from aprilsched.analysis.plots.first_look import first_look
    from aprilsched.analysis.plots.length_laws import estimate_by_batch, length_law, lengths
    from aprilsched.analysis.plots.over_time import timeline, utilization
    from aprilsched.analysis.plots.plans import frontier, what_if
    from aprilsched.analysis.plots.side_by_side import comparison
    from aprilsched.analysis.plots.stale import (
        bias_by_batch,
        staleness,
        staleness_by_length,
        tokens_by_age,
    )
    from aprilsched.analysis.plots.usage_parts import causes, engine_strip, where_time_goes
    from aprilsched.analysis.style import save

__all__ = [
    "bias_by_batch",
    "causes",
    "comparison",
    "engine_strip",
    "estimate_by_batch",
    "first_look",
    "frontier",
    "length_law",
    "lengths",
    "save",
    "staleness",
    "staleness_by_length",
    "timeline",
    "tokens_by_age",
    "utilization",
    "what_if",
    "where_time_goes",
]
