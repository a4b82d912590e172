"""Replays how forecasts are corrected by earlier batches, on the servers' logs in raw/.

    python experiments/h200/corrections.py

For each choice of a schedule that was in force for at least eight batches and had four batches or
more before it, the speed that was forecast without a correction is compared with what was
generated, by the step times of the forecast. The batches before it make the correction by
:mod:`aprilsched.planning.planner`, by their plain mean with the weight of several numbers of
batches that went as forecast, or not at all. Cells beside a trainer of 20 s, where the trainer
decides, are left out.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from analysis import generated, lines, of_forecasts  # noqa: E402
from schedules import Cell  # noqa: E402

from aprilsched.planning.planner import Bias  # noqa: E402

PRIORS = {"as Bias does": None, "1 batch": 1.0, "4 batches": 4.0, "8 batches": 8.0,
          "16 batches": 16.0, "not corrected": float("inf")}  # fmt: skip
SETTLING = 2
"""Batches of another schedule that do not count, as in aprilsched/driver/forecasts.py."""
LEAST_BEFORE, LEAST_AFTER = 7, 8


@dataclass
class Choice:
    """A choice, and the batches that were known when it was made."""

    cell: str
    batch: int
    found: float
    """Speed in the batches after it, over the one that was forecast without a correction."""
    corrected: float
    """The correction in the run."""
    known: list[tuple[float, float]] = field(default_factory=list)
    """Speed of each batch before it, over the forecast one, and its time in forecast steps."""

    def corrected_with(self, prior: float | None) -> float:
        """The correction with the weight of so many batches, or with what Bias does."""
        if prior is None:
            bias = Bias()
            for ratio, time in self.known:
                bias.observe("any", work=ratio * time, time=time)
            return bias.factor("any")
        if prior == float("inf"):
            return 1.0
        work = sum(ratio * time for ratio, time in self.known)
        return (work + prior) / (sum(time for _, time in self.known) + prior)


def choices(line: dict[str, Any]) -> list[Choice]:
    """The choices of a run that count."""
    times, ends = of_forecasts(line), len(line["batches"])
    made = [each for each in line["chosen"] if each["forecast"]]
    after = [each["batch"] for each in made[1:]] + [ends]
    known: list[tuple[float, float]] = []
    found: list[Choice] = []
    before: str | None = None
    for each, end in zip(made, after, strict=True):
        cast, begin = each["forecast"], each["batch"]
        plain = cast["efficiency"] / cast["correction"]
        whole = generated(line, times, begin, end) if end > begin else None
        if whole and begin >= LEAST_BEFORE and end - begin >= LEAST_AFTER:
            choice = Choice(line["cell"], begin, whole / plain, cast["correction"], list(known))
            found.append(choice)
        name = each["schedule"].split(":")[0]
        first = begin if name == before else begin + SETTLING
        before = name
        for batch, batch_end in pairwise(range(first, end + 1)):
            speed = generated(line, times, batch, batch_end) or 0.0
            seconds = line["batches"][batch]["step_s"]
            known.append((speed / plain, seconds / cast["step_seconds"] / cast["correction"]))
    return found


def main() -> None:
    runs = [
        line for line in lines("cells.jsonl")
        if line.get("kind") == "cell" and line.get("log") and line["chosen"]
        and "token_seconds" in line["chosen"][0]["forecast"] and Cell.of(line["cell"]).trainer < 20
    ]  # fmt: skip
    several = [choice for line in runs for choice in choices(line)]
    for choice in several:
        print(f"{choice.cell}, batch {choice.batch}: found {choice.found:.3f}, "
              f"corrected by {choice.corrected:.3f}")  # fmt: skip
    off = {
        name: statistics.fmean(abs(c.corrected_with(prior) - c.found) for c in several)
        for name, prior in PRIORS.items()
    }
    off["in the runs"] = statistics.fmean(abs(c.corrected - c.found) for c in several)
    rounded = {name: round(value, 4) for name, value in off.items()}
    print(json.dumps(rounded, indent=1))
    result = {"mean_error": rounded,
              "choices": [[c.cell, c.batch, round(c.found, 4), round(c.corrected, 4)]
                          for c in several]}  # fmt: skip
    (HERE / "corrections.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
