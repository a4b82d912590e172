"""SkyRL's own trainer and generator on a real vLLM server; only the policy's training is left out.

The servers' weights change at every step, and every token is held to its version.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The packages have no complete types, and .venv does not have them.
from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typing_extensions

from aprilsched import RolloutScheduler, SchedulerConfig
from aprilsched.config import Retries
from aprilsched.errors import ConfigError, MemberLost
from aprilsched.trainers.skyrl import ScheduledRollouts
from tests.sglang.recorded import TOLERANCE
from tests.support.openrlhf_on_cpu import write_stand_ins
from tests.support.trl_run import TRIES, with_tokenizer
from tests.vllm.conftest import reset
from tests.vllm.server import VLLMServer
from tests.vllm.test_versions import differences

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("skyrl") is None,
    reason="SkyRL is not installed; use make test-vllm-trainers",
)

STEPS, GROUPS, SIZE, TURNS = 5, 2, 3, 2
FAILED: list[str] = []
"""The prompt of the first agent loop, which fails."""


@pytest.fixture(scope="module", autouse=True)
def skyrl_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> typing.Iterator[None]:
    """SkyRL targets Python 3.12: pydantic takes an earlier TypedDict only from typing_extensions.
    It also imports flash-attn, which needs a GPU."""
    packages = tmp_path_factory.mktemp("packages")
    write_stand_ins(packages)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        import skyrl.train.entrypoints.main_base  # noqa: F401
        import skyrl_gym

        skyrl_gym.register(id="words", entry_point=environment())
        yield


def environment(*, lost: bool = True) -> type[Any]:
    """An environment of two turns that rewards the number of words; the first one may be lost."""
    from skyrl_gym.envs.base_text_env import BaseTextEnv

    class Words(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()

        def init(self, prompt: Any) -> Any:
            if lost and not FAILED:
                FAILED.append(prompt[0]["content"])
                raise MemberLost("this agent loop is lost once")
            return prompt, {}

        def step(self, action: str) -> Any:
            self.turns += 1
            more = [{"role": "user", "content": "w30 w31"}] if self.turns < TURNS else []
            reward = float(len(action.split()))
            return {"observations": more, "reward": reward, "done": not more, "metadata": {}}

    return Words


def configuration(url: str, model: Path, folder: Path, *, rows: int = 40, **changes: Any) -> Any:
    from skyrl.train.config import SkyRLTrainConfig

    data = folder / "prompts.jsonl"
    prompts = [
        {
            "prompt": [{"role": "user", "content": f"w{i + 10} w{i + 11}"}],
            "env_class": "words",
            "max_turns": TURNS,
        }
        for i in range(rows)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    values = {
        "data.train_data": f"['{data}']",
        "data.val_data": None,
        "data.dataloader.num_workers": 0,
        "data.dataloader.persistent_workers": False,
        "trainer.policy.model.path": model,
        "trainer.placement.colocate_all": False,
        "trainer.fully_async.enabled": True,
        "trainer.fully_async.simulate_training": True,
        "trainer.fully_async.simulate_training_step_seconds": 0.0,
        "trainer.fully_async.num_parallel_generation_workers": 2 * GROUPS,
        "trainer.fully_async.max_staleness_steps": 2,
        "trainer.train_batch_size": GROUPS,
        "trainer.policy_mini_batch_size": GROUPS,
        "trainer.max_training_steps": STEPS,
        "trainer.epochs": 1,
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.resume_mode": "none",
        "trainer.update_ref_every_epoch": False,
        "trainer.logger": "console",
        "trainer.ckpt_path": folder / "ckpt",
        "trainer.export_path": folder / "export",
        "trainer.log_path": folder / "log",
        "trainer.max_prompt_length": 64,
        "generator.batched": False,
        "generator.max_turns": TURNS,
        "generator.max_input_length": 4000,
        "generator.n_samples_per_prompt": SIZE,
        "generator.sampling_params.max_generate_length": 150,
        "generator.sampling_params.logprobs": 1,
        "generator.inference_engine.run_engines_locally": False,
        # It would look for Ray, which this test does not need.
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        "generator.inference_engine.external_server_urls": f"['{url}']",
    }
    return SkyRLTrainConfig.from_cli_overrides({**values, **changes})


class Saves:
    """SkyRL's dispatch to its policy, whose weights alternate between two models."""

    def __init__(self, models: tuple[Path, Path]) -> None:
        self._models = models
        self._saved = 0

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        assert model == "policy"
        self._saved += 1
        shutil.copytree(self._models[self._saved % 2], export_dir, dirs_exist_ok=True)

    def get_lcm_dp_size(self) -> int:
        return 1


def experiment(cfg: Any, models: tuple[Path, Path], folder: Path) -> Any:
    """SkyRL's experiment with a simulated trainer that records its training data."""
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim

    class Trainer(FullyAsyncTrainerSim):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.dispatch = Saves(models)
            self.trained: list[Any] = []

        def convert_generation_group_mini_batch_to_training_input(
            self, groups: Any, *args: Any
        ) -> Any:
            self.trained.append(groups)
            return super().convert_generation_group_mini_batch_to_training_input(groups, *args)

    class Experiment(ScheduledRollouts, BasePPOExp):
        directory = folder / "weights"
        scheduler = SchedulerConfig(straggler="retract")

        def trainer_class(self) -> type[Any]:
            return Trainer

        def get_train_dataset(self) -> Any:
            from skyrl.train.dataset import PromptDataset

            # SkyRL's eight processes take minutes to start on a busy machine.
            return PromptDataset(cfg.data.train_data, self.tokenizer, 64, num_workers=1)

    return Experiment(cfg)


def crossing(rollouts: list[Any]) -> bool:
    """Return whether several versions sampled one response."""
    return any(len(set(each.versions[each.loss_mask].tolist())) > 1 for each in rollouts)


@pytest.mark.shows(
    "retract", "weights from disk", "sessions and agents", engine="vLLM", adapter="SkyRL"
)
def test_five_steps_of_skyrls_trainer(
    clean_server: VLLMServer,
    models: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouts: list[Any] = []
    following = RolloutScheduler.next_batch

    async def kept(scheduler: Any) -> Any:
        batch = await following(scheduler)
        rollouts.extend(batch.rollouts)
        return batch

    monkeypatch.setattr(RolloutScheduler, "next_batch", kept)
    model = with_tokenizer(models[0], tmp_path / "model")
    for number in range(TRIES):
        # On a busy machine no response may be in flight at any update; longer ones are.
        length = {"generator.sampling_params.max_generate_length": 150 * 3 ** min(number, 2)}
        asyncio.run(reset(clean_server.url, models[0]))
        FAILED.clear()
        rollouts.clear()
        folder = tmp_path / str(number)
        folder.mkdir()
        made = experiment(configuration(clean_server.url, model, folder, **length), models, folder)
        trainer = made._setup_trainer()
        asyncio.run(trainer.train())
        if crossing(rollouts):
            break
    assert trainer.global_step == STEPS + 1
    assert len(FAILED) == 1
    # What SkyRL trained on is what the scheduler delivered.
    by_tokens = {tuple(each.token_ids.tolist()): each for each in rollouts}
    trained = [group.generator_output for batch in trainer.trained for group in batch]
    assert [len(batch) for batch in trainer.trained] == [GROUPS] * STEPS
    assert len({group.uid for batch in trainer.trained for group in batch}) == STEPS * GROUPS
    for output in trained:
        assert len(output["response_ids"]) == SIZE
        for ids, logprobs, mask in zip(
            output["response_ids"],
            output["rollout_logprobs"],
            output["loss_masks"],
            strict=True,
        ):
            rollout = by_tokens[tuple(ids)]
            own = rollout.loss_mask
            assert np.array_equal(np.array(mask, bool), own)
            assert np.allclose(np.array(logprobs)[own], rollout.logprobs[own])
    assert any(not rollout.loss_mask.all() for rollout in rollouts), "no rollout had two turns"
    assert all(rollout.versions_exact for rollout in rollouts)
    for rollout, (own, other) in zip(
        rollouts, differences(rollouts, models, tmp_path, vllm_python), strict=True
    ):
        assert own[rollout.loss_mask].max() < TOLERANCE
        assert np.median(other[rollout.loss_mask]) > 0.5
    assert crossing(rollouts)


@pytest.mark.lacks("LoRA adapters", adapter="SkyRL", why="The servers load whole models.")
@pytest.mark.lacks("images", adapter="SkyRL", why="Only text is scheduled.")
@pytest.mark.lacks(
    "routed experts", adapter="SkyRL", why="vLLM's routed experts are not passed on."
)
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"trainer.fully_async.enabled": False}, "asks for a whole batch"),
        ({"generator.inference_engine.external_server_urls": None}, "older vLLM"),
        ({"trainer.policy.model.lora.rank": 8}, "the servers load whole models"),
        ({"generator.vision_language_generator": True}, "only text is scheduled"),
        (
            {"generator.inference_engine.enable_return_routed_experts": True},
            "routed experts are not passed on",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(
    models: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    model = with_tokenizer(models[0], tmp_path / "model")
    cfg = configuration("http://127.0.0.1:1", model, tmp_path, **changes)
    made = experiment(cfg, models, tmp_path)
    with pytest.raises(ConfigError, match=error):
        made.get_inference_client()


@pytest.mark.lacks(
    "single samples",
    adapter="SkyRL",
    why="SkyRL's queue takes all trajectories of a prompt at once.",
)
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"retries": Retries(member="shrink")}, "SkyRL takes groups of one size"),
        ({"delivery": "samples"}, "SkyRL's queue takes all trajectories of a prompt at once"),
    ],
)
def test_settings_that_change_groups_are_refused(
    models: tuple[Path, Path], tmp_path: Path, settings: dict[str, Any], error: str
) -> None:
    model = with_tokenizer(models[0], tmp_path / "model")
    cfg = configuration("http://127.0.0.1:1", model, tmp_path)
    made = experiment(cfg, models, tmp_path)
    type(made).scheduler = SchedulerConfig(**settings)
    with pytest.raises(ConfigError, match=error):
        made.get_inference_client()
