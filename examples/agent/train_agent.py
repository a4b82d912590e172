"""GRPO on an agent that is reached by URLs alone.

    python examples/agent/train_agent.py --out runs/agent
    python -m sglang.launch_server --model-path runs/agent/policy --skip-tokenizer-init --port 30000
    python examples/agent/train_agent.py --out runs/agent --engine http://127.0.0.1:30000

Without ``--engine`` it makes the policy. With it, it trains the agent of agent.py, which is given
the address and the key of a session and asks there by OpenAI's package. `make example-agent` does
all this on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent import TURNS, Task, solve, task, write
from openai import AsyncOpenAI
from policy import write_policy
from transformers.utils.logging import disable_progress_bar

from aprilsched import (
    Batch,
    DiskPublisher,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.agents.sessions import Session, Sessions

sys.path.append(str(Path(__file__).parents[1] / "grpo"))
from train import Trainer


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="extend", nargs="+", help="URL of a server")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--warm-up", type=int, default=200, help="steps that make the policy")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--groups", type=int, default=8, help="tasks in a batch")
    parser.add_argument("--size", type=int, default=8, help="sessions of a task")
    parser.add_argument("--evaluate-every", type=int, default=6, help="updates")
    parser.add_argument("--held-out", type=int, default=96, help="tasks of an evaluation")
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(given)


def prompts(seed: int) -> Iterator[Prompt]:
    """Tasks without end. What the policy is told comes from the agent, so the ids are not used."""
    draw = random.Random(seed)
    while True:
        yield Prompt(input_ids=[0], metadata={"task": task(draw)})


class Harness:
    """Runs the agent in a folder of its own, and says what its answer is worth."""

    def __init__(self) -> None:
        # One client for all, because each would have connections of its own.
        self._client = AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0)

    async def __call__(self, session: Session, prompt: Prompt) -> float:
        given = Task(*prompt.metadata["task"])
        client = self._client.with_options(base_url=session.url, api_key=session.key)
        with TemporaryDirectory() as folder:
            write(Path(folder), given.notes)
            answer = await solve(client, Path(folder), given.first)
        return float(answer == given.code)


def figures(batch: Batch) -> dict[str, float]:
    """Means over the sessions of a batch, and sums of what should be 0."""
    rollouts = list(batch.rollouts)
    told = [rollout.info["session"] for rollout in rollouts]
    return {
        "reward": sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts),
        "turns": sum(each["turns"] for each in told) / len(told),
        "drift": sum(each["drift"] for each in told),
        "inexact": sum(not rollout.versions_exact for rollout in rollouts),
    }


async def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train, and return a line for each update and each evaluation."""
    options.model = str(options.out / "policy")
    trainer = Trainer(options)
    publisher = DiskPublisher(options.out / "weights", save=trainer.model.save_pretrained)
    held_out = list(islice(prompts(10_007), options.held_out))
    config = SchedulerConfig(
        batch_groups=options.groups,
        group_size=options.size,
        max_staleness=options.max_staleness,
        sampling=SamplingParams(max_new_tokens=32),
    )
    found: list[dict[str, Any]] = []
    seconds = 0.0

    def note(**more: Any) -> None:
        found.append({"update": trainer.updates, "seconds": round(seconds, 1), **more})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)

    async with (
        Sessions(Harness(), tokenizer=options.model) as sessions,
        RolloutScheduler(
            SGLangFleet(options.engine), prompts(options.seed), episode=sessions, config=config
        ) as rollouts,
    ):
        # The engines may have the weights of an earlier run.
        await rollouts.update_weights(publisher)
        note(held_out=figures(await rollouts.evaluate(held_out)))
        while trainer.updates < options.updates:
            began = time.monotonic()
            batch = await rollouts.next_batch()
            trained = await asyncio.to_thread(trainer.accumulate, batch, 1 / options.groups)
            await asyncio.to_thread(trainer.step)
            trainer.updates += 1
            await rollouts.update_weights(publisher)
            seconds += time.monotonic() - began
            note(
                **figures(batch),
                mismatch=trained["mismatch"] / trained["fresh"] if trained["fresh"] else None,
                off_policy=trained["stale"] / trained["tokens"],
            )
            if trainer.updates % options.evaluate_every == 0 or trainer.updates == options.updates:
                note(held_out=figures(await rollouts.evaluate(held_out)))
    return found


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """The share of solved tasks over the updates, and how many turns the agent takes."""
    from aprilsched.observe.report.style import GREY, PALETTE, finish, new_figure, save

    figure = new_figure(9, 3.6)
    solved, turns = figure.subplots(1, 2)
    held = [each for each in found if "held_out" in each]
    trained = [each for each in found if "reward" in each]
    for axes, name in ((solved, "reward"), (turns, "turns")):
        axes.plot([x["update"] for x in held], [x["held_out"][name] for x in held], "o-",
                  color=PALETTE[5], label="held-out tasks")  # fmt: skip
        axes.plot([x["update"] for x in trained], [x[name] for x in trained],
                  color=GREY, linewidth=1, label="training batches")  # fmt: skip
    solved.set_ylim(0, 1)
    turns.set_ylim(0, TURNS)
    solved.legend()
    finish(solved, title="", x="updates", y="share solved")
    finish(turns, title="", x="updates", y="turns of a session")
    save(figure, path)


def main() -> None:
    options = arguments()
    disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.engine:
        write_policy(options.out / "policy", steps=options.warm_up)
        return
    found = asyncio.run(train(options))
    (options.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.out / "curve.png")
    before, after = (found[place]["held_out"]["reward"] for place in (0, -1))
    print(f"held-out tasks solved: {before:.2f} before and {after:.2f} after training")


if __name__ == "__main__":
    main()
