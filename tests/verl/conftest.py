"""A small model, a data set and a configuration for verl's trainer on a CPU."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ray_cluster import patiently
from tests.verl.on_path import python_path
from tests.verl.server import VOCAB_SIZE, WEIGHTS

STEPS = 6
WARM_UP = 2
"""Number of batches of prompts that are pushed before the first step."""
FAILS = 5
"""Row of the data set whose reward function raises."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|> ' + message['role'] + ' ' + message['content'] "
    "+ ' <|im_end|> ' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}"
    "{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and a tokenizer, and no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "user", "assistant", "system"]
    words += [f"w{n}" for n in range(VOCAB_SIZE - len(words))]
    words = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.parquet, val.parquet and reward.py."""
    import pandas

    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 64), ("val", 4)):
        rows = [
            {
                "data_source": "words",
                "prompt": [{"role": "user", "content": f"w{index} w{index + 1}"}],
                "reward_model": {
                    "style": "rule",
                    "ground_truth": "fail" if (name, index) == ("train", FAILS) else str(index),
                },
                "extra_info": {"index": index},
            }
            for index in range(count)
        ]
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):\n"
        "    if ground_truth == 'fail':\n"
        "        raise RuntimeError('no such answer')\n"
        "    return {'score': len(solution_str) % 7 / 7, 'acc': float(len(solution_str) % 2)}\n"
    )
    (folder / "agents.yaml").write_text(
        "- name: two_turns\n  _target_: tests.verl.on_cpu.TwoTurns\n"
        "- name: two_outputs\n  _target_: tests.verl.on_cpu.TwoOutputs\n"
    )
    return folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which step-N has the weights of step N."""
    folder = tmp_path_factory.mktemp("weights")
    for step in range(2 * STEPS):
        (folder / f"step-{step}").mkdir()
        (folder / f"step-{step}" / "model.safetensors").write_bytes(b"weights of %d" % step)
    return folder


@pytest.fixture
def configure(model: Path, data: Path, tmp_path: Path) -> Callable[..., Any]:
    """Makes verl's whole configuration, with changes as on its command line."""
    import verl
    from hydra import compose, initialize_config_dir

    folder = Path(verl.__file__).parent / "trainer" / "config"

    def configuration(*changes: str) -> Any:
        overrides = [
            f"data.train_files={data}/train.parquet",
            f"data.val_files={data}/val.parquet",
            "data.train_batch_size=4",
            "data.max_prompt_length=32",
            "data.max_response_length=1000",
            "data.dataloader_num_workers=0",
            "data.shuffle=False",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.hybrid_engine=False",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.use_kl_loss=False",
            "actor_rollout_ref.rollout.name=sglang",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.rollout.calculate_log_probs=True",
            "actor_rollout_ref.rollout.temperature=0",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=files",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={data}/agents.yaml",
            "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=tests.verl.on_cpu.Usual",
            "algorithm.adv_estimator=grpo",
            "algorithm.rollout_correction.bypass_mode=True",
            f"reward.custom_reward_function.path={data}/reward.py",
            "reward.num_workers=1",
            "trainer.device=cpu",
            "trainer.logger=[console]",
            "trainer.n_gpus_per_node=1",
            f"trainer.total_training_steps={STEPS}",
            "trainer.val_before_train=False",
            "trainer.resume_mode=disable",
            f"trainer.default_local_dir={tmp_path}/checkpoints",
            "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.separate_async.parameter_sync_step=1",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
            *changes,
        ]
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            return compose(config_name="ppo_trainer", overrides=overrides)

    return configuration


@pytest.fixture(scope="session")
def cluster(weights: Path) -> Iterator[None]:
    """Ray, whose processes import the tests and the library from here."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        # Ray would write a token into the home folder.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("PYTHONPATH", python_path())
        patch.setenv("TRANSFER_QUEUE_ENABLE", "1")
        patch.setenv(WEIGHTS, str(weights))
        patiently(lambda: ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False))
        yield
        ray.shutdown()


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that hold some responses over an update; see HoldingServer."""
    from tests.verl import on_cpu

    monkeypatch.setattr(on_cpu, "make_server", on_cpu.make_holding_server)


@pytest.fixture
def run(
    cluster: None, configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Runs a task runner of verl in this process; returns its trainer, and what the servers call
    their weights at the end."""
    import ray
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from tests.verl.on_cpu import Trainer

    monkeypatch.setitem(TRAINER_REGISTRY, "separate_async", Trainer)

    def runs(kind: type[Any], *changes: str) -> Any:
        runner = kind()
        warm_up = f"trainer.v1.separate_async.num_warmup_batches={WARM_UP}"
        runner.run(configure(warm_up, *changes))
        trainer = runner.trainer
        servers = trainer.standalone_server_manager.server_handles
        labels = ray.get([server.label.remote() for server in servers])
        # The name of the run follows.
        labels = [label.partition("@")[0] for label in labels]
        runner.agent_loop_manager.close()
        # They have names, which the next run uses again.
        for actor in (*servers, *trainer.get_reward_handles()):
            ray.kill(actor)
        return trainer, labels

    return runs
