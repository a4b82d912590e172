"""Checks formulas for lone samples (groups of one), whose schedules are renewal processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist, fmean

from aprilsched.config import Pool, SchedulerConfig
from aprilsched.core.policies.straggler import StragglerRule
from aprilsched.timing.model import H200_QWEN3_4B_LINEAR
from aprilsched.workload import LongTailWorkload
from experiments.formulas.row import Row
from experiments.frontier.measured import MAX_RUNNING, Figures, Run, mean, run

__all__ = ["best_ratio", "caches", "pools", "pools_together", "waves", "whole_groups"]

MODEL = H200_QWEN3_4B_LINEAR
BATCHES, BURN_IN, SEEDS = 60, 15, 2
_NORMAL = NormalDist()
_RATIOS = (1.0625, 1.125, 1.25, 1.375, 1.5, 1.75, 2.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """What the formulas know of the lengths: those of the example."""

    mean: float
    spread: float
    """1 + c^2."""
    cap: int
    prompt: int
    median: float
    sigma: float

    @property
    def partial(self) -> float:
        """Mean length of what is in flight, as of a renewal process at any time."""
        return self.mean * self.spread / 2

    def longer(self, steps: float) -> float:
        """Share of the responses that have more tokens."""
        if steps >= self.cap:
            return 0.0
        return 1 - _NORMAL.cdf(math.log(steps / self.median) / self.sigma)

    def wave_steps(self, ratio: float) -> float:
        """Steps S of a wave, exactly: a response of L tokens is interrupted at S, 2 S, ... < L,
        which is rho - 1 times in the mean."""
        low, high = 1.0, float(self.cap)
        for _ in range(60):
            middle = (low + high) / 2
            if sum(self.longer(stop) for stop in self._stops(middle)) > ratio - 1:
                low = middle
            else:
                high = middle
        return high

    def wave_again(self, ratio: float) -> float:
        """Tokens prefilled again for each response, exactly: its length at each interruption."""
        stops = self._stops(self.wave_steps(ratio))
        return sum(stop * self.longer(stop) for stop in stops)

    def exact_wave_seconds(self, n: int, ratio: float) -> float:
        """Work, steps, and prefill in one burst of passes."""
        tokens = n * (self.wave_again(ratio) + ratio * self.prompt)
        work = MODEL.t1 * self.mean + MODEL.t2 * self.mean**2 * self.spread / 2
        return n * work + MODEL.t0 * self.wave_steps(ratio) + MODEL.prefill_seconds(round(tokens))

    def _stops(self, steps: float) -> list[float]:
        return [steps * (k + 1) for k in range(int(self.cap / steps))]

    def wave_seconds(self, n: int, ratio: float, *, passes: bool = False) -> float:
        """The formula; with `passes` also what it leaves out, passes and prompts."""
        work = MODEL.t1 * self.mean + MODEL.t2 * self.mean**2 * self.spread / 2
        steps = MODEL.t0 * self.mean / (ratio - 0.5)
        again = (ratio - 1) * n * self.partial
        if passes:
            tokens = again + (n + (ratio - 1) * n) * self.prompt
            return n * work + steps + MODEL.prefill_seconds(round(tokens))
        return n * work + steps + again / MODEL.prefill_rate


def law() -> Law:
    """Of the example workload."""
    workload = LongTailWorkload(group_size=1)
    moments = workload.moments()
    return Law(
        mean=moments.mean,
        spread=1 + moments.cv2,
        cap=workload.cap,
        prompt=workload.prompt_tokens,
        median=workload.median,
        sigma=workload.sigma,
    )


def lone(
    n: int, ratio: float, *, together: int = 0, straggler: StragglerRule = "retract"
) -> list[Run]:
    """Runs of batches of `n` lone samples: waves, or a pool refilled `together`."""
    config = SchedulerConfig(
        batch_groups=n,
        group_size=1,
        over_provision=ratio,
        refill=Pool(together=together) if together else "wave",
        straggler=straggler,
    )
    return [
        run(config, LongTailWorkload(group_size=1, seed=seed), batches=BATCHES)
        for seed in range(SEEDS)
    ]


def figures(runs: list[Run]) -> Figures:
    return mean([one.figures(BURN_IN) for one in runs])


def per_batch(runs: list[Run], name: str) -> float:
    """Increase of a total, a batch, after the burn-in."""
    marks = [(one.marks[BURN_IN - 1], one.marks[-1]) for one in runs]
    return fmean((getattr(b, name) - getattr(a, name)) / (BATCHES - BURN_IN) for a, b in marks)


def mean_kv(runs: list[Run]) -> float:
    """Tokens read by a step, in the mean: what decoding took beyond t0 and t1, over t2."""
    generated, steps = per_batch(runs, "generated"), per_batch(runs, "steps")
    work = per_batch(runs, "work") - MODEL.t0 * generated / MAX_RUNNING
    return (work - MODEL.t1 * generated) / MODEL.t2 / steps


def waves() -> Iterator[Row]:
    """Time of a batch, steps and re-prefill of waves over the ratio."""
    known, n = law(), 256
    for ratio in _RATIOS:
        runs = lone(n, ratio)
        found = figures(runs)
        # Batches of one run differ in length: the formula is for the mean length generated.
        scale = per_batch(runs, "generated") / (n * known.mean)
        at = f"waves, N = 256, rho = {ratio:g}"
        seconds = found.seconds / scale
        yield Row("wave time", at, known.wave_seconds(n, ratio), seconds)
        yield Row("wave time, with passes", at, known.wave_seconds(n, ratio, passes=True), seconds)
        yield Row("wave time, exact", at, known.exact_wave_seconds(n, ratio), seconds)
        steps = per_batch(runs, "steps") / scale
        yield Row("steps of a wave, mu/(rho - 1/2)", at, known.mean / (ratio - 0.5), steps)
        yield Row("steps of a wave, exact", at, known.wave_steps(ratio), steps)
        again = (ratio - 1) * n * known.partial
        yield Row("re-prefill, waves (rho - 1)", at, again, found.reprefilled)
        yield Row(
            "re-prefill, waves (rho - 1/2)",
            at,
            (ratio - 0.5) * n * known.partial,
            found.reprefilled,
        )
        yield Row("re-prefill, waves, exact", at, n * known.wave_again(ratio), found.reprefilled)
        bound = (ratio - 0.5) * known.cap / known.mean
        yield Row("staleness, (rho - 1/2)·L_max/mu", at, bound, found.staleness_max)
        crossed = math.ceil(known.cap / known.wave_steps(ratio)) - 1
        yield Row("staleness, ends of waves within L_max", at, crossed, found.staleness_max)


def pools() -> Iterator[Row]:
    """Re-prefill, staleness and cache of a constant pool under recompute."""
    known, n = law(), 256
    for ratio in (1.0, 1.25, 1.5, 2.0):
        runs = lone(n, ratio, together=16)
        found, at = figures(runs), f"pool refilled 16 together, N = 256, rho = {ratio:g}"
        again = ratio * n * known.partial
        yield Row("re-prefill, pool (rho)", at, again, found.reprefilled)
        steps = per_batch(runs, "steps") / per_batch(runs, "generated") * n * known.mean
        yield Row("steps of a pool, mu/rho", at, known.mean / ratio, steps)
        bound = ratio * known.cap / known.mean
        yield Row("staleness of a pool, rho·L_max/mu", at, bound, found.staleness_max)


def pools_together() -> Iterator[Row]:
    """Passes and idle slots of a pool by how many are refilled together; KV kept."""
    known, n, ratio = law(), 256, 1.25
    for together in (1, 4, 16, 32, 64):
        runs = lone(n, ratio, together=together, straggler="in_place")
        found, at = figures(runs), f"pool of 320, KV kept, k = {together}"
        rate = found.generated_per_s / known.mean
        predicted = rate * MODEL.prefill_pass / together
        yield Row("pass loss, r·t_p/k", at, predicted, found.prefill)
        width = per_batch(runs, "generated") / per_batch(runs, "steps")
        yield Row("idle slots, k/2", at, ratio * n - together / 2, width)


def caches() -> Iterator[Row]:
    """KV in use: the mean over steps, and the most."""
    known, n = law(), 256
    for ratio, together in ((1.25, 16), (2.0, 16), (1.5, 0), (2.0, 0)):
        runs = lone(n, ratio, together=together, straggler="in_place")
        kind = "pool" if together else "waves"
        predicted = ratio * n * (known.prompt + known.partial)
        at = f"{kind}, N = 256, rho = {ratio:g}, KV kept"
        yield Row("KV, rho·N·(prompt + mu(1 + c^2)/2): mean", at, predicted, mean_kv(runs))
        peak = fmean(mark.peak for one in runs for mark in one.marks[BURN_IN:])
        yield Row("the same: peak of a batch", at, predicted, peak)
        most = max(mark.peak for one in runs for mark in one.marks[BURN_IN:])
        yield Row("the same: peak of the run", at, predicted, most)


def best_ratio() -> Iterator[Row]:
    """The predicted best ratio against the best of a sweep, and what it loses."""
    known = law()
    for n, ratios in ((64, (1.25, 1.5, 2.0, 2.5, 3.0, 4.0)), (256, _RATIOS)):
        root = 2 * MODEL.t0 * MODEL.prefill_rate / (n * known.spread)
        predicted = 0.5 + math.sqrt(root)
        swept = {ratio: figures(lone(n, ratio)).efficiency for ratio in ratios}
        best = max(swept, key=lambda ratio: swept[ratio])
        at = f"waves, N = {n}"
        yield Row("rho*", at, predicted, best)
        reached = figures(lone(n, round(predicted * n) / n)).efficiency
        yield Row("efficiency at rho*, against the best", at, reached, swept[best])
        fine = [1 + step / 32 for step in range(1, 97)]
        exact = min(fine, key=lambda ratio: known.exact_wave_seconds(n, ratio))
        yield Row("rho* of the exact time", at, exact, best)
        reached = figures(lone(n, exact)).efficiency
        yield Row("efficiency at that rho*, against the best", at, reached, swept[best])


def whole_groups() -> Iterator[Row]:
    """Of whole groups: the formula of lone samples does not hold for them."""
    known = law()
    for ratio in (1.25, 1.5, 2.0):
        config = SchedulerConfig(over_provision=ratio)
        runs = [run(config, LongTailWorkload(seed=seed), batches=BATCHES) for seed in range(SEEDS)]
        found, at = figures(runs), f"waves, 32 groups of 8, rho = {ratio:g}"
        scale = per_batch(runs, "generated") / (256 * known.mean)
        yield Row(
            "wave time, whole groups", at, known.wave_seconds(256, ratio), found.seconds / scale
        )
        again = (ratio - 1) * 256 * known.partial
        yield Row("re-prefill, whole groups", at, again, found.reprefilled)
        bound = (ratio - 0.5) * known.cap / known.mean
        yield Row("staleness, whole groups", at, bound, found.staleness_max)
