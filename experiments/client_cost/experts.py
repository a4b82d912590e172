"""Measures what routed experts cost, in bytes and in CPU, beside what the engine sends.

    python experiments/client_cost/experts.py --out experiments/client_cost/experts.json

The answers have the routing of a Qwen3-30B-A3B in their last event. The bare loop reads that event
and leaves the routing in it; the scheduler decodes it and keeps it. See README.md in this folder.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmark import measure
from clients import ROUTED
from server import ANSWER_TOKENS, EVENT_TOKENS, PROMPT_TOKENS, answer

from experiments.library import arguments, machine, say, write

RUNS = {"bare": 0, "scheduled": 0, "bare, with experts": 1, "scheduled, with experts": 1}
"""Whether the answers have experts."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    runs: dict[str, list[float]] = {name: [] for name in RUNS}
    for repeat in range(options.repeats):
        for name, experts in list(RUNS.items())[:: 1 if repeat % 2 == 0 else -1]:
            client = "routed" if name.startswith("scheduled") and experts else name.split(",")[0]
            found = measure(
                client, options.in_flight, options.rollouts, ANSWER_TOKENS, EVENT_TOKENS, experts
            )
            runs[name].append(1e6 * found["cpu"] / found["tokens"])
        say(f"repeat {repeat} done")
    sent = [
        sum(map(len, answer(ANSWER_TOKENS, EVENT_TOKENS, experts=experts))) / ANSWER_TOKENS
        for experts in (False, True)
    ]
    rows = PROMPT_TOKENS + ANSWER_TOKENS - 1
    result = {
        **machine(),
        "sent_bytes_per_token": {"without": sent[0], "with": sent[1]},
        "kept_bytes_per_token": ROUTED.row_bytes * rows / ANSWER_TOKENS,
        "cpu_us_per_token": {name: statistics.median(found) for name, found in runs.items()},
        "runs": runs,
    }
    write(options.out, result, shown={**result, "runs": len(runs)})


if __name__ == "__main__":
    main()
