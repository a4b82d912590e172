"""Samples of GPUs and engines beside a run, and what they mean."""

from aprilsched.telemetry.sampling.labels import NVML_UTILIZATION
from aprilsched.telemetry.sampling.sampler import Sampler

__all__ = ["NVML_UTILIZATION", "Sampler"]
