"""Runs a part of the chaos campaign; see README.md in this folder.

python experiments/chaos/run.py engines --seeds 0:1000 --jobs 2
python experiments/chaos/run.py engines --seeds 17 --verbose
python experiments/chaos/run.py servers --seeds 0:500
python experiments/chaos/run.py kills --kills 50 --groups 500
python experiments/chaos/run.py real --seeds 0:40
python experiments/chaos/run.py sessions --seeds 0:3
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.chaos import agents, servers, trial
from experiments.chaos.history import Outcome
from experiments.chaos.mix import KINDS, Mix
from experiments.library import arguments, pooled, seeds

CPU_S = 60
"""Of the processor's time, however busy it is: a seed that takes longer loops without its clock
going on. A usual one takes half a second."""


class LoopsForEver(KeyboardInterrupt):
    """No virtual time passes, and nothing ends. Event loops let this one pass, and no other."""


def runner(options: argparse.Namespace) -> Callable[..., Outcome]:
    """What runs a seed of the part that was asked for."""
    if options.part == "engines":

        def engines(seed: int, **named: Any) -> Outcome:
            mix = Mix.of(
                seed,
                only=options.only,
                without=options.without,
                companions=options.companions,
            )
            return trial.run(mix, **named)

        return engines
    if options.part == "sessions":
        return agents.run
    if options.part in ("kills", "real"):
        # They need the servers of the tests.
        from experiments.chaos import kills, real

        return partial((kills if options.part == "kills" else real).run, options=options)
    return partial(servers.run, companions=options.companions)


def one(task: tuple[int, argparse.Namespace]) -> dict[str, Any]:
    """One seed, as plain data."""
    seed, options = task
    gc.freeze()  # what is imported need not be looked at again after each seed
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, CPU_S, CPU_S)
    began, used = time.monotonic(), time.process_time()
    try:
        outcome = runner(options)(seed, aloud=options.verbose, lines=options.lines)
    except LoopsForEver as error:
        outcome = Outcome(seed, [f"{error}\n{''.join(traceback.format_exception(error)[-14:])}"])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {
        **asdict(outcome),
        "cpu_s": round(time.process_time() - used, 2),
        "wall_s": round(time.monotonic() - began, 2),
    }


def _too_long(*_: object) -> None:
    raise LoopsForEver(f"not done after {CPU_S} s of CPU time")


def _show(result: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"--- seed {result['seed']}: {', '.join(result['kinds'])}; {result['ending']}")
    print(f"  {result['settings']}")
    for complaint in result["complaints"][:5]:
        print(f"  ! {complaint if options.long else complaint.splitlines()[0][:300]}")
    if options.long:
        for line in result["history"]:
            print(f"    {line[:260]}")
    sys.stdout.flush()


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the README's tables have."""
    figures: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    for result in results:
        figures.update(result["figures"])
        kinds.update(set(result["kinds"]))
        endings.update(ending.split(":")[0] for ending in result["ending"])
    found: dict[str, Any] = {
        "seeds": len(results),
        "seeds_with_complaints": sum(bool(r["complaints"]) for r in results),
        "virtual_hours": round(sum(r["seconds"] for r in results) / 3600, 1),
        "cpu_s": round(sum(r["cpu_s"] for r in results), 1),
        "figures": dict(figures),
        "endings_of_lives": dict(endings),
        "seeds_with_kind": dict(sorted(kinds.items())),
        "failing": {
            r["seed"]: [complaint.splitlines()[0][:200] for complaint in r["complaints"]]
            for r in results
            if r["complaints"]
        },
    }
    kept = ("seed", "kinds", "ending", "figures", "details")
    runs = [{name: r[name] for name in kept} for r in results if r["details"]]
    return {**found, "runs": runs} if runs else found


def written(found: dict[str, Any]) -> str:
    """The summary, and then a line for each run."""
    runs = ",\n".join(json.dumps(run) for run in found.get("runs", []))
    text = json.dumps({**found, "runs": []} if runs else found, indent=1)
    return text.replace('"runs": []', f'"runs": [\n{runs}\n ]') + "\n"


def options_of(arguments_given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=["engines", "servers", "sessions", "kills", "real"])
    parser.add_argument(
        "--seeds", type=seeds, default=range(1), help="FIRST:LAST, the last one not included"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="one seed: all that happens")
    parser.add_argument("--long", action="store_true", help="with the history of each failing seed")
    parser.add_argument("--lines", type=int, default=80, help="of history")
    parser.add_argument(
        "--companions",
        action="store_true",
        help="engines and servers: ask for routed experts, and of engines for sampling masks too",
    )
    engines = parser.add_argument_group("engines")
    engines.add_argument("--only", type=_kinds, help="these kinds of chaos, in every seed")
    engines.add_argument("--without", type=_kinds, default=(), help="not these kinds")
    kills = parser.add_argument_group("kills")
    kills.add_argument("--kills", type=int, default=50, help="of an open scheduler")
    kills.add_argument("--groups", type=int, default=400)
    kills.add_argument("--longest", type=float, default=4.0, help="seconds of an open scheduler")
    kills.add_argument("--process", action="store_true", help="in a process of its own")
    return parser.parse_args(arguments_given)


def _kinds(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown} are no kinds; there are {', '.join(KINDS)}")
    return names


def main() -> None:
    options = options_of()
    tasks = [(seed, options) for seed in options.seeds]
    results: list[dict[str, Any]] = []
    # What uses servers of its own, or is looked at, runs here.
    alone = options.part in ("kills", "real") or options.verbose
    for result in map(one, tasks) if alone else pooled(one, tasks, options.jobs):
        results.append(result)
        if result["complaints"] or options.verbose:
            _show(result, options)
    results.sort(key=lambda result: result["seed"])
    found = summary(results)
    print(json.dumps({name: found[name] for name in found if name != "runs"}, indent=1))
    if options.part == "servers":
        print(servers.tables(results))
    if options.part == "real":
        from experiments.chaos import real

        print(real.tables(results))
    if options.out:
        options.out.write_text(written(found), encoding="utf-8")
    sys.exit(bool(found["seeds_with_complaints"]))


if __name__ == "__main__":
    main()
