"""What more room for requests on a server would change, simulated for the user's lengths.

More room can do more than any schedule: in a pool that is too small, requests wait however they are
scheduled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from aprilsched.cli.doctor.checks import CLIP
from aprilsched.cli.runs.settings import RunSettings
from aprilsched.cli.runs.setup import prepare
from aprilsched.cli.runs.virtual_time import simulate
from aprilsched.kernel.values.capabilities import Capabilities

_CLIPS = (1024, 256)
_LESS_RESERVED = "--schedule-conservativeness 0.14"
"""With it a server that was idle reserves what it reserves by default after 600 decode steps."""
_FACTOR = 1.5
"""Size of a change of the KV pool or of the running requests."""


@dataclass(frozen=True, slots=True)
class Gain:
    """The forecast of a change."""

    name: str
    tokens_per_s: float
    share: float
    """What it adds to the generated tokens a second of the server as it is, as a share of them."""
    is_setting: bool
    """Whether a setting makes the change, without more memory."""


def gains(settings: Sequence[RunSettings], able: Capabilities) -> list[Gain]:
    """Return the forecast of the server as it is, and of each change; means over the seeds.

    Args:
        settings: the schedule, the lengths and the step times of one server, for each seed.
        able: what the server reports, with the sizes of its KV pool and its batch.
    """
    found: list[Gain] = []
    for seeds in zip(*(_changes(each, able) for each in settings), strict=True):
        name = seeds[0][0]
        runs = (simulate(prepare(changed)) for _, changed in seeds)
        speed = fmean(run.generated_tokens_per_s or 0.0 for run in runs)
        before = found[0].tokens_per_s if found else speed
        share = speed / before - 1 if before else 0.0
        found.append(Gain(name, speed, share, name.startswith((CLIP, _LESS_RESERVED))))
    return found


def _changes(settings: RunSettings, able: Capabilities) -> Iterator[tuple[str, RunSettings]]:
    """Yield the server as it is, and each change."""
    kv, running, rule = able.kv_tokens or 1, able.max_running_requests or 1, able.reservation
    sim = replace(
        settings.sim,
        kv_tokens=kv,
        max_running=running,
        conservativeness=1.0 if rule is None else rule.conservativeness,
        admission="vllm" if rule is None else "sglang" if rule.fixed_in_full else "sglang-0.5.21",
    )
    more_kv, more_running = round(_FACTOR * kv), round(_FACTOR * running)
    for name, other in (
        ("as it is", sim),
        (f"{more_kv} tokens of KV", replace(sim, kv_tokens=more_kv)),
        (f"{more_running} running requests", replace(sim, max_running=more_running)),
        ("both", replace(sim, kv_tokens=more_kv, max_running=more_running)),
    ):
        yield name, replace(settings, sim=other)
    rules = {f"{CLIP}={clip}": replace(sim, reserve_clip=clip) for clip in _CLIPS}
    rules[_LESS_RESERVED] = replace(sim, conservativeness=0.14)
    for name, other in rules.items() if rule else ():
        yield name, replace(settings, sim=other)
