"""What the servers of one fleet must have in common, when it opens and when one joins later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aprilsched.engines.sglang.engine import SGLangEngine
from aprilsched.engines.sglang.probe import ServerFacts
from aprilsched.errors import ConfigError

__all__ = ["check_fleet", "check_joiner"]

Trait = tuple[str, Callable[[ServerFacts], Any], str]

_ONE_MODEL: Sequence[Trait] = (
    ("model", lambda facts: facts.model_path, "serve one model in the whole fleet"),
    ("vocabulary size", lambda facts: facts.vocab_size, "serve one model in the whole fleet"),
)
_ONE_VERSION: Trait = (
    "weight version",
    lambda facts: facts.label,
    "load the same weights everywhere, under the same weight_version, or restart the servers",
)


def check_fleet(engines: Sequence[SGLangEngine], model_path: str | None) -> None:
    """Refuse open engines that differ in model or weights, or serve another than `model_path`.

    Raises:
        ConfigError: naming two that differ, and what to change.
    """
    first, *others = engines
    if model_path is not None and first.facts.model_path != model_path:
        raise ConfigError(
            f"{first.name} serves {first.facts.model_path!r} and not {model_path!r}; "
            "start it with that model or change model_path."
        )
    for other in others:
        _agree(first, other, (*_ONE_MODEL, _ONE_VERSION))


def check_joiner(first: SGLangEngine, joiner: SGLangEngine) -> None:
    """Refuse an open engine of another model; its weights may be of any version.

    Raises:
        ConfigError: naming both, and what to change.
    """
    _agree(first, joiner, _ONE_MODEL)


def _agree(first: SGLangEngine, other: SGLangEngine, traits: Sequence[Trait]) -> None:
    for what, of, remedy in traits:
        ours, theirs = of(first.facts), of(other.facts)
        if ours != theirs and ours is not None and theirs is not None:
            raise ConfigError(
                f"{first.name} and {other.name} disagree on the {what} ({ours!r} and "
                f"{theirs!r}); {remedy}."
            )
