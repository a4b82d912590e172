"""Prints the CPU seconds of a simulated run of 60 batches with one engine: simulated.py POLICY."""

from __future__ import annotations

import json
import sys
import time
from itertools import islice

from aprilsched import presets
from aprilsched.config import SchedulerConfig
from aprilsched.simulation import Simulation, rare_collections
from aprilsched.telemetry.summary import Summary
from aprilsched.workload import LongTailWorkload

_BATCHES, _GROUPS = 60, 32


def main() -> None:
    prompts = list(islice(LongTailWorkload(), (_BATCHES + 4) * _GROUPS))
    config = getattr(presets, sys.argv[1])(SchedulerConfig(batch_groups=_GROUPS))
    listeners = [Summary(trainer_waits=True)]
    run = Simulation(config, prompts, engines=1, batches=_BATCHES, listeners=listeners)
    began = time.process_time()
    with rare_collections():
        run.run()
    print(json.dumps({"cpu_s": time.process_time() - began}))


if __name__ == "__main__":
    main()
