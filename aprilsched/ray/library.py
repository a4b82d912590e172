"""Ray itself, and what all actors of this package have. Ray has no complete types."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from aprilsched.errors import ConfigError
from aprilsched.extras import extra
from aprilsched.loop_thread import LoopThread
from aprilsched.remote import Caller, unsendable

with extra("ray"):
    import ray as _ray
    from ray import exceptions as _exceptions

ray: Any = _ray
exceptions: Any = _exceptions


def named(name: str, namespace: str | None) -> Any:
    """The actor of this name; None if there is none."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


class LoopActor:
    """An actor that makes one object and passes calls on to it.

    The object's methods run on an event loop in a thread of its own. So code of the user that
    blocks this loop does not keep the actor from answering Ray.

    Args:
        make: makes the object.
        arguments: arguments of `make`.
    """

    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        self._thread = LoopThread("aprilsched-loop")
        self._made = make(*arguments)

    async def do(self, name: str, *arguments: object, **named: object) -> Any:
        """Call the method of this name, which is a coroutine function."""
        work = getattr(self._made, name)(*arguments, **named)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._thread.loop))


class ActorAway(Exception):
    """The actor has died since the call was made, or is not there."""


class ActorCaller(Caller):
    """The side that calls an actor with something that answers
    (:class:`~aprilsched.remote.Answering`)."""

    def __init__(self) -> None:
        super().__init__()
        self._actor: Any = None
        self._numbers = itertools.count()

    async def _asked(
        self, number: Hashable, name: str, arguments: Sequence[object], named: Mapping[str, object]
    ) -> Any:
        """The :class:`~aprilsched.remote.Answer` to a call, which is made once.

        Raises:
            ActorAway: if the actor has died.
            ConfigError: if an argument or the answer cannot be sent.
        """
        try:
            reference = self._actor.do.remote("answer", number, name, arguments, named)
        except TypeError as error:
            raise unsendable(f"an argument of {name}()", error) from error
        future = asyncio.ensure_future(_awaited(reference))
        try:
            return await self._answer(number, future)
        except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
            raise ActorAway(str(error).partition("\n")[0]) from error
        except exceptions.RayTaskError as error:
            raise ConfigError(
                f"what the scheduler returned cannot be sent to the trainer ({error.cause}); give "
                "prompts only metadata that pickle can take."
            ) from error

    async def _withdraw(self, number: Hashable) -> None:
        actor = self._actor
        if actor is not None:  # Otherwise it is being closed, which ends every call.
            with suppress(exceptions.RayError):
                await actor.do.remote("withdraw", number)


async def _awaited(reference: Any) -> Any:
    return await reference
