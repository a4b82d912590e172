"""Tests cached KV that survives the flush of its engine."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.engines.sglang import probe
from aprilsched.kernel.engines.sglang.wire import ModelInfo, OpenApi, ServerInfo
from aprilsched.kernel.engines.vllm import server_info
from aprilsched.kernel.shell import opening
from aprilsched.kernel.values.capabilities import Capabilities
from aprilsched.simulation.engine import SimConfig, SimEngine
from aprilsched.simulation.engine.toy_model import KvTier
from aprilsched.types import VersionSpan
from tests.support.driver import Driver, config
from tests.support.table import each_row

Tier = Literal["none", "keyed", "unkeyed"]

SERVERS: list[tuple[str, dict[str, Any], Tier]] = [
    ("0.5.23", {}, "keyed"),
    ("0.5.23", {"enable_hierarchical_cache": False}, "none"),
    ("0.5.23", {"enable_hierarchical_cache": True}, "keyed"),
    ("0.5.23", {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, "keyed"),
    ("0.5.21", {"enable_hierarchical_cache": True}, "keyed"),
    ("0.5.21", {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, "unkeyed"),
    ("0.5.23", {"enable_hierarchical_cache": False, "enable_lmcache": True}, "keyed"),
    ("0.5.23", {"enable_hierarchical_cache": False, "enable_flexkv": True}, "unkeyed"),
    (
        "0.5.23",
        {"enable_hierarchical_cache": False, "unified_cache_external_linker_config": {"a": 1}},
        "keyed",
    ),
]


@each_row(("version", "received", "tier"), SERVERS)
def test_a_tier_of_sglang_is_known_by_its_arguments(
    version: str, received: dict[str, Any], tier: Tier
) -> None:
    info = msgspec.convert({"version": version, **received}, ServerInfo)
    model = ModelInfo(model_path="m", weight_version="0")
    assert probe._capabilities(model, info, OpenApi()).kv_tier == tier  # pyright: ignore[reportPrivateUsage]


CONNECTORS: list[tuple[dict[str, Any], Tier]] = [
    ({}, "keyed"),
    ({"kv_transfer_config": None}, "none"),
    ({"kv_transfer_config": {"kv_connector": None}}, "none"),
    ({"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}, "keyed"),
    ({"kv_transfer_config": {"kv_connector": "ExampleConnector"}}, "unkeyed"),
    ({"kv_transfer_config": {"kv_connector": "MineConnector"}}, "unkeyed"),
]
for inner, found in (("NixlConnector", "keyed"), ("HF3FSKVConnector", "unkeyed")):
    both = [{"kv_connector": inner}, {"kv_connector": "OffloadingConnector"}]
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": both},
    }
    CONNECTORS.append(({"kv_transfer_config": several}, found))  # type: ignore[arg-type]


@each_row(("received", "tier"), CONNECTORS)
def test_a_tier_of_vllm_is_known_by_its_connector(received: dict[str, Any], tier: Tier) -> None:
    required = {
        "model_config": {"model": "m", "max_model_len": 1, "logprobs_mode": "raw_logprobs"},
        "cache_config": {},
        "parallel_config": {},
        "scheduler_config": {"max_num_seqs": 1},
    }
    info = msgspec.convert({**required, **received}, server_info._Config)  # pyright: ignore[reportPrivateUsage]
    assert server_info._kv_tier(info.kv_transfer_config) == tier  # pyright: ignore[reportPrivateUsage]


class Unkeyed(SimEngine):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(version_spans=True, flush_while_paused=True, kv_tier="unkeyed")


@each_row("kv", ["recompute", "apart", "keep"])
async def test_a_tier_without_keys_is_refused_unless_kv_is_kept(kv: str) -> None:
    engine = Unkeyed()
    await engine.open()
    settings = config(straggler="in_place" if kv == "keep" else "abort", kv_after_refit=kv)
    if kv == "keep":
        await opening.check_engines([engine], settings)
    else:
        with pytest.raises(ConfigError, match=r"of all cache keys.*start it without"):
            await opening.check_engines([engine], settings)
    await engine.close()


async def test_opening_reports_the_tier(caplog: pytest.LogCaptureFixture) -> None:
    engines = [SimEngine(f"sim-{index}", SimConfig(tier=KvTier())) for index in range(4)]
    for engine in engines:
        await engine.open()
    await opening.check_engines(engines, config())
    assert "4 engines may keep KV through a flush (sim-0, sim-1, sim-2, …)" in caplog.text
    for engine in engines:
        await engine.close()


def test_every_load_of_weights_gets_a_cache_key_of_its_own() -> None:
    driver = Driver(config(straggler="abort"), engines=("a", "b"), stores_kv=True)
    driver.request_batch()
    found = {send.engine: send.cache_key for send in driver.sends.values()}
    assert found == {"a": "0-1", "b": "0-2"}
    driver.feed(ev.EngineLost(engine="b", cause="restarted"))
    driver.come_back("b")
    driver.feed(ev.EngineLost(engine="a", cause="restarted too"))
    driver.settle()
    assert {send.cache_key for send in driver.sends.values() if send.engine == "b"} == {"0-3"}


@each_row(
    ("settings", "key"),
    [
        ({"straggler": "in_place"}, "kept"),
        ({"straggler": "in_place", "kv_after_refit": "apart"}, "0-1"),
    ],
)
def test_kept_kv_is_shared_within_the_run_alone(settings: dict[str, Any], key: str) -> None:
    driver = Driver(config(**settings), engines=("a",), stores_kv=True)
    driver.request_batch()
    assert {send.cache_key for send in driver.sends.values()} == {key}


def test_without_a_tier_no_key_is_sent() -> None:
    driver = Driver(config(), engines=("a",))
    driver.request_batch()
    assert {send.cache_key for send in driver.sends.values()} == {None}


@each_row("joins", [False, True])
def test_no_request_waits_inside_through_a_refit(joins: bool) -> None:
    """It would keep its key, and the engine would find older keys under it."""
    driver = Driver(config(straggler="retract"), engines=("a",), stores_kv=not joins)
    driver.request_batch()
    if joins:
        driver.stores_kv = True
        driver.feed(ev.EngineJoined(info=driver.info("b")))
    driver.progress(driver.attempts()[0], 2)
    driver.feed(ev.UpdateRequested(version=1))
    assert set(driver.aborts) == set(driver.attempts())
    assert not driver.controls
    for key in driver.attempts():
        driver.interrupt(key)
    driver.settle()
    assert driver.state.weights.versions.trainer == 1
    assert driver.attempts()


@each_row("stores", [False, True])
@each_row("by_spans", [False, True])
def test_tokens_of_another_version_than_their_key_have_stale_keys(
    stores: bool, by_spans: bool
) -> None:
    settings = config(batch_groups=1, group_size=1, over_provision=1.0)
    driver = Driver(settings, engines=("a", "b"), stores_kv=stores)
    driver.request_batch()
    (key,) = driver.attempts()
    driver.feed(ev.UpdateRequested(version=1, external=True))
    driver.progress(key, 2, label=None if by_spans else 1)
    driver.finish(key, 1, spans=(VersionSpan(version=1, start=0, end=3),))
    driver.answer_refit()
    driver.settle()
    (rollout,) = driver.batches[0].rollouts
    assert rollout.versions.tolist() == [1, 1, 1]
    assert rollout.stale_keys is stores
