"""Tests what is refused without a server: addresses, keys, limits, versions, checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.failures import Answer, rejection
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.server import release
from aprilsched.kernel.engines.sglang import SGLangEngine, probe
from aprilsched.kernel.engines.sglang.http_engine import SGLangFleet
from aprilsched.kernel.engines.sglang.probe import SPANS_SINCE
from aprilsched.kernel.engines.sglang.wire import ModelInfo, OpenApi, ServerInfo, generate_body
from aprilsched.kernel.engines.stream import FOREIGN, version_number
from aprilsched.kernel.weights.disk import DiskPublisher
from aprilsched.types import SamplingParams
from tests.support.table import each_row


@each_row(
    "url",
    ["", "10.0.0.1:30000", "ftp://10.0.0.1", "http://", "http://h:99999", "http://h/?a=1", "x y"],
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="give one like http://"):
        SGLangFleet([url])


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="use api_key") as caught:
        SGLangFleet(["http://me:secret@10.0.0.1:30000"])
    assert "secret" not in str(caught.value)


def test_a_fleet_needs_servers_each_of_them_once() -> None:
    with pytest.raises(ConfigError, match="at least one URL"):
        SGLangFleet([])
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:80 is listed twice"):
        SGLangFleet(["http://10.0.0.1", "http://10.0.0.1:80/"])
    with pytest.raises(ConfigError, match="give a list"):
        SGLangFleet("http://10.0.0.1")
    fleet = SGLangFleet(["http://gate:80/a", "http://gate:80/b/", "http://[::1]:30000"])
    assert [engine.name for engine in fleet.engines] == ["gate:80/a", "gate:80/b", "[::1]:30000"]


@each_row("key", ["", "two words", "line\nbreak", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigError, match="no HTTP header can carry") as caught:
        SGLangEngine("http://10.0.0.1:30000", admin_key=key)
    assert not key or key not in str(caught.value)


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="control_timeout is 0"):
        HttpLimits(control_timeout=0)
    with pytest.raises(ConfigError, match="max_connections is -1"):
        HttpLimits(max_connections=-1)
    with pytest.raises(ConfigError, match="stream_interval is 0"):
        SGLangEngine("http://10.0.0.1:30000", stream_interval=0)


def test_the_release_of_any_version_string() -> None:
    assert release("0.5.21") == (0, 5, 21)
    assert release("v0.5.19.dev12+g1a2b3c") == SPANS_SINCE
    assert release("0.5.18.post1") < SPANS_SINCE
    assert release("0.6") > SPANS_SINCE
    assert release("") == release("unknown") == (0, 0, 0)


@each_row(
    ("version", "spans", "waiting"),
    [
        ("0.5.18", False, False),
        ("0.5.19", True, False),
        ("0.5.20", True, False),
        ("0.5.21", True, True),
        ("0.5.23", True, True),
    ],
)
def test_what_a_release_can_do(version: str, spans: bool, waiting: bool) -> None:
    model, server = ModelInfo(model_path="m", weight_version="0"), ServerInfo(version=version)
    can = probe._capabilities(model, server, OpenApi())  # pyright: ignore[reportPrivateUsage]
    assert can.version_spans is spans
    assert can.flush_while_paused is can.release_while_paused is waiting


def test_only_labels_that_we_wrote_are_versions() -> None:
    labels = {"7": 7, "00": 0, "default": 0, "": 0, None: 0, "-3": 0, "1.5": 0, "٣": 0}
    assert {label: version_number(label) for label in labels} == labels


def test_a_label_of_another_run_is_no_version_of_this_one() -> None:
    labels = {"7@a": 47, "7@b": 47, "7@c": FOREIGN, "7": 47, "7@": 47, "x@c": 40, "default": 40}
    assert {label: version_number(label, 40, ("a", "b")) for label in labels} == labels
    assert version_number("7@c") == 7, "an engine outside of a run reads all"


def test_a_request_carries_the_sampling_and_the_users_extras() -> None:
    sampling = SamplingParams(
        max_new_tokens=7, stop_token_ids=(1, 2), sampling_seed=3, extra={"regex": "a+"}
    )
    request = GenerationRequest(
        request_id="r", input_ids=np.array([5, 6], np.int32), sampling=sampling
    )
    body = generate_body(request, stream_interval=64)
    assert body["input_ids"] == [5, 6]
    assert (body["rid"], body["stream"], body["return_logprob"]) == ("r", True, True)
    params = body["sampling_params"]
    assert params["stop_token_ids"] == [1, 2]
    assert (params["sampling_seed"], params["regex"], params["stream_interval"]) == (3, "a+", 64)
    assert "stream_interval" not in generate_body(request, stream_interval=None)["sampling_params"]


def test_a_server_with_one_seed_gets_another_one_for_each_request() -> None:
    """With --enable-deterministic-inference SGLang takes 42 for a request without a seed."""

    def seed(request_id: str, given: int | None = None, *, one_seed: bool = True) -> int | None:
        request = GenerationRequest(
            request_id=request_id,
            input_ids=np.array([5], np.int32),
            sampling=SamplingParams(sampling_seed=given),
        )
        body = generate_body(request, stream_interval=None, one_seed=one_seed)
        return body["sampling_params"].get("sampling_seed")

    assert seed("a") == seed("a") != seed("b")
    assert seed("a", 3) == 3
    assert seed("a", one_seed=False) is None


@each_row(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"success": false, "message": "no such file"}', "no such file"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"plain words", "plain words"),
        (b"\xff" * 9999, "\N{REPLACEMENT CHARACTER}"),
        (b"", "no message"),
    ],
)
def test_a_rejection_has_the_servers_words(body: bytes, message: str) -> None:
    error = rejection("engine:1", "POST /x", Answer(400, body))
    assert message in str(error)
    assert error.status == 400
    assert len(str(error)) < 400


async def test_only_a_checkpoint_is_published(tmp_path: Path) -> None:
    publisher = DiskPublisher(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no checkpoint; it needs a config\.json"):
        await publisher.prepare(1)
    with pytest.raises(ConfigError, match="keep is 0"):
        DiskPublisher(tmp_path, keep=0)
    empty = DiskPublisher(tmp_path, lambda path: None)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        await empty.prepare(1)
    assert _names(tmp_path) == []
    with pytest.raises(ConfigError, match="version-00000002 holds no checkpoint"):
        await empty.publish(2, [])


async def test_a_version_appears_whole_and_keeps_only_the_newest(tmp_path: Path) -> None:
    """The newest by age, because a restored trainer counts again from a lower version."""
    seen: list[list[str]] = []

    async def save(path: Path) -> None:
        (path / "config.json").write_text("{}")
        seen.append([name for name in _names(tmp_path) if name.startswith("version-")])
        await asyncio.sleep(0)
        (path / "model.safetensors").write_text("weights")

    publisher = DiskPublisher(tmp_path / ".", save, keep=2)
    for version in (8, 9, 3, 3):
        await publisher.prepare(version)
        assert await publisher.publish(version, []) == {}
    assert seen[2] == ["version-00000008", "version-00000009"]
    assert _names(tmp_path) == ["version-00000003", "version-00000009"]


async def test_a_failed_or_cancelled_save_leaves_nothing(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def hang(path: Path) -> None:
        (path / "config.json").write_text("{}")
        started.set()
        await asyncio.sleep(60)

    def fail(path: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await DiskPublisher(tmp_path, fail).prepare(1)
    task = asyncio.create_task(DiskPublisher(tmp_path, hang).prepare(1))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _names(tmp_path) == []


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())
