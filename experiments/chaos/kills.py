"""Kills the coordinator (-9) at random moments of a run on a real server, and resumes it each time.

With --process, the scheduler has a process of its own, which is killed and stopped at random too,
and the trainer has forked a child.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.chaos.history import Outcome
from experiments.library import say
from tests.sglang.server import CpuServer, write_model

__all__ = ["campaign", "run"]

TRAINER = Path(__file__).with_name("trainer.py")
SAVED_WITHIN = 0.7
"""Seconds after its end in which a rollout may not be saved yet: 0.5, and the writing. A busy
machine may take longer."""
EARLY = 0.2
"""Share of lives that are killed while they import or open, maybe."""


@dataclass
class Lives:
    """Every life of one run, as it was logged."""

    logs: list[list[dict[str, Any]]]
    begun: list[float]
    killed_at: list[float]
    seconds_to_its_end: list[float]
    """How long the scheduler's own process has outlived each trainer that was killed."""
    forked: int = 0
    """Children that the trainers had forked and that were alive then."""

    @property
    def finished_and_sent_again(self) -> list[int]:
        """Rollouts that had ended in time to be saved, and were generated again all the same."""
        return self._sent_again("finished", SAVED_WITHIN)

    @property
    def saved_and_sent_again(self) -> list[int]:
        """Rollouts that were in the file with their end, and were generated again all the same."""
        return self._sent_again("saved", 0.0)

    def _sent_again(self, what: str, seconds_before_the_kill: float) -> list[int]:
        again: list[int] = []
        for life, killed in enumerate(self.killed_at):
            ended = {
                line["rollout"]
                for line in self.logs[life]
                if line["what"] == what and line["at"] < killed - seconds_before_the_kill
            }
            for later in self.logs[life + 1 :]:
                again += [
                    line["rollout"]
                    for line in later
                    if line["what"] == "sent" and line["rollout"] in ended
                ]
        return again

    @property
    def resumed_partials(self) -> int:
        """Requests that a later life sent with tokens that an earlier one had generated."""
        return sum(
            line["what"] == "sent" and line["known"] > 12 for log in self.logs[1:] for line in log
        )

    def seconds_to_resume(self) -> list[float]:
        """From the start of each later life to its open scheduler."""
        return [
            line["at"] - begun
            for log, begun in zip(self.logs[1:], self.begun[1:], strict=True)
            for line in log
            if line["what"] == "open"
        ]


def start(
    url: str, folder: Path, options: argparse.Namespace, life: int
) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(TRAINER), url, str(folder), str(options.groups), str(life)]
    command += ["process"] * options.process
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def log_of(folder: Path, life: int) -> list[dict[str, Any]]:
    """What a life said; nothing if it was killed while it imported."""
    path = folder / f"log-{life}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def end_of(log: list[dict[str, Any]]) -> dict[str, Any]:
    """The last one: a store closes itself before it opens, too."""
    return [line for line in log if line["what"] == "end"][-1]


def is_open(log: list[dict[str, Any]]) -> bool:
    return any(line["what"] == "open" for line in log)


def wait_open(process: subprocess.Popen[bytes], folder: Path, life: int) -> int | None:
    """Until its scheduler is open, however long a busy machine needs to import it."""
    while not is_open(log_of(folder, life)):
        if process.poll() is not None:
            return process.returncode
        time.sleep(0.05)
    return None


def uninterrupted(url: str, folder: Path, options: argparse.Namespace) -> float:
    """The same run without a kill; how long it took."""
    began = time.monotonic()
    if start(url, folder, options, 0).wait(600):
        raise SystemExit("the uninterrupted run failed")
    return time.monotonic() - began


def killed_often(url: str, folder: Path, options: argparse.Namespace, seed: int) -> Lives:
    """Kill at random moments until an open scheduler was met often enough, then let it end."""
    draw = random.Random(seed)
    lives = Lives(logs=[], begun=[], killed_at=[], seconds_to_its_end=[])
    while True:
        life = len(lives.begun)
        lives.begun.append(time.time())
        process = start(url, folder, options, life)
        if sum(map(is_open, lives.logs)) == options.kills:
            code = process.wait(600)
        else:
            try:
                if draw.random() < EARLY:
                    code = process.wait(draw.uniform(0.5, 2.0))
                else:
                    code = wait_open(process, folder, life)
                    if code is None:
                        code = process.wait(draw.uniform(0.0, options.longest))
            except subprocess.TimeoutExpired:
                lives.killed_at.append(time.time())
                kill(process, draw, lives)
                lives.logs.append(log_of(folder, life))
                say(f"life {life} was killed")
                continue
        if code:
            raise SystemExit(f"life {life} ended by itself with {code}")
        lives.logs.append(log_of(folder, life))
        return lives


def own_processes(trainer: int) -> tuple[list[int], list[int]]:
    """The scheduler's own process, and the child that the trainer has forked; each if there is."""
    found: tuple[list[int], list[int]] = ([], [])
    for path in Path(f"/proc/{trainer}/task").glob("*/children"):
        for child in path.read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"spawn_main" in command or TRAINER.name.encode() in command:
                found[b"spawn_main" not in command].append(int(child))
    return found


def kill(trainer: subprocess.Popen[bytes], draw: random.Random, lives: Lives) -> None:
    """Kill the trainer. Its scheduler's own process may be killed before, which the trainer has to
    notice, or stand still meanwhile; the child that it has forked lives on."""
    schedulers, forked = own_processes(trainer.pid)
    fate = draw.choice(["killed", "stopped", "", ""])
    for scheduler in schedulers:
        if fate == "killed":
            os.kill(scheduler, signal.SIGKILL)
            trainer.wait(60)
        elif fate == "stopped":
            os.kill(scheduler, signal.SIGSTOP)
            time.sleep(draw.uniform(0, 2))
    trainer.kill()
    trainer.wait()
    for scheduler in schedulers:
        if fate == "stopped":
            os.kill(scheduler, signal.SIGCONT)
        began = time.monotonic()
        while runs(scheduler):
            # The next trainer needs its store.
            if time.monotonic() > began + 60:
                raise SystemExit("the scheduler's process does not end with its trainer")
            time.sleep(0.01)
        lives.seconds_to_its_end.append(time.monotonic() - began)
    for child in forked:
        lives.forked += runs(child)
        os.kill(child, signal.SIGKILL)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def delivered(folder: Path) -> dict[str, list[int]]:
    """Every rollout of every batch, by its prompt and place; raises on a second one."""
    found: dict[str, list[int]] = {}
    ids: set[int] = set()
    for path in sorted(folder.glob("batch-*.json")):
        for rollout in json.loads(path.read_text())["rollouts"]:
            key = str(rollout["key"])
            if key in found or rollout["id"] in ids:
                raise SystemExit(f"{key} was delivered twice")
            found[key] = rollout["tokens"]
            ids.add(rollout["id"])
    return found


def campaign(url: str, folder: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The figures of a run that is killed as `seed` says, beside one that is not."""
    whole, cut = folder / "whole", folder / "cut"
    whole.mkdir()
    cut.mkdir()
    seconds = uninterrupted(url, whole, options)
    lives = killed_often(url, cut, options, seed)
    expected, got = delivered(whole), delivered(cut)
    end = end_of(lives.logs[-1])
    again = [line for log in lives.logs for line in log if line["what"] == "got" and line["again"]]
    resumed = lives.seconds_to_resume()
    return {
        "kills": len(lives.killed_at),
        "kills_of_an_open_scheduler": sum(map(is_open, lives.logs[:-1])),
        "groups": options.groups,
        "rollouts_expected": len(expected),
        "rollouts_delivered": len(got),
        "lost": len(expected.keys() - got.keys()),
        "doubled": 0,
        "different_from_the_uninterrupted_run": sum(expected[k] != got.get(k) for k in expected),
        "finished_and_generated_again": len(lives.finished_and_sent_again),
        "saved_and_generated_again": len(lives.saved_and_sent_again),
        "batches_delivered_again": len(again),
        "partials_resumed": lives.resumed_partials,
        "tokens_of_the_run": end_of(log_of(whole, 0))["generated"],
        "tokens_known_at_the_end": end["generated"],
        "dropped": end["dropped"],
        "seconds_uninterrupted": seconds,
        "seconds_in_all": sum(k - b for k, b in zip(lives.killed_at, lives.begun, strict=False)),
        "seconds_to_an_open_scheduler": [min(resumed), max(resumed)] if resumed else None,
        "forked_children_that_outlived_a_trainer": lives.forked,
        "seconds_that_a_scheduler_outlived_its_trainer": max(lives.seconds_to_its_end, default=0),
    }


ZERO = ("lost", "doubled", "different_from_the_uninterrupted_run", "saved_and_generated_again")


def run(seed: int, *, options: argparse.Namespace, **_: Any) -> Outcome:
    """Run a seed on a server of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = CpuServer(write_model(folder / "model"), folder / "server.txt")
        server.start()
        try:
            server.wait_ready()
            found = campaign(server.url, folder, options, seed)
        finally:
            server.stop()
    complaints = [f"{found[what]} rollouts are {what}" for what in ZERO if found[what]]
    return Outcome(seed, complaints, ["done"], details=found)
