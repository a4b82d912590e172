"""Evaluations at any moment of a life, also during and right after updates."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import numpy as np

from aprilsched import Prompt, SamplingParams
from aprilsched.errors import ConfigError

if TYPE_CHECKING:
    from tests.campaign.life import Life

_MOST_AT_ONCE = 8


class Evaluations:
    """Starts evaluations, and checks what they return."""

    def __init__(self, life: Life) -> None:
        self._life = life

    async def run(self) -> None:
        """Evaluate now and then until the life ends."""
        draw = self._life.mix.draw(f"evaluations {self._life.number}")
        while not self._life.closing:
            await asyncio.sleep(draw.expovariate(1 / draw.choice([1.0, 5.0, 40.0])))
            self.start(draw)

    def start(self, draw: random.Random) -> None:
        """Start an evaluation now."""
        if len(self._life.helpers) < _MOST_AT_ONCE and not self._life.closing:
            self._life.help(self._evaluate(draw))

    async def _evaluate(self, draw: random.Random) -> None:
        life = self._life
        count, size = draw.choice([1, 2, 5]), draw.choice([1, 2])
        prompts = [
            Prompt(
                input_ids=np.asarray([5, place + 3], np.int32),
                sampling=SamplingParams(
                    max_new_tokens=1 + draw.randrange(0, 60), ignore_eos=True, sampling_seed=place
                ),
                key=f"evaluation {place}",
            )
            for place in range(count)
        ]
        after = None
        if life.mix.has("cancels") and draw.random() < 0.3:
            after = draw.choice([0.001, 0.5, 5.0]) * draw.random() + 1e-6
        first = life.scheduler.version
        try:
            batch = await life.calls.call(
                "evaluate",
                life.scheduler.evaluate(prompts, group_size=size),
                cancel_after=after,
            )
        except asyncio.CancelledError:
            if life.closing or after is None:
                raise
        except ConfigError as error:
            if "asleep" not in str(error) and not life.failed():
                life.complain(f"evaluate() raised {error!r}")
        except Exception as error:
            life.note(f"an evaluation ended with {error!r}")
        else:
            life.checks.evaluation(batch, count, between=(first, life.scheduler.version))
