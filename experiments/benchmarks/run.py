"""Measures CPU per rollout of the core, the simulator, the client, the store and the gateway.

    git worktree add /tmp/before COMMIT
    python experiments/benchmarks/run.py --against /tmp/before --out result.json

Each measurement is a fresh process that imports the library of one checkout. The checkouts take
turns, so that other work on the machine affects both. See README.md in this folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from experiments.benchmarks.parts import ALONE, SERVED  # noqa: E402
from experiments.library import arguments, machine, say, table  # noqa: E402


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of a stand-in for SGLang whose answers are encoded in advance."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.communicate()


def measure(checkout: Path, part: str) -> float:
    """CPU milliseconds per rollout of `part` in `checkout`."""
    with server() if part in SERVED else contextlib.nullcontext() as url:
        done = subprocess.run(
            [sys.executable, str(HERE / "parts.py"), part, *(["--url", url] if url else [])],
            env=os.environ | {"PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{part} of {checkout}:\n{done.stderr}")
    found = json.loads(done.stdout)
    return 1e3 * found["cpu_s"] / found["rollouts"]


def compare(part: str, checkouts: dict[str, Path], repeats: int) -> dict[str, Any]:
    """All runs of a part, and the ratio of the first checkout to the second within a repeat."""
    runs: dict[str, list[float]] = {name: [] for name in checkouts}
    for repeat in range(repeats):
        for name in list(checkouts)[:: 1 if repeat % 2 == 0 else -1]:
            runs[name].append(measure(checkouts[name], part))
    medians = {name: statistics.median(each) for name, each in runs.items()}
    row: dict[str, Any] = {"part": part, "ms_per_rollout": medians, "runs": runs}
    if len(runs) > 1:
        ratios = [now / before for now, before in zip(*runs.values(), strict=True)]
        row["ratio"] = [f(ratios) for f in (min, statistics.median, max)]
    return row


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="parts whose name has this")
    options = parser.parse_args()
    checkouts = {"now": HERE.parents[1]}
    if options.against is not None:
        checkouts["before"] = options.against.resolve()
    rows: list[dict[str, Any]] = []
    for part in (part for part in (*ALONE, *SERVED) if options.only in part):
        rows.append(compare(part, checkouts, options.repeats))
        say({name: value for name, value in rows[-1].items() if name != "runs"})
        if options.out:
            options.out.write_text(json.dumps({**machine(), "rows": rows}, indent=1) + "\n")
    print(table(["part", *checkouts, "ratio"], [_cells(row) for row in rows]))


def _cells(row: dict[str, Any]) -> list[str]:
    times = [f"{ms:.3f} ms" for ms in row["ms_per_rollout"].values()]
    low, middle, high = row.get("ratio", (0, 0, 0))
    return [row["part"], *times, f"{middle:.2f} ({low:.2f} to {high:.2f})" if middle else ""]


if __name__ == "__main__":
    main()
