"""A trainer that may be killed at any moment: it writes each batch to a file and acknowledges it.

    python trainer.py URL FOLDER GROUPS LIFE [process]

When it is started again, it resumes. FOLDER has `rollouts.store`, one `batch-N.json` for each
batch, and one `log-LIFE.jsonl` for each life, with the sent and the finished rollouts. With
`process`, the scheduler has a process of its own, and the trainer polls, and has forked a child
that outlives it, as a data loader does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from aprilsched import (
    Batch,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
    SqliteStore,
    process,
)
from aprilsched.core.messages.facts import AttemptEnded, AttemptSent, Fact
from aprilsched.core.state.saved import Snapshot, Stage
from aprilsched.errors import PromptsExhausted

GROUP_SIZE = 2
VOCABULARY = 128
SEED = 7


class Log:
    """Says when each rollout was sent and when it came to its end, as it happens."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")  # the two processes of a life share it
        self._lock = threading.Lock()  # the store has a thread of its own
        self._rollouts: dict[int, int] = {}

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, AttemptSent):
                self._rollouts[fact.request_id] = fact.rollout_id
                self.say("sent", rollout=fact.rollout_id, known=fact.tokens)
            elif isinstance(fact, AttemptEnded) and fact.outcome == "finished":
                self.say("finished", rollout=self._rollouts[fact.request_id])

    def say(self, what: str, **fields: object) -> None:
        with self._lock:
            self._file.write(json.dumps({"at": time.time(), "what": what, **fields}) + "\n")
            self._file.flush()


class Store(SqliteStore):
    """Says which rollouts are in the file with their end, and at the end what the run has."""

    def __init__(self, path: Path, log: Log) -> None:
        super().__init__(path)
        self._log = log
        self.rollouts: RolloutScheduler | None = None

    def close(self) -> None:
        super().close()
        if self.rollouts is not None:
            in_flight = self.rollouts.state.in_flight
            self._log.say(
                "end",
                launched=in_flight.counters.launched,
                delivered=in_flight.counters.delivered,
                dropped=in_flight.ledger.total,
                generated=in_flight.counters.tokens_generated,
            )

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        super().save(snapshot, durable=durable)
        for rollout in snapshot.rollouts:
            if rollout.stage is not Stage.GENERATING:
                self._log.say("saved", rollout=rollout.rollout_id)


def prompts(groups: int) -> Iterator[Prompt]:
    """Greedy responses of a long-tailed law; the length is the limit."""
    draw = np.random.default_rng(SEED)
    for index in range(groups):
        yield Prompt(
            input_ids=draw.integers(3, VOCABULARY, 12),
            key=index,
            sampling=tuple(
                SamplingParams(
                    max_new_tokens=int(np.clip(draw.lognormal(3.6, 0.8), 8, 300)),
                    temperature=0.0,
                    ignore_eos=True,
                )
                for _ in range(GROUP_SIZE)
            ),
        )


def written(batch: Batch) -> dict[str, object]:
    return {
        "index": batch.index,
        "rollouts": [
            {
                "id": rollout.rollout_id,
                "key": [group.prompt.key, rollout.index],
                "tokens": rollout.token_ids.tolist(),
                "segments": len(rollout.segments),
                "versions": sorted(set(rollout.versions.tolist())),
            }
            for group in batch.groups
            for rollout in group.rollouts
        ],
    }


def write(folder: Path, batch: Batch) -> None:
    """As a trainer's checkpoint does it: whole or not at all, and then on the disk."""
    path = folder / f"batch-{batch.index}.json"
    content = json.dumps(written(batch))
    if (
        path.exists()
        and json.loads(path.read_text())["rollouts"] != json.loads(content)["rollouts"]
    ):
        raise SystemExit(f"batch {batch.index} was delivered again and is another one")
    writing = path.with_suffix(".writing")
    with writing.open("w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(writing, path)


def scheduler(url: str, folder: Path, groups: int, log: Path) -> RolloutScheduler:
    logged = Log(log)
    store = Store(folder / "rollouts.store", logged)
    store.rollouts = RolloutScheduler(
        SGLangFleet([url], stream_interval=8),
        prompts(groups),
        config=SchedulerConfig(
            batch_groups=4, group_size=GROUP_SIZE, over_provision=2.0, save_interval_s=0.5
        ),
        store=store,
        listeners=[logged],
    )
    return store.rollouts


def train(batch: Batch, folder: Path, log: Log) -> None:
    log.say("got", batch=batch.index, again=batch.redelivered)
    write(folder, batch)
    batch.acknowledge()


async def in_one_process(url: str, folder: Path, groups: int, path: Path) -> None:
    log = Log(path)
    async with scheduler(url, folder, groups, path) as rollouts:
        log.say("open")
        async for batch in rollouts:
            train(batch, folder, log)


def in_two_processes(url: str, folder: Path, groups: int, path: Path) -> None:
    log = Log(path)
    with process.RolloutScheduler(scheduler, url, folder, groups, path) as rollouts:
        forked = os.fork()
        if not forked:
            time.sleep(600)
            os._exit(0)
        log.say("open")
        while True:
            try:
                train(rollouts.next_batch(timeout=0.1), folder, log)
            except TimeoutError:
                continue
            except PromptsExhausted:
                os.kill(forked, signal.SIGKILL)
                return


if __name__ == "__main__":
    where, number = Path(sys.argv[2]).absolute(), sys.argv[4]
    arguments = (sys.argv[1], where, int(sys.argv[3]), where / f"log-{number}.jsonl")
    if sys.argv[5:] == ["process"]:
        in_two_processes(*arguments)
    else:
        asyncio.run(in_one_process(*arguments))
