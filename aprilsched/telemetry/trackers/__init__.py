"""The figures of each batch for experiment trackers: wandb, trackio, TensorBoard."""

from aprilsched.telemetry.trackers.base import Writer
from aprilsched.telemetry.trackers.steps import StepTracker

__all__ = ["StepTracker", "Writer"]
