"""Reference tables as Markdown: the settings, the figures of a run, its event log.

Each is made from the classes themselves, their field names, types, defaults and docstrings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from msgspec import Struct

from aprildocs.documented import cell, field_texts, type_text
from aprilsched.cli.runs.settings_tables import POLICIES
from aprilsched.config import SchedulerConfig
from aprilsched.kernel.core.messages.events import LogprobComparison, LogprobDifferences
from aprilsched.kernel.core.messages.facts import DeliveredRollout, DroppedRollout, RestoredLengths
from aprilsched.observe.figures import figures, run_figures
from aprilsched.observe.figures.engine_time import BUSY, PARTS
from aprilsched.observe.figures.table import FIGURES
from aprilsched.observe.log.line_format import KINDS
from aprilsched.observe.sampling.sample_log import FIELDS as SAMPLED
from aprilsched.types import SamplingParams

__all__ = [
    "fact_lines",
    "fact_parts",
    "metrics",
    "sampled_figures",
    "sampling_settings",
    "setting_parts",
    "setting_policies",
    "settings",
    "summary_figures",
    "tracked_figures",
    "usage_parts",
]


_PARTS = (
    DeliveredRollout,
    DroppedRollout,
    LogprobComparison,
    LogprobDifferences,
    RestoredLengths,
)
_OF_TOKENS = frozenset({"asked", "key", "input_ids", "token_ids", "logprobs"})
"""Fields that are written with ``--log-tokens`` only."""


def settings() -> str:
    """Every field of the scheduler's configuration."""
    return _settings(SchedulerConfig)


def setting_parts() -> str:
    """Every field of the configuration's parts, but for the sampling parameters."""
    found: list[str] = []
    for part in fields(SchedulerConfig):
        if part.default_factory is not MISSING and part.default_factory is not SamplingParams:
            kind: Any = part.default_factory
            found += [f"### `{part.name}`: {kind.__name__}", _doc(kind), _settings(kind)]
    return "\n\n".join(found)


def setting_policies() -> str:
    """Every field of the policies that have any."""
    found: list[str] = []
    for name, kinds in POLICIES.items():
        for rule, kind in kinds.items():
            short = f' (`"{rule}"`)' if rule else ""
            found += [f"### `{name}`: {kind.__name__}{short}", _doc(kind)]
            found += [_settings(kind)] if fields(kind) else []
    return "\n\n".join(found)


def sampling_settings() -> str:
    """Every field of the sampling parameters."""
    return _settings(SamplingParams)


def _settings(kind: type[Any]) -> str:
    texts = field_texts(kind)
    rows = ((f"`{f.name}`", f"`{_default(f)}`", cell(texts.get(f.name, ""))) for f in fields(kind))
    return _table(("setting", "default", "what it does"), rows)


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        value: Any = field.default
        return f'"{value}"' if isinstance(value, str) else repr(value)
    if field.default_factory is MISSING:
        return "required"
    made = field.default_factory()
    return repr(made) if not is_dataclass(made) else f"{type(made).__name__}()"


def summary_figures() -> str:
    """summary.json, one table for each object in it."""
    return "\n\n".join(_figures(run_figures.RunSummary, "", set()))


def _figures(kind: type[Any], path: str, seen: set[type[Any]]) -> list[str]:
    """The table of one object, then those of the objects inside it."""
    seen.add(kind)
    known = {name: figure.help for name, figure in figures.figures_in(kind).items()}
    texts, hints = field_texts(kind) | known, get_type_hints(kind)
    rows = [
        (
            f"`{f.name}`",
            cell(_written_type(type_text(kind, f.name))),
            cell(texts.get(f.name, "")) or " ".join(map(_doc, _classes(hints[f.name]))),
        )
        for f in fields(kind)
    ]
    heading = f"### `{path}`" if path else "### The whole"
    inner = (
        _figures(nested, f"{path}.{f.name}".lstrip("."), seen)
        for f in fields(kind)
        for nested in _classes(hints[f.name])
        if nested not in seen
    )
    own = [heading, _doc(kind), _table(("field", "type", "meaning"), rows)]
    return [*(part for part in own if part), *(part for parts in inner for part in parts)]


def _classes(hint: Any) -> list[type[Any]]:
    if isinstance(hint, type) and is_dataclass(hint):
        return [hint]
    return [found for argument in get_args(hint) for found in _classes(argument)]


def _written_type(written: str) -> str:
    """As JSON has it."""
    words = {"None": "null", "str": "string", "list": "list", "dict": "object"}
    plain = re.sub(r"\b\w+Figures\b|\bSteadyState\b", "object", written)
    plain = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " or "), plain)
    plain = re.sub(r"\bBiasReference\b|\bMeanReference\b", "string", plain)
    return re.sub(r"\b\w+\b", lambda word: words.get(word.group(), word.group()), plain)


def usage_parts() -> str:
    """The parts of an engine's wall time."""
    rows = (
        (f"`{part}`", "busy" if part in BUSY else "not busy", cell(meaning))
        for part, meaning in PARTS.items()
    )
    return _table(("part", "", "what it is"), rows)


def metrics() -> str:
    """The metrics that Prometheus reads."""
    rows = (
        (
            f"`{figure.metric}`",
            figure.kind,
            ", ".join(f"`{label}`" for label in figure.labels),
            cell(figure.help),
        )
        for figure in FIGURES.values()
        if figure.exposed
    )
    return _table(("metric", "kind", "labels", "meaning"), rows)


def tracked_figures() -> str:
    """What a tracker is given of each batch."""
    tracked = (each for each in FIGURES.values() if each.tracked and each.of is not None)
    rows = ((f"`{figure.name}`", cell(figure.help)) for figure in tracked)
    return _table(("figure", "meaning"), rows)


def sampled_figures() -> str:
    """The lines of samples.jsonl, by their source."""
    rows = (
        (f"`{source}`", f"`{name}`", cell(meaning))
        for source, names in SAMPLED.items()
        for name, meaning in names.items()
    )
    return _table(("source", "field", "meaning"), rows)


def fact_lines() -> str:
    """The facts: what is in events.jsonl."""
    return _table(("fact", "fields", "meaning"), (_line(kind) for kind in KINDS.values()))


def _line(kind: type[Struct]) -> tuple[str, str, str]:
    names = ", ".join(
        f"*{name}*" if name in _OF_TOKENS else f"`{name}`" for name in kind.__struct_fields__
    )
    return (f"`{kind.__name__}`", names or "none", _doc(kind))


def fact_parts() -> str:
    """The objects inside of facts."""
    return _table(("object", "fields", "meaning"), map(_line, _PARTS))


def _doc(kind: type[Any]) -> str:
    """A docstring's sentences. Dataclasses without one have a made-up signature there."""
    doc = inspect.cleandoc(kind.__doc__ or "")
    if doc.startswith(f"{kind.__name__}("):
        return ""
    prose = re.split(r"^(?:Attributes|Args|Raises):", doc, maxsplit=1, flags=re.MULTILINE)[0]
    return cell(prose)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
