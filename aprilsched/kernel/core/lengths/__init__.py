"""Estimates of response lengths: their distribution, the bias of a schedule, and groups like the
observed ones."""
