"""slime's and miles' own order of pause, flush, load, label and continue, on two real servers.

The weights of two versions are very different, so the log-probability of each token proves which
of them sampled it. With ``SLIME_ROOT`` or ``MILES_ROOT`` the modules of the trainer are real too.
"""

# pyright: basic
# The packages have no types.
from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched.kernel.core.state.records import State
from aprilsched.trainers import slime
from aprilsched.trainers.slime_settings import ADVANTAGES_PATH
from aprilsched.types import Batch, Rollout, Sample
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.recorded import SCORED, TOLERANCE, scores
from tests.sglang.server import CpuServer
from tests.support.slime_loop import Loop, arguments, numbers, write_prompts
from tests.support.slime_stand_in import trainer_modules

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
        reason="could not import 'torch' or 'transformers'",
    ),
]

CALLS = {
    "slime": ("aprilsched.trainers.slime.generate_rollout", {}),
    # miles pauses otherwise, and passes the version to its class form.
    "miles": ("aprilsched.trainers.slime.RolloutFn", {"mode": "retract"}),
}


class Run:
    """Processes of a training, one after another, and everything that they were given."""

    def __init__(
        self,
        trainer: str,
        servers: Sequence[CpuServer],
        models: Sequence[Path],
        folder: Path,
        *,
        single: bool,
    ) -> None:
        from tests.support.trl_on_cpu import tokenizer

        write_prompts(folder)
        model = Path(shutil.copytree(models[0], folder / "model"))
        tokenizer().save_pretrained(model)
        self._function, self._pause = CALLS[trainer]
        self._changes: dict[str, Any] = {"aprilsched": {"over_provision": 3.0}}
        if single:
            self._changes["aprilsched"] |= {"delivery": "samples", "siblings": 2}
            self._changes["custom_reward_post_process_path"] = ADVANTAGES_PATH
        self.single = single
        self._urls = [server.url for server in servers]
        self._models = models
        self._folder = folder
        self.batches: list[Batch] = []
        self.samples: list[list[list[Any]]] = []
        self.step = 0
        self._loop: Loop | None = None
        self._args: Any = None

    def launch(self) -> None:
        """Start a process. Its labels start at 1, and its first weights are the next version's."""
        args = self._args = arguments(
            self._folder,
            self._urls,
            rollout_function_path=self._function,
            eval_function_path=self._function,
            rollout_max_response_len=700,
            # Responses have 50 tokens on average, and some have hundreds.
            rollout_stop_token_ids=list(range(10)),
            sglang_admin_api_key=ADMIN_KEY,
            **self._changes,
        )
        first = self.version
        weights = [self._models[(first + label) % 2] for label in range(2)]
        self._loop = Loop(args, weights, admin_key=ADMIN_KEY, pause=self._pause)
        self._loop.start(self.step)

    @property
    def version(self) -> int:
        return self.batches[-1].version if self.batches else 0

    @property
    def state(self) -> Any:
        assert slime._current is not None
        assert slime._current._open is not None
        return slime._current._open.state

    def take(self, *, save: bool = False, die: bool = False) -> None:
        """One step of train.py; with `die`, the process ends before the next update."""
        loop = self._loop
        assert loop is not None
        self.samples.append(loop.generate(self.step).samples)
        assert self.state.in_flight.open_attempts == 0
        if save:
            loop.save(self.step)
        self.step += 1
        if die:
            self.end()
        else:
            loop.update()

    def end(self) -> None:
        assert self._loop is not None
        self._loop.end()

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for batch in self.batches for rollout in batch.rollouts]

    def crossed(self, updates: int) -> bool:
        """Whether a response was carried over at least `updates` updates."""
        return any(len(set(each.versions.tolist())) > updates for each in self.rollouts)

    def check(self) -> None:
        """Check that samples are what was delivered, that none is lost or given twice, and that
        every token is of its recorded version."""
        seen = [number for groups in self.samples for number in numbers(groups)]
        assert len(seen) == len(set(seen)) == 8 * len(self.samples)
        flying = {
            4 * int(each.group.prompt.key) + each.index
            for each in self.state.in_flight.rollouts.values()
        }
        assert set(seen) | flying == set(range(4 * self.state.prompts.cursor))
        assert not set(seen) & flying
        assert self.state.in_flight.ledger.total == 0
        by_index = {s.index: s for groups in self.samples for group in groups for s in group}
        for batch in self.batches:
            for unit in batch.units:
                for rollout in unit.rollouts:
                    sample = by_index[4 * int(str(unit.prompt.key)) + rollout.index]
                    if isinstance(unit, Sample):
                        first, second = (each.reward or 0.0 for each in unit.siblings)
                        _, (advantage,) = slime.sibling_advantages(self._args, [sample])
                        assert advantage == pytest.approx(sample.reward - (first + second) / 2)
                    assert sample.tokens == [*rollout.prompt_ids, *rollout.token_ids]
                    assert sample.rollout_log_probs == rollout.logprobs.tolist()
                    assert [int(v) for v in sample.weight_versions] == sorted(set(rollout.versions))
                    assert rollout.versions_exact
        chosen = sorted(self.rollouts, key=lambda r: len(set(r.versions.tolist())))[-SCORED:]
        found = scores(self._models, chosen, self._folder)
        for index, rollout in enumerate(chosen):
            at, of = np.arange(len(rollout)), rollout.versions % 2
            right, wrong = (np.stack([own[index] for own in found])[x, at] for x in (of, 1 - of))
            assert np.abs(rollout.logprobs - right).max() < TOLERANCE
            assert np.abs(rollout.logprobs - wrong).max() > 100 * TOLERANCE


@pytest.fixture(params=["slime", "miles", "slime-samples"])
def run(
    request: pytest.FixtureRequest,
    clean_pair: tuple[CpuServer, CpuServer],
    models: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Run]:
    trainer, _, delivery = request.param.partition("-")
    with trainer_modules(trainer):
        made = Run(trainer, clean_pair, models, tmp_path, single=bool(delivery))
        output: Callable[..., Any] = slime._Rollouts._output

        def noted(rollouts: Any, batch: Batch) -> Any:
            made.batches.append(batch)
            return output(rollouts, batch)

        monkeypatch.setattr(slime._Rollouts, "_output", noted)
        yield made
        slime.close()


@pytest.mark.shows(
    "abort",
    "weights that the trainer moves",
    "checkpoints with partials",
    engine="SGLang",
    adapter=("slime", "miles"),
)
@pytest.mark.shows("single samples", engine="SGLang", adapter="slime")
def test_responses_are_carried_over_the_trainers_own_updates_and_over_a_restart(run: Run):
    run.launch()
    while not run.crossed(3):
        run.take()
    # The process dies with responses in flight that are half generated. Its checkpoint has them.
    partial: dict[int, list[int]] = {}
    while not partial:
        run.take(save=True)
        partial = {
            rollout.rollout_id: rollout.log.token_ids.tolist()
            for rollout in run.state.in_flight.rollouts.values()
            if rollout.state is State.QUEUED and rollout.log.size
        }
    run.end()
    version = run.version + 1
    run.launch()
    run.take()
    assert run.batches[-1].version == version, "versions continue, and labels start again"
    found: dict[int, list[int]] = {}
    while not partial.keys() <= found.keys():
        run.take()
        found = {each.rollout_id: each.token_ids.tolist() for each in run.rollouts}
    for rollout_id, started in partial.items():
        assert found[rollout_id][: len(started)] == started
    run.check()
    groups = [{sample.index // 4 for g in step for sample in g} for step in run.samples]
    split = any(one & other for one, other in pairwise(groups))
    assert split == run.single
