"""The arms, the workload and the measurement of experiments/h200, real and simulated alike.

A cell is ``ARM:sSEED``, for example ``samples@2.0:s0``, on one server. On several it is
``ENGINESxGROUPS:ARM:sSEED``, with batches of GROUPS groups (engines.md). Responses end at stop
tokens, as those of a trained model do, and every request has the same limit. A model with random
weights gives each token about the same probability, so a set of m stop tokens ends a response with
probability m / V at each step: lengths are exponential with the mean V / m, which differs by group.

Everything that counts tokens has a quarter of its usual size (:data:`SCALE`): lengths, the limit,
the KV pool, and the part of a limit that SGLang reserves. A batch then takes a sixth of the time,
and the pool is as full as in full size.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from aprilsched.config import Pool, SchedulerConfig
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.values.capabilities import Reservation
from aprilsched.observe.figures.summary import Summary
from aprilsched.planning import Planner
from aprilsched.planning.presets import PRESETS
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.simulation import Costs, Simulation, rare_collections
from aprilsched.simulation.engine import SimConfig
from aprilsched.types import Prompt, SamplingParams

MODEL = StepTimeModel(
    t0=6.4e-3,
    t1=15.25e-6,
    t2=33.9e-9,
    prefill_pass=41.19e-3,
    prefill_rate=70_480.0,
    t0_experts=10.8e-3,
    expert_share=1 / 16,
)
"""Fitted to earlier runs of the shape of Qwen3-30B-A3B on one H200 (exact_limits.md)."""
GROUPS, SIZE = 32, 8
MAX_RUNNING = 512
SCALE = 0.25
CAP = round(6000 * SCALE)
KV_TOKENS = round(750_000 * SCALE)
CLIP = round(4096 * SCALE)
"""Tokens that SGLang reserves at most for what a request may still generate."""
VOCABULARY = 151_936
MOST_STOPS = 2_500
"""Stop tokens of a request at most, so that its body stays small."""
MOST_BATCHES = 20
"""Of a simulated cell, more than :data:`SECONDS` have room for."""
UPDATE_SECONDS = 0.006
"""Seconds of an update for each group of a batch, in the simulation: a pause, a label, delivery and
new requests. Fitted to the cell 4x64:wave@2.0:s0 alone (engines.md)."""
BURN_IN = 3
"""Batches that are not counted, because the engine fills in them."""
AUTO_BURN_IN = 6
"""Those of automatic schedules, which learn the lengths too."""
SECONDS = 75.0
"""After them a cell takes no further batch."""
LONG_SECONDS = 120.0
"""Those of schedules that need more than :data:`SECONDS`, from seed 1 on."""
LONG = {"auto", "pool@1.75", "pool@1.75:clip", "wave@2.0:recompute", "samples@2.0:recompute"}
DENSE_SECONDS = 50.0
"""Those of the dense shape, whose batches take half of the time."""
FLEET_SECONDS = 27.0
"""Those of a cell of :func:`fleets`, whose lengths have half of the size (:attr:`Cell.scale`)."""
KILLED_SECONDS = 130.0
"""Those of a cell in which an engine is killed and started again."""

Change = Callable[[SchedulerConfig], SchedulerConfig]


def _wave(ratio: float, **more: Any) -> Change:
    return lambda config: replace(config, over_provision=ratio, refill="wave", **more)


def _pool(config: SchedulerConfig) -> SchedulerConfig:
    return replace(config, over_provision=1.75, refill=Pool(together=4))


def _auto(config: SchedulerConfig, **more: Any) -> SchedulerConfig:
    return replace(PRESETS["auto"](config), **more)


def _running(config: SchedulerConfig, **more: Any) -> SchedulerConfig:
    return replace(config, over_provision=2.0, refill="pool", pace="asynchronous", **more)


class Server(NamedTuple):
    """A kind of server."""

    shape: str = "mixture"
    """Name of the shape in cells.py."""
    model: StepTimeModel = MODEL
    kv_tokens: int = KV_TOKENS
    clip: int = CLIP
    max_running: int = MAX_RUNNING
    conservativeness: float = 1.0
    """Factor of what running requests reserve."""


SERVERS = {
    "mixture": Server(),
    # 256 tokens in full size
    "clip": Server(clip=round(256 * SCALE)),
    # What an empty server reserves is then what one reserves by default that ran for long.
    "ratio": Server(conservativeness=0.14),
    "dense": Server(shape="dense", model=H200_QWEN3_4B),
    # Two of them take turns on one GPU, so that a step of each takes as long as one of all layers.
    "half": Server(
        shape="half", kv_tokens=KV_TOKENS // 4, clip=CLIP // 2, max_running=MAX_RUNNING // 2
    ),
}
"""The servers: one for each GPU, with "half" of the layers and half of the lengths two."""


class Arm(NamedTuple):
    """An arm: its title, what it changes, its treatment of KV, and its server."""

    title: str
    change: Change
    kept: dict[str, Any]
    server: str = "mixture"


_SAMPLES: dict[str, Any] = {"delivery": "samples", "siblings": 4}
# SGLang 0.5.17 does not report the version of each token, which only "KV kept" would need, and
# cannot flush its cache while requests wait inside, so "recompute" calls stragglers back.
_KEPT: dict[str, Any] = {"straggler": "in_place", "allow_inexact_versions": True}
_BACK: dict[str, Any] = {"straggler": "abort"}
_ARMS: dict[str, tuple[str, Change]] = {
    "sync": ("synchronous", PRESETS["sync"]),
    "wave@1.5": ("groups, wave 1.5", _wave(1.5)),
    "wave@2.0": ("groups, wave 2.0 (APRIL)", _wave(2.0)),
    "wave@3.0": ("groups, wave 3.0", _wave(3.0)),
    "wave@3.5": ("groups, wave 3.5", _wave(3.5)),
    "pool@1.75": ("groups, pool 1.75", _pool),
    "samples@1.5": ("samples, wave 1.5", _wave(1.5, **_SAMPLES)),
    "samples@2.0": ("samples, wave 2.0", _wave(2.0, **_SAMPLES)),
    "samples@2.5": ("samples, wave 2.5", _wave(2.5, **_SAMPLES)),
    "auto": ("groups, auto", _auto),
    "auto@4": ("groups, auto, max_staleness=4", partial(_auto, max_staleness=4)),
    "auto-samples": ("samples, auto", partial(_auto, **_SAMPLES)),
    "auto-samples@4": (
        "samples, auto, max_staleness=4",
        partial(_auto, max_staleness=4, **_SAMPLES),
    ),
}
ARMS: dict[str, Arm] = {
    **{name: Arm(title, change, _KEPT) for name, (title, change) in _ARMS.items()},
    **{
        f"{name}:recompute": Arm(f"{_ARMS[name][0]}, recompute", _ARMS[name][1], _BACK)
        for name in ("wave@2.0", "samples@2.0", "samples@1.5", "wave@3.5")
    },
    **{
        f"{name}:clip": Arm(f"{_ARMS[name][0]}, clip 64", _ARMS[name][1], _KEPT, "clip")
        for name in ("wave@2.0", "pool@1.75")
    },
    **{
        f"{name}:ratio": Arm(
            f"{_ARMS[name][0]}, recompute, conservativeness 0.14", _ARMS[name][1], _BACK, "ratio"
        )
        for name in ("wave@2.0", "samples@2.0")
    },
    **{
        f"{name}:dense": Arm(f"{_ARMS[name][0]}, dense", _ARMS[name][1], _KEPT, "dense")
        for name in ("sync", "wave@2.0", "samples@2.0", "auto-samples")
    },
    "together@2.0": Arm("groups, pool 2.0, refits together", _running, _BACK),
    "rolling@2.0": Arm(
        "groups, pool 2.0, rolling refits",
        partial(_running, refit="rolling"),
        {"straggler": "run"},
    ),
    "wave@2.0:weights": Arm("groups, wave 2.0 (APRIL), weights", _wave(2.0), _KEPT),
    "wave@2.0:killed": Arm("groups, wave 2.0 (APRIL), one engine killed", _wave(2.0), _KEPT),
}
"""The arms. Samples have 4 siblings. In "weights" an update brings weights to the engines."""
COMPARED = (
    ("samples@2.0", "wave@2.0"), ("auto-samples", "auto"), ("auto-samples", "sync"),
    ("auto-samples@4", "auto@4"), ("auto-samples@4", "auto-samples"), ("auto@4", "auto"),
    ("auto", "wave@2.0"), ("pool@1.75", "auto"), ("samples@2.0:recompute", "wave@2.0:recompute"),
    ("samples@2.0:recompute", "wave@3.5:recompute"), ("pool@1.75:clip", "pool@1.75"),
    ("samples@2.0:ratio", "wave@2.0:ratio"), ("wave@2.0:ratio", "wave@2.0:recompute"),
    ("samples@2.0:ratio", "samples@2.0:recompute"), ("wave@2.0:clip", "wave@2.0"),
    ("samples@2.0:dense", "wave@2.0:dense"), ("auto-samples:dense", "sync:dense"),
)  # fmt: skip
"""Arms of which the first is compared with the second."""
FLEET_ARMS = ("wave@2.0", "samples@2.0", "auto", "auto-samples")


def fleets(gpus: int) -> list[list[str]]:
    """Lists of cells with several engines: for the engines of each GPU, and for all of them.

    Every engine has 16 groups of a batch, except where the batch is that of one GPU ("strong").
    """
    each = engines_of_a_gpu(gpus)
    alone = [f"{each}x{16 * each}:{arm}:s0" for arm in FLEET_ARMS]
    every, engines = f"{each * gpus}x{16 * each * gpus}", each * gpus
    arms = ("wave@2.0:killed", "rolling@2.0", "together@2.0", "wave@2.0:weights")
    whole = [f"{every}:{arm}:s0" for arm in arms]
    if gpus > 1:
        whole[:0] = [f"{every}:{arm}:s0" for arm in FLEET_ARMS]
        whole[4:4] = [f"{engines}x{16 * each}:{arm}:s0" for arm in FLEET_ARMS[:3]]
    return [*(alone[gpu::gpus] for gpu in range(gpus)), whole]


def engines_of_a_gpu(gpus: int) -> int:
    """Return how many engines share a GPU: two, unless there are four GPUs."""
    return 2 if gpus < 4 else 1


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of one arm."""

    name: str
    arm: str
    seed: int
    engines: int = 1
    groups: int = GROUPS
    """Of a batch."""
    is_fleet: bool = False
    """It is one of :func:`fleets`."""
    draw: int = 0
    """Simulations of other draws have other tokens, so responses of other lengths."""

    @classmethod
    def of(cls, name: str) -> Cell:
        found = re.fullmatch(r"(?:(\d+)x(\d+):)?(.+):s(\d+)", name)
        if found is None or found[3] not in ARMS:
            raise ValueError(f"{name} must be [ENGINESxGROUPS:]ARM:sSEED, ARM of {', '.join(ARMS)}")
        return cls(
            name=name, arm=found[3], seed=int(found[4]), engines=int(found[1] or 1),
            groups=int(found[2] or GROUPS), is_fleet=found[1] is not None,
        )  # fmt: skip

    @property
    def title(self) -> str:
        return ARMS[self.arm].title + (f", seed {self.seed}" if self.seed else "")

    @property
    def config(self) -> SchedulerConfig:
        arm = ARMS[self.arm]
        base = SchedulerConfig(batch_groups=self.groups, group_size=SIZE, max_staleness=None)
        return arm.change(replace(base, **arm.kept))

    @property
    def server(self) -> str:
        """The kind of its servers."""
        return ARMS[self.arm].server if not self.is_fleet else "half"

    @property
    def scale(self) -> float:
        """The scale of the lengths and their limit."""
        return SCALE / 2 if self.is_fleet else SCALE

    @property
    def burn_in(self) -> int:
        """Number of batches that are not counted."""
        if self.arm.startswith("sync"):  # Nothing is carried from one batch into the next.
            return 0
        return AUTO_BURN_IN if self.arm.startswith("auto") else BURN_IN

    @property
    def seconds(self) -> float:
        """After them it takes no further batch."""
        if self.is_fleet:
            return KILLED_SECONDS if self.arm.endswith("killed") else FLEET_SECONDS
        if self.server == "dense":
            return DENSE_SECONDS
        return LONG_SECONDS if self.arm in LONG and self.seed else SECONDS

    def continues(self, batches: int, seconds: float, limit: float) -> bool:
        """Return whether another batch is taken after `batches` that took `seconds`."""
        return seconds < limit or batches < self.burn_in + 2

    def workload(
        self, vocabulary: int = VOCABULARY, scale: float | None = None
    ) -> Iterator[Prompt]:
        """Prompts with the stop tokens of their group.

        Args:
            vocabulary: size of the server's vocabulary.
            scale: of the lengths and the limit; None for the cell's.
        """
        scale = self.scale if scale is None else scale
        rng, others = random.Random(self.seed), random.Random(7919 * self.draw + 1)
        group = 0
        while True:
            mean = min(6000, max(60, 800 * math.exp(0.7 * rng.gauss(0, 1)))) * scale
            stops = min(MOST_STOPS, vocabulary // 2, max(1, round(vocabulary / mean)))
            first = rng.randrange(vocabulary - stops - 100)
            if self.draw:
                first = others.randrange(vocabulary - stops - 100)
            ids = np.array([50 + group // 400 % 400, 50 + group % 400] + [50] * 6, dtype=np.int32)
            sampling = SamplingParams(
                max_new_tokens=round(6000 * scale),
                stop_token_ids=tuple(range(100 + first, 100 + first + stops)),
            )
            yield Prompt(input_ids=ids, sampling=(sampling,) * SIZE, key=group)
            group += 1


class Meter:
    """A listener that measures whole steps: from one update's end to the next one's."""

    def __init__(self, cell: Cell) -> None:
        self.summary = Summary()
        self.cap = round(6000 * cell.scale)
        self.events: list[tuple[float, str]] = []
        """Seconds from the first batch's start, and what became of an engine or a group."""
        self.ends: list[float] = []
        self.chosen: list[str] = []
        """The automatic schedules."""
        self.generated: list[int] = []
        """Tokens that arrived in each step."""
        self._arrived = 0
        self._first: float | None = None

    def on_facts(self, new: Sequence[facts.Fact], now: float) -> None:
        self.summary.on_facts(new, now)
        for fact in new:
            if isinstance(fact, facts.TokensReceived):
                self._arrived += fact.tokens
            elif self._first is None and isinstance(fact, facts.BatchRequested):
                self._first = now
            elif isinstance(fact, facts.UpdateFinished):
                self.ends.append(now)
                self.generated.append(self._arrived)
                self._arrived = 0
            elif isinstance(fact, facts.ScheduleChanged):
                self.chosen.append(str(fact.schedule))
            elif isinstance(fact, facts.EngineLost | facts.EngineAdmitted | facts.GroupDropped):
                at = now - (now if self._first is None else self._first)
                self.events.append((round(at, 2), type(fact).__name__))

    def has_recovered(self, seconds: float) -> bool:
        """Return whether a lost engine has been in use again for `seconds`."""
        lost = [at for at, event in self.events if event == "EngineLost"]
        again = [at for at, event in self.events if event == "EngineAdmitted" and at > 0]
        if not lost or not again or again[-1] < lost[-1] or not self.ends:
            return False
        assert self._first is not None
        return self.ends[-1] - self._first > again[-1] + seconds

    def rows(self) -> list[dict[str, Any]]:
        """The figures of each batch whose update is over."""
        rows = []
        before = self._first
        for batch, end, arrived in zip(
            self.summary.batches, self.ends, self.generated, strict=False
        ):
            assert before is not None
            found = batch.figures
            rows.append({
                "step_s": round(end - before, 4), "tokens": found.tokens, "generated": arrived,
                "responses": len(batch.lengths),
                "capped": sum(bool(length >= self.cap) for length in batch.lengths),
                "off_policy": round(found.off_policy_token_share, 5),
                "staleness": round(found.staleness_mean, 5), "oldest": found.staleness_max,
            })  # fmt: skip
            before = end
        return rows


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over batches. Shares and staleness cover all their tokens together."""
    seconds = sum(row["step_s"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    responses = sum(row["responses"] for row in rows)
    return {
        "batches": len(rows),
        "step_s": seconds / len(rows),
        "generated_s": sum(row["generated"] for row in rows) / seconds,
        "delivered_s": tokens / seconds,
        "staleness": sum(row["staleness"] * row["tokens"] for row in rows) / tokens,
        "oldest": max(row["oldest"] for row in rows),
        "off_policy": sum(row["off_policy"] * row["tokens"] for row in rows) / tokens,
        "mean_length": tokens / responses,
        "capped": sum(row["capped"] for row in rows) / responses,
    }


def simulated(
    cell: Cell, model: StepTimeModel | None = None, batches: int | None = None
) -> list[dict[str, Any]]:
    """Return the batches that the simulator expects of a cell, on its own prompts.

    The toy model's tokens are uniform too, so stop tokens end its responses by the same
    distribution.

    Args:
        cell: the cell.
        model: step times; None for those that are known beforehand.
        batches: number of batches; None for those that the cell's seconds have room for.
    """
    server = SERVERS[cell.server]
    model = model or server.model
    meter = Meter(cell)
    most = batches or MOST_BATCHES * (1 + (cell.seconds == LONG_SECONDS))
    simulation = Simulation(
        cell.config, cell.workload(), batches=most, listeners=[meter],
        engines=cell.engines,
        engine=SimConfig(timing=model, max_running=server.max_running, kv_tokens=server.kv_tokens,
                         reserve_clip=server.clip, conservativeness=server.conservativeness,
                         vocab_size=VOCABULARY),
        costs=Costs(refit_seconds=UPDATE_SECONDS * cell.groups),
        # A server does not report its clip.
        planner=Planner(model, max_running=server.max_running, inline=True,
                        reserve_clip=Reservation().clip),
    )  # fmt: skip
    with rare_collections():
        simulation.run()
    rows = meter.rows()
    ends = [sum(row["step_s"] for row in rows[: n + 1]) for n in range(len(rows))]
    taken = 1 + sum(cell.continues(n + 1, end, cell.seconds) for n, end in enumerate(ends))
    return rows[: batches or taken]
