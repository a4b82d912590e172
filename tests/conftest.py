"""Distributes the tests among processes, shows what each test costs (``--cpu-times``), and lets
Hypothesis take its time."""

# xdist has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from aprilsched.simulation.engine.clock import virtual_loop
from tests.support.loop import PatientLoop

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite("aprilsched.testing.contract", "aprilsched.testing.contract")

SERVERS = Path(__file__).parent / "sglang"
VLLM = Path(__file__).parent / "vllm"
UNIT = Path(__file__).parent / "unit"
LONG_SECONDS = 2 * 3600
LONG_NOTEBOOKS = (
    "03_long_tails.ipynb",
    "04_how_much_to_over_provision.ipynb",
    "05_staleness_and_bias.ipynb",
)
"""They take 60 s of CPU time; the others take 15 together."""
CPU = "cpu seconds"

# On a busy machine an example of a millisecond had taken longer than Hypothesis's 200 ms, and the
# making of examples more than a second.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests on servers first, and then those of the gateway: they mostly wait, and the other
    tests use that time.

    The files of :data:`UNIT` come last. They are short, so all processes end at about one time.
    """
    items.sort(key=lambda item: _place(item.path))
    for item in items:
        if item.path.name in LONG_NOTEBOOKS:
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))


def _place(path: Path) -> tuple[bool, ...]:
    """What the files of tests are ordered by."""
    return (
        not {SERVERS, VLLM} & set(path.parents),
        not path.name.startswith("test_gateway"),
        UNIT in path.parents,
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Run the tests of a file in one process, so that their fixtures are made once.

    The tests on real servers run in three processes, two of them for SGLang. Each has its own
    servers and boots them once.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _shared(nodeid.split("::", 1)[0])

    # Otherwise the files with many tests, which are the quick ones, would come first.
    config.option.loadscopereorder = False
    return Files(config, log)


@cache
def _shared(file: str) -> str:
    """A name that is equal for tests of one process: the file, or the servers that they use."""
    path = SERVERS.parents[1] / file
    if VLLM in path.parents:
        return "servers of vLLM"
    if SERVERS not in path.parents:
        return file
    return "two servers" if "_pair" in path.read_text(encoding="utf-8") else "one server"


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Use a loop whose timers do not run ahead of the test's work on a busy machine, or the virtual
    clock where the test or its file has the mark ``virtual_time``."""
    mark = item.get_closest_marker("virtual_time")
    virtual = mark is not None and mark.args != (False,)
    return {"virtual": virtual_loop} if virtual else {"patient": PatientLoop}


# --- what tests cost -----------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times",
        type=int,
        default=0,
        metavar="N",
        help="show the N tests that took the most CPU time, that of child processes included",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A plugin, because the hooks of a conftest do not see the notebooks.
    if config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes())


class CpuTimes:
    """Measures the CPU time of each test, with the fixtures that it is first or last to use."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[_begun] = _cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the time to the test's last report, which also comes from other processes."""
        report = yield
        if call.when == "teardown":
            report.user_properties.append((CPU, _cpu_seconds() - item.stash[_begun]))
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        reports = [report for found in terminalreporter.stats.values() for report in found]
        costs = {
            report.nodeid: seconds
            for report in reports
            for name, seconds in getattr(report, "user_properties", ())
            if name == CPU
        }
        most = terminalreporter.config.getoption("--cpu-times")
        terminalreporter.section(f"most CPU time, of {sum(costs.values()):.0f} s")
        for nodeid, seconds in sorted(costs.items(), key=lambda cost: -cost[1])[:most]:
            terminalreporter.write_line(f"{seconds:8.2f} s  {nodeid}")


_begun = pytest.StashKey[float]()


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its child processes, those that have ended and their
    children included. A test's servers run on after it, and are children of children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ended = sum(part.ru_utime + part.ru_stime for part in used)
    return ended + _live_children()


def _live_children() -> float:
    """CPU seconds of the processes below this one, and of those below them that have ended."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            used[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    below, found = {os.getpid()}, 0.0
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found += sum(used[pid] for pid in below)
    return found
