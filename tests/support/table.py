"""Run a test for every row of a table as one case, whose failure names each row that fails."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import pytest

ROW_NAME_LENGTH = 120
"""Characters of a row's values in a failure."""

Test = TypeVar("Test", bound=Callable[..., Any])


def each_row(
    names: str | Sequence[str],
    rows: Iterable[Any],
    *,
    ids: Iterable[str] | Callable[[Any], str] | None = None,
) -> Callable[[Test], Test]:
    """Return a decorator with the arguments of ``pytest.mark.parametrize`` that makes one case.

    All rows run, and those that fail are raised together. Each row has an empty folder as its
    ``tmp_path``, and leaves nothing in ``monkeypatch``, ``caplog`` and ``capsys``.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = _named_rows(keys, list(rows), ids)

    def decorate(test: Test) -> Test:
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run_async(**fixtures: Any) -> None:
                failures: list[Exception] = []
                for number, (name, row) in enumerate(table):
                    with _row(name, failures), ExitStack() as row_fixtures:
                        await test(**row_fixtures.enter_context(_fresh(fixtures, number)), **row)
                _raise_all(failures, len(table))

            run = run_async
        else:

            @functools.wraps(test)
            def run_sync(**fixtures: Any) -> None:
                failures: list[Exception] = []
                for number, (name, row) in enumerate(table):
                    with _row(name, failures), ExitStack() as row_fixtures:
                        test(**row_fixtures.enter_context(_fresh(fixtures, number)), **row)
                _raise_all(failures, len(table))

            run = run_sync
        signature = inspect.signature(test)
        left = [value for key, value in signature.parameters.items() if key not in keys]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate


def _named_rows(
    keys: Sequence[str], rows: list[Any], ids: Iterable[str] | Callable[[Any], str] | None
) -> list[tuple[str, dict[str, Any]]]:
    """The name and the arguments of each row, which may be a ``pytest.param``."""
    given = [None] * len(rows) if ids is None or callable(ids) else list(ids)
    table: list[tuple[str, dict[str, Any]]] = []
    for row, id in zip(rows, given, strict=True):
        name = id
        if hasattr(row, "values") and hasattr(row, "marks"):
            name, values = row.id or id, row.values
        else:
            values = (row,) if len(keys) == 1 else tuple(row)
        arguments = dict(zip(keys, values, strict=True))
        if name is None and callable(ids):
            name = "-".join(str(ids(value)) for value in values)
        table.append((name or repr(arguments)[:ROW_NAME_LENGTH], arguments))
    assert table, "A table must have rows."
    return table


@contextmanager
def _row(name: str, failures: list[Exception]) -> Generator[None]:
    """Keep the failure of a row, so that the next rows run."""
    try:
        yield
    except (Exception, pytest.fail.Exception, asyncio.CancelledError) as error:
        failure = AssertionError(f"row {name}: {error}")
        failure.__cause__ = error
        failures.append(failure)


@contextmanager
def _fresh(fixtures: dict[str, Any], number: int) -> Generator[dict[str, Any]]:
    """The fixtures for a row, as they would be if the row were a case."""
    fresh = dict(fixtures)
    if "tmp_path" in fixtures:
        fresh["tmp_path"] = fixtures["tmp_path"] / str(number)
        fresh["tmp_path"].mkdir()
    try:
        yield fresh
    finally:
        if "monkeypatch" in fixtures:
            fixtures["monkeypatch"].undo()
        if "caplog" in fixtures:
            fixtures["caplog"].clear()
        if "capsys" in fixtures:
            fixtures["capsys"].readouterr()


def _raise_all(failures: list[Exception], rows: int) -> None:
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {rows} rows", failures)
