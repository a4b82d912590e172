"""The meaning of the sampled figures: the sentences that accompany them everywhere."""

from __future__ import annotations

NVML_UTILIZATION = (
    "NVML's GPU utilization is the share of its sample period in which at least one kernel ran: "
    "one straggler alone shows about 100 %. It does not show how full the GPU was."
)
STEP_SHARE = (
    "The step share is the part of the time in which the engine computed steps, by its own "
    "counters: one straggler alone shows about 100 %. It does not show how full the steps were."
)
