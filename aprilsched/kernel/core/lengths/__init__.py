"""Estimates of response lengths: their law, the bias of a schedule, and groups like the observed
ones."""
