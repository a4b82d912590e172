"""Measures what one core can schedule, for two checkouts in turns.

    git worktree add /tmp/before COMMIT
    python experiments/one_core/benchmark.py --before /tmp/before --out result.json

Each measurement is a fresh process that imports the library of one checkout, against a fresh
server. See README.md in this folder.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))

from experiments.library import arguments, machine, say  # noqa: E402

EVENTS = 64
"""Events of a response."""
LEAST_ROLLOUTS = 2048
CASES = (
    *((event, flight, 8) for event in (1, 8, 64) for flight in (64, 512, 4096)),
    *((event, 512, engines) for event in (8, 64) for engines in (1, 64, 512)),
)
"""Tokens of an event, rollouts in flight, engines."""
PROFILED = ((1, 512, 8), (64, 512, 8), (64, 4096, 512))
CONTROLLED = (8, 64, 512)


def measure(
    checkout: Path,
    event: int,
    in_flight: int,
    engines: int,
    *,
    profile: bool = False,
    control: bool = False,
) -> dict[str, Any]:
    """One run in a process of its own."""
    tokens = event * EVENTS
    with subprocess.Popen(
        [sys.executable, str(HERE / "ports.py"), str(tokens), str(event), str(engines)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        given = {
            "ports": [int(port) for port in server.stdout.readline().split()],
            "in_flight": in_flight,
            "rollouts": max(in_flight, LEAST_ROLLOUTS),
            "tokens": tokens,
            "event_tokens": event,
            "profile": profile,
            "control": control,
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "client.py"), json.dumps(given)],
            env=os.environ | {"PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
            check=False,
        )
        server.communicate()
    if done.returncode:
        raise SystemExit(f"{checkout}:\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--after", type=Path, default=HERE.parents[1])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    found: dict[str, Any] = {"machine": machine(), "rows": [], "profiles": [], "control": []}
    for event, in_flight, engines in CASES:
        runs: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
        for repeat in range(options.repeats):
            for which in list(checkouts)[:: 1 if repeat % 2 == 0 else -1]:
                runs[which].append(measure(checkouts[which], event, in_flight, engines))
        cpu = {k: [run["cpu_us_per_event"] for run in v] for k, v in runs.items()}
        ratios = [b / a for a, b in zip(cpu["before"], cpu["after"], strict=True)]
        row = {
            "event_tokens": event,
            "in_flight": in_flight,
            "engines": engines,
            "cpu_us_per_event": {k: statistics.median(v) for k, v in cpu.items()},
            "ratio": [f(ratios) for f in (min, statistics.median, max)],
            "runs": runs,
        }
        say({k: v for k, v in row.items() if k != "runs"})
        found["rows"].append(row)
        write(options.out, found)
    after = checkouts["after"]
    for case in PROFILED:
        found["profiles"].append({"case": case, **measure(after, *case, profile=True)})
        write(options.out, found)
    for engines in CONTROLLED:
        calls = measure(after, 64, 8, engines, control=True)
        found["control"].append({"engines": engines, **calls})
        write(options.out, found)


def write(path: Path | None, found: dict[str, Any]) -> None:
    """Write what was measured so far: a run takes half an hour."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
