"""Trains one policy under several schedules, each for the same time, on one GPU's server.

    PYTHONPATH=.:examples/grpo python experiments/learning/campaign.py --out DIRECTORY \
        --work DIRECTORY --cells sync:1,april:1 --seconds 60

See README.md in this folder. The trainer is examples/grpo's. One server runs all cells of a list
one after the other; each begins with the same weights. A cell that was killed goes on when the
same list is given again with the same ``--work``, in this or in a later call.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
import train
from countdown import EOS, score
from transformers.utils.logging import disable_progress_bar

from aprilsched import Batch, DiskPublisher, Prompt, Rollout, SchedulerConfig, SGLangFleet
from aprilsched.fronts.blocking import RolloutScheduler
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.engines.sglang.http_engine import SGLangEngine
from aprilsched.kernel.store import SqliteStore
from aprilsched.observe.figures.engine_time import PARTS
from aprilsched.observe.figures.run_state import RunState
from aprilsched.observe.figures.summary import Summary
from aprilsched.observe.log import EventLog
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.rebuild import remainder_of
from aprilsched.planning import Planner
from aprilsched.planning.presets import PRESETS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
Change = Callable[[SchedulerConfig], SchedulerConfig]


def preset(name: str, **more: Any) -> Change:
    return lambda config: replace(PRESETS[name](config), **more)


SAMPLES: dict[str, Any] = {"delivery": "samples", "siblings": 4}
# SGLang 0.5.17 cannot flush its cache while requests wait inside, so stragglers are called back.
ARMS: dict[str, tuple[Change, bool]] = {
    "sync": (preset("sync", straggler="abort"), False),
    "streamed": (preset("sync", straggler="abort"), True),
    "april": (preset("april", straggler="abort"), False),
    "areal": (preset("areal", straggler="abort"), False),
    "auto": (preset("auto", straggler="abort"), False),
    "auto-kept": (preset("auto", straggler="in_place"), False),
    "auto-kept-4": (preset("auto", straggler="in_place", max_staleness=4), False),
    "auto-kept-clip": (preset("auto", straggler="in_place"), False),
    "auto-kept-half": (preset("auto", straggler="in_place"), False),
    "april-kept": (preset("april", straggler="in_place"), False),
    "rollpacker": (preset("rollpacker", straggler="abort"), False),
    "on-policy": (preset("on_policy", straggler="abort"), False),
    "streamed-ready": (preset("sync", straggler="abort"), True),
    "april-streamed": (preset("april", straggler="abort"), True),
    "samples": (preset("april", straggler="in_place", **SAMPLES), False),
    "samples-1.5": (preset("april", straggler="in_place", over_provision=1.5, **SAMPLES), False),
    "samples-naive": (preset("april", straggler="in_place", **SAMPLES), False),
}
"""Settings of each arm, and whether its trainer takes groups from a stream. "clip" and "half"
are explained in experiments/learning_moe, and "naive" in samples.py."""
SPACING = 2 / 3
"""So much of the evaluations' number lies before a share of the time, as a power of it."""
GATHERED = {"streamed-ready", "april-streamed"}
"""Streamed arms whose trainer trains on all groups that are ready together, up to --micro of them,
instead of one after the other."""
OWN = "-own"
"""At the end of an arm's name: the trainer of a mixture of experts does not replay routing."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained, on what. `trainer` and `configured` are given the arm's name too."""

    trainer: Callable[[argparse.Namespace, str], train.Trainer]
    prompts: Callable[..., Iterator[Prompt]]
    """As that of examples/grpo."""
    score: Callable[[Sequence[int], Any], float]
    """Of a response, by its prompt's problem."""
    configured: Callable[[SchedulerConfig, str], SchedulerConfig]
    write: Callable[[Any, Path], object]
    """Writes a model's weights and config.json into a folder."""
    measured: Callable[[Any], dict[str, Any]] = lambda trainer: {}
    """What else is to be kept of a trainer whose cell is done."""
    arguments: Callable[[str], Sequence[str]] = lambda arm: ()
    """Of the arm's trainer, besides those of the campaign."""

    def reward(self, rollout: Rollout, prompt: Prompt) -> float:
        numbers, target = prompt.metadata["problem"]
        return self.score(rollout.token_ids.tolist(), (tuple(numbers), target))


GRPO = Study(
    trainer=lambda options, arm: train.Trainer(options),
    prompts=train.prompts,
    score=score,
    configured=lambda config, arm: config,
    write=lambda model, folder: model.save_pretrained(folder),
)
"""The policy and the task of examples/grpo."""


# --- the server ----------------------------------------------------------------------------------


class SpansEngine(SGLangEngine):
    """A server that spans_server.py started: it tells the version of each token."""

    async def open(self) -> None:
        await super().open()
        can = replace(self._facts.capabilities, version_spans=True)
        self._facts = replace(self._facts, capabilities=can)


class SpansFleet(SGLangFleet):
    """Servers that spans_server.py started."""

    _engine_type = SpansEngine


class Server:
    """One SGLang server, in a process group of its own."""

    def __init__(self, options: argparse.Namespace, log: Path) -> None:
        self._log, self._known = log, options.work / "server.json"
        self._process: subprocess.Popen[bytes] | None = None
        if self._known.exists() and self._still_there():
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = 20_000 + probe.getsockname()[1] % 10_000
        self.url = f"http://127.0.0.1:{port}"
        cpu = options.cpu
        settings = {
            "--model-path": options.boots or options.model,
            "--host": "127.0.0.1",
            "--port": port,
            "--weight-version": "0",
            "--dtype": "float32" if cpu else options.dtype,
            "--attention-backend": "torch_native" if cpu else "triton",
            "--max-running-requests": 128 if cpu else 512,
            "--max-total-tokens": 65_536 if cpu else 600_000,
            "--mem-fraction-static": 0.3,
            "--stream-interval": 16 if cpu else 64,
            "--random-seed": 1,
        }
        flags = ["--skip-tokenizer-init", "--disable-overlap-schedule"]
        flags += ["--incremental-streaming-output", "--skip-server-warmup"]
        if cpu:
            flags += ["--device", "cpu"]
        else:
            flags += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
            flags += ["--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode"]
            flags += [str(size) for size in (1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)]
        python = options.server_python or sys.executable
        paths = [str(HERE), *options.server_path, os.environ.get("PYTHONPATH", "")]
        command = [python, str(HERE / "spans_server.py"), *flags]
        command += [str(part) for pair in settings.items() for part in pair]
        command += options.server_flag
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": ":".join(paths)}, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        self._known.write_text(json.dumps({"url": self.url, "pid": self.pid}))

    def _still_there(self) -> bool:
        """Take over the server of an earlier call, which may wait in a pause."""
        known = json.loads(self._known.read_text())
        self.url, self.pid = known["url"], known["pid"]
        try:
            self.call("/continue_generation")
            self.call("/abort_request", rid="", abort_all=True)
        except OSError:
            return False
        return True

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process is not None and self._process.poll() is not None:
                break
            try:
                self.call("/generate", input_ids=[[5, 6]], sampling_params={"max_new_tokens": 2})
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"no server:\n{self._log.read_text(errors='replace')[-6000:]}")

    def call(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(  # noqa: S310
            self.url + path, data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
            content = answer.read()
        return json.loads(content) if content.startswith((b"{", b"[")) else content

    def load(self, model: Path | str) -> None:
        """Load weights, as those of version 0."""
        until = time.monotonic() + 60
        while True:
            try:
                self.call("/flush_cache")
                break
            except urllib.error.HTTPError:  # what was called back is still running
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        loaded = self.call("/update_weights_from_disk", model_path=str(model), weight_version="0",
                           flush_cache=True)  # fmt: skip
        assert loaded["success"], loaded

    def held_out(self, options: argparse.Namespace, study: Study) -> dict[str, float]:
        """The share of the held-out problems that the present weights solve."""
        asked = list(islice(study.prompts(10_007, held_out=True), options.held_out))
        answers = self.call(
            "/generate",
            input_ids=[prompt.input_ids.tolist() for prompt in asked],
            sampling_params={"max_new_tokens": options.cap, "temperature": 1.0,
                             "stop_token_ids": [EOS]},
        )  # fmt: skip
        received = [answer["output_ids"] for answer in answers]
        solved = [
            study.score(tokens, prompt.metadata["problem"])
            for tokens, prompt in zip(received, asked, strict=True)
        ]
        return {
            "held_out": sum(solved) / len(solved),
            "length": sum(map(len, received)) / len(received),
            "capped": sum(len(tokens) >= options.cap for tokens in received) / len(received),
        }

    def steps(self, running: int, tokens: int) -> float:
        """Seconds of a decode step of so many requests."""
        started_at = time.monotonic()
        self.call("/generate", input_ids=[[5, 6, 7]] * running,
                  sampling_params={"max_new_tokens": tokens, "ignore_eos": True})  # fmt: skip
        return (time.monotonic() - started_at) / tokens

    def stop(self) -> None:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, kind)
                if self._process is not None:
                    self._process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


# --- a cell --------------------------------------------------------------------------------------


class Checkpoints(train.Log):
    """The run's log, which also keeps the weights at fixed times of the run's own clock.

    They lie closer together at the beginning, where the reward rises fastest.
    """

    def __init__(
        self, options: argparse.Namespace, trainer: train.Trainer, write: Callable[..., object]
    ) -> None:
        super().__init__(options, prints=False)
        self._trainer, self._write_model = trainer, write
        self.folder = options.out / "checkpoints"
        self._options = options

    def _due(self) -> int:
        """How many times have come."""
        share = self.seconds / self._options.seconds
        return int(self._options.evaluations * share**SPACING)

    def update(self, number: int, found: Any, **times: float) -> None:
        before = self._due()
        super().update(number, found, **times)
        if self._due() != before:
            # A run that was killed while it wrote went on and evaluated half of the weights.
            unfinished = self.folder.with_name("unfinished")
            self._write_model(self._trainer.model, unfinished)
            self.folder.mkdir(exist_ok=True)
            finished = self.folder / str(number)
            shutil.rmtree(finished, ignore_errors=True)  # of an update that is made again
            unfinished.rename(finished)


class Schedules:
    """Notes what auto chose, and engines that were lost."""

    def __init__(self) -> None:
        self.chosen: list[str] = []
        self.lost = self.opened = 0

    def on_facts(self, new: list[Any], now: float) -> None:
        for fact in new:
            if isinstance(fact, facts.ScheduleChanged):
                self.chosen.append(str(fact.schedule))
            self.lost += isinstance(fact, facts.EngineLost)
            self.opened += isinstance(fact, facts.RunOpened)


class Gathering:
    """A scheduler whose streams give all groups that are ready as one part.

    A thread takes the groups as they come, so that the trainer finds what came while it trained.
    """

    def __init__(self, rollouts: RolloutScheduler, most: int) -> None:
        self._rollouts, self._most = rollouts, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollouts, name)

    def stream(self) -> Iterator[Batch]:
        taken: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()

        def take() -> None:
            try:
                for part in self._rollouts.stream():
                    taken.put(part)
            except BaseException as error:
                taken.put(error)

        threading.Thread(target=take, daemon=True).start()
        complete = False
        while not complete:
            parts = [taken.get()]
            while len(parts) < self._most and not taken.empty():
                parts.append(taken.get())
            for part in parts:
                if isinstance(part, BaseException):
                    raise part
            whole = [part for part in parts if isinstance(part, Batch)]
            complete = whole[-1].complete
            units = tuple(unit for part in whole for unit in part.units)
            yield replace(whole[-1], units=units)


def keyed(prompts: Iterator[Prompt]) -> Iterator[Prompt]:
    """The prompts with keys, by which lengths are remembered."""
    for prompt in prompts:
        yield replace(prompt, key=str(prompt.metadata["problem"]))


def run(
    server: Server, given: argparse.Namespace, study: Study, arm: str, seed: int, seconds: float
) -> dict[str, Any]:
    """Train one cell to its end; returns what is to be kept of it."""
    change, streamed = ARMS[arm.removesuffix(OWN)]
    folder = given.work / f"{arm}-{seed}"
    resumed = (folder / "events.jsonl").exists()
    options = train.arguments([
        "--engine", server.url, "--model", given.model, "--out", str(folder),
        "--updates", "100000", "--groups", str(given.groups), "--size", str(given.size),
        "--cap", str(given.cap), "--max-staleness", str(given.max_staleness),
        "--stream" if streamed else "--no-stream", "--micro", str(given.micro),
        "--evaluate-every", "0", "--seconds", str(seconds), "--seed", str(seed),
        *study.arguments(arm),
    ])  # fmt: skip
    options.evaluations = given.evaluations
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    server.load(given.model)
    trainer = study.trainer(options, arm)
    publisher = DiskPublisher(folder / "weights", save=partial(study.write, trainer.model))
    log = Checkpoints(options, trainer, study.write)
    config = study.configured(change(train.configuration(options)), arm)
    events = EventLog(folder / "events.jsonl", append=resumed)
    with RolloutScheduler(
        SpansFleet(options.engine, stream_interval=16 if given.cpu else 64),
        keyed(study.prompts(seed)) if arm == "on-policy" else study.prompts(seed),
        reward=study.reward,
        config=config,
        planner=Planner(max_running=128 if given.cpu else 512),
        store=SqliteStore(folder / "rollouts.sqlite"),
        listeners=[events],
    ) as rollouts:
        taken: Any = Gathering(rollouts, given.micro) if arm in GATHERED else rollouts
        train.train(taken, trainer, publisher, log)
    events.close()
    state, noted = RunState(), Schedules()
    summary = Summary()
    replay(folder / "events.jsonl", [state, summary, noted])
    figures = msgspec.to_builtins(summary.result(remainder_of(state), clock="wall"))
    figures.pop("per_batch", None)
    (engine,) = state.engines.values()
    spent = {part: round(seconds, 2) for part, seconds in zip(PARTS, engine.seconds, strict=True)}
    evaluated = [{"seconds": 0.0, "update": 0, "tokens": 0}]
    lines = log.lines()
    for number in sorted(int(each.name) for each in log.folder.glob("*")):
        past = [line for line in lines if line["update"] <= number]
        evaluated.append({
            "seconds": past[-1]["seconds"], "update": number,
            "tokens": sum(line["tokens"] for line in past),
        })  # fmt: skip
    first = given.work / f"held_out-{Path(given.model).name}.json"
    for each in evaluated:
        number = each["update"]
        if not number and first.exists():  # All cells begin with the same weights.
            each |= json.loads(first.read_text())
            continue
        server.load(log.folder / str(number) if number else given.model)
        found = server.held_out(given, study)
        if not number:
            first.write_text(json.dumps(found))
        each |= found
    return {
        "arm": arm, "seed": seed, "resumed": resumed, "opened": noted.opened, "lost_engines":
        noted.lost, "chosen": noted.chosen, "updates": lines, "evaluations": evaluated,
        "summary": figures, "engine_s": spent, **study.measured(trainer),
    }  # fmt: skip


def main(study: Study = GRPO) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, required=True, help="folder of unfinished cells")
    parser.add_argument("--cells", required=True, help="ARM:SEED,ARM:SEED@SECONDS,…")
    parser.add_argument("--name", default="results", help="name of the results' file")
    parser.add_argument("--code", default="", help="commit of the code, for the results")
    parser.add_argument("--until", type=float, default=float("inf"), help="Unix time of the end")
    parser.add_argument("--model", default=str(ROOT / "examples" / "grpo" / "policy"))
    parser.add_argument("--boots", help="another policy of that shape for the server to boot with")
    parser.add_argument("--server-flag", action="append", default=[], help="one more for it")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each cell, by its clock")
    parser.add_argument("--evaluations", type=int, default=8)
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--cap", type=int, default=1024)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--max-staleness", type=int, default=8)
    parser.add_argument("--last", action="append", default=[], help="cell for what time is left")
    parser.add_argument("--reserve", type=float, default=15.0, help="seconds of a cell's rest")
    parser.add_argument("--stays", action="store_true", help="leave the server for another call")
    parser.add_argument("--probe", action="store_true", help="measure step times first")
    parser.add_argument("--cpu", action="store_true", help="a small form, without a GPU")
    parser.add_argument("--server-python", help="another Python for the server")
    parser.add_argument("--server-path", action="append", default=[], help="its PYTHONPATH")
    given = parser.parse_args()
    disable_progress_bar()
    for folder in (given.out, given.work):
        folder.mkdir(parents=True, exist_ok=True)
    started_at = time.time()
    notes = (given.out / f"{given.name}.jsonl").open("a")

    def note(**line: Any) -> None:
        notes.write(json.dumps({"kind": "note", "at": round(time.time(), 2), **line}) + "\n")
        notes.flush()
        shown = {k: v for k, v in line.items() if not isinstance(v, dict | list)}
        print(round(time.time() - started_at, 1), shown, flush=True)

    server = Server(given, given.work / "server.log")
    try:
        server.wait(400)
        note(kind="boot", seconds=time.time() - started_at)
        server.steps(256 if not given.cpu else 4, 16)
        if given.probe:
            for running in (1, 4, 32, 64, 128, 256, 384, 512):
                server.steps(running, 8)
                note(kind="step", running=running, seconds=server.steps(running, 200))
        while not Path(given.model).exists():  # It is still trained for the format.
            time.sleep(0.2)
        cells = [(cell, False) for cell in given.cells.split(",")]
        cells += [(cell, True) for cell in given.last]
        longest = given.reserve
        for cell, last in cells:
            name, _, own = cell.partition("@")
            arm, seed = name.split(":")
            done = given.work / f"{arm}-{seed}.done"
            seconds = float(own or given.seconds)
            needed = seconds + longest
            if done.exists() or (not last and time.time() + needed > given.until):
                continue
            start = time.time()
            try:
                result = run(server, given, study, arm, int(seed), seconds)
            except Exception as error:
                note(kind="failed", arm=arm, seed=seed, error=f"{type(error).__name__}: {error}")
                traceback.print_exc()
                continue
            took = time.time() - start
            longest = max(longest, took - seconds)
            note(kind="cell", name=given.name, code=given.code, took=took, **result)
            final = result["updates"][-1]
            print({k: final[k] for k in ("seconds", "update", "reward", "waits_s", "trains_s",
                   "refit_s", "mismatch", "off_policy", "length")},
                  [each["held_out"] for each in result["evaluations"]], flush=True)  # fmt: skip
            done.touch()
            shutil.rmtree(given.work / f"{arm}-{seed}")
    finally:
        if not given.stays:
            server.stop()


if __name__ == "__main__":
    main()
