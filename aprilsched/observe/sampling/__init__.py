"""Samples of GPUs and engines during a run, and what the figures mean."""

from aprilsched.observe.sampling.labels import NVML_UTILIZATION
from aprilsched.observe.sampling.sampler import Sampler

__all__ = ["NVML_UTILIZATION", "Sampler"]
