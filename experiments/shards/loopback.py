"""Shards in Ray actors on loopback servers that answer at once: tokens and CPU of each process.

    python -m experiments.shards.loopback --out experiments/shards/loopback.json

Each shard has a server of its own (experiments/client_cost/server.py). See README.md in this
folder.
"""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, SGLangFleet
from aprilsched.shards import LocalShard, ShardedScheduler, ShardParts
from experiments.library import arguments, fresh, machine, write

ANSWER_TOKENS = 1024
GROUP_SIZE = 8
BATCH_GROUPS = 32
BATCHES = 10
BURN_IN = 2
SERVER = Path(__file__).parents[1] / "client_cost" / "server.py"
TICKS = os.sysconf("SC_CLK_TCK")


def part(url: str) -> ShardParts:
    return ShardParts(fleet=SGLangFleet([url]))


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def prompts() -> Iterator[Prompt]:
    sampling = SamplingParams(max_new_tokens=ANSWER_TOKENS, ignore_eos=True)
    for number in range(10**9):
        ids = [(number * 31 + i) % 50_000 for i in range(128)]
        yield Prompt(input_ids=ids, sampling=sampling, key=number)  # type: ignore[arg-type]


def config(shards: int) -> SchedulerConfig:
    """The pool grows with the shards, so that each has the same number of rollouts in flight."""
    return SchedulerConfig(
        batch_groups=BATCH_GROUPS * max(1, shards),
        group_size=GROUP_SIZE,
        over_provision=2.0,
        refill="pool",
        pace="asynchronous",
    )


@contextmanager
def servers(count: int) -> Iterator[list[tuple[str, int]]]:
    """Servers in processes of their own: their URLs and process ids."""
    with ExitStack() as stack:
        found: list[tuple[str, int]] = []
        for _ in range(count):
            server = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(SERVER)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(server.terminate)
            assert server.stdout is not None
            found.append((f"http://127.0.0.1:{int(server.stdout.readline())}", server.pid))
        yield found


@asynccontextmanager
async def opened(kind: str, urls: Sequence[str]) -> AsyncGenerator[tuple[Any, dict[str, int]]]:
    """The scheduler, and the processes of its shards."""
    settings = config(len(urls))
    if kind == "one":
        async with RolloutScheduler(SGLangFleet(list(urls)), prompts(), config=settings) as one:
            yield one, {}
        return
    members: list[Any]
    if kind == "local":
        members = [LocalShard(f"shard-{i}", partial(part, url)) for i, url in enumerate(urls)]
    else:
        from aprilsched.ray import RayShard

        members = [
            RayShard(f"shard-{i}", partial(part, url), num_cpus=0) for i, url in enumerate(urls)
        ]
    async with ShardedScheduler(members, prompts(), config=settings) as sharded:
        pids: dict[str, int] = {}
        if kind == "ray":
            from ray._private.state import actors

            for member in members:
                found: Any = actors(actor_id=member._actor._actor_id.hex())
                pids[member.name] = found["Pid"]
        yield sharded, pids


async def measure(kind: str, count: int) -> dict[str, Any]:
    with servers(count) as found:
        urls = [url for url, _ in found]
        async with opened(kind, urls) as (rollouts, pids):
            processes = {"collector": os.getpid(), **pids}
            processes.update({f"server-{i}": pid for i, (_, pid) in enumerate(found)})
            for _ in range(BURN_IN):
                await rollouts.next_batch()
            before = {name: cpu_seconds(pid) for name, pid in processes.items()}
            began, tokens = time.monotonic(), 0
            for _ in range(BATCHES):
                tokens += (await rollouts.next_batch()).tokens
            wall = time.monotonic() - began
            cpu = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
    own = [seconds for name, seconds in cpu.items() if name.startswith("shard")]
    return {
        "kind": kind,
        "shards": count,
        "tokens": tokens,
        "tokens_per_s": tokens / wall,
        "cpu_us_a_token": {name: 1e6 * seconds / tokens for name, seconds in cpu.items()},
        "of_a_shard_us_a_token_of_its_own": 1e6 * sum(own) / tokens if own else None,
        "tokens_per_s_of_a_collector_core": tokens / cpu["collector"],
        "tokens_per_s_of_a_shard_core": tokens / sum(own) if own else None,
        "machine": machine(),
    }


RUNS = (("one", 1), ("local", 1), ("ray", 1), ("ray", 2), ("ray", 4))


def alone(kind: str, count: int) -> dict[str, Any]:
    """A run, in a process that nothing else has used."""
    if kind == "ray":
        import ray

        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    return asyncio.run(measure(kind, count))


def main() -> None:
    options = arguments(__doc__).parse_args()
    write(options.out, {"runs": [fresh(alone, *run) for run in RUNS]})


if __name__ == "__main__":
    main()
