"""Tests updates that fail in the trainer: a real server continues under the old version.

In each test the server is in the middle of long responses, and is paused for the refit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from aprilsched import DiskPublisher
from aprilsched.config import Timeouts
from aprilsched.errors import RefitError
from aprilsched.kernel.core.messages.commands import Command, Pause
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.testing.contract import until
from tests.sglang.recorded import Recorder, scheduled
from tests.sglang.server import CpuServer


class Raises:
    """A publisher whose file system fails."""

    async def prepare(self, version: int) -> None:
        pass

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        raise OSError("no space left on the device")


class Hangs(Raises):
    """A publisher that waits forever."""

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        await asyncio.Event().wait()
        return {}


class CancelsInThePause(Recorder):
    """A listener that cancels the trainer's call as soon as the pause is commanded."""

    task: asyncio.Task[object] | None = None

    def on_command(self, command: Command, now: float) -> None:
        super().on_command(command, now)
        if isinstance(command, Pause) and self.task is not None:
            self.task.cancel()


@pytest.mark.parametrize(
    "failing",
    ["raises", *(pytest.param(how, marks=pytest.mark.long) for how in ("hangs", "is cancelled"))],
)
async def test_the_server_goes_on_under_the_old_version_and_the_next_update_works(
    clean_server: CpuServer,
    models: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
    failing: str,
):
    recorder = CancelsInThePause()
    limits = Timeouts(refit_s=2.0 if failing == "hangs" else 60.0)
    scheduler = scheduled([clean_server.url], recorder, pace="asynchronous", timeouts=limits)
    async with scheduler as rollouts:
        await rollouts.next_batch()
        if failing == "is cancelled":
            recorder.task = asyncio.create_task(rollouts.update_weights(DiskPublisher(models[1])))
            with pytest.raises(asyncio.CancelledError):
                await recorder.task
            await until(lambda: rollouts.state.weights.update is None)
            recorder.task = None
            cause = "the call was cancelled before any weights were loaded"
        else:
            cause = "no space left" if failing == "raises" else "did not finish within 2 s"
            with pytest.raises(RefitError, match=cause):
                await rollouts.update_weights(Raises() if failing == "raises" else Hangs())
        assert "version 1 is not in use, the fleet continues under 0: " in caplog.text
        assert cause in caplog.text
        for _ in range(2):
            batch = await rollouts.next_batch()
            assert {int(v) for r in batch.rollouts for v in r.versions} == {0}
        await rollouts.update_weights(DiskPublisher(models[1]))
        assert rollouts.state.weights.versions.engines.popitem()[1] == 1
    engine = SGLangEngine(clean_server.url)
    await engine.open()
    assert await engine.is_paused() is False
    assert await engine.version() == 1
    await engine.close()
