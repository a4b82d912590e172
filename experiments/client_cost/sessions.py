"""CPU of a session's turn beside that of the same turn of a coroutine; see README.md.

python experiments/client_cost/sessions.py --out experiments/client_cost/sessions.json
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, SimFleet, Turn
from aprilsched.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.engines.sim import SimConfig, SimEngine, run_virtual
from aprilsched.sessions import Session, Sessions
from experiments.chaos.agents import Letters
from experiments.library import arguments, machine, write
from tests.support.tiny_tokenizer import bytes_tokenizer

TURNS, GROUPS, SIZE = 20, 8, 2
ASKED = "and what else is there? " * 4


class _Fleet(SimFleet):
    """Engines that sample letters, so that every text comes back as it was."""

    def __init__(self) -> None:
        super().__init__(2)
        machine = SimConfig(model=Letters)
        self._engines = tuple([SimEngine(f"sim-{i}", machine) for i in range(2)])


async def _harness(session: Session, prompt: Prompt) -> float:
    messages: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": prompt.metadata["task"]},
    ]
    for _ in range(TURNS):
        reply = await session.chat(messages)
        messages = [*messages, reply.message, {"role": "user", "content": ASKED}]
        await asyncio.sleep(0.03)
    return 1.0


def _coroutine(tokenizer: ModelTokenizer) -> Any:
    """The same as `_harness`, written with tokens."""

    def text(*messages: tuple[str, str]) -> str:
        return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)

    begin = "<|im_start|>assistant\n"

    async def episode(turn: Turn, prompt: Prompt) -> float:
        first = text(("system", "be brief"), ("user", prompt.metadata["task"])) + begin
        context = tokenizer.encode(first, special=False)
        for _ in range(TURNS):
            output = await turn.generate(context)
            more = tokenizer.encode("<|im_end|>\n" + text(("user", ASKED)) + begin, special=False)
            context = [*context, *output.token_ids.tolist(), *more]
            await asyncio.sleep(0.03)
        return 1.0

    return episode


async def _batch(episode: Any, tokens: int) -> int:
    """The tokens of a batch, prompts included."""
    prompts = [Prompt(input_ids=[1, 2], metadata={"task": f"task {i}"}) for i in range(GROUPS)]
    config = SchedulerConfig(
        batch_groups=GROUPS,
        group_size=SIZE,
        pace="asynchronous",
        over_provision=1.0,
        sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True),
    )
    async with RolloutScheduler(_Fleet(), prompts, episode=episode, config=config) as rollouts:
        batch = await rollouts.next_batch()
        return sum([len(rollout) for rollout in batch.rollouts])


async def _session_batch(tokenizer: ModelTokenizer, tokens: int) -> int:
    async with Sessions(_harness, tokenizer=tokenizer) as sessions:
        return await _batch(sessions, tokens)


def _ms_of_a_turn(what: Any) -> tuple[float, int]:
    began = time.process_time()
    size = run_virtual(what)
    return 1e3 * (time.process_time() - began) / (TURNS * GROUPS * SIZE), size


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(bytes_tokenizer(Path(folder), parses=True))
    result: dict[str, Any] = machine()
    for tokens in (150, 500):
        runs: list[dict[str, float]] = []
        for _ in range(options.repeats + 1):
            plain, size = _ms_of_a_turn(_batch(_coroutine(tokenizer), tokens))
            session, same = _ms_of_a_turn(_session_batch(tokenizer, tokens))
            if size != same:
                raise SystemExit(f"a batch has {size} tokens, and {same} with sessions")
            runs.append({"coroutine_ms": round(plain, 3), "session_ms": round(session, 3)})
        runs = runs[1:]  # The first has what is loaded once.
        ratios = [run["session_ms"] / run["coroutine_ms"] for run in runs]
        found = {"ratio": round(statistics.median(ratios), 2), "runs": runs}
        print(f"{tokens} tokens a turn: {found['ratio']} times, {runs[-1]}")
        result[str(tokens)] = found
    write(options.out, result)


if __name__ == "__main__":
    main()
