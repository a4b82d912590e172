"""Compares the cost of two checkouts of the project, measured in turns on one machine.

    git worktree add /tmp/before COMMIT
    python experiments/before_after/benchmark.py --before /tmp/before --out result.json

Each measurement is a fresh process that imports the library of one checkout, and runs that
checkout's own experiment. See README.md in this folder.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "client_cost"), str(HERE.parents[1])]

from benchmark import server  # noqa: E402

from experiments.library import arguments, machine, say  # noqa: E402

POLICIES = ("sync", "april", "pool")
_ROLLOUTS = 4096
"""Of a run of the client. Runs of 1,024 take 1.3 s and differed by up to 10 %."""
_ANSWER_TOKENS = 16_384
_SECONDS = 10
_TOKENS_PER_SECOND, _IN_FLIGHT = 100_000, 512
"""Those of experiments/telemetry_cost."""


def process(checkout: Path, script: Path, *given: object) -> dict[str, Any]:
    """The result that `script` prints when it imports the library of `checkout`."""
    done = subprocess.run(
        [sys.executable, str(script), *map(str, given)],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{script} of {checkout}:\n{done.stderr}")
    return json.loads(done.stdout)


def client(checkout: Path, in_flight: int) -> float:
    """CPU seconds of a rollout in the process of the scheduler."""
    script = checkout / "experiments/client_cost/benchmark.py"
    rollouts = max(_ROLLOUTS, in_flight)
    with server() as url:
        found = process(
            checkout, script, "--client", "scheduled", "--url", url,
            "--in-flight", in_flight, "--rollouts", rollouts,
        )  # fmt: skip
    return found["cpu"] / rollouts


def load(checkout: Path, in_flight: int) -> float:
    """CPU microseconds of an event of 64 tokens of a long response."""
    with server(_ANSWER_TOKENS, 64) as url:
        script = checkout / "experiments/load/benchmark.py"
        found = process(checkout, script, "--url", url, "--in-flight", in_flight)
    return found["cpu_us_per_event"]


def telemetry(checkout: Path) -> float:
    """CPU milliseconds a second of all listeners and their threads."""
    rollouts = _SECONDS * _TOKENS_PER_SECOND // 1024 // _IN_FLIGHT * _IN_FLIGHT
    with server() as url:
        found = process(
            checkout, checkout / "experiments/telemetry_cost/benchmark.py", "--url", url,
            "--run", "everything", "--rollouts", max(rollouts, 2 * _IN_FLIGHT), "--inside",
        )  # fmt: skip
    return sum(found["inside_ms_per_s"].values())


def simulator(checkout: Path, policy: str) -> float:
    """CPU seconds of a simulated run of 60 batches with one engine."""
    return process(checkout, HERE / "simulated.py", policy)["cpu_s"]


MEASUREMENTS: dict[str, Callable[[Path], float]] = {
    **{f"simulator, {policy}": lambda at, p=policy: simulator(at, p) for policy in POLICIES},
    "client, 64 in flight": lambda at: client(at, 64),
    "client, 512 in flight": lambda at: client(at, 512),
    "client, 4096 in flight": lambda at: client(at, 4096),
    "load, 64 in flight": lambda at: load(at, 64),
    "load, 512 in flight": lambda at: load(at, 512),
    "telemetry": telemetry,
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--after", type=Path, default=HERE.parents[1])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="measurements whose name has this")
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    rows: list[dict[str, Any]] = []
    for name, measure in MEASUREMENTS.items():
        if options.only not in name:
            continue
        runs: dict[str, list[float]] = {"before": [], "after": []}
        for repeat in range(options.repeats):
            for which in list(checkouts)[:: 1 if repeat % 2 == 0 else -1]:
                runs[which].append(measure(checkouts[which]))
        ratios = [b / a for a, b in zip(runs["before"], runs["after"], strict=True)]
        row = {
            "measured": name,
            "ratio": [f(ratios) for f in (min, statistics.median, max)],
            "ratio_of_least": min(runs["after"]) / min(runs["before"]),
            "runs": runs,
        }
        say({k: v for k, v in row.items() if k != "runs"})
        rows.append(row)
        if options.out:
            options.out.write_text(json.dumps({**machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
