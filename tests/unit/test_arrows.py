"""Tests which module may import which, by the import statements: the arrows of the architecture.

The vocabulary (types, errors, config) is below the kernel; in the kernel the core is below the
shell, and engines, weights and the store know neither. The other folders are leaves around the
kernel, and the command line puts them together. The table below has the rules.
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
    "aprilsched.trainers.corrections", "aprilsched.kernel.engines.sglang",
    "aprilsched.planning.presets",
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
    "errors kernel.engines.address kernel.engines.base kernel.engines.control "
    "kernel.engines.failures kernel.engines.fleet kernel.engines.generations kernel.engines.http "
    "kernel.engines.load kernel.engines.refit kernel.engines.server kernel.engines.sockets "
    "kernel.engines.sse kernel.engines.stream kernel.engines.transport kernel.values.bounds "
    "kernel.values.capabilities kernel.values.companions types"
)
"""What adapters of servers share may import."""
PURE = (
    "errors kernel.values.bounds kernel.values.capabilities kernel.values.checks "
    "kernel.values.companions"
)

_RULES: dict[str, Rule] = {
    # The vocabulary.
    "errors": rule(others=frozenset(), pure=True),
    "types": rule(PURE, deferred="trainers.tensors", others=NUMPY | {"msgspec"}, pure=True),
    "config": rule("errors kernel.core.config kernel.core.policies types", others=NUMPY, pure=True),
    # The kernel: values, the core, engines, weights, the store, and the shell around the core.
    "kernel": rule(),
    "kernel.values": rule("errors", others=NUMPY, pure=True),
    "kernel.values.extras": rule("errors", others=frozenset()),
    "kernel.values.files": rule(others=frozenset()),
    "kernel.values.sampling": rule("errors kernel.values.checks types", others=NUMPY),
    # Inside the core the nouns are below and the verbs above.
    "kernel.core.lengths": rule("errors kernel.core.lengths types", others=NUMPY, pure=True),
    "kernel.core.policies": rule(
        f"{PURE} kernel.core.lengths kernel.core.policies", others=NUMPY, pure=True
    ),
    "kernel.core.messages": rule(
        f"{PURE} kernel.core.lengths kernel.core.messages kernel.core.policies types",
        others=NUMPY | {"msgspec"},
        pure=True,
    ),
    "kernel.core.state": rule(
        f"{PURE} kernel.core.config kernel.core.lengths kernel.core.messages kernel.core.policies "
        "kernel.core.state types",
        others=NUMPY,
        pure=True,
    ),
    # The records that a store writes.
    "kernel.core.state.saved": rule(
        "kernel.core.lengths kernel.core.policies kernel.core.state kernel.values.companions types",
        others=NUMPY | {"msgspec"},
        pure=True,
    ),
    "kernel.core": rule(f"{PURE} kernel.core types", others=NUMPY, pure=True),
    "kernel.engines": rule(
        "errors kernel.engines kernel.values kernel.weights.publisher types",
    ),
    # What all adapters of servers use. It knows no server, and no adapter knows another one.
    **{f"kernel.engines.{name}": rule(SHARED) for name in ("fleet", "server", "stream")},
    **{
        f"kernel.engines.{name}": rule(f"{SHARED} kernel.engines.{name} kernel.values.extras")
        for name in (folder.name for folder in PACKAGE.glob("kernel/engines/[!_]*/"))
    },
    "kernel.weights": rule(
        "errors kernel.engines kernel.values.bounds kernel.values.extras kernel.weights types"
    ),
    "kernel.store": rule(
        "errors kernel.core.lengths kernel.core.policies kernel.core.state kernel.store "
        "kernel.values.companions kernel.values.files types",
    ),
    # The engine protocol, but no particular engine: a test can bring its own. Schedules are
    # chosen by the planner, and the figures are asked for by the trainer.
    "kernel.shell": rule(
        "config errors kernel.core kernel.engines.base kernel.engines.load kernel.engines.refit "
        "kernel.engines.self_check kernel.shell kernel.store kernel.values kernel.weights "
        "observe planning types",
    ),
    # Pure arithmetic for one command of the core; both shells carry it out.
    "planning": rule("kernel.core kernel.values.capabilities planning", others=NUMPY, pure=True),
    "planning.presets": rule("config", others=frozenset(), pure=True),
    "planning.step_times": rule(
        "errors kernel.values.bounds kernel.values.files planning.step_times", others=NUMPY
    ),
    # The second shell: the coordinator's loop, and modelled engines instead of real ones.
    "simulation": rule(
        f"{PURE} config kernel.core kernel.engines kernel.shell kernel.values.extras "
        "kernel.values.files kernel.weights observe planning simulation types",
        others=DEPENDENCIES | {"matplotlib"},
    ),
    # What observes a run: it may listen, read files and draw, and knows no engine.
    "observe": rule(
        "errors kernel.core.lengths kernel.core.messages kernel.core.policies "
        "kernel.core.state.ledger kernel.engines.base kernel.engines.load kernel.shell.listener "
        "kernel.values.extras kernel.values.files observe planning.step_times "
        "simulation.frontier simulation.side_by_side simulation.workload types",
        others=DEPENDENCIES | PLOTS,
    ),
    "observe.live": rule(
        "errors kernel.core.messages kernel.core.state.ledger kernel.shell.listener "
        "kernel.values.extras observe types",
        others=NUMPY | {"rich"},
    ),
    # Each of these files is for one package, and imported by those who want it.
    "observe.exports.prometheus": rule(
        "errors kernel.values.extras observe", others=frozenset({"prometheus_client"})
    ),
    **{
        f"observe.exports.{name}": rule(
            "errors kernel.core.messages kernel.shell.listener kernel.values.extras observe",
            others=frozenset({"tensorboard", "trackio", "wandb"}),
        )
        for name in ("trackers", "tracker_writers")
    },
    # What clients say in text, the server side of HTTP, an episode's own address, and one address
    # in front of a fleet.
    "agents": rule(),
    "agents.serving": rule("agents.serving errors kernel.values.bounds"),
    "agents.chat": rule(
        "agents.chat agents.serving errors kernel.values.extras kernel.values.files types"
    ),
    "agents.dialects": rule(
        "agents.chat agents.dialects agents.serving errors kernel.values.companions types"
    ),
    "agents.sessions": rule(
        "agents.chat agents.dialects agents.serving agents.sessions errors kernel.shell.episodes "
        "kernel.values.bounds kernel.values.files types"
    ),
    "agents.gateway": rule(
        f"{PURE} __version__ agents kernel observe types",
    ),
    # For tests of other projects, too: the embedded engine behind SGLang's HTTP API.
    "testing": rule(
        f"{PURE} agents.dialects agents.serving fronts.loop_thread kernel.engines kernel.values "
        "simulation testing types",
    ),
    "testing.fixtures": rule("testing", others=frozenset({"pytest"})),
    # The outermost ring puts the parts together and is imported by none of them.
    "": EVERYTHING,
    "__main__": replace(EVERYTHING, others=frozenset()),
    "fronts": EVERYTHING,
    "fronts.loop_thread": rule(others=frozenset()),
    "fronts.ray": replace(EVERYTHING, others=DEPENDENCIES | {"ray"}),
    "trainers": EVERYTHING,
    "trainers.corrections": rule("errors trainers.arrays", others=NUMPY),
    "trainers.advantages": rule("errors types", others=NUMPY),
    "trainers.tensors": rule(
        "kernel.values.companions kernel.values.extras trainers.advantages types", others=NUMPY
    ),
    # What the console script starts with, in an install that may lack the extra.
    "cli": replace(EVERYTHING, others=CLI),
    "cli.doctor": rule("cli.doctor errors kernel.engines kernel.values.extras testing.contract"),
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
    return "is not a dependency of this part"


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
        ("aprilsched.kernel.core.x", "import aiohttp", "not a dependency of this part"),
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
        ("aprilsched.kernel.shell.x", "import uvloop", "not a dependency of this part"),
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
