"""The table of features by engine and adapter, from the marks of the tests that show each.

A test function has ``@pytest.mark.shows("retract", engine="vLLM", adapter="verl")`` for what it
shows, and ``@pytest.mark.lacks("LoRA adapters", adapter="verl", why="...")`` for what it shows to
be refused or not to work. Several features, or a tuple of adapters, may be in one mark. The marks
are read from the files, so no trainer must be installed, and a value that no column or row has is
an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ADAPTERS", "ENGINES", "FEATURES", "Shown", "shown", "shown_in"]

ROOT = Path(__file__).parents[3]

FEATURES: tuple[str, ...] = (
    "abort",
    "retract",
    "in_place",
    "rolling refits",
    "weights from disk",
    "weights by broadcast",
    "vLLM's transfer",
    "sparse transfer",
    "deltas on disk",
    "weights that the trainer moves",
    "LoRA adapters",
    "speculation",
    "draft refits",
    "data-parallel ranks",
    "sliding windows",
    "Mamba layers",
    "linear attention",
    "prefill and decode apart",
    "KV stores outside",
    "sleep",
    "lost engines",
    "single samples",
    "sessions and agents",
    "gateway",
    "routed experts",
    "images",
    "checkpoints with partials",
)
"""The rows, in their order."""
ENGINES = {"SGLang": "S", "vLLM": "V", "embedded": "E"}
"""The kinds of engines, and their letters in the cells of adapters."""
ADAPTERS: tuple[str, ...] = (
    "TRL",
    "verl",
    "slime",
    "miles",
    "AReaL",
    "OpenRLHF",
    "SkyRL",
    "TorchRL",
    "own loop",
)

_MARKS = {"pytest.mark.shows": False, "pytest.mark.lacks": True}
"""Whether a mark is about something that does not work."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What one test shows of one feature.

    Attributes:
        feature: the row.
        engine: the kind of engine that runs; empty if a missing feature needs none.
        adapter: the adapter that runs; empty for the scheduler alone.
        why: why the feature is refused or does not work; empty if it works.
        path: the file, from the root of the repository.
        test: the name of the test.
    """

    feature: str
    engine: str
    adapter: str
    why: str
    path: str
    test: str


def shown_in(source: str, path: str) -> Iterator[Shown]:
    """Yield what the marks in a test file have.

    Raises:
        ValueError: if a mark names an unknown feature, engine or adapter, has no engine, or
            is about a missing feature without a reason.
    """
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call):
                    name = ast.unparse(decorator.func)
                    if name in _MARKS:
                        yield from _marked(decorator, _MARKS[name], path, function.name)


def _marked(mark: ast.Call, is_missing: bool, path: str, test: str) -> Iterator[Shown]:
    where = f"{path}:{mark.lineno}"
    features = [ast.literal_eval(each) for each in mark.args]
    keys: dict[str, Any] = {str(k.arg): ast.literal_eval(k.value) for k in mark.keywords}
    engines, adapters = _several(keys.pop("engine", "")), _several(keys.pop("adapter", ""))
    why = keys.pop("why", "")
    if keys or bool(why) != is_missing or not features or not test.startswith("test_"):
        raise ValueError(
            f"{where}: a mark of a test must have features and an engine, or `why` one is missing."
        )
    for what, found, known in (
        ("feature", features, FEATURES),
        ("engine", engines, ENGINES if not is_missing else ("", *ENGINES)),
        ("adapter", adapters, ("", *ADAPTERS)),
    ):
        for each in found:
            if each not in known:
                raise ValueError(f"{where}: {what} must be one of {list(known)}, got {each!r}.")
    for feature in features:
        for engine in engines:
            for adapter in adapters:
                yield Shown(
                    feature=feature, engine=engine, adapter=adapter, why=why, path=path, test=test
                )


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (value,)


def shown() -> str:
    """Return the table, and below it the tests of each feature."""
    found = [
        each
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for each in shown_in(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]
    columns = [*((engine, "") for engine in ("SGLang", "vLLM")), *(("", a) for a in ADAPTERS)]
    header = ["", *(engine or adapter for engine, adapter in columns)]
    table = [_row(header), _row(["---"] * len(header))]
    lists: list[str] = []
    for feature in FEATURES:
        own = [each for each in found if each.feature == feature]
        if not own:
            raise ValueError(f"No test shows {feature!r}; mark one, or remove the feature.")
        anchor = re.sub(r"[^\w -]", "", feature.lower()).replace(" ", "-")
        cells = (_cell(own, engine, adapter, anchor) for engine, adapter in columns)
        table.append(_row([feature, *cells]))
        lists += [f"### {feature}", "", *_list(own), ""]
    return "\n".join([*table, "", "## The tests", "", *lists]).rstrip()


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(own: list[Shown], engine: str, adapter: str, anchor: str) -> str:
    """Return the numbers of tests, or that the feature is missing, with a link to the list."""
    here = [each for each in own if each.adapter == adapter]
    if engine:
        here = [each for each in here if each.engine in (engine, "")]
    parts: list[str] = []
    for each in ENGINES:
        count = sum(one.engine == each and not one.why for one in here)
        if count:
            parts.append(str(count) if engine else f"{count} {ENGINES[each]}")
    missing = [each for each in here if each.why]
    if missing:
        letters = sorted({ENGINES.get(each.engine, "") for each in missing})
        on = "" if engine or "" in letters else f" {' '.join(letters)}"
        parts.append(f"no{on}")
    return f"[{', '.join(parts)}](#{anchor})" if parts else "—"


def _list(own: list[Shown]) -> Iterator[str]:
    """Yield a line for the tests of a file that show the feature for the same engines."""
    order = ["", *ADAPTERS], ["", *ENGINES]
    own = sorted(
        own,
        key=lambda each: (
            bool(each.why),
            order[0].index(each.adapter),
            order[1].index(each.engine),
        ),
    )
    whose: dict[tuple[str, str, str], list[str]] = {}
    for each in own:
        who = " on ".join(part for part in (each.adapter, each.engine) if part)
        whose.setdefault((each.path, each.test, each.why), []).append(who)
    tests: dict[tuple[str, str, str], list[str]] = {}
    for (path, test, why), who in whose.items():
        tests.setdefault((", ".join(who), path, why), []).append(f"`{test}`")
    for (who, path, why), names in tests.items():
        reason = f" no. {why}" if why else ""
        yield f"- {who}:{reason} [{path}](../{path}): {', '.join(names)}"
