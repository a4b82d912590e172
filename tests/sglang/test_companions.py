"""Tests routed experts and sampling masks of a real server with a tiny mixture of experts.

The weights of one version and the next are very different, and so are their routers. Every row is
compared with the router of transformers under the version of its token, over the whole sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aprilsched import (
    DiskPublisher,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
    SqliteStore,
)
from aprilsched.cli.doctor import examine
from aprilsched.config import Pool
from aprilsched.errors import PromptsExhausted
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.engines.address import ServerAddress
from aprilsched.kernel.values.companions import Companion, routed_experts, top_logprobs
from aprilsched.testing.contract import until
from aprilsched.trainers.corrections import renormalized
from tests.sglang.helpers import reset
from tests.sglang.recorded import Run, crossing, long_tail, record, scores, try_until
from tests.sglang.server import CpuServer, write_model

LAYERS, PER_TOKEN, EXPERTS = 2, 2, 8
COMPANIONS = (
    routed_experts(layers=LAYERS, per_token=PER_TOKEN, experts=EXPERTS),
    Companion("sampling_mask"),
    top_logprobs(3),
)
TOP_K, TOP_P = 12, 0.3
CUT = "output_token_sampling_logprobs"
"""What the server reports of the policy that it cut to the kept ids, in each event of a stream."""
CLOSE = 1e-4
"""Largest difference of two numbers that differ by rounding."""

RULES: dict[str, tuple[StragglerRule, dict[str, Any]]] = {
    "retract": ("retract", {}),
    "abort": ("abort", {}),
    "in place": ("in_place", {}),
    "run": ("run", {}),
    "rolling": ("run", {"pace": "asynchronous", "refit": "rolling", "refill": Pool(together=1)}),
}
LONG = ("abort", "in place", "run", "rolling")
OF_ONE_VERSION = ("run", "rolling")


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two mixtures of experts of one shape with very different weights."""
    folder = tmp_path_factory.mktemp("mixtures")
    return (
        write_model(folder / "first", seed=0, kind="moe"),
        write_model(folder / "second", seed=1, kind="moe"),
    )


@pytest.fixture(scope="module")
def servers(
    mixtures: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[CpuServer, CpuServer]]:
    """Two servers that return routed experts."""
    folder = tmp_path_factory.mktemp("servers")
    flag = "--enable-return-routed-experts"
    with (
        CpuServer(mixtures[0], folder / "first.txt", flag) as first,
        CpuServer(mixtures[0], folder / "second.txt", flag) as second,
    ):
        first.wait_ready()
        second.wait_ready()
        yield first, second


def prompts(every: int = 5) -> list[Prompt]:
    """Prompts whose responses are sampled from few tokens."""

    def few(sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, top_k=TOP_K, top_p=TOP_P, keep=(CUT,))

    given = long_tail(60, longest=400, every=every)
    return [replace(p, sampling=tuple(map(few, p.sampling or ()))) for p in given]  # type: ignore[arg-type]


@dataclass
class Truth:
    """Results of transformers for each model and rollout: experts [P + T, layers, experts a token]
    and log-probabilities of the next token [P + T - 1, vocabulary]."""

    experts: list[list[NDArray[np.uint8]]]
    logprobs: list[list[NDArray[np.float32]]]


def truth(models: Sequence[Path], rollouts: Sequence[Rollout], folder: Path) -> Truth:
    scores(models, rollouts, folder)
    found = Truth([], [])
    for model in models:
        with np.load(folder / f"{model.name}.npz") as arrays:
            found.experts.append([arrays[f"experts-{i}"] for i in range(len(rollouts))])
            found.logprobs.append([arrays[f"all-{i}"] for i in range(len(rollouts))])
    return found


@pytest.mark.shows("routed experts", engine="SGLang")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in LONG)) for kind in RULES]
)
async def test_rows_are_those_of_the_version_of_their_token(
    kind: str, servers: tuple[CpuServer, CpuServer], mixtures: tuple[Path, Path], tmp_path: Path
) -> None:
    rule, changes = RULES[kind]

    async def once(number: int) -> Run:
        for server in servers:
            await reset(server.url, mixtures[0])
        return await record(
            [server.url for server in servers],
            mixtures,
            rule,
            prompts=prompts(),
            batches=4,
            changes={"companions": COMPANIONS, "batch_groups": 3, **changes},
            folder=tmp_path / f"weights-{number}",
        )

    run = await try_until(
        once, lambda run: _versions(run, kind) > 1, "no rollouts are of several versions"
    )
    _check(run.rollouts, mixtures, tmp_path, in_place=kind == "in place")
    if kind in OF_ONE_VERSION:
        assert not crossing(run)


def _versions(run: Run, kind: str) -> int:
    """Number of versions in one rollout, or of all where each has one."""
    if kind in OF_ONE_VERSION:
        return len({int(rollout.versions[0]) for rollout in run.rollouts})
    return max(len(set(rollout.versions.tolist())) for rollout in run.rollouts)


def _check(
    rollouts: Sequence[Rollout],
    mixtures: Sequence[Path],
    folder: Path,
    *,
    in_place: bool = False,
) -> None:
    """Compare the rows of those rollouts that were interrupted most with both routers."""
    chosen = sorted(rollouts, key=lambda rollout: len(rollout.segments), reverse=True)[:12]
    text = truth(mixtures, chosen, folder)
    for index, rollout in enumerate(chosen):
        # After an update in place, the keys are of one version and the weights of another.
        upto = rollout.segments[0].end if in_place else len(rollout)
        _check_experts(rollout, [own[index] for own in text.experts], upto)
        _check_masks(rollout, [own[index] for own in text.logprobs], upto)
        _check_cut(rollout, [own[index] for own in text.logprobs], upto)
        _check_likely(rollout, [own[index] for own in text.logprobs], upto)


def _check_likely(rollout: Rollout, text: Sequence[NDArray[np.float32]], upto: int) -> None:
    """The likely tokens are those of the version that sampled their token."""
    rows = rollout.companions["top_logprobs"]
    assert rows.exact.all()
    assert rows.rows.values.shape == (len(rollout), 3, 2)
    ids, received = np.moveaxis(rows.rows.values[:upto], -1, 0)
    at = np.arange(upto)
    by_model = np.stack([each[len(rollout.prompt_ids) - 1 :][:upto] for each in text])
    own, other = (by_model[(rollout.versions[:upto] + n) % 2, at] for n in (0, 1))
    np.testing.assert_allclose(received, -np.sort(-own)[:, :3], atol=CLOSE)
    of_ids = np.take_along_axis(own, ids.astype(np.int64), -1)
    np.testing.assert_allclose(of_ids, received, atol=CLOSE)
    assert np.median(np.abs(np.take_along_axis(other, ids.astype(np.int64), -1) - received)) > 0.1


def _check_experts(rollout: Rollout, text: Sequence[NDArray[np.uint8]], upto: int) -> None:
    rows = rollout.companions["routed_experts"]
    prompt = len(rollout.prompt_ids)
    assert rows.rows.values.dtype == np.uint8
    assert rows.rows.values.shape == (prompt + len(rollout) - 1, LAYERS, PER_TOKEN)
    assert rows.exact.all()
    own = np.sort(rows.rows.values[prompt - 1 :], -1)[:upto]
    by_model = np.stack([each[prompt - 1 : -1] for each in text])
    at = np.arange(upto)
    expected = by_model[rollout.versions[:upto] % 2, at]
    assert (own == expected).all((1, 2)).mean() == 1.0
    other = by_model[(rollout.versions[:upto] + 1) % 2, at]
    assert (own == other).all((1, 2)).mean() < 0.5, "both models route alike: this shows nothing"


def _check_cut(rollout: Rollout, text: Sequence[NDArray[np.float32]], upto: int) -> None:
    """What the server reports of its cut policy is what a trainer computes from the masks."""
    rows = rollout.companions["sampling_mask"].aligned(prompt=len(rollout.prompt_ids))
    ids = np.concatenate((rollout.prompt_ids, rollout.token_ids))
    response = np.arange(len(ids)) >= len(rollout.prompt_ids)
    ours = np.stack(
        [
            renormalized(
                np.concatenate((each, each[-1:])),  # Nothing is sampled at the last token.
                ids,
                response,
                kept=rows.values,
                offsets=np.array([0, *rows.offsets]),
            )[response]
            for each in text
        ]
    )
    # The last event of a response has those of its own tokens, which are the last ones.
    received = np.array(rollout.answers[-1].values[CUT])
    known = np.arange(len(rollout))[-len(received) :]
    own = ours[rollout.versions[known] % 2, known]
    np.testing.assert_allclose(received[known < upto], own[known < upto], atol=CLOSE)


def _check_masks(rollout: Rollout, text: Sequence[NDArray[np.float32]], upto: int) -> None:
    """Each mask has the likeliest tokens up to top-k and top-p under the token's version, but for
    tokens so close to the edge that rounding decides."""
    rows = rollout.companions["sampling_mask"]
    assert rows.exact.all()
    assert len(rows.rows) == len(rollout)
    prompt = len(rollout.prompt_ids)
    for index in range(0, upto, 7):
        kept = set(rows.rows.row(index).tolist())
        logprobs = text[int(rollout.versions[index]) % 2][prompt - 1 + index]
        order = np.argsort(-logprobs)[:TOP_K]
        share = np.exp(logprobs[order].astype(np.float64))
        before = np.cumsum(share) - share
        sure = set(order[before < TOP_P - CLOSE].tolist())
        maybe = set(order[before < TOP_P + CLOSE].tolist())
        assert int(rollout.token_ids[index]) in kept
        assert sure <= kept <= maybe


@pytest.mark.long
async def test_the_doctor_proves_a_refit(
    servers: tuple[CpuServer, CpuServer], mixtures: tuple[Path, Path]
) -> None:
    await _fresh(servers, mixtures)
    findings = await examine(servers[0].url, refit=str(mixtures[1]))
    found = {finding.check: finding for finding in findings}
    assert [finding for finding in findings if finding.status == "fail"] == []
    assert "routed_experts, sampling_mask" in found["server"].seen
    before, again, other, back = found["refit by its logprobs"].seen.split(": ")[1].split(", ")
    assert before == again == back != other
    assert "'default'" in found["left as found"].seen


# --- servers and trainers that die ---------------------------------------------------------------


def scheduler(urls: Sequence[str], groups: int, **settings: Any) -> RolloutScheduler:
    config = {"batch_groups": 3, "group_size": 4, "over_provision": 2.0, "straggler": "abort"}
    return RolloutScheduler(
        SGLangFleet(urls, stream_interval=16),
        prompts(every=2)[:groups],
        config=SchedulerConfig(**config, companions=COMPANIONS),  # type: ignore[arg-type]
        **settings,
    )


async def rest(rollouts: RolloutScheduler) -> list[Rollout]:
    """The rollouts of all remaining batches."""
    found: list[Rollout] = []
    with suppress(PromptsExhausted):
        while True:
            found += (await rollouts.next_batch()).rollouts
    return found


async def _fresh(servers: Sequence[CpuServer], mixtures: Sequence[Path]) -> None:
    """Servers with the first weights, also where a test has killed one."""
    for server in servers:
        if not server.alive():
            server.start()
            await asyncio.to_thread(server.wait_ready)
        await reset(server.url, mixtures[0])


def _first_life(urls: Sequence[str], second: Path, store: Path, updated: Path) -> None:
    """A trainer that is killed: a batch, new weights, and then it waits for its end."""

    async def live() -> None:
        async with scheduler(urls, 12, store=SqliteStore(store)) as rollouts:
            (await rollouts.next_batch()).acknowledge()
            await rollouts.update_weights(DiskPublisher(second))
            await asyncio.sleep(2.0)  # the store has what was there within 0.5 s
            await asyncio.to_thread(updated.touch)
            await asyncio.Event().wait()

    asyncio.run(live())


@pytest.mark.shows("routed experts", "checkpoints with partials", engine="SGLang")
@pytest.mark.long
async def test_a_killed_trainer_goes_on_with_the_rows_of_both_versions(
    servers: tuple[CpuServer, CpuServer], mixtures: tuple[Path, Path], tmp_path: Path
) -> None:
    urls = [server.url for server in servers]

    async def once(number: int) -> list[Rollout]:
        await _fresh(servers, mixtures)
        store, updated = tmp_path / f"store-{number}", tmp_path / f"updated-{number}"
        trainer = get_context("spawn").Process(
            target=_first_life, args=(urls, mixtures[1], store, updated)
        )
        trainer.start()
        await until(updated.exists)
        trainer.kill()
        await asyncio.to_thread(trainer.join)
        async with scheduler(urls, 12, store=SqliteStore(store)) as rollouts:
            resumed = await rest(rollouts)
        assert len({rollout.rollout_id for rollout in resumed}) == len(resumed) == 9 * 4
        return resumed

    def carried(resumed: list[Rollout]) -> bool:
        return any(set(rollout.versions.tolist()) == {0, 1} for rollout in resumed)

    resumed = await try_until(once, carried, "no response outlived the update")
    _check(resumed, mixtures, tmp_path)


@pytest.mark.shows("lost engines", "routed experts", engine="SGLang")
@pytest.mark.long
async def test_what_a_killed_server_had_is_routed_again_by_another_one(
    servers: tuple[CpuServer, CpuServer], mixtures: tuple[Path, Path], tmp_path: Path
) -> None:
    names = {ServerAddress.parse(server.url).name: server for server in servers}

    async def once(_: int) -> list[Rollout]:
        """The rollouts that left the killed server amid their responses."""
        await _fresh(servers, mixtures)
        victim = ""
        async with scheduler([server.url for server in servers], 15) as rollouts:

            def halfway() -> str:
                """An engine with a request in the middle of its response."""
                requests = rollouts.state.in_flight.open_requests()
                found = (r.engine for r in requests if r.generated >= 32 and r.remaining >= 100)
                return next(found, "")

            delivered = list((await rollouts.next_batch()).rollouts)
            await rollouts.update_weights(DiskPublisher(mixtures[1]))
            waiting = asyncio.create_task(rest(rollouts))
            await until(lambda: halfway() != "" or waiting.done())
            if victim := halfway():
                names[victim].kill()
            delivered += await waiting
        assert len({rollout.rollout_id for rollout in delivered}) == len(delivered) == 15 * 4
        return [r for r in delivered if victim in [segment.engine for segment in r.segments[:-1]]]

    def moved(rollouts: list[Rollout]) -> bool:
        return any(len({segment.engine for segment in r.segments}) == 2 for r in rollouts)

    _check(await try_until(once, moved, "no response moved"), mixtures, tmp_path)
