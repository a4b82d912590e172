"""The figures of each batch for experiment trackers: wandb, trackio, TensorBoard."""

from aprilsched.telemetry.trackers.steps import StepTracker
from aprilsched.telemetry.trackers.writers import Writer

__all__ = ["StepTracker", "Writer"]
