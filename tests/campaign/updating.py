"""The trainer's work between batches: updates, sleep and checkpoints, cancelled at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aprilsched.errors import CallbackError, ConfigError, RefitError, StoreError

if TYPE_CHECKING:
    from tests.campaign.life import Life
    from tests.campaign.trainer import Trainer

_MOST_TRIES = 80
_TRIES_THAT_MAY_FAIL = 8
"""Updates after which the publisher is no longer bad, and no call is cancelled."""
_TAGS = [("kv_cache", "weights"), ("kv_cache",), ("weights",), ("cuda_graph",)]


class Updates:
    """Publishes versions, lets engines sleep, and writes checkpoints."""

    def __init__(self, life: Life, trainer: Trainer) -> None:
        self._life = life
        self._trainer = trainer
        self.running = 0
        """Updates and sleeps that have not returned."""

    @contextmanager
    def _counted(self) -> Generator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _cancel_after(self) -> float | None:
        draw = self._life.draw
        if self._life.mix.has("cancels") and draw.random() < 0.25:
            return draw.choice([0.0001, 0.01, 0.5, 5.0]) * draw.random() + 1e-6
        return None

    async def update(self, *, whole: bool = False) -> str | None:
        """Publish the next version; after an error or a cancellation, perhaps again.

        Returns:
            Why the run ended, if it did.
        """
        life, trainer, draw = self._life, self._trainer, self._life.draw
        for tries in range(_MOST_TRIES):
            version = life.scheduler.version
            new: int | None = None
            if whole and draw.random() < 0.5 and not life.scheduler.state.fleet.control.engines:
                new = version
            elif draw.random() < 0.1:
                new = version + draw.randrange(1, 4)
            may_fail = tries < _TRIES_THAT_MAY_FAIL
            life.publisher.fails = may_fail
            batches = trainer.unacknowledged()
            trainer.may_acknowledge.update(batches, (part.index for part in trainer.parts))
            after = self._cancel_after() if may_fail else None
            try:
                with self._counted():
                    await life.calls.call(
                        "update_weights",
                        life.scheduler.update_weights(life.publisher, version=new),
                        cancel_after=after,
                    )
            except asyncio.CancelledError:
                if life.closing or after is None:
                    raise
                # Its effect shows later; it may acknowledge earlier batches.
                trainer.acknowledged(batches)
                if draw.random() < 0.5:
                    return None
            except Exception as error:
                if life.failed():
                    return f"{type(error).__name__}: {error}"
                newer = isinstance(error, ConfigError) and "newer" in str(error)
                expected = isinstance(error, (RefitError, CallbackError))
                if not (newer or expected or life.calls.comes_from_caller(error)):
                    life.complain(f"update_weights() raised {error!r}")
                await asyncio.sleep(draw.choice([0.1, 1.0, 10.0]))
            else:
                trainer.acknowledged(batches)
                trainer.since_update = 0
                return None
        life.complain(f"{_MOST_TRIES} updates in a row did not reach an engine")
        return "refused"

    async def sleep(self) -> str | None:
        """Let the engines sleep, mostly with an update; return why the run ended, or None."""
        life = self._life
        tags = life.draw.choice(_TAGS)
        after = self._cancel_after()
        try:
            with self._counted():
                await life.calls.call("asleep", self._asleep(tags), cancel_after=after)
        except asyncio.CancelledError:
            if life.closing:
                raise
        except Exception as error:
            if life.failed():
                return f"{type(error).__name__}: {error}"
            if not isinstance(error, RefitError):
                life.complain(f"asleep() raised {error!r}")
        return None

    async def _asleep(self, tags: tuple[str, ...]) -> None:
        life, trainer, draw = self._life, self._trainer, self._life.draw
        async with life.scheduler.asleep(tags=tags):
            await asyncio.sleep(draw.choice([0.0, 0.5, 30.0]))
            if draw.random() >= 0.7 or life.mix.has("adapters"):
                return
            batches = trainer.unacknowledged()
            trainer.may_acknowledge.update(batches)
            try:
                await life.scheduler.update_weights(life.publisher)
            except asyncio.CancelledError:
                trainer.acknowledged(batches)  # perhaps
                raise
            except RefitError as error:
                life.note(f"update_weights() raised {error!r}")
            except Exception as error:
                if not life.calls.comes_from_caller(error):
                    raise
            else:
                trainer.acknowledged(batches)
                trainer.since_update = 0

    async def checkpoint(self) -> None:
        """Write a checkpoint, also into a folder that does not exist."""
        life, trainer, trial = self._life, self._trainer, self._life.trial
        fails = life.draw.random() < 0.2
        folder = trial.folder / ("nowhere" if fails else ".")
        path = folder / f"checkpoint-{len(trial.checkpoints)}"
        acknowledge = life.draw.random() < 0.7 or life.store is None
        batches = trainer.unacknowledged() if acknowledge else []
        records = trial.records.copy()
        may = set(trainer.may_acknowledge)
        trainer.may_acknowledge.update(batches)
        for index in batches:
            records.batches[index].acknowledged = True
        try:
            await life.calls.call(
                "checkpoint",
                life.scheduler.checkpoint(path, acknowledge=acknowledge),
                cancel_after=self._cancel_after(),
            )
        except asyncio.CancelledError:
            if life.closing:
                raise
            trainer.acknowledged(batches)  # perhaps
        except StoreError as error:
            if not fails:
                life.complain(f"checkpoint() raised {error!r}")
            trainer.may_acknowledge = may
        except Exception as error:
            if not life.failed():
                life.complain(f"checkpoint() raised {error!r}")
        else:
            if fails:
                life.complain("checkpoint() into a folder that does not exist raised nothing")
            trainer.acknowledged(batches)
            for batch in records.batches.values():
                batch.secured = True
            trial.checkpoints.append((path, records))
