"""The scheduler's settings, from the trainer's arguments and the table of aprilsched."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aprilsched.cli.runs.settings_tables import config_of
from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.values.sampling import sampling_params
from aprilsched.trainers.adapter import check_fixed_groups, check_replay, refuse
from aprilsched.trainers.slime_trainer import TrainerParts, companions_of
from aprilsched.types import SamplingParams

_ROUTER_SECONDS = 30.0

_BY_FLAGS = {
    "batch_groups": "--rollout-batch-size",
    "group_size": "--n-samples-per-prompt",
    "sampling": "--rollout-temperature, --rollout-max-response-len and the related flags",
}
"""Settings of the scheduler that the trainer has flags for."""
ADVANTAGES_PATH = "aprilsched.trainers.slime.sibling_advantages"
"""Name of the function for ``--custom-reward-post-process-path``."""
_FIXED = {"straggler": "abort", "pace": "synchronous", "stop": "groups"}
"""Settings that have one possible value here."""


def settings_table(args: Any) -> dict[str, Any]:
    table = getattr(args, "aprilsched", None)
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"aprilsched is {table!r} in the config file; give a mapping of settings."
        )
    return dict(table)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def scheduler_config(args: Any, trainer: TrainerParts) -> SchedulerConfig:
    """The scheduler's settings: those of the mapping `aprilsched`, and what the flags say."""
    table = settings_table(args)
    for own in ("data_source_path", "listeners_path", "sessions"):
        table.pop(own, None)
    for name, flags in _BY_FLAGS.items():
        if name in table:
            raise ConfigError(f"aprilsched.{name} is set, and {flags} sets it; leave it out.")
    for name, only in _FIXED.items():
        if table.setdefault(name, only) != only:
            raise ConfigError(
                f"aprilsched.{name} is {table[name]!r}, and the trainer pauses and continues the "
                f"engines itself between two steps; leave it out ({only!r})."
            )
    # slime starts `over_sampling_batch_size` groups at once, and the same number again if these do
    # not suffice.
    asked = getattr(args, "over_sampling_batch_size", None) or args.rollout_batch_size
    table.setdefault("over_provision", max(1.0, asked / args.rollout_batch_size))
    table["batch_groups"] = args.rollout_batch_size
    table["group_size"] = args.n_samples_per_prompt
    sampling = sampling_of(
        args,
        temperature=args.rollout_temperature,
        top_p=args.rollout_top_p,
        top_k=args.rollout_top_k,
        max_new_tokens=args.rollout_max_response_len,
    )
    config = config_of(table, "aprilsched.")
    check_fixed_groups(config, "slime", samples=True)
    if config.delivery == "samples":
        _check_samples(args, trainer)
    if getattr(args, "use_rollout_indexer_replay", False):
        check_replay(config, "--use-rollout-indexer-replay", "indexer_topk=int32[4,2048]")
    own = config.policies.companions
    named = {each.name for each in own}
    ours = [each for each in companions_of(args, trainer) if each.name not in named]
    return replace(config, sampling=sampling, companions=(*own, *ours))


def takes_advantages(args: Any) -> bool:
    """Return whether the trainer trains on the advantages of this package."""
    return getattr(args, "custom_reward_post_process_path", None) == ADVANTAGES_PATH


def _check_samples(args: Any, trainer: TrainerParts) -> None:
    """Reject arguments under which the trainer would use groups that are not complete."""
    if not takes_advantages(args):
        raise ConfigError(
            'aprilsched.delivery is "samples", and the trainer would subtract the mean of an '
            f"incomplete group; set --custom-reward-post-process-path {ADVANTAGES_PATH}."
        )
    estimator = getattr(args, "advantage_estimator", None)
    rates = trainer.name == "slime" and getattr(args, "log_passrate", False)
    convert = getattr(args, "custom_convert_samples_to_train_data_path", None)
    refuse(
        {
            "--group-rm": (args.group_rm, "single samples are scored by themselves"),
            "--advantage-estimator ppo": (
                estimator == "ppo",
                "its critic would learn advantages in the place of rewards",
            ),
            "--log-passrate": (rates, "it takes the samples of a step for whole groups"),
            "--custom-convert-samples-to-train-data-path": (
                convert is not None,
                "it replaces the function that gives single samples their advantages",
            ),
        }
    )


def sampling_of(args: Any, **values: Any) -> SamplingParams:
    """Sampling parameters as slime sends them."""
    given = {
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        **values,
    }
    stop = given.pop("stop")
    return sampling_params({**given, "extra": {} if stop is None else {"stop": stop}})


def engine_addresses(args: Any) -> list[str]:
    """Return the engines' URLs, from the trainer's arguments or from its router."""
    external = getattr(args, "rollout_external_engine_addrs", None)
    if external:
        infos: list[dict[str, Any]] = getattr(args, "rollout_external_engine_infos", None) or []
        for info in infos:
            _check_worker(info["url"], info["worker_type"])
        return [each if "://" in each else f"http://{each}" for each in external]
    old = getattr(args, "use_miles_router", False)
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    found = _asked(f"{router}/{'list_workers' if old else 'workers'}")
    urls: list[str] = []
    for worker in found["urls"] if old else found["workers"]:
        if not isinstance(worker, str):
            _check_worker(worker["url"], worker.get("worker_type", "regular"))
            worker = worker["url"]
        # A router that knows of data parallelism lists each rank, as URL@RANK.
        base, at, rank = worker.rpartition("@")
        url = (base if at and rank.isdigit() else worker).rstrip("/")
        if url not in urls:
            urls.append(url)
    if not urls:
        raise ConfigError(f"the router {router} lists no engine; start the engines before.")
    return urls


def _check_worker(url: str, kind: str) -> None:
    if kind != "regular":
        raise ConfigError(
            f"{url} is a {kind} worker, and every engine must prefill and decode; start the "
            "engines without disaggregation."
        )


def _asked(url: str) -> Any:
    try:
        # The proxies of the environment lead out of the cluster.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=_ROUTER_SECONDS) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{url} does not list the engines ({error}); start the router, or give "
            "--rollout-external-engine-addrs."
        ) from error
