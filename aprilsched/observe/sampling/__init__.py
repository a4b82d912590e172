"""Samples of GPUs and engines during a run, and the meaning of the figures."""

from aprilsched.observe.sampling.labels import NVML_UTILIZATION
from aprilsched.observe.sampling.sampler import Sampler

__all__ = ["NVML_UTILIZATION", "Sampler"]
