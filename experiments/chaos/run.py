"""Runs a chaos campaign on the embedded engine; see README.md in this folder.

python experiments/chaos/run.py --seeds 0:1000 --jobs 2
python experiments/chaos/run.py --seed 17 --verbose
python experiments/chaos/run.py --shards --seeds 0:1000
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.chaos import shards
from experiments.chaos.mix import KINDS, Mix
from experiments.chaos.trial import Outcome, run

CPU_S = 60
"""Of the processor's time, however busy it is: a seed that takes longer loops without its clock
going on. A usual one takes half a second."""


class LoopsForEver(BaseException):
    """No virtual time passes, and nothing ends."""


def one(task: tuple[int, argparse.Namespace]) -> dict[str, Any]:
    """One seed, as plain data."""
    seed, options = task
    gc.freeze()  # what is imported need not be looked at again after each seed
    mix = None if options.shards else Mix.of(seed, only=options.only, without=options.without)
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    began, used = time.monotonic(), time.process_time()
    try:
        if mix is None:
            outcome = shards.run(seed, lines=options.lines)
        else:
            outcome = run(mix, lines=options.lines)
    except LoopsForEver as error:
        import traceback

        outcome = Outcome(seed, [f"{error}\n{''.join(traceback.format_exception(error)[-14:])}"])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {
        **asdict(outcome),
        "kinds": [] if mix is None else sorted(mix.kinds),
        "mix": "shards" if mix is None else described(mix),
        "cpu_s": round(time.process_time() - used, 2),
        "wall_s": round(time.monotonic() - began, 2),
    }


def described(mix: Mix) -> str:
    """The settings that matter most, in a line."""
    names = ("stop", "refill", "over_provision", "straggler", "pace", "max_staleness")
    said = [f"{name} {mix.settings[name]}" for name in names]
    if mix.settings["max_staleness"] is not None:
        said.append(mix.settings["staleness_rule"])
    said += [f"{mix.engines} engines", f"store {mix.store}", f"reward {mix.reward}"]
    return ", ".join(said + ["accept"] * mix.accepts + ["episodes"] * mix.episodes)


def _too_long(*_: object) -> None:
    raise LoopsForEver(f"not done after {CPU_S} s of CPU time")


def campaign(seeds: Sequence[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All seeds, with a line of progress now and then and the complaints of whoever has some."""
    tasks = [(seed, options) for seed in seeds]
    found: list[dict[str, Any]] = []
    began = said = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=50) as pool:
        for result in pool.imap_unordered(one, tasks):
            found.append(result)
            if result["complaints"]:
                _show(result, options)
            if time.monotonic() > said + 10:
                said = time.monotonic()
                bad = sum(bool(r["complaints"]) for r in found)
                print(
                    f"{len(found)} of {len(tasks)} seeds, {bad} with complaints, "
                    f"{said - began:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return sorted(found, key=lambda result: result["seed"])


def _show(result: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"--- seed {result['seed']}: {', '.join(result['kinds'])}; {result['ending']}")
    print(f"  {result['mix']}")
    for complaint in result["complaints"][:5]:
        print(f"  ! {complaint if options.long else complaint.splitlines()[0][:300]}")
    if options.long:
        for line in result["history"]:
            print(f"    {line[:260]}")
    sys.stdout.flush()


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the README's table has."""
    figures: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    for result in results:
        figures.update(result["figures"])
        kinds.update(result["kinds"])
        endings.update(ending.split(":")[0] for ending in result["ending"])
    return {
        "seeds": len(results),
        "seeds_with_complaints": sum(bool(r["complaints"]) for r in results),
        "virtual_hours": round(sum(r["seconds"] for r in results) / 3600, 1),
        "cpu_s": round(sum(r["cpu_s"] for r in results), 1),
        "figures": dict(figures),
        "endings_of_lives": dict(endings),
        "seeds_with_kind": {kind: kinds[kind] for kind in KINDS if kinds},
        "failing": {
            r["seed"]: [complaint.splitlines()[0][:200] for complaint in r["complaints"]]
            for r in results
            if r["complaints"]
        },
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="first:last, last not included")
    parser.add_argument("--seed", type=int, help="a single one, in this process")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--shards", action="store_true", help="schedulers that are used as one")
    parser.add_argument("--only", type=_kinds, help="these kinds of chaos, in every seed")
    parser.add_argument("--without", type=_kinds, default=(), help="not these kinds")
    parser.add_argument(
        "--verbose", action="store_true", help="--seed: all that happens, as it does"
    )
    parser.add_argument("--long", action="store_true", help="with the history of each failing seed")
    parser.add_argument("--lines", type=int, default=80, help="of history")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _kinds(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown} are no kinds; there are {', '.join(KINDS)}")
    return names


def main() -> None:
    options = arguments()
    if options.seed is not None:
        if options.shards:
            outcome = shards.run(options.seed, aloud=options.verbose, lines=options.lines)
        else:
            mix = Mix.of(options.seed, only=options.only, without=options.without)
            for name, value in asdict(mix).items():
                print(f"{name}: {value}")
            outcome = run(mix, aloud=options.verbose, lines=options.lines)
        if not options.verbose:
            print("\n".join(outcome.history))
        for complaint in outcome.complaints:
            print(f"! {complaint}")
        print(outcome.ending, outcome.figures, f"{outcome.seconds:.0f} s")
        sys.exit(bool(outcome.complaints))
    first, last = map(int, options.seeds.split(":"))
    results = campaign(range(first, last), options)
    figures = summary(results)
    print(json.dumps(figures, indent=1))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(figures["seeds_with_complaints"]))


if __name__ == "__main__":
    main()
