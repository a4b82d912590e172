"""The rollout function of slime and miles, in slime's own order, with serve-sim's engines.

With ``SLIME_ROOT`` or ``MILES_ROOT`` the same tests run with the real modules.
"""

# pyright: basic
# The packages have no types.
from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import itertools
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

from aprilsched.errors import ConfigError, RefitError, RunGivenUp, SchedulerClosed
from aprilsched.kernel.engines.server import HttpEngine
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.testing import SimServer
from aprilsched.testing.threaded import ThreadedServer
from aprilsched.trainers import slime, slime_settings
from aprilsched.types import Batch
from tests.support.sim_http import two_weights
from tests.support.slime_loop import Loop, arguments, length_reward, numbers, write_prompts
from tests.support.slime_stand_in import ROOTS, train_data, trainer_modules
from tests.support.table import each_row

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="could not import 'torch' or 'transformers'",
)

VOCABULARY = 64
HERE = "tests.unit.test_slime"


OTHER = pytest.param("miles", marks=() if ROOTS["miles"] else pytest.mark.long)
both = pytest.mark.parametrize("trainer", ["slime", "miles"], indirect=True)
"""For tests of what the stand-ins of slime and miles do in two ways."""
slime_alone = pytest.mark.parametrize("trainer", ["slime"], indirect=True)
miles_alone = pytest.mark.parametrize("trainer", ["miles"], indirect=True)


@pytest.fixture(params=["slime", OTHER])
def trainer(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """The modules of the trainer; its process has no other trainer."""
    with trainer_modules(request.param) as modules:
        yield modules
        slime.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, for all tests."""
    from tests.support.trl_on_cpu import tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    """The folder of a training: prompts, model and two checkpoints of weights."""
    write_prompts(tmp_path)
    (tmp_path / "model").symlink_to(model)
    two_weights(tmp_path)
    return tmp_path


@pytest.fixture
def servers() -> Iterator[list[ThreadedServer]]:
    """Two servers whose responses have about 64 tokens, and up to 200."""
    with ThreadedServer(sim()) as one, ThreadedServer(sim()) as other:
        yield [one, other]


def sim() -> SimServer:
    config = SimConfig(
        stream_at_pause=False, vocab_size=VOCABULARY, eos_token_id=0, stream_interval=8
    )
    return SimServer(config, time_scale=0.2)


@pytest.fixture
def started(
    trainer: SimpleNamespace, folder: Path, servers: list[ThreadedServer]
) -> Callable[..., Loop]:
    """Return a function that starts a process of the training."""

    def low(start_rollout_id: int = 0, **changes: Any) -> Loop:
        args = arguments(folder, [server.url for server in servers], **changes)
        return Loop(args, weights(folder)).start(start_rollout_id)

    return low


def weights(folder: Path) -> list[Path]:
    return [folder / "first", folder / "second"]


def scheduler() -> Any:
    """The open scheduler."""
    assert slime._current is not None
    assert slime._current._open is not None
    return slime._current._open


def in_flight() -> Any:
    return scheduler().state.in_flight


def address(server: ThreadedServer) -> str:
    return server.url.removeprefix("http://")


def engines() -> set[str]:
    """The names of the engines that take part."""
    return {control.name for control in scheduler().state.fleet.control.all()}


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until something holds; the limit is for tests that hang."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check(groups: list[list[Any]], version: int, size: int = 4) -> None:
    """Check that groups are what the trainer converts to its training data."""
    assert [len(group) for group in groups] == [size] * len(groups)
    assert numbers(groups) == sorted(numbers(groups))
    for group in groups:
        assert len({sample.prompt for sample in group}) == 1
        for sample in group:
            length = sample.response_length
            assert length == len(sample.loss_mask) == len(sample.rollout_log_probs) > 0
            assert len(sample.tokens) == 3 + length
            assert " ".join(f"w{token}" for token in sample.tokens[:3]) == sample.prompt
            assert set(map(type, sample.tokens)) == {int}
            assert set(sample.loss_mask) <= {0, 1}
            assert all(type(each) is float and each < 0 for each in sample.rollout_log_probs)
            shown = [int(each) for each in sample.weight_versions]
            assert shown == sorted(set(shown))
            assert shown[-1] <= version
            ended = sample.tokens[-1] == 0
            assert sample.status is (
                type(sample).Status.COMPLETED if ended else type(sample).Status.TRUNCATED
            )
            assert ended or length == 200
            assert len(sample.response.split()) == length
            assert type(sample.response) is str
            assert sample.reward is not None


def once(taken: list[list[list[Any]]]) -> list[int]:
    """The numbers of all samples that were taken; none came twice."""
    seen = [number for groups in taken for number in numbers(groups)]
    assert len(seen) == len(set(seen))
    return seen


def check_nothing_skipped(seen: list[int]) -> None:
    """Check that every group which the data source gave was taken or is in flight."""
    state = scheduler().state
    keys = {group.prompt.key for group in state.in_flight.training_groups()}
    assert {number // 4 for number in seen} | keys == set(range(state.prompts.cursor))


def step(loop: Loop, rollout_id: int) -> Any:
    """Run one step of train.py. A flag of the trainer masks tokens of older versions."""
    output = loop.generate(rollout_id)
    assert in_flight().open_attempts == 0, "the engines are empty when the trainer has them"
    check(output.samples, scheduler().version)
    old = False
    for sample in itertools.chain(*output.samples):
        older = set(sample.weight_versions) - {str(scheduler().version)}
        off = sample.loss_mask.count(0)
        assert sample.loss_mask == [0] * off + [1] * (sample.response_length - off)
        assert bool(off) == bool(older and loop.args.mask_offpolicy_in_partial_rollout)
        old |= bool(older)
    assert 0 <= output.metrics["rollout/aprilsched/off_policy_tokens"] <= 1
    assert bool(output.metrics["rollout/aprilsched/off_policy_tokens"]) == old
    assert bool(output.metrics["rollout/aprilsched/staleness_max"]) == old
    loop.update()
    return output


def train(loop: Loop, steps: int, low: int = 0) -> list[list[list[Any]]]:
    """Return the samples of `steps` steps."""
    return [step(loop, rollout_id).samples for rollout_id in range(low, low + steps)]


@pytest.mark.shows(
    "abort", "weights that the trainer moves", engine="embedded", adapter=("slime", "miles")
)
@pytest.mark.parametrize(
    ("trainer", "masks"), [("slime", True), ("miles", False)], indirect=["trainer"]
)
def test_steps_in_the_trainers_order_lose_nothing_and_carry_partial_responses(
    started: Callable[..., Loop], trainer: SimpleNamespace, masks: bool
):
    loop = started(mask_offpolicy_in_partial_rollout=masks)
    taken, mixed = [], 0
    while mixed == 0 or len(taken) < 6:
        output = step(loop, len(taken))
        assert isinstance(output, trainer.base_types.RolloutFnTrainOutput)
        assert isinstance(output.samples[0][0], trainer.Sample)
        taken.append(output.samples)
        mixed += any(len(sample.weight_versions) > 1 for sample in itertools.chain(*taken[-1]))
    seen = once(taken)
    assert len(seen) == 8 * len(taken)
    flying = in_flight()
    assert flying.counters.launched == len(seen) + len(flying.rollouts)
    assert flying.ledger.total == 0
    check_nothing_skipped(seen)
    # What is trained on is not kept: two batches are, and what is taken and not launched.
    assert len(scheduler().state.delivery.unacknowledged) == 2
    assert slime._current is not None
    assert len(slime._current._samples) <= 4 + 2 + len(list(flying.training_groups()))


@pytest.mark.shows("checkpoints with partials", engine="embedded", adapter=("slime", "miles"))
def test_a_saved_training_resumes_everything_in_flight(
    started: Callable[..., Loop], servers: list[ThreadedServer]
):
    first = started()
    before: list[Any] = []
    partial: dict[int, list[int]] = {}
    while not any(partial.values()):
        before.append(first.generate(len(before)).samples)
        partial = {
            rollout.rollout_id: rollout.log.token_ids.tolist()
            for rollout in in_flight().rollouts.values()
        }
        if not any(partial.values()):
            first.update()
    step = len(before)
    first.save(step - 1)
    version = scheduler().version
    first.update()
    first.generate(step)  # It is trained on, and the process dies before that is saved.
    first.end()

    second = started(step)
    after = [second.generate(step).samples]
    assert scheduler().version == version + 1, "versions continue, and labels restart"
    assert second.version == 1
    check(after[0], version + 1)
    second.update()
    after += train(second, 3, low=step + 1)
    check_nothing_skipped(once(before + after))
    # Responses that were saved incomplete were continued from their tokens.
    tokens = [sample.tokens[3:] for groups in after for group in groups for sample in group]
    flying_now = {r.rollout_id: r.log.token_ids.tolist() for r in in_flight().rollouts.values()}
    for rollout_id, begun_with in partial.items():
        found = [flying_now[rollout_id]] if rollout_id in flying_now else tokens
        assert any(ids[: len(begun_with)] == begun_with for ids in found)


def test_a_batch_that_was_taken_ahead_comes_again(started: Callable[..., Loop]):
    """train_async.py generates rollout k + 1 while it trains on k, and saves k after that."""
    first = started()
    first.generate(0)
    ahead = first.generate(1)
    first.save(0)
    first.end()
    second = started(1)
    again = second.generate(1)
    for name in ("index", "tokens", "rollout_log_probs", "reward", "weight_versions"):
        before, after = (
            [getattr(sample, name) for group in output.samples for sample in group]
            for output in (ahead, again)
        )
        assert before == after
    following = second.generate(2)
    assert not set(numbers(following.samples)) & set(numbers(again.samples))


@miles_alone
def test_it_can_be_saved_while_another_thread_generates(started: Callable[..., Loop]):
    """miles saves while it generates the next rollout. The process ends before that is there."""
    first = started(aprilsched={"over_provision": 1.0})
    taken = [first.generate(0).samples]
    Judge.calls, Judge.gate = 0, threading.Event()
    first.args.custom_rm_path = f"{HERE}.blocks"
    with ThreadPoolExecutor() as threads:
        output = threads.submit(first.generate, 1)
        wait_for(lambda: Judge.calls)
        first.save(0)
        first.end()
        with pytest.raises(SchedulerClosed):
            output.result()
        Judge.gate.set()
    second = started(1)
    taken += train(second, 3, low=1)
    seen = once(taken)
    assert len(seen) == 32
    check_nothing_skipped(seen)


def test_a_plain_data_source_works_and_its_checkpoints_are_said_to_be_incomplete(
    started: Callable[..., Loop], trainer: SimpleNamespace, caplog: pytest.LogCaptureFixture
):
    path = f"{trainer.name}.rollout.data_source.RolloutDataSourceWithBuffer"
    loop = started(data_source_path=path)
    check(loop.generate(0).samples, 1)
    assert "set --data-source-path to aprilsched.trainers.slime.DataSource" in caplog.text
    loop.save(0)
    check(loop.generate(1).samples, 1)


@both
def test_the_data_source_behaves_like_the_one_that_it_wraps(
    started: Callable[..., Loop], trainer: SimpleNamespace
):
    source = started(prompt_data=None, rollout_global_dataset=False).data_source
    if trainer.name == "slime":  # That of miles has no length.
        assert len(source) == 0
    assert source.dataset is None
    group = source.get_samples(1)
    assert [len(each) for each in group] == [4]
    source.add_samples(group)
    assert source.get_buffer_length() == 1
    assert source.get_samples(1)[0][0].index == group[0][0].index
    with pytest.raises(AttributeError):
        source.no_such_thing  # noqa: B018


def test_a_checkpoint_that_was_cut_off_is_none(started: Callable[..., Loop], folder: Path):
    loop = started()
    loop.generate(0)
    loop.save(0)
    loop.end()
    (folder / "checkpoints/rollout/aprilsched_0.samples").unlink()
    check(started(1).generate(1).samples, 1)


def test_a_rollout_that_is_asked_for_again_is_another_one(started: Callable[..., Loop]):
    loop = started()
    taken = [loop.generate(0).samples for _ in range(4)]
    assert len(once(taken)) == 32
    assert len(scheduler().state.delivery.unacknowledged) == 1


class Judge:
    """Reward functions with a memory, which are loaded by their paths."""

    calls = 0
    gate = threading.Event()


async def raises(args: Any, sample: Any, **_: Any) -> float:
    raise ZeroDivisionError("the judge is down")


async def nothing(args: Any, sample: Any, **_: Any) -> None:
    return None


async def blocks(args: Any, sample: Any, **_: Any) -> float:
    """It holds up the event loop that it runs on."""
    Judge.calls += 1
    if Judge.calls == 1:
        assert Judge.gate.wait(60)
    return 1.0


async def named(args: Any, sample: Any, **_: Any) -> dict[str, Any]:
    sample.metadata["judged"] = True
    return {"score": float(sample.index), "why": "x" * 100_000}


async def together(args: Any, samples: list[Any], **_: Any) -> list[float]:
    assert len(samples) == 4
    longest = max(sample.response_length for sample in samples)
    return [sample.response_length / longest for sample in samples]


async def too_few(args: Any, samples: list[Any], **_: Any) -> list[float]:
    return [1.0] * 3


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "the judge is down"),
        ("nothing", "None for sample"),
        ("too_few", "shorter than argument 1"),
    ],
)
def test_a_reward_function_that_never_works_ends_the_training(
    started: Callable[..., Loop], name: str, why: str
):
    grouped = {"group_rm": True} if name == "too_few" else {}
    loop = started(custom_rm_path=f"{HERE}.{name}", rollout_max_response_len=4, **grouped)
    with pytest.raises(RunGivenUp, match=why):
        loop.generate(0)


def test_a_blocking_reward_function_delays_no_stream(started: Callable[..., Loop]):
    """It blocks its own event loop only, and engines keep streaming tokens to the scheduler."""
    Judge.calls, Judge.gate = 0, threading.Event()
    loop = started(custom_rm_path=f"{HERE}.blocks", aprilsched={"over_provision": 1.0})
    with ThreadPoolExecutor() as threads:
        output = threads.submit(loop.generate, 0)
        # All responses end while the judge holds up its loop.
        wait_for(lambda: Judge.calls)
        wait_for(lambda: not in_flight().generating)
        assert not output.done()
        Judge.gate.set()
        check(output.result().samples, 1)


def test_a_reward_may_be_a_dictionary_of_any_size(started: Callable[..., Loop]):
    loop = started(custom_rm_path=f"{HERE}.named", reward_key="score")
    for group in loop.generate(0).samples:
        for sample in group:
            assert sample.reward["score"] == sample.index
            assert len(sample.reward["why"]) == 100_000
            assert sample.metadata["judged"] is True
    loop.save(0)
    loop.end()
    assert not started(1, custom_rm_path=f"{HERE}.named").generate(1).samples[0][0].remove_sample


def test_groups_are_scored_together(started: Callable[..., Loop]):
    loop = started(custom_rm_path=f"{HERE}.together", group_rm=True)
    for group in loop.generate(0).samples:
        assert max(sample.reward for sample in group) == 1.0
    with pytest.raises(ConfigError, match="leave --group-rm out"):
        loop.evaluate(0)


def even_groups(args: Any, samples: list[Any], **_: Any) -> Any:
    """A dynamic filter that keeps every second group of the data source."""
    filters = importlib.import_module(args.filters)
    keep = samples[0].index // 4 % 2 == 0
    return filters.DynamicFilterOutput(keep=keep, reason=None if keep else "odd")


def no_group(args: Any, samples: list[Any], **_: Any) -> Any:
    filters = importlib.import_module(args.filters)
    return filters.DynamicFilterOutput(keep=False, reason="none", keep_when_insufficient=True)


def first_is_removed(args: Any, groups: list[list[Any]]) -> None:
    groups[0][0].remove_sample = True


def note_all(args: Any, groups: list[list[Any]], data_source: Any) -> None:
    args.noted = numbers(groups)


@both
def test_dynamic_filters_replace_groups_and_all_of_them_can_be_processed(
    started: Callable[..., Loop], trainer: SimpleNamespace
):
    loop = started(
        dynamic_sampling_filter_path=f"{HERE}.even_groups",
        rollout_sample_filter_path=f"{HERE}.first_is_removed",
        rollout_all_samples_process_path=f"{HERE}.note_all",
        filters=f"{trainer.name}.rollout.filter_hub.base_types",
    )
    rejected = rollout_id = 0
    while rejected == 0 or rollout_id < 3:
        output = loop.generate(rollout_id)
        assert all(number // 4 % 2 == 0 for number in numbers(output.samples))
        rejected += output.metrics.get("rollout/dynamic_filter/drop_odd", 0)
        assert set(numbers(output.samples)) <= set(loop.args.noted)
        assert output.samples[0][0].remove_sample
        loop.update()
        rollout_id += 1
    # Engines run while a batch waits for verdicts, so the next batch may have some already.
    assert in_flight().ledger.rollouts["rejected"] >= 4 * rejected


@slime_alone
def test_a_filter_that_falls_back_does_not_ask_for_another_wave(
    started: Callable[..., Loop], trainer: SimpleNamespace
):
    loop = started(
        aprilsched={"over_provision": 2.0},
        dynamic_sampling_filter_path=f"{HERE}.no_group",
        filters=f"{trainer.name}.rollout.filter_hub.base_types",
    )
    assert len(loop.generate(0).samples) == 2
    assert in_flight().ledger.rollouts["rejected"] <= 2 * 4


SINGLE: dict[str, Any] = {
    "aprilsched": {"over_provision": 2.0, "delivery": "samples", "siblings": 2},
    "custom_reward_post_process_path": slime_settings.ADVANTAGES_PATH,
    "use_dynamic_global_batch_size": False,
}
"""Arguments of a training on single samples."""


def check_single(output: Any, batch: Batch, trained: dict[str, Any]) -> list[Any]:
    """Check the samples of a step and what the trainer trains on; return them in their order."""
    samples = [sample for group in output.samples for sample in group]
    assert len(samples) == len(batch.samples) == 8
    for group in output.samples:
        assert len({sample.prompt for sample in group}) == 1
    check([[each] for each in sorted(samples, key=lambda each: each.index)], batch.version, size=1)
    assert trained["sample_indices"] == [sample.index for sample in samples]
    units = {4 * int(str(unit.prompt.key)) + unit.rollout.index: unit for unit in batch.samples}
    for sample, reward, raw in zip(samples, trained["rewards"], trained["raw_reward"], strict=True):
        unit = units[sample.index]
        assert sample.tokens == [*unit.rollout.prompt_ids, *unit.rollout.token_ids]
        assert raw == sample.reward == unit.reward
        first, second = (each.reward or 0.0 for each in unit.siblings)
        assert reward == pytest.approx(raw - (first + second) / 2)
    return samples


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches behind the outputs."""
    taken: list[Batch] = []
    output: Callable[..., Any] = slime._Rollouts._output
    monkeypatch.setattr(
        slime._Rollouts, "_output", lambda own, batch: [taken.append(batch), output(own, batch)][1]
    )
    return taken


def split_groups(taken: list[list[Any]]) -> set[int]:
    """The groups of which samples came in several steps."""
    first, *rest = ({sample.index // 4 for sample in samples} for samples in taken)
    found: set[int] = set()
    for groups in rest:
        found |= first & groups
        first |= groups
    return found


@pytest.mark.shows("single samples", engine="embedded", adapter=("slime", "miles"))
@both
def test_single_samples_have_the_advantages_of_their_siblings(
    started: Callable[..., Loop], trainer: SimpleNamespace, batches: list[Batch], folder: Path
):
    datasets = [dataset(folder, "one")]
    loop = started(
        eval_datasets=datasets, rollout_all_samples_process_path=f"{HERE}.note_all", **SINGLE
    )
    taken: list[list[Any]] = []
    while len(taken) < 3 or not split_groups(taken):
        output = loop.generate(len(taken))
        assert in_flight().open_attempts == 0
        trained = train_data(trainer, loop.args, output.samples)
        taken.append(check_single(output, batches[-1], trained))
        assert loop.args.noted == numbers(output.samples)
        if len(taken) == 2:
            assert len(loop.evaluate(1).data["one"]["samples"]) == 10
        loop.update()
    once(taken and [taken])
    assert in_flight().ledger.total == 0
    flying = {4 * int(each.group.prompt.key) + each.index for each in in_flight().rollouts.values()}
    seen = {sample.index for samples in taken for sample in samples}
    assert seen | flying == set(range(4 * scheduler().state.prompts.cursor))
    assert not seen & flying


def hold_one(args: Any, samples: list[Any], **_: Any) -> Any:
    """A filter that keeps all, the last sample of the first group when the gate is open."""
    assert samples[0].index != 3 or Judge.gate.wait(60)
    return importlib.import_module(args.filters).DynamicFilterOutput(keep=True)


@both
def test_a_process_that_ends_between_two_batches_of_a_group_resumes_both(
    started: Callable[..., Loop], trainer: SimpleNamespace, batches: list[Batch]
):
    Judge.gate = threading.Event()
    settings = {
        "dynamic_sampling_filter_path": f"{HERE}.hold_one",
        "filters": f"{trainer.name}.rollout.filter_hub.base_types",
        **SINGLE,
    }
    first = started(**settings)
    taken: list[list[Any]] = []
    while len(taken) < 2 or sum(sample.index < 4 for each in taken for sample in each) < 3:
        output = first.generate(len(taken))
        trained = train_data(trainer, first.args, output.samples)
        taken.append(check_single(output, batches[-1], trained))
        first.update()
    saved = len(taken)
    first.generate(saved)  # It comes again.
    first.save(saved - 1)
    Judge.gate.set()
    first.end()
    second = started(saved, **settings)
    while len(taken) < saved + 2 or sum(s.index < 4 for each in taken for s in each) < 4:
        output = second.generate(len(taken))
        trained = train_data(trainer, second.args, output.samples)
        taken.append(check_single(output, batches[-1], trained))
        second.update()
    ahead, again = (
        [(unit.unit_id, unit.siblings) for unit in batch.samples]
        for batch in batches[saved : saved + 2]
    )
    assert ahead == again
    seen = once([taken])
    flying = {4 * int(each.group.prompt.key) + each.index for each in in_flight().rollouts.values()}
    assert set(seen) | flying == set(range(4 * scheduler().state.prompts.cursor))
    assert not set(seen) & flying


async def coarse(args: Any, sample: Any, **_: Any) -> float:
    return float(sample.response_length % 3 == 0)


def same_rewards(args: Any, samples: list[Any], **_: Any) -> Any:
    """A filter for a sample and its two siblings."""
    assert len(samples) == 3
    filters = importlib.import_module(args.filters)
    keep = len({sample.reward for sample in samples}) > 1
    return filters.DynamicFilterOutput(keep=keep, reason=None if keep else "same")


def test_a_dynamic_filter_sees_a_sample_with_its_siblings(
    started: Callable[..., Loop], trainer: SimpleNamespace, batches: list[Batch]
):
    loop = started(
        dynamic_sampling_filter_path=f"{HERE}.same_rewards",
        rollout_all_samples_process_path=f"{HERE}.note_all",
        custom_rm_path=f"{HERE}.coarse",
        filters=f"{trainer.name}.rollout.filter_hub.base_types",
        **SINGLE,
    )
    rejected = rollout_id = 0
    taken: list[list[Any]] = []
    while rejected == 0 or rollout_id < 3:
        output = loop.generate(rollout_id)
        trained = train_data(trainer, loop.args, output.samples)
        taken.append(check_single(output, batches[-1], trained))
        assert all(trained["rewards"]), "a dropped sample has an advantage of 0"
        dropped = int(output.metrics.get("rollout/dynamic_filter/drop_same", 0))
        assert len(loop.args.noted) == len(set(loop.args.noted)) == 8 + dropped
        rejected += dropped
        loop.update()
        rollout_id += 1
    once([taken])
    assert in_flight().ledger.rollouts["rejected"] >= rejected


@slime_alone
def test_a_filter_of_samples_that_falls_back_does_not_ask_for_more(
    started: Callable[..., Loop], trainer: SimpleNamespace
):
    loop = started(
        dynamic_sampling_filter_path=f"{HERE}.no_group",
        filters=f"{trainer.name}.rollout.filter_hub.base_types",
        **SINGLE,
    )
    assert len(numbers(loop.generate(0).samples)) == 8
    assert in_flight().ledger.rollouts["rejected"] <= 8


@slime_alone
def test_single_samples_need_rewards_that_are_numbers(started: Callable[..., Loop], folder: Path):
    """A 0 in the place of another would count in baselines. An evaluation has none."""
    one = [dataset(folder, "one")]
    loop = started(custom_rm_path=f"{HERE}.named", eval_datasets=one, **SINGLE)
    assert set(map(type, loop.evaluate(0).data["one"]["rewards"])) == {dict}
    with pytest.raises(RunGivenUp, match="float"):
        loop.generate(0)


def test_whole_groups_may_have_the_advantages_of_the_others(
    started: Callable[..., Loop], trainer: SimpleNamespace
):
    """Nothing else changes with the function for ``--custom-reward-post-process-path``."""
    loop = started(**{**SINGLE, "aprilsched": {"over_provision": 2.0}})
    output = loop.generate(0)
    check(output.samples, 1)
    found = iter(train_data(trainer, loop.args, output.samples)["rewards"])
    for group in output.samples:
        total = sum(sample.reward for sample in group)
        for sample in group:
            others = (total - sample.reward) / 3
            assert next(found) == pytest.approx(sample.reward - others)


@slime_alone
@each_row(
    ("changes", "why"),
    [
        ({"custom_reward_post_process_path": "a.b"}, "the mean of an incomplete group; set"),
        ({"group_rm": True}, "--group-rm is set, and single samples are scored"),
        ({"advantage_estimator": "ppo"}, "its critic would learn advantages"),
        ({"log_passrate": True}, "--log-passrate is set"),
        ({"custom_convert_samples_to_train_data_path": "a.b"}, "gives single samples their"),
    ],
)
def test_a_trainer_that_would_need_whole_groups_is_refused(
    started: Callable[..., Loop], changes: dict[str, Any], why: str
):
    with pytest.raises(ConfigError, match=why):
        started(**{**SINGLE, **changes}).generate(0)


def shout(args: Any, sample: Any, evaluation: bool = False) -> None:
    sample.response = sample.response.upper()


@slime_alone
def test_sample_hooks_see_the_response_before_the_reward(started: Callable[..., Loop]):
    loop = started(rollout_sample_hook_path=[f"{HERE}.shout"])
    assert all(s.response.isupper() for group in loop.generate(0).samples for s in group)


class Short:
    """A data source of `args.groups` groups."""

    def __init__(self, args: Any) -> None:
        types = importlib.import_module(f"{args.trainer}.utils.types")
        self._sample, self._left, self._next = types.Sample, args.groups, 0

    def get_samples(self, count: int) -> list[list[Any]]:
        given = min(count, self._left)
        self._left -= given
        groups = []
        for _ in range(given):
            self._next += 1
            groups.append(
                [self._sample(index=self._next, prompt=f"w{5 + self._next}") for _ in range(4)]
            )
        return groups

    def save(self, rollout_id: int) -> None: ...
    def load(self, rollout_id: int | None = None) -> None: ...


class Pausing(Short):
    """A data source that has nothing at every second call."""

    asked = 0

    def get_samples(self, count: int) -> list[list[Any]]:
        self.asked += 1
        return [] if self.asked % 2 == 0 else super().get_samples(count)


class Twice(Short):
    """A data source that gives each group twice, and always the same objects."""

    def get_samples(self, count: int) -> list[list[Any]]:
        (group,) = super().get_samples(1)
        return [group, group]


def test_a_data_source_that_runs_dry_gives_what_it_has(
    started: Callable[..., Loop], trainer: SimpleNamespace
):
    loop = started(data_source_path=f"{HERE}.Short", trainer=trainer.name, groups=3)
    output = loop.generate(0)
    assert len(output.samples) == 2
    with pytest.raises(ConfigError, match="1 of the 2 groups of this step are there"):
        loop.generate(1)


def test_a_data_source_that_runs_dry_gives_the_samples_that_it_has(
    started: Callable[..., Loop], trainer: SimpleNamespace
):
    loop = started(data_source_path=f"{HERE}.Short", trainer=trainer.name, groups=3, **SINGLE)
    assert len(numbers(loop.generate(0).samples)) == 8
    with pytest.raises(ConfigError, match="4 of the 8 samples of this step are there"):
        loop.generate(1)


@pytest.mark.parametrize("name", ["Pausing", "Twice"])
def test_a_data_source_may_be_dry_for_now_or_give_a_group_twice(
    started: Callable[..., Loop], trainer: SimpleNamespace, name: str
):
    loop = started(data_source_path=f"{HERE}.{name}", trainer=trainer.name, groups=100)
    taken = [group for step in range(3) for group in loop.generate(step).samples]
    assert len({id(sample) for group in taken for sample in group}) == 24
    assert name == "Twice" or loop.data_source.asked > 6


def test_samples_with_a_response_are_generated_again(
    started: Callable[..., Loop], caplog: pytest.LogCaptureFixture
):
    loop = started()
    output = loop.generate(0)
    loop.data_source.add_samples(output.samples)
    missing = set(numbers(output.samples))
    while missing:
        again = loop.generate(1)
        missing -= set(numbers(again.samples))
        check(again.samples, 1)
    assert caplog.text.count("it is generated again") == 1


def dataset(folder: Path, name: str, **changes: Any) -> SimpleNamespace:
    rows = [{"question": f"w{10 + i} w{20 + i}", "answer": i} for i in range(5)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "name": name,
        "path": str(folder / f"{name}.jsonl"),
        "input_key": "question",
        "label_key": "answer",
        "metadata_key": "metadata",
        "tool_key": None,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_response_len": 30,
        "n_samples_per_eval_prompt": 2,
        "inject_metadata": lambda metadata: {**(metadata or {}), "of": name},
        "custom_generate_function_path": None,
    }
    return SimpleNamespace(**{**values, **changes})


async def eval_reward(args: Any, sample: Any, **_: Any) -> float:
    if "of" not in sample.metadata:  # A training sample that ended just before the evaluation.
        return await length_reward(args, sample)
    assert sample.metadata["of"] in ("one", "two")
    return float(sample.label)


@both
def test_an_evaluation_between_two_steps_carries_the_training_rollouts_over(
    started: Callable[..., Loop], folder: Path, trainer: SimpleNamespace
):
    datasets = [dataset(folder, "one"), dataset(folder, "two", temperature=1.0)]
    loop = started(eval_datasets=datasets)
    taken = train(loop, 2)
    carried = {rollout.rollout_id: rollout.log.size for rollout in in_flight().rollouts.values()}
    loop.args.custom_rm_path = f"{HERE}.eval_reward"
    result = loop.evaluate(1)
    assert isinstance(result, trainer.base_types.RolloutFnEvalOutput)
    loop.args.custom_rm_path = length_reward.__module__ + ".length_reward"
    assert set(result.data) == {"one", "two"}
    for of in result.data.values():
        assert of["rewards"] == [float(i) for i in range(5) for _ in range(2)]
        assert [sample.index for sample in of["samples"]] == list(range(10))
        for sample, truncated in zip(of["samples"], of["truncated"], strict=True):
            assert sample.weight_versions == ["3"]
            assert truncated == (sample.status is type(sample).Status.TRUNCATED)
            assert sample.response_length <= 30
    greedy = [sample.tokens for sample in result.data["one"]["samples"]]
    assert greedy[::2] == greedy[1::2]
    now = {rollout.rollout_id: rollout.log.size for rollout in in_flight().rollouts.values()}
    assert carried == {number: now[number] for number in carried}, "they have waited"
    taken += train(loop, 3, low=2)
    once(taken)
    assert slime._current is not None
    assert not [key for key in slime._current._samples if isinstance(key, str)]


def test_an_evaluation_may_come_first_have_nothing_to_ask_and_fail(
    started: Callable[..., Loop], folder: Path
):
    loop = started(eval_datasets=[dataset(folder, "one", n_samples_per_eval_prompt=1)])
    assert len(loop.evaluate(0).data["one"]["samples"]) == 5
    reward, loop.args.custom_rm_path = loop.args.custom_rm_path, f"{HERE}.raises"
    with pytest.raises(ConfigError, match=r"5 prompts .*the judge is down"):
        loop.evaluate(0)
    loop.args.eval_datasets, loop.args.custom_rm_path = None, reward
    assert loop.evaluate(0).data == {}
    check(loop.generate(0).samples, 1)


def test_an_engine_that_missed_an_update_waits_for_the_next(
    started: Callable[..., Loop], servers: list[ThreadedServer]
):
    loop = started()
    loop.generate(0)
    # Two of three would be needed to outvote it; of two, the newer version counts.
    loop.update([servers[0].url])
    check(loop.generate(1).samples, 2)
    assert list(scheduler().state.fleet.control.standby) != []
    loop.update()
    check(loop.generate(2).samples, 3)
    assert len(scheduler().state.fleet.control.engines) == 2


def test_weights_that_go_back_are_refused(
    started: Callable[..., Loop], servers: list[ThreadedServer]
):
    loop = started()
    train(loop, 2)
    loop.update()
    loop.generate(2)
    loop.version = 0
    loop.update()
    with pytest.raises(ConfigError, match="version 1, and version 4 was in use before"):
        loop.generate(3)


@pytest.mark.shows("lost engines", engine="embedded", adapter=("slime", "miles"))
def test_an_engine_that_dies_in_a_step_is_let_go_and_looked_for_again(
    started: Callable[..., Loop], servers: list[ThreadedServer]
):
    loop = started()
    taken = train(loop, 1)
    killer = threading.Timer(0.2, servers[0].crash)
    killer.start()
    # Its requests continue elsewhere, and it gets no request between two calls.
    while len(engines()) == 2:
        taken.append(loop.generate(len(taken)).samples)
    killer.join()
    assert engines() == {address(servers[1])}
    servers[0].restart()
    loop.update()
    taken += train(loop, 2, low=len(taken))
    assert len(engines()) == 2
    once(taken)


class Router:
    """Lists workers as sglang-router does, or as the router of miles does."""

    def __init__(self, urls: list[str]) -> None:
        self.urls, outer = urls, self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listed = [{"url": url, "worker_type": outer.kind} for url in outer.urls]
                found = {"/workers": {"workers": listed}, "/list_workers": {"urls": outer.urls}}
                body = json.dumps(found[self.path]).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.kind = "regular"
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = {
            "sglang_router_ip": "127.0.0.1",
            "sglang_router_port": self.server.server_port,
            "rollout_external_engine_addrs": None,
        }
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def router(servers: list[ThreadedServer]) -> Iterator[Router]:
    made = Router([servers[0].url])
    yield made
    made.server.shutdown()
    made.server.server_close()


@both
def test_engines_come_from_the_router_and_may_be_replaced(
    trainer: SimpleNamespace,
    folder: Path,
    servers: list[ThreadedServer],
    router: Router,
    monkeypatch: pytest.MonkeyPatch,
):
    """The proxies of the environment lead out of the cluster."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    old = trainer.name == "miles"
    args = arguments(folder, [], **router.address, use_miles_router=old)
    loop = Loop(args, weights(folder), urls=router.urls).start()
    taken = train(loop, 2)
    # The trainer has ended its engine and has started another one at another address.
    router.urls[:] = [f"{servers[1].url}@0", f"{servers[1].url}@1"]
    loop.urls = [servers[1].url]
    servers[0].crash()
    loop.update()
    taken += train(loop, 2, low=2)
    assert engines() == {address(servers[1])}
    once(taken)


@pytest.mark.lacks(
    "prefill and decode apart",
    adapter=("slime", "miles"),
    why="Every engine of the scheduler does both.",
)
def test_a_router_without_engines_or_with_half_engines_is_refused(
    trainer: SimpleNamespace, folder: Path, router: Router
):
    args = arguments(folder, [], **router.address)
    loop = Loop(args, weights(folder), urls=[])
    router.kind = "decode"
    with pytest.raises(ConfigError, match="is a decode worker"):
        loop.generate(0)
    router.urls = []
    with pytest.raises(ConfigError, match="lists no engine"):
        loop.generate(0)
    router.server.shutdown()
    router.server.server_close()
    with pytest.raises(ConfigError, match="does not list the engines"):
        loop.generate(0)


def test_the_class_form_of_miles_checks_its_version(folder: Path, servers: list[ThreadedServer]):
    with trainer_modules("miles"):
        args = arguments(
            folder,
            [server.url for server in servers],
            rollout_function_path="aprilsched.trainers.slime.RolloutFn",
            eval_datasets=[dataset(folder, "one")],
        )
        loop = Loop(args, weights(folder), pause={"mode": "retract"}).start()
        taken = train(loop, 3)
        assert len(once(taken)) == 24
        assert len(loop.evaluate(2).data["one"]["samples"]) == 10
        loop.version += 1  # It claims a version that it has not loaded.
        with pytest.raises(RefitError, match=r'names its weights "4@[\w@]+" and not "5@'):
            loop.generate(3)
        other = SimpleNamespace(evaluation=True, generate_state=None, hf_dir="/snapshot")
        with pytest.raises(ConfigError, match="evaluation is one of a checkpoint"):
            loop._made(other)
        slime.close()


MADE: dict[int, Any] = {}
"""What functions have returned, by the index of the sample."""
CALLS: list[int] = []


async def asked_of(args: Any, body: Any) -> Any:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def two_turns(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generates twice with a result of a tool in between and one at the end, as functions for slime
    do."""
    assert sample.tokens == []
    assert sampling_params["max_new_tokens"] in (30, 200)
    assert sampling_params["no_stop_trim"] is True
    CALLS.append(sample.index)
    prompt = [int(word[1:]) for word in sample.prompt.split()]
    tokens, mask, logprobs = list(prompt), [], []
    for _ in range(2):
        output = await asked_of(
            args,
            {"input_ids": tokens, "sampling_params": sampling_params, "return_logprob": True},
        )
        received = output["meta_info"]["output_token_logprobs"]
        tokens += [each[1] for each in received] + [9, 9]
        logprobs += [each[0] for each in received] + [0.0, 0.0]
        # The first token of each answer does not count.
        mask += [0, *[1] * (len(received) - 1), 0, 0]
    sample.tokens, sample.response_length = tokens, len(mask)
    sample.loss_mask, sample.rollout_log_probs = mask, logprobs
    sample.status = type(sample).Status.TRUNCATED
    sample.reward, sample.metadata = 0.5, {"of": "two turns"}
    MADE[sample.index] = sample
    return [sample]


async def told_of_input(input: Any) -> Any:
    """miles' own form of a function."""
    types = importlib.import_module("miles.rollout.base_types")
    assert input.state.tokenizer.encode("w5") == [5]
    made = await two_turns(input.args, input.sample, input.sampling_params)
    return types.GenerateFnOutput(samples=made[0])


def check_made(groups: list[list[Any]]) -> None:
    """Check that samples are those of the functions, without the result that nothing follows."""
    for sample in itertools.chain(*groups):
        made = MADE[sample.index]
        assert sample.tokens == made.tokens[:-2]
        assert sample.loss_mask == made.loss_mask[:-2]
        received = zip(sample.rollout_log_probs, made.rollout_log_probs, strict=False)
        assert all(
            a == b for (a, b), counts in zip(received, sample.loss_mask, strict=True) if counts
        )
        assert (sample.reward, sample.metadata) == (0.5, {"of": "two turns"})
        assert sample.status is type(sample).Status.TRUNCATED
        assert sample.weight_versions


@pytest.mark.shows("sessions and agents", engine="embedded", adapter=("slime", "miles"))
@pytest.mark.parametrize(
    ("trainer", "form"),
    [
        ("slime", "two_turns"),
        pytest.param("miles", "two_turns", marks=pytest.mark.long),
        ("miles", "told_of_input"),
    ],
    indirect=["trainer"],
)
def test_a_function_of_the_user_generates_and_goes_on_after_updates_and_a_restart(
    started: Callable[..., Loop], form: str
):
    MADE.clear()
    CALLS.clear()
    given: dict[str, Any] = {
        "custom_generate_function_path": f"{HERE}.{form}",
        "aprilsched": {"over_provision": 3.0},
    }
    loop = started(**given)
    taken: list[Any] = []
    while not any(len(s.weight_versions) > 1 for step in taken for g in step for s in g):
        taken.append(loop.generate(len(taken)).samples)
        check_made(taken[-1])
        loop.update()
    loop.save(len(taken) - 1)
    loop.end()
    unfinished = set(CALLS) - MADE.keys()
    CALLS.clear()
    loop = started(len(taken), **given)
    for _ in range(2):
        taken.append(loop.generate(len(taken)).samples)
        check_made(taken[-1])
        loop.update()
    check_nothing_skipped(once(taken))
    assert unfinished <= set(CALLS), "functions are called again after a restart"


async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, **_: Any) -> Any:
    """An agent of miles, which sends no key that means anything."""
    assert metadata["session_server_id"] in base_url
    messages: list[Any] = [{"role": "user", "content": prompt}]
    headers = {"Authorization": "Bearer none"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for _turn in range(2):
            body = {"model": "m", "messages": messages, **request_kwargs}
            async with http.post(f"{base_url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                messages.append((await answer.json())["choices"][0]["message"])
            messages.append({"role": "user", "content": "w9"})
    if metadata.get("fails"):
        raise TimeoutError("its sandbox is gone")
    return {"reward": 0.25}


async def reward_of_metadata(args: Any, sample: Any, **_: Any) -> float:
    return sample.metadata.get("reward", -1.0)


@pytest.mark.shows("sessions and agents", engine="embedded", adapter="miles")
@miles_alone
@pytest.mark.parametrize("fails", [False, True])
def test_an_agent_of_miles_gets_the_url_of_a_session(started: Callable[..., Loop], fails: bool):
    loop = started(
        custom_generate_function_path="miles.rollout.generate_hub.agentic_tool_call.generate",
        custom_agent_function_path=f"{HERE}.agent",
        custom_rm_path=f"{HERE}.reward_of_metadata",
        aprilsched={"over_provision": 1.0},
    )
    groups = [loop.data_source.get_samples(1)[0] for _ in range(2)]
    for sample in itertools.chain(*groups):
        sample.metadata = {"fails": fails}
    loop.data_source.add_samples(groups)
    samples = list(itertools.chain(*loop.generate(0).samples))
    # As in miles, what was asked before an agent failed is a sample.
    assert {sample.reward for sample in samples} == {-1.0 if fails else 0.25}
    for sample in samples:
        assert 0 in sample.loss_mask
        assert sample.loss_mask.count(1) > 1


async def in_turn(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any:
    """Does what the metadata of the sample say."""
    what = (sample.metadata or {}).get("does", "works")
    if what == "raises":
        raise ZeroDivisionError("a bug of the user")
    if what != "asks nothing":
        await two_turns(args, sample, sampling_params)
        sample.reward, sample.metadata = None, {"did": what}
    if what == "aborts" and CALLS.count(sample.index) == 1:
        sample.status = type(sample).Status.ABORTED
    return [sample, sample] if what == "two" else sample


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("raises", "a bug of the user"),
        ("asks nothing", "has asked nothing at the address"),
        ("two", "returned 2 samples"),
        ("aborts", ""),
    ],
)
def test_a_function_that_fails_costs_its_group_and_one_that_aborts_its_sample(
    started: Callable[..., Loop], does: str, why: str
):
    CALLS.clear()
    loop = started(custom_generate_function_path=f"{HERE}.in_turn")
    (group,) = loop.data_source.get_samples(1)
    for sample in group:
        sample.metadata = {"does": does}
    loop.data_source.add_samples([group])
    taken: list[Any] = []

    def ended() -> bool:
        if does == "aborts":
            return any(group[0].index in numbers(groups) for groups in taken)
        return bool(in_flight().ledger.entries)

    while not taken or not ended():
        taken.append(loop.generate(len(taken)).samples)
        loop.update()
    causes = [entry.cause for entry in in_flight().ledger.entries]
    assert all((why or "has aborted sample") in cause for cause in causes if "sibling" not in cause)
    assert len(causes) >= 4
    if does == "aborts":
        assert all(CALLS.count(sample.index) == 2 for sample in group)


KEPT: list[Any] = []
"""The arguments of the first call of the function that keeps them, and its event."""
REFUSED: list[str] = []


async def keeps_its_address(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Asks three times at the address of its first call, while that runs or when it has ended."""
    if not KEPT:
        KEPT.extend((args, asyncio.Event()))
        if not sample.metadata.get("ends"):
            await KEPT[1].wait()
        made = await two_turns(args, sample, sampling_params)
        KEPT[1].set()
        return made
    if len(REFUSED) >= 3:
        return await two_turns(args, sample, sampling_params)
    if sample.metadata.get("ends"):
        await KEPT[1].wait()
    try:
        return await two_turns(KEPT[0], sample, sampling_params)
    except AssertionError as error:
        REFUSED.append(str(error))
        if len(REFUSED) == 3:
            KEPT[1].set()
        raise


@pytest.mark.parametrize("ends", [False, True], ids=["open", "ended"])
def test_a_function_that_keeps_an_address_asks_nothing_for_another_sample(
    started: Callable[..., Loop], ends: bool
):
    for each in (MADE, CALLS, KEPT, REFUSED):
        each.clear()
    loop = started(
        custom_generate_function_path=f"{HERE}.keeps_its_address", n_samples_per_prompt=1
    )
    groups = [loop.data_source.get_samples(1)[0] for _ in range(8)]
    for (sample,) in groups:
        sample.metadata = {"ends": ends}
    loop.data_source.add_samples(groups)
    check_made(loop.generate(0).samples)
    assert len(REFUSED) >= 3
    assert all(
        "starts with the prompt of another sample; let it use" in why or (ends and "ended" in why)
        for why in REFUSED
    )


def test_an_evaluation_may_have_a_function_of_its_own(started: Callable[..., Loop], folder: Path):
    own = dataset(folder, "one", custom_generate_function_path=f"{HERE}.in_turn")
    loop = started(
        eval_datasets=[own, dataset(folder, "two")], custom_rm_path=f"{HERE}.length_reward"
    )
    train(loop, 1)
    CALLS.clear()
    result = loop.evaluate(0)
    one, two = (result.data[name]["samples"] for name in ("one", "two"))
    assert sorted(CALLS) == sorted(sample.index for sample in one)
    assert all(0 in sample.loss_mask for sample in one)
    assert not any(0 in sample.loss_mask for sample in two)
    train(loop, 1, low=1)


@pytest.mark.lacks(
    "retract",
    "in_place",
    adapter="slime",
    why="Its pause for an update has no mode, so SGLang aborts all requests.",
)
@pytest.mark.lacks(
    "retract",
    "in_place",
    adapter="miles",
    why="It continues the engines before a rollout function learns of the new weights.",
)
@both
def test_other_rules_for_stragglers_are_refused(started: Callable[..., Loop]):
    for rule in ("retract", "in_place", "run"):
        with pytest.raises(ConfigError, match=f"aprilsched.straggler is '{rule}'"):
            started(aprilsched={"straggler": rule}).generate(0)


@slime_alone
@each_row(
    ("changes", "why"),
    [
        (
            {
                "custom_generate_function_path": "a.b",
                "aprilsched": {"sessions": {"branches": "all"}},
            },
            "takes one sequence for each rollout",
        ),
        ({"custom_agent_function_path": "a.b", "max_seq_len": 99}, "--max-seq-len is set"),
        ({"use_rollout_indexer_replay": True}, "does not know the shape of the rows"),
        ({"rollout_top_p": 0.9}, "set --rollout-top-k, at most 4096"),
        ({"aprilsched": {"batch_groups": 3}}, "--rollout-batch-size sets it"),
        ({"aprilsched": {"over_provison": 3}}, "nearest known one is aprilsched.over_provision"),
        ({"aprilsched": "auto"}, "give a mapping of settings"),
    ],
)
def test_what_does_not_work_is_refused_in_a_sentence(
    started: Callable[..., Loop], changes: dict[str, Any], why: str
):
    with pytest.raises(ConfigError, match=why):
        started(**changes).generate(0)


def of_one(**fields: Any) -> Callable[[list[Any]], Any]:
    """A group whose last sample has these fields."""
    return lambda group: [group[-1].__dict__.update(fields), group][1]


@each_row(
    ("change", "why"),
    [
        (
            of_one(multimodal_inputs={"images": None, "videos": [1]}),
            "it has videos, and only images",
        ),
        (of_one(generate_function_path="a.b"), "set --custom-generate-function-path too"),
        (of_one(prompt="w9"), "two prompts"),
        (lambda group: group[:3], "a group of 3 samples"),
    ],
)
def test_samples_that_do_not_work_are_refused_in_a_sentence(
    started: Callable[..., Loop], change: Callable[[list[Any]], Any], why: str
):
    loop = started()
    source = loop.data_source.wrapped
    given = source.get_samples
    source.get_samples = lambda count: [change(group) for group in given(count)]
    with pytest.raises(ConfigError, match=why):
        loop.generate(0)


@slime_alone
def test_samples_have_the_kept_tokens_of_top_p(started: Callable[..., Loop]):
    for sample in itertools.chain(
        *started(rollout_top_p=0.9, rollout_top_k=20).generate(0).samples
    ):
        offsets = sample.rollout_top_p_token_offsets
        assert len(offsets) == sample.response_length + 1
        assert offsets[-1] == len(sample.rollout_top_p_token_ids)
        response = sample.tokens[-sample.response_length :]
        kept = [sample.rollout_top_p_token_ids[low:end] for low, end in pairwise(offsets)]
        assert all(token in own for token, own in zip(response, kept, strict=True))


@pytest.mark.shows("routed experts", engine="embedded", adapter=("slime", "miles"))
def test_samples_have_the_rows_of_every_token_that_the_trainer_replays(
    started: Callable[..., Loop],
):
    """The shape of an indexer's rows is in the settings of the scheduler, because the arguments do
    not say it."""
    loop = started(
        use_rollout_routing_replay=True,
        num_layers=3,
        moe_router_topk=2,
        num_experts=256,
        use_rollout_indexer_replay=True,
        aprilsched={"companions": ["indexer_topk=int32[3,2]!"]},
    )
    for sample in itertools.chain(*loop.generate(0).samples):
        for rows in (sample.rollout_routed_experts, sample.rollout_indexer_topk):
            assert rows.shape == (len(sample.tokens) - 1, 3, 2)
            assert rows.dtype == np.int32
        assert all(sample.loss_mask)


class Processor:
    """Expands the placeholder of each image, which is the word w9, into three."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.image_token = "w9"

    def __call__(self, *, text: str, images: Any, **_: Any) -> dict[str, Any]:
        words = text.replace("w9", "w9 w9 w9")
        pixels = [float(image.size[0]) for image in images]
        return {
            "input_ids": [self.tokenizer.encode(words, add_special_tokens=False)],
            "attention_mask": None,
            "pixel_values": pixels,
        }


@pytest.mark.shows("images", engine="embedded", adapter=("slime", "miles"))
def test_images_reach_the_engine_once_and_the_trainer_expanded(
    started: Callable[..., Loop], trainer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    from PIL import Image

    utils = importlib.import_module(f"{trainer.name}.utils.processing_utils")

    def load(path: str, **_: Any) -> Processor:
        return Processor(utils.load_tokenizer(path))

    monkeypatch.setattr(utils, "load_processor", load, raising=False)
    if not trainer.real:
        monkeypatch.setattr(utils, "build_processor_kwargs", dict, raising=False)
    sent: list[Any] = []
    stream = HttpEngine.generate
    monkeypatch.setattr(
        HttpEngine, "generate", lambda self, asked: (sent.append(asked), stream(self, asked))[1]
    )
    loop = started()
    groups = loop.data_source.get_samples(loop.args.rollout_batch_size)
    for group in groups:
        for sample in group:
            sample.prompt = "w1 w9 w2 w9 w3"
            sample.multimodal_inputs = {"images": [Image.new("RGB", (2, 2))] * 2}
    loop.data_source.add_samples(groups)
    once = load(loop.args.hf_checkpoint).tokenizer.encode(
        "w1 w9 w2 w9 w3", add_special_tokens=False
    )
    place = once[1]
    expanded = [each for token in once for each in [token] * (3 if token == place else 1)]
    # Other groups are opened too, and the first batches may be of them alone.
    made: list[Any] = []
    while not any(sample.multimodal_inputs for sample in made):
        made += [sample for group in loop.generate(0).samples for sample in group]
    for sample in made:
        if sample.multimodal_inputs:
            assert sample.tokens[: -sample.response_length] == expanded
            assert sample.multimodal_train_inputs == {"pixel_values": [2.0, 2.0]}
            assert len(sample.rollout_log_probs) == sample.response_length
    shown = [each for each in sent if each.media]
    assert {len(each.media) for each in shown} == {2}
    assert {tuple(each.input_ids[:5].tolist()) for each in shown} == {tuple(once)}


def test_without_slime_or_miles_the_function_is_refused():
    with pytest.raises(ConfigError, match="neither slime nor miles is loaded"):
        slime.generate_rollout(SimpleNamespace(), 0, None)


def test_the_stand_in_has_the_fields_of_the_real_types():
    """Run with SLIME_ROOT or MILES_ROOT: what the tests rely on is in the real modules."""
    roots = [name for name, root in ROOTS.items() if root]
    if not roots:
        pytest.skip("set SLIME_ROOT or MILES_ROOT to a checkout of the trainer")
    from tests.support import slime_stand_in

    for name in roots:
        with trainer_modules(name) as real:
            ours = inspect.signature(slime_stand_in.Sample).parameters
            theirs = inspect.signature(real.Sample).parameters
            missing = set(ours) - set(theirs)
            assert missing <= ({"custom_rm_path"} if name == "miles" else set())
            assert {each.name for each in real.Sample.Status} >= {
                each.name for each in slime_stand_in.Sample.Status
            }
            for kind in ("RolloutFnTrainOutput", "RolloutFnEvalOutput"):
                found = inspect.signature(getattr(real.base_types, kind)).parameters
                assert list(found) == list(
                    inspect.signature(getattr(slime_stand_in, kind)).parameters
                )


def test_the_example_goes_through_slimes_steps_and_goes_on_after_them(
    folder: Path,
    servers: list[ThreadedServer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    example = Path(__file__).parents[2] / "examples" / "slime_steps.py"
    monkeypatch.chdir(folder)
    model = Path(shutil.copytree(folder / "model", folder / "whole"))
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    program = ["slime_steps.py", "--model", str(model), "--prompts", "prompts.jsonl"]
    program += [f"--engine={server.url}" for server in servers]
    with trainer_modules("slime"):
        spec = importlib.util.spec_from_file_location("slime_steps", example)
        assert spec is not None
        assert spec.loader is not None
        steps = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "slime_steps", steps)
        spec.loader.exec_module(steps)
        seen: list[int] = []
        for low in (0, 3):
            arguments = [*program, "--longest=100", "--steps=3", f"--begin={low}"]
            monkeypatch.setattr(sys, "argv", arguments)
            outputs = steps.main()
            slime.close()
            for output in outputs:
                check_shape(output.samples)
                seen += numbers(output.samples)
    assert len(seen) == len(set(seen)) == 6 * 16
    assert capsys.readouterr().out.count("16 samples") == 6


def check_shape(groups: list[list[Any]]) -> None:
    assert [len(group) for group in groups] == [4] * 4
    assert all(sample.reward in (0.0, 1.0) for group in groups for sample in group)
