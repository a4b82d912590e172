"""The schedules, the workload and the measurement of experiments/h200, real and simulated alike.

A cell is ``SCHEDULE:TRAINER:SCALE``, for example ``auto:20:0.25``, with ``:VARIANT`` and ``:sSEED``
behind it if they are not the usual ones. TRAINER is the trainer's seconds for a batch of the
workload in full size. SCALE multiplies all lengths. A quarter of the lengths is generated in about
0.16 of the time, because a step reads less KV, so the trainer takes 0.16 of its time there, and the
parts of a step keep their proportions. VARIANT is one of :data:`VARIANTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aprilsched.config import Objective, SchedulerConfig
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.values.companions import routed_experts
from aprilsched.observe.figures.summary import Summary
from aprilsched.planning import Planner
from aprilsched.planning.presets import PRESETS
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.simulation import NEVER, Costs, Simulation, rare_collections
from aprilsched.simulation.engine import SimConfig
from aprilsched.simulation.workload import LongTailWorkload

MODEL = H200_QWEN3_4B
EXPERTS = StepTimeModel(
    t0=17.81e-3,
    t1=15.25e-6,
    t2=31.86e-9,
    prefill_pass=41.19e-3,
    prefill_rate=70_480.0,
)
"""Fitted (``aprilsched calibrate``) to 298 windows of an earlier run of the shape of Qwen3-30B-A3B
on one H200. None of its batches was smaller than 64, where steps are shorter than this says,
because they do not read all experts."""
MAX_RUNNING = 512
KV_TOKENS = 500_000
REFIT_SECONDS = 0.01
"""A pause, a flush and a label, in the simulation."""

Change = Callable[[SchedulerConfig], SchedulerConfig]


def _preset(name: str, **more: Any) -> Change:
    return lambda config: replace(PRESETS[name](config), **more)


# SGLang 0.5.17 cannot flush its cache while requests wait inside, so stragglers are called back. It
# does not tell the version of each token either, which only "KV kept" would need.
_BACK: dict[str, Any] = {"straggler": "abort"}
_KEPT: dict[str, Any] = {"straggler": "in_place", "allow_inexact_versions": True}
# The price of age and the tolerance with which the first cells were measured, so that later ones
# are like them.
_PRICED: dict[str, Any] = {"objective": Objective(usefulness_age=17.0, tolerance=0.02)}
_SPEED: dict[str, Any] = {
    "objective": Objective(usefulness_age=math.inf, distance_price=0.0, tolerance=0.02)
}
# Gives up three times as much speed as the default for fresher tokens.
_FRESH: dict[str, Any] = {"objective": Objective(tolerance=0.03)}
SCHEDULES: dict[str, tuple[Change, bool]] = {
    "waiting": (_preset("sync", **_BACK), False),
    "waiting-streamed": (_preset("sync", **_BACK), True),
    "april": (_preset("april", **_BACK), False),
    "april-kept": (_preset("april", **_KEPT), False),
    "april-streamed": (_preset("april", **_BACK), True),
    "areal": (_preset("areal", **_BACK), False),
    "areal-kept": (_preset("areal", **_KEPT), False),
    "auto": (_preset("auto", **_BACK, **_PRICED), False),
    "auto-kept": (_preset("auto", **_KEPT, **_PRICED), False),
    "auto-fast": (_preset("auto", **_BACK, **_SPEED), False),
    "auto-kept-fast": (_preset("auto", **_KEPT, **_SPEED), False),
    "auto-fresh": (_preset("auto", **_BACK, **_FRESH), False),
    "auto-default": (_preset("auto", **_BACK), False),
    "auto-kept-default": (_preset("auto", **_KEPT), False),
    "auto-default-streamed": (_preset("auto", **_BACK), True),
    "auto-kept-default-streamed": (_preset("auto", **_KEPT), True),
}
"""Settings of each schedule, and whether its trainer takes groups from a stream."""
VARIANTS = {
    "": "one server of the 4B shape",
    "moved": "weights moved",
    "tail": "longer tail",
    "two": "two engines",
    "tp2-8b": "8B shape, tensor parallelism 2",
    "recv8": "requests taken every eighth step",
    "single": "each request in a body of its own",
    "moe": "mixture of experts",
    "routed": "mixture of experts, routed experts returned",
}
"""What differs in a cell from the others, in words. "tail" has lengths of sigma 1.1 and a cap of
16,000, and "two" has batches of 64 groups for two servers. In "single" the number of connections is
bounded, by more than are needed, so that none is shared."""
ROUTED = "--enable-return-routed-experts"
SERVERS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "tp2-8b": ("8b", 2, ()),
    "recv8": ("4b", 1, ("--scheduler-recv-interval", "8")),
    "moe": ("moe", 1, (ROUTED,)),
    "routed": ("moe", 1, (ROUTED,)),
}
"""Shape, GPUs and further arguments of the servers of variants that need others."""
TRAINER_SHARE = {1.0: 1.0, 0.25: 0.16}
"""The share of the trainer's seconds by SCALE."""
BATCHES = {"waiting": (2, 8), "waiting-streamed": (2, 8)}
WHOLE = {"waiting": (0, 4), "april": (3, 10), "april-kept": (3, 12), "areal": (4, 10),
         "areal-kept": (4, 10)}  # fmt: skip
"""Batches that are not counted, and batches that are, by the schedule, if it is neither (6, 14) nor
automatic. Cells in full size without a trainer have fewer, because a batch takes up to 85 s."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of one schedule."""

    name: str
    schedule: str
    trainer: float
    scale: float
    variant: str
    seed: int = 0

    @classmethod
    def of(cls, name: str) -> Cell:
        schedule, trainer, scale, *rest = name.split(":")
        seed = 0
        if rest and rest[-1].removeprefix("s").isdecimal():
            seed = int(rest.pop().removeprefix("s"))
        variant = rest[0] if rest else ""
        if schedule not in SCHEDULES or variant not in VARIANTS:
            raise ValueError(f"there is no cell {name}; see SCHEDULES and VARIANTS")
        return cls(name=name, schedule=schedule, trainer=float(trainer), scale=float(scale),
                   variant=variant, seed=seed)  # fmt: skip

    @property
    def server(self) -> tuple[str, int, tuple[str, ...]]:
        """Shape, GPUs and further arguments of its server."""
        return SERVERS.get(self.variant, ("4b", 1, ()))

    @property
    def model(self) -> StepTimeModel:
        """The step times that were known before."""
        return EXPERTS if self.server[0] == "moe" else MODEL

    @property
    def engines(self) -> int:
        return 2 if self.variant == "two" else 1

    def bound(self, prompts: Sequence[int], lengths: Sequence[int]) -> float:
        """T_bound on the cell's engines."""
        return self.model.bound_seconds(prompts, lengths, MAX_RUNNING) / self.engines

    @property
    def train_seconds(self) -> float:
        return self.trainer * TRAINER_SHARE.get(self.scale, self.scale)

    @property
    def _batches(self) -> tuple[int, int]:
        whole = self.scale == 1 and not self.trainer
        if self.schedule.startswith("auto"):
            return (10, 12 if whole else 20)
        return (BATCHES | WHOLE if whole else BATCHES).get(self.schedule, (6, 14))

    @property
    def burn_in(self) -> int:
        return self._batches[0]

    @property
    def batches(self) -> int:
        return sum(self._batches)

    @property
    def streamed(self) -> bool:
        return SCHEDULES[self.schedule][1]

    @property
    def config(self) -> SchedulerConfig:
        base = SchedulerConfig(batch_groups=32 * self.engines, group_size=8)
        config = SCHEDULES[self.schedule][0](base)
        if self.variant == "routed":
            rows = routed_experts(layers=48, per_token=8, experts=128)
            config = replace(config, companions=(rows,))
        if config.automatic and self.train_seconds:
            config = replace(config, pace="auto" if PACED else "asynchronous")
        return config

    @property
    def workload(self) -> LongTailWorkload:
        sigma, cap = (1.1, 16_000) if self.variant == "tail" else (0.9, 6000)
        return LongTailWorkload(
            median=700 * self.scale,
            sigma=sigma,
            cap=round(cap * self.scale),
            group_size=8,
            seed=self.seed,
            vocab_size=512,
        )

    def planner(self, known: StepTimeModel | None = None) -> Planner:
        """The planner of a simulation knows the model; that of a run learns it."""
        return Planner(known or MODEL, max_running=MAX_RUNNING, inline=known is not None)


def _paced() -> bool:
    try:
        replace(PRESETS["auto"](SchedulerConfig()), pace="auto")
    except ValueError:
        return False
    return True


PACED = _paced()
"""Whether automatic scheduling chooses the pace too."""


class Meter:
    """A listener that measures whole steps: from one update's end to the next one's."""

    def __init__(self, cell: Cell) -> None:
        waits = cell.config.first_pace == "synchronous"
        self.summary = Summary(trainer_waits=waits, bound=cell.bound)
        self.ends: list[float] = []
        self.chosen: list[dict[str, Any]] = []
        """Each choice of a schedule: the batches before it, what was chosen, and the forecast."""
        self.generated: list[int] = []
        """Tokens that arrived in each step."""
        self._arrived = 0
        self._began: float | None = None

    def on_facts(self, new: Sequence[facts.Fact], now: float) -> None:
        self.summary.on_facts(new, now)
        for fact in new:
            if isinstance(fact, facts.TokensReceived):
                self._arrived += fact.tokens
            elif self._began is None and isinstance(fact, facts.BatchRequested):
                self._began = now
            elif isinstance(fact, facts.UpdateFinished):
                self.ends.append(now)
                self.generated.append(self._arrived)
                self._arrived = 0
            elif isinstance(fact, facts.ScheduleChanged):
                cast = fact.forecast
                forecast = {} if cast is None else {
                    name: getattr(cast, name)
                    for name in ("step_seconds", "efficiency", "off_policy_share", "mean_age",
                                 "distance", "token_seconds", "read_seconds")
                }  # fmt: skip
                self.chosen.append(
                    {"batch": len(self.ends), "schedule": fact.schedule, "forecast": forecast}
                )

    def rows(self) -> list[dict[str, Any]]:
        """The figures of each batch whose update is over."""
        rows = []
        before = self._began
        for batch, end, arrived in zip(
            self.summary.batches, self.ends, self.generated, strict=False
        ):
            assert before is not None
            found = batch.figures
            rows.append({
                "step_s": end - before, "bound_s": found.t_bound, "tokens": found.tokens,
                "generated": arrived,
                "responses": len(batch.lengths),
                "off_policy": found.off_policy_token_share, "age": found.staleness_mean,
                "oldest": found.staleness_max, "distance": found.length_distance,
            })  # fmt: skip
            before = end
        return rows


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over batches. Shares and ages are of all their tokens together."""
    seconds = sum(row["step_s"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    known = all("generated" in row for row in rows)
    return {
        "step_s": seconds / len(rows),
        **({"generated_s": sum(row["generated"] for row in rows) / seconds} if known else {}),
        "tokens_s": tokens / seconds,
        "efficiency": sum(row["bound_s"] for row in rows) / seconds,
        "off_policy": sum(row["off_policy"] * row["tokens"] for row in rows) / tokens,
        "age": sum(row["age"] * row["tokens"] for row in rows) / tokens,
        "oldest": max(row["oldest"] for row in rows),
        "mean_length": tokens / sum(row.get("responses", 256) for row in rows),
        "distance": sum(row["distance"] or 0.0 for row in rows) / len(rows),
    }


def simulated(
    cell: Cell, model: StepTimeModel | None = None, batches: int | None = None
) -> dict[str, Any]:
    """What the simulator says of a cell, on its own prompts, with the step times that were known
    before or others, and in its own number of batches or another."""
    meter, model = Meter(cell), model or cell.model
    engine = SimConfig(
        timing=model, max_running=MAX_RUNNING, kv_tokens=KV_TOKENS, make_tokens=False,
        stream_interval=NEVER,
    )  # fmt: skip
    simulation = Simulation(
        cell.config, cell.workload, engine=engine, engines=cell.engines,
        batches=batches or cell.batches,
        streamed=cell.streamed,
        costs=Costs(train_seconds=cell.train_seconds, refit_seconds=REFIT_SECONDS),
        planner=cell.planner(model), listeners=[meter],
    )  # fmt: skip
    with rare_collections():
        simulation.run()
    rows = meter.rows()
    return {
        "cell": cell.name,
        "seconds": sum(row["step_s"] for row in rows),
        **figures(rows[cell.burn_in :]),
        "schedule": meter.chosen[-1]["schedule"] if meter.chosen else "",
    }
