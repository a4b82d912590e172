"""Writes a run folder with a log of any number of lines, within seconds.

A run of the embedded engine would take a minute for a million lines. This log is artificial: waves
of groups on some engines, lengths with a long tail, a pause and a refit after each batch. It has
every kind of line that a plain run has, in a possible order.
"""

from __future__ import annotations

import heapq
from pathlib import Path

import numpy as np

__all__ = ["write_long_run"]

GROUPS, SIZE, ENGINES = 32, 8, 4
STEP = 0.005
"""Seconds a token."""
CHUNK = 8
"""Tokens a line."""
CONFIG = f"""
engine = ["sim"]
batches = 0
seed = 0
train_seconds = 0.0

[sim]
engines = {ENGINES}
max_running = 512

[workload]
median = 700.0
sigma = 0.9
cap = 6000
within_group = 0.5
law = "lognormal"
dof = 4.0
prompt_tokens = 8
vocab_size = 32000

[scheduler]
batch_groups = {GROUPS}
group_size = {SIZE}
over_provision = 1.0
refill = "wave"
straggler = "retract"
pace = "synchronous"
"""


def write_long_run(folder: Path, lines: int, *, seed: int = 0) -> int:
    """Write config.toml and events.jsonl of at least `lines` lines; how many they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    draws = np.random.default_rng(seed)
    written, now, batch = 1, 0.0, 0
    with (folder / "events.jsonl").open("w", encoding="utf-8") as file:
        names = ",".join(f'{{"name":"sim-{i}","version":0}}' for i in range(ENGINES))
        file.write(f'{{"t":0.0,"event":"Opened","engines":[{names}],"adopt":true}}\n')
        while written < lines:
            body, now = _batch(batch, now, draws)
            file.write("\n".join(body) + "\n")
            written += len(body)
            batch += 1
    return written


def _batch(batch: int, start: float, draws: np.random.Generator) -> tuple[list[str], float]:
    """A wave that is waited for, and its refit; the lines and when they end."""
    count = GROUPS * SIZE
    lengths = np.clip(draws.lognormal(np.log(700), 0.9, count), 1, 6000).astype(int).tolist()
    first = batch * count
    out = [f'{{"t":{start:.6f},"event":"BatchRequested"}}']
    for group in range(GROUPS):
        ids = [first + group * SIZE + i for i in range(SIZE)]
        out.append(
            f'{{"t":{start:.6f},"command":"Launch","group_id":{batch * GROUPS + group},'
            f'"rollout_ids":{ids},"prompt_tokens":8,"evaluation_id":null}}'
        )
        out += [
            f'{{"t":{start:.6f},"command":"Send","engine":"sim-{i % ENGINES}","request_id":{i},'
            f'"attempt":1,"rollout_id":{i},"group_id":{i // SIZE},"tokens":8,'
            '"max_new_tokens":6000}'
            for i in ids
        ]
    ends = [_tokens(first + i, length, start) for i, length in enumerate(lengths)]
    out += [line for _, line in heapq.merge(*ends, key=lambda pair: pair[0])]
    now = start + (max(lengths) + 1) * STEP
    rows = ",".join(
        f'{{"rollout_id":{first + i},"group_id":{(first + i) // SIZE},"prompt_tokens":8,'
        f'"tokens":{length},"segments":[[0,{length},{batch},"sim-{i % ENGINES}"]],'
        '"finish_reason":"stop"}'
        for i, length in enumerate(lengths)
    )
    out.append(
        f'{{"t":{now:.6f},"command":"Deliver","batch":{batch},"version":{batch},"rollouts":[{rows}]}}'
    )
    return out + _refit(batch + 1, now), now + 1.1


def _tokens(request: int, length: int, start: float) -> list[tuple[float, str]]:
    """The chunks of a response and its end."""
    whole, rest = divmod(length, CHUNK)
    sizes = [CHUNK] * whole + ([rest] if rest else [])
    head, lines, done = f'"request_id":{request},"attempt":1', list[tuple[float, str]](), 0
    for size in sizes:
        done += size
        at = start + done * STEP
        lines.append((at, f'{{"t":{at:.6f},"event":"Progress",{head},"tokens":{size}}}'))
    at = start + length * STEP
    end = f'{{"t":{at:.6f},"event":"Finished",{head},"reason":"stop","spans":null}}'
    return [*lines, (at, end)]


def _refit(version: int, now: float) -> list[str]:
    """A tenth of a second of pause, and a second for the weights."""
    engines = [f"sim-{i}" for i in range(ENGINES)]
    names = ",".join(f'"{name}"' for name in engines)
    out = [f'{{"t":{now:.6f},"event":"UpdateRequested","version":{version}}}']
    for word in ("command", "event"):
        kind = "Pause" if word == "command" else "Paused"
        mode = ',"mode":"retract"' if word == "command" else ""
        at = now if word == "command" else now + 0.1
        out += [f'{{"t":{at:.6f},"{word}":"{kind}","engine":"{n}"{mode}}}' for n in engines]
    at = now + 0.1
    out.append(f'{{"t":{at:.6f},"command":"Refit","version":{version},"engines":[{names}]}}')
    at = now + 1.1
    for n in engines:
        out.append(f'{{"t":{at:.6f},"event":"Refitted","engine":"{n}","version":{version}}}')
        out.append(f'{{"t":{at:.6f},"command":"Continue","engine":"{n}"}}')
        out.append(f'{{"t":{at:.6f},"event":"Continued","engine":"{n}"}}')
    out.append(
        f'{{"t":{at:.6f},"command":"FinishUpdate","version":{version},"failed":[],"cause":""}}'
    )
    return out
