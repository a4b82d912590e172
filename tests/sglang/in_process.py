"""Uses SGLang inside of its own process; module_runner.py runs it, with the server's packages.

``main(WHAT, …)`` calls the function of that name with the arguments. The engine that `contract`
and `tensors` share is made once, as a notebook makes it, and used in a new event loop each time.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import score
import stand_ins

from aprilsched import DiskPublisher, Prompt, SamplingParams, SchedulerConfig
from aprilsched.blocking import RolloutScheduler
from aprilsched.engines.sglang.in_process import SGLangInProcessEngine, SGLangInProcessFleet
from aprilsched.errors import ConfigError, EngineError
from aprilsched.testing.contract import ALL_CHECKS, ENDLESS, Stream, Subject, greedy, until, whole

_CHECKS = {check.__name__: check for check in ALL_CHECKS}
_given: list[Any] = []


def arguments(model: str) -> dict[str, Any]:
    """What a server of the tests is started with; see server.py."""
    return {
        "model_path": model,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "max_total_tokens": 65536,
        "max_running_requests": 128,
        "mem_fraction_static": 0.3,
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,
    }


def given(model: str) -> Any:
    """The engine that the user made."""
    if not _given:
        import sglang

        defaults = {"skip_tokenizer_init": True, "incremental_streaming_output": True}
        _given.append(sglang.Engine(**defaults, **arguments(model)))
    return _given[0]


def shut_down() -> None:
    """End the engine that the user made, because a process has one at a time."""
    while _given:
        _given.pop().shutdown()


# --- what is run -------------------------------------------------------------------------------


def contract(name: str, first: str, second: str) -> None:
    """Make one check of the contract."""

    async def check(engine: SGLangInProcessEngine) -> None:
        async def busy() -> int:
            load = await engine.load()
            return load.running + load.queued

        weights = Path(first), Path(second)
        await _CHECKS[name](Subject(engine=engine, busy=busy, weights=weights))

    asyncio.run(with_given(first, check))


def tensors(first: str, second: str) -> None:
    """Weights come from the memory of this process, which is the trainer's."""

    async def check(engine: SGLangInProcessEngine) -> None:
        from safetensors.torch import load_file
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        before = await whole(engine, greedy(40))
        bucket = FlattenedTensorBucket(
            named_tensors=list(load_file(f"{second}/model.safetensors").items())
        )
        payload = {
            "flattened_tensor": bucket.get_flattened_tensor(),
            "metadata": bucket.get_metadata(),
        }
        handle = MultiprocessingSerializer.serialize(payload, output_str=True)
        await engine.pause("retract")
        await engine.flush()
        await engine.begin_update()
        await engine.update_from_tensors([handle], load_format="flattened_bucket")
        await engine.end_update(3)
        await engine.resume()
        assert await engine.version() == 3
        after = await whole(engine, greedy(40))
        assert after.last.spans is not None
        assert [span.version for span in after.last.spans] == [3]
        await refit(engine, second, 4)
        assert (await whole(engine, greedy(40))).ids == after.ids != before.ids

    asyncio.run(with_given(first, check))


def versions(first: str, second: str, folder: str) -> None:
    """A blocking scheduler starts SGLang, and changes its weights while responses are open."""
    shut_down()
    lengths = itertools.cycle((16, 400, 32, 64))
    prompts = (
        Prompt(
            input_ids=[3 + number % 30, 5, 7, 9],
            sampling=SamplingParams(max_new_tokens=next(lengths), ignore_eos=True),
        )
        for number in itertools.count()
    )
    config = SchedulerConfig(batch_groups=2, group_size=2, over_provision=3.0)
    fleet = SGLangInProcessFleet(stream_interval=8, **arguments(first))
    rollouts = []
    with RolloutScheduler(fleet, prompts, config=config) as scheduler:
        for batch in itertools.islice(scheduler, 6):
            rollouts += batch.rollouts
            scheduler.update_weights(DiskPublisher((second, first)[batch.version % 2]))
    assert not multiprocessing.active_children()
    assert all(rollout.versions_exact for rollout in rollouts)
    assert any(len(set(rollout.versions.tolist())) > 1 for rollout in rollouts)
    sequences = {
        str(number): np.concatenate([rollout.prompt_ids, rollout.token_ids]).astype(np.int64)
        for number, rollout in enumerate(rollouts)
    }
    np.savez(f"{folder}/in.npz", **sequences)
    score.main(f"{folder}/in.npz", first, f"{folder}/0.npz", second, f"{folder}/1.npz")
    scored = [np.load(f"{folder}/{number}.npz") for number in (0, 1)]
    for number, rollout in enumerate(rollouts):
        of_weights = [scores[str(number)][len(rollout.prompt_ids) :] for scores in scored]
        odd = rollout.versions % 2 == 1
        np.testing.assert_allclose(rollout.logprobs, np.where(odd, *of_weights[::-1]), atol=1e-4)
        assert np.abs(of_weights[0] - of_weights[1]).max() > 0.1


def loss(first: str) -> None:
    """A process of SGLang is killed: the streams end with an error, and SGLang starts again."""
    shut_down()

    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

    async def go() -> None:
        fleet = SGLangInProcessFleet(stream_interval=8, **arguments(first))
        other = SGLangInProcessFleet(**arguments(first))
        await fleet.open()
        (engine,) = fleet.engines
        try:
            await expect(other.open(), ConfigError)
            reference = await whole(engine, greedy(40))
            stream = await Stream(engine, greedy(ENDLESS)).start().reach(20)
            for process in multiprocessing.active_children():
                os.kill(process.pid, signal.SIGKILL)
            await until(lambda: stream.done)
            assert isinstance(stream.task.exception(), EngineError)
            await expect(engine.version(), EngineError)
            await engine.open()
            assert (await whole(engine, greedy(40))).ids == reference.ids
        finally:
            await fleet.close()

    threads = set(threading.enumerate())
    asyncio.run(go())
    assert signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL
    assert not multiprocessing.active_children()
    assert not [new for new in set(threading.enumerate()) - threads if new.name == "sglang"]


def failed_start(first: str) -> None:
    """SGLang refuses its arguments, or one of its processes fails: nothing of it is left."""
    shut_down()

    async def go() -> None:
        refused = SGLangInProcessFleet(no_such_argument=1, **arguments(first))
        await expect(refused.open(), ConfigError)
        broken = SGLangInProcessFleet(**{**arguments(first), "max_total_tokens": 1})
        await expect(broken.open(), EngineError)
        works = SGLangInProcessFleet(**arguments(first))
        await works.open()
        await works.close()

    asyncio.run(go())
    assert not multiprocessing.active_children()


# --- parts -------------------------------------------------------------------------------------


async def with_given(first: str, check: Any) -> None:
    """Open a fleet around the engine that the user made, and bring it to its first weights."""
    engine = given(first)
    fleet = SGLangInProcessFleet(engine, stream_interval=16)
    await fleet.open()
    try:
        (opened,) = fleet.engines
        await opened.resume()
        await refit(opened, first, 0)
        await check(opened)
    finally:
        await fleet.close()


async def refit(engine: SGLangInProcessEngine, model: str, version: int) -> None:
    """Load a checkpoint, as the scheduler does."""
    await engine.pause("retract")
    await engine.flush()
    await engine.update_from_disk(Path(model), version)
    await engine.resume()


async def expect(call: Any, error: type[Exception]) -> None:
    """Check that a call raises."""
    try:
        await call
    except error:
        return
    raise AssertionError(f"the call did not raise {error.__name__}")


def main(what: str, *parameters: str) -> None:
    """Run what is asked for."""
    if multiprocessing.get_start_method(allow_none=True) is None:
        stand_ins.fork()
        stand_ins.doze()
    tests = (contract, tensors, versions, loss, failed_start)
    {test.__name__: test for test in tests}[what](*parameters)
