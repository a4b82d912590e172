"""Runs one part of the campaign; README.md describes the parts.

python -m tests.campaign.run engines --seeds 0:1000 --jobs 2
python -m tests.campaign.run engines --seeds 17 --verbose
python -m tests.campaign.run servers --seeds 0:500
python -m tests.campaign.run sessions --seeds 0:4
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tests.campaign import agents, servers, trial
from tests.campaign.history import Outcome
from tests.campaign.mix import KINDS, Mix

CPU_S = 60
"""CPU seconds after which a seed loops while its clock stands still. Most need half a second."""
_SEEDS_OF_A_PROCESS = 50
"""Seeds after which a worker is replaced, so that leaked memory does not add up."""


class LoopsForever(KeyboardInterrupt):
    """Raised if virtual time stands still. Event loops let this exception pass."""


def outcome_of(seed: int, options: argparse.Namespace) -> Outcome:
    """Run one seed of the part in `options`."""
    match options.part:
        case "engines":
            mix = Mix.of(
                seed, only=options.only, without=options.without, companions=options.companions
            )
            return trial.run(mix)
        case "servers":
            return servers.run(seed, companions=options.companions)
        case _:
            return agents.run(seed)


def one(task: tuple[int, argparse.Namespace]) -> dict[str, Any]:
    """Run one seed, and return plain data."""
    seed, options = task
    gc.freeze()  # imports need not be scanned again after each seed
    signal.signal(signal.SIGPROF, _raise_loops_forever)
    signal.setitimer(signal.ITIMER_PROF, CPU_S, CPU_S)
    started = time.process_time()
    try:
        outcome = outcome_of(seed, options)
    except LoopsForever as error:
        outcome = Outcome(seed, [f"{error}\n{''.join(traceback.format_exception(error)[-14:])}"])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {**asdict(outcome), "cpu_s": round(time.process_time() - started, 2)}


def _raise_loops_forever(*_: object) -> None:
    raise LoopsForever(f"not done after {CPU_S} s of CPU time")


def results_of(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Run all seeds."""
    tasks = [(seed, options) for seed in options.seeds]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=_SEEDS_OF_A_PROCESS) as pool:
        yield from pool.imap_unordered(one, tasks)


def show(result: dict[str, Any], *, verbose: bool) -> None:
    """Print the outcome of a seed."""
    print(f"--- seed {result['seed']}: {', '.join(result['kinds'])}; {result['ending']}")
    print(f"  {result['settings']}")
    for complaint in result["complaints"][:5]:
        print(f"  ! {complaint if verbose else complaint.splitlines()[0][:300]}")
    for line in result["history"] if verbose else ():
        print(f"    {line[:260]}")
    sys.stdout.flush()


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over all seeds."""
    figures: Counter[str] = Counter()
    for result in results:
        figures.update(result["figures"])
    return {
        "seeds": len(results),
        "virtual_hours": round(sum(r["seconds"] for r in results) / 3600, 1),
        "cpu_s": round(sum(r["cpu_s"] for r in results), 1),
        "figures": dict(figures),
        "seeds_with_kind": Counter(kind for r in results for kind in set(r["kinds"])),
        "failing": {r["seed"]: r["complaints"][0][:200] for r in results if r["complaints"]},
    }


def seeds(text: str) -> range:
    """Parse FIRST:LAST, the last one not included, or one seed."""
    first, _, last = text.partition(":")
    return range(int(first), int(last or int(first) + 1))


def kinds(text: str) -> tuple[str, ...]:
    """Parse names of kinds of chaos."""
    names = tuple(name for name in text.split(",") if name)
    if unknown := set(names) - KINDS.keys():
        raise argparse.ArgumentTypeError(f"{unknown} must be among {', '.join(KINDS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["engines", "servers", "sessions"])
    parser.add_argument("--seeds", type=seeds, default=range(1), help="FIRST:LAST, or one")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--verbose", action="store_true", help="print all that happens")
    parser.add_argument("--companions", action="store_true", help="engines, servers: with rows")
    parser.add_argument("--only", type=kinds, help="engines: these kinds, in every seed")
    parser.add_argument("--without", type=kinds, default=(), help="engines: not these kinds")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for result in results_of(options):
        results.append(result)
        if result["complaints"] or options.verbose:
            show(result, verbose=options.verbose)
    print(json.dumps(summary(results), indent=1))
    sys.exit(any(result["complaints"] for result in results))


if __name__ == "__main__":
    main()
