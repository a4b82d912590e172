"""Measures what the scheduler costs its process, relative to a bare loop on the same answers.

    python experiments/client_cost/benchmark.py --out experiments/client_cost/result.json

Each measurement is a fresh process. The clients alternate, so that other work of the machine
affects both. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from clients import CLIENTS, routed
from memory import held, post

from experiments.library import arguments, machine, say, write

HERE = Path(__file__).parent
LEVELS = (64, 512, 4096)
_EVENTS_PER_SECOND = 4000
"""Of all streams together, so that the client keeps up and reads most events one by one."""


@contextlib.contextmanager
def server(*arguments: int) -> Iterator[str]:
    """The stand-in's URL; its arguments are those of server.py."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.communicate()


def measure(client: str, in_flight: int, rollouts: int, *of_server: int) -> dict[str, Any]:
    """One run of one client in a process of its own, against a fresh server with these
    arguments."""
    with server(*of_server) as url:
        command = [
            sys.executable, __file__, "--client", client, "--url", url,
            "--in-flight", str(in_flight), "--rollouts", str(rollouts),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


async def run_client(options: argparse.Namespace) -> dict[str, Any]:
    """The measured process."""
    pace = options.in_flight / _EVENTS_PER_SECOND
    if options.client.startswith("held"):
        return await held(
            options.url, in_flight=options.in_flight, trace="traced" in options.client
        )
    await post(options.url, {"pace": pace})
    run = routed if options.client == "routed" else CLIENTS[options.client]
    cost = await run(options.url, in_flight=options.in_flight, rollouts=options.rollouts)
    if cost.rollouts != options.rollouts or cost.tokens != cost.rollouts * 1024:
        raise SystemExit(f"{options.client} read {cost} of {options.rollouts} rollouts")
    return {"client": options.client, "in_flight": options.in_flight, **asdict(cost)}


def compare(level: int, repeats: int, rollouts: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Alternating runs at one number in flight, and what they come to."""
    raw: list[dict[str, Any]] = []
    row: dict[str, Any] = {"in_flight": level}
    for repeat in range(repeats):
        order = list(CLIENTS)[:: 1 if repeat % 2 == 0 else -1]
        raw += [measure(client, level, max(rollouts, level)) for client in order]
        say(f"{level} in flight: repeat {repeat} done")
    for other in ("bare", "tight", "single"):
        ratios = [a / b for a, b in zip(_cpu(raw, "scheduled"), _cpu(raw, other), strict=True)]
        row[f"ratio_to_{other}"] = [f(ratios) for f in (min, statistics.median, max)]
    for client in CLIENTS:
        row[f"{client}_ms"] = 1e3 * statistics.median(_cpu(raw, client))
    return raw, row


def _cpu(raw: list[dict[str, Any]], client: str) -> list[float]:
    """CPU seconds of a rollout in each run of a client."""
    return [run["cpu"] / run["rollouts"] for run in raw if run["client"] == client]


def options_of() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--levels", type=int, nargs="*", default=list(LEVELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=1024, help="at least, for each run")
    parser.add_argument("--no-memory", action="store_true")
    # What the measured processes are started with.
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--in-flight", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = options_of()
    if options.client:
        print(json.dumps(asyncio.run(run_client(options))))
        return
    rows: list[dict[str, Any]] = []
    raw: list[dict[str, Any]] = []
    for level in options.levels:
        measured, row = compare(level, options.repeats, options.rollouts)
        raw += measured
        rows.append(row)
    result: dict[str, Any] = {
        **machine(),
        "rows": rows,
        "memory": {} if options.no_memory else memory(max(options.levels)),
        "runs": raw,
    }
    write(options.out, result, shown={**result, "runs": len(raw)})


def memory(level: int) -> dict[str, Any]:
    """Bytes of a held token at `level` in flight."""
    return {"traced": measure("held_traced", level, 0), "resident": measure("held", level, 0)}


if __name__ == "__main__":
    main()
