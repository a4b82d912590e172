"""Faults of the simulated server, as objects that a test gives to a :class:`FaultyServer`."""

from tests.support.faults.corrupting import (
    few_logprobs,
    more_tokens,
    no_logprobs,
    other_ids,
    out_of_order,
    strange_logprob,
    twice,
    twice_at_the_finish,
)
from tests.support.faults.kinds import (
    KINDS,
    Answer,
    Corrupt,
    Cut,
    Delay,
    Fault,
    Garbage,
    Hang,
    LoseAnswer,
    Restart,
    failed_update,
)
from tests.support.faults.routes import ABORT, ALL, CONTROL, GENERATE, INFO, STEERING, UPDATES
from tests.support.faults.server import FaultyServer
from tests.support.faults.triggers import Fired

__all__ = [
    "ABORT",
    "ALL",
    "CONTROL",
    "GENERATE",
    "INFO",
    "KINDS",
    "STEERING",
    "UPDATES",
    "Answer",
    "Corrupt",
    "Cut",
    "Delay",
    "Fault",
    "FaultyServer",
    "Fired",
    "Garbage",
    "Hang",
    "LoseAnswer",
    "Restart",
    "failed_update",
    "few_logprobs",
    "more_tokens",
    "no_logprobs",
    "other_ids",
    "out_of_order",
    "strange_logprob",
    "twice",
    "twice_at_the_finish",
]
