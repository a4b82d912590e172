"""Tests which module may import which, by the import statements: the arrows of the architecture.

types, errors <- core <- driver <- coordinator -> engines, weights, store; telemetry listens;
analysis reads files only; runs put the parts together, and the command line calls runs.
The table below has the rules. The checker is small and is tested itself.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.table import each_row

PACKAGE = Path(__file__).resolve().parents[2] / "aprilsched"

DEPENDENCIES = frozenset({"aiohttp", "asyncio_throttle", "msgspec", "numpy", "tenacity", "yarl"})
"""What the base install brings, for any part that is not pure."""
CLI = DEPENDENCIES | {"docstring_parser", "rich", "tomli_w"}
"""What the extra ``cli`` brings, for the parts that only the command line uses."""
NUMPY = frozenset({"numpy"})
PLOTS = frozenset({"matplotlib", "plotly", "polars"})
# fmt: off
LAZY = PLOTS | frozenset({
    "datasets", "jinja2", "looptime", "omegaconf", "openrlhf",
    "prometheus_client", "pynvml", "pytest", "ray", "rich", "safetensors", "sglang", "skyrl",
    "tensorboard", "tensordict", "tokenizers", "tomli_w", "torch", "torchrl", "trackio",
    "transfer_queue", "transformers", "trl", "verl", "vllm", "wandb",
})
# fmt: on
"""Packages that are optional or slow to import, so they may be imported only inside functions or
for the type checker."""

# fmt: off
EFFECTS = frozenset({
    "asyncio", "concurrent", "contextvars", "datetime", "http", "io", "logging", "multiprocessing",
    "os", "pathlib", "queue", "random", "sched", "secrets", "select", "selectors", "shutil",
    "signal", "socket", "sqlite3", "subprocess", "tempfile", "threading", "time", "urllib", "uuid",
    "warnings",
})
# fmt: on
"""Modules of the standard library with effects: clocks, random numbers, threads, I/O."""

BASE_INSTALL = (
    "aprilsched", "aprilsched.fronts.blocking", "aprilsched.__main__", "aprilsched.kernel.shell",
    "aprilsched.trainers.corrections", "aprilsched.kernel.engines.sglang", "aprilsched.planning.presets",
    "aprilsched.fronts.process", "aprilsched.simulation", "aprilsched.testing",
    "aprilsched.testing.contract",
)  # fmt: skip
"""Modules that work without an extra."""

EFFECT_CALLS = frozenset({"input", "open", "print"})


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a module may import. A name allows itself and all modules below it."""

    ours: tuple[str, ...] = ()
    ours_deferred: tuple[str, ...] = ()
    others: frozenset[str] = DEPENDENCIES
    pure: bool = False


EVERYTHING = Rule(ours=("aprilsched",))


def rule(
    ours: str = "", *, deferred: str = "", others: frozenset[str] = DEPENDENCIES, pure: bool = False
) -> Rule:
    """A rule whose names are words, without the package's name."""
    mine, later = (
        tuple(f"aprilsched.{name}" for name in names.split()) for names in (ours, deferred)
    )
    return Rule(ours=mine, ours_deferred=later, others=others, pure=pure)


SHARED = (
    "companions engines.base engines.fleet engines.http engines.server engines.stream errors types"
)
"""What adapters of servers share may import."""

_RULES: dict[str, Rule] = {
    "errors": rule(others=frozenset(), pure=True),
    # It looks up how aprilsched was installed.
    "extras": rule("errors", others=frozenset()),
    "files": rule(others=frozenset()),
    "bounds": rule("errors", others=frozenset(), pure=True),
    "checks": rule("errors", others=NUMPY, pure=True),
    "companions": rule("errors", others=NUMPY, pure=True),
    "types": rule(
        "checks companions errors", deferred="tensors", others=NUMPY | {"msgspec"}, pure=True
    ),
    "sampling": rule("checks errors types", others=NUMPY),
    "tensors": rule("companions extras", others=NUMPY),
    "corrections": rule("errors", others=NUMPY),
    "timing.model": rule("bounds errors", others=NUMPY, pure=True),
    "workload": rule("bounds checks errors files types", others=NUMPY),
    # Inside the core the nouns are below and the verbs above.
    "core.lengths": rule("core.lengths errors types", others=NUMPY, pure=True),
    "core.policies": rule(
        "bounds checks core.lengths core.policies errors", others=NUMPY, pure=True
    ),
    "core.messages": rule(
        "companions core.lengths core.messages core.policies errors types",
        others=NUMPY | {"msgspec"},
        pure=True,
    ),
    "core.state": rule(
        "companions core.config core.lengths core.messages core.policies core.state errors types",
        others=NUMPY,
        pure=True,
    ),
    # The records that a store writes.
    "core.state.saved": rule(
        "companions core.lengths core.policies core.state types",
        others=NUMPY | {"msgspec"},
        pure=True,
    ),
    "core": rule("bounds checks companions core errors types", others=NUMPY, pure=True),
    "config": rule("core.config core.policies errors types", others=NUMPY, pure=True),
    "loop_thread": rule(others=frozenset()),
    "presets": rule("config", others=frozenset(), pure=True),
    "engines": rule(
        "companions engines errors extras loop_thread timing.model types weights.publisher "
        "workload",
    ),
    "engines.sim.clock": rule("errors extras", others=frozenset()),
    # What all adapters of servers take; they know no server, and no adapter knows another one.
    "engines.http": rule("engines.http errors"),
    **{f"engines.{name}": rule(SHARED) for name in ("fleet", "server", "stream")},
    **{
        f"engines.{name}": rule(f"{SHARED} engines.{name} extras loop_thread")
        for name in (folder.name for folder in PACKAGE.glob("engines/[!_]*/"))
        if name != "sim"
    },
    "doctor": rule("doctor engines errors testing.contract"),
    "weights": rule("engines.base errors extras types weights"),
    "store": rule(
        "companions core.lengths.observed core.policies core.state.ledger core.state.saved errors "
        "files store types",
    ),
    # What an engine says of itself, as data; no engine is known here.
    "telemetry": rule(
        "core.lengths core.messages core.policies.schedule core.state.ledger engines.base errors "
        "extras files telemetry types",
    ),
    "telemetry.live": rule(
        "core.messages core.state.ledger extras telemetry types",
        others=NUMPY | {"rich"},
    ),
    # Each of these files is for one package, and imported by who wants it.
    "telemetry.prometheus": rule(
        "errors extras telemetry",
        others=frozenset({"prometheus_client"}),
    ),
    "telemetry.trackers": rule(
        "core.messages errors extras telemetry",
        others=frozenset({"tensorboard", "trackio", "wandb"}),
    ),
    # What a setting is called and means, for the report's sentences.
    "analysis": rule(
        "analysis core.lengths core.messages core.policies core.state.ledger errors extras "
        "files telemetry timing types workload",
        others=DEPENDENCIES | PLOTS,
    ),
    "timing": rule("bounds errors files timing", others=NUMPY),
    "driver": rule("core driver engines.base errors telemetry.base types"),
    # Both shells tell the planner how its forecasts came true, and measure batches for that.
    "driver.forecasts": rule("core planning telemetry.base telemetry.batch_figures"),
    # The engine protocol, but no particular engine: that is what lets a test bring its own.
    "coordinator": rule(
        "companions config coordinator core driver engines.base engines.self_check errors planning "
        "sampling store telemetry timing types weights.external weights.publisher",
    ),
    # Pure arithmetic for one command of the core; both shells carry it out.
    "planning": rule("core planning timing.model", others=NUMPY, pure=True),
    # The second shell: the coordinator's loop, and modelled engines instead of real ones.
    "simulation": rule(
        "bounds checks config core driver engines.base engines.sim errors planning simulation "
        "telemetry timing.model types",
    ),
    # What came of it, in the figures and pictures of a real run.
    "simulation.results": rule(
        "analysis.plots analysis.usage checks core engines.sim errors planning simulation "
        "telemetry types workload",
        others=NUMPY | {"matplotlib"},
    ),
    # The server side of SGLang's HTTP API, for the test server and the gateway; it knows neither.
    "serving": rule("errors serving"),
    # What clients say and are answered, for the gateway, the sessions and the test server.
    "dialects": rule("chat companions dialects errors serving types"),
    # For tests of other projects, too: the embedded engine behind SGLang's HTTP API.
    "testing": rule(
        "checks companions dialects engines errors extras loop_thread sampling serving testing "
        "types workload",
    ),
    "testing.fixtures": rule("testing", others=frozenset({"pytest"})),
    # The outermost ring puts the parts together and is imported by none of them.
    "": EVERYTHING,
    "blocking": EVERYTHING,
    "process": EVERYTHING,
    # What a trainer's process and a scheduler's have, for the module above and the package below.
    "remote": EVERYTHING,
    "ray": replace(EVERYTHING, others=DEPENDENCIES | {"ray"}),
    # What the console script starts with, in an install that may lack the extra.
    "cli": replace(EVERYTHING, others=CLI),
    "__main__": replace(EVERYTHING, others=frozenset()),
    # What clients say in text, for the gateway and for sessions.
    "chat": rule("chat errors extras files serving types"),
    # What an episode may do, and an address of its own.
    "sessions": rule("chat coordinator.episodes dialects errors files serving sessions types"),
    # A front of the coordinator, as a trainer is.
    # The version in the answers.
    "gateway": rule(
        "__version__ bounds chat checks companions coordinator core dialects engines errors extras "
        "files gateway sampling serving store telemetry types weights",
    ),
    "runs": replace(EVERYTHING, others=CLI),
    "integrations": EVERYTHING,
}
RULES = {f"aprilsched.{name}".rstrip("."): each for name, each in _RULES.items()}


@dataclass(frozen=True)
class Import:
    """One imported name. `target` is the module, `name` the module or something in it."""

    target: str
    name: str
    line: int
    deferred: bool


def within(name: str, roots: tuple[str, ...] | frozenset[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def imports(node: ast.AST, *, deferred: bool = False) -> Iterator[Import]:
    """Every import below `node`; deferred are those in functions and under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, alias.name, child.lineno, deferred)
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            for alias in child.names:
                yield Import(module, f"{module}.{alias.name}", child.lineno, deferred)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for statement in child.body:
                yield from imports(ast.Module([statement], []), deferred=True)
            for statement in child.orelse:
                yield from imports(ast.Module([statement], []), deferred=deferred)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(child, deferred=deferred or inside)


def rule_of(module: str) -> Rule | None:
    """The rule of the module, or of the nearest package above it except "aprilsched" itself."""
    found = [name for name in RULES if within(module, (name,)) and name != "aprilsched"]
    return (
        RULES["aprilsched"]
        if module == "aprilsched"
        else RULES.get(max(found, key=len, default=""))
    )


def forbidden(found: Import, rule: Rule) -> str | None:
    """Why the rule does not allow the import; None if it does."""
    top = found.target.split(".")[0]
    if top == "":
        return "is relative"
    if top == "aprilsched":
        allowed = rule.ours + (rule.ours_deferred if found.deferred else ())
        fits = within(found.target, allowed) or within(found.name, allowed)
        return None if fits else "points against the arrows"
    if top in sys.stdlib_module_names:
        return "has effects" if rule.pure and top in EFFECTS else None
    if within(found.name, frozenset({"numpy.random"})) and rule.pure:
        return "has effects"
    if top in rule.others or (top in LAZY and found.deferred and not rule.pure):
        return None
    if top in LAZY and not rule.pure:
        return "must wait until it is used"
    return "is no dependency of this part"


def effects(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Calls of built-in functions that do I/O, and uses of numpy.random."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in EFFECT_CALLS:
                yield node.func.id, node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.random", "numpy.random"):
            yield "numpy.random", node.lineno


def violations(module: str, source: str) -> list[str]:
    """One sentence for each violation in `module`."""
    rule = rule_of(module)
    if rule is None:
        return [f"{module} has no rule; add it to the table, with what it may import."]
    tree = ast.parse(source)
    wrong = [
        f"{module}:{found.line}: the import of {found.name} {reason}."
        for found in imports(tree)
        if (reason := forbidden(found, rule))
    ]
    if rule.pure:
        wrong += [f"{module}:{line}: {name} has effects." for name, line in effects(tree)]
    if ast.get_docstring(tree) is None:
        wrong.append(f"{module} has no docstring.")
    return wrong


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_the_arrows_hold():
    found = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    assert [each for name, source in found.items() for each in violations(name, source)] == []


@each_row(
    ("module", "source", "part"),
    [
        ("aprilsched.kernel.core.x", "def f():\n import random", "has effects"),
        ("aprilsched.kernel.core.x", "from numpy import random", "has effects"),
        ("aprilsched.kernel.core.x", "np.random.rand()", "numpy.random has effects"),
        ("aprilsched.kernel.core.x", "print('hello')", "print has effects"),
        ("aprilsched.kernel.core.x", "import aiohttp", "no dependency of this part"),
        ("aprilsched.kernel.core.x", "from aprilsched.config import X", "against the arrows"),
        ("aprilsched.kernel.core.x", "from . import events", "relative"),
        (
            "aprilsched.kernel.core.x",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n import aprilsched.kernel.shell",
            "against the arrows",
        ),
        ("aprilsched.types", "from aprilsched.trainers.tensors import pad", "against the arrows"),
        (
            "aprilsched.trainers.tensors",
            "try:\n import torch\nexcept ImportError: pass",
            "must wait",
        ),
        (
            "aprilsched.trainers.tensors",
            "if TYPE_CHECKING:\n pass\nelse:\n import torch",
            "must wait",
        ),
        ("aprilsched.kernel.shell.x", "import uvloop", "no dependency of this part"),
        ("aprilsched.brand_new", "import aprilsched", "has no rule"),
    ],
)
def test_the_checker_finds_a_violation(module: str, source: str, part: str):
    (found,) = violations(module, f'"""What it is for."""\n{source}')
    assert part in found


@each_row(
    ("module", "source"),
    [
        (
            "aprilsched.kernel.core.x",
            "import math\nfrom aprilsched.kernel.core.messages import events",
        ),
        ("aprilsched.types", "def f():\n from aprilsched.trainers.tensors import pad"),
        ("aprilsched.trainers.tensors", "if TYPE_CHECKING:\n from torch import Tensor"),
        ("aprilsched.observe.plots", "import matplotlib.pyplot as plt"),
    ],
)
def test_the_checker_lets_the_rest_pass(module: str, source: str):
    assert violations(module, f'"""What it is for."""\n{source}') == []


def test_a_missing_docstring_is_found():
    assert violations("aprilsched.kernel.core.x", "x = 1") == [
        "aprilsched.kernel.core.x has no docstring."
    ]


def test_what_the_base_install_runs_imports_no_extra():
    """One process imports all of it, and prints the first module that each package comes with."""
    script = f"""
import importlib, sys
for module in {BASE_INSTALL}:
    importlib.import_module(module)
    found = {{name.partition(".")[0] for name in sys.modules}} & {set(LAZY)}
    if found:
        sys.exit(f"{{module}} imports {{found}}")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
