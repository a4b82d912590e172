"""Simulates the measured cells with SGLang's whole rule of admission, and makes admission.md.

    python experiments/h200/admission.py [CELL…]

Cells and step times are those of frontier.json; admission.json has the result, and with a constant
share of 0.098 that of commit 4c563dc7. Without names all of its cells are simulated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1])]

from schedules import ARMS, Cell, figures, simulated  # noqa: E402

from aprilsched.planning.step_times.model import StepTimeModel  # noqa: E402
from experiments.library import table  # noqa: E402

RESULT, PAGE = HERE / "admission.json", HERE / "admission.md"
MARKS = ("<!-- table -->\n", "\n<!-- end of table -->")


def simulate(names: list[str]) -> None:
    """Simulate these cells of admission.json again, or all of them."""
    found = json.loads(RESULT.read_text())
    frontier = json.loads((HERE / "frontier.json").read_text())
    for name in names or found:
        cell, measured = Cell.of(name), frontier["cells"][name]
        machine = frontier["machines"][f"{measured['gpu']} {cell.server}"]
        model = StepTimeModel(**machine["model"])
        rows = simulated(cell, model)[cell.burn_in :]
        found[name] |= {
            "measured": {key: measured[key] for key in ("generated_s", "staleness", "batches")},
            "falling": {key: figures(rows)[key] for key in ("generated_s", "staleness", "batches")},
        }
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


def rows_table(found: dict[str, Any]) -> str:
    """The table of admission.md."""
    head = ["arm", "measured, tokens/s", "constant share", "error", "falling share", "error",
            "measured staleness", "constant", "falling"]  # fmt: skip
    lines: list[list[str]] = []
    errors: dict[str, list[float]] = {"constant": [], "falling": []}
    for name, cell in found.items():
        if "falling" not in cell:
            continue
        line = [ARMS[Cell.of(name).arm][0], f"{cell['measured']['generated_s']:,.0f}"]
        for rule, all_of in errors.items():
            error = cell[rule]["generated_s"] / cell["measured"]["generated_s"] - 1
            all_of.append(abs(error))
            line += [f"{cell[rule]['generated_s']:,.0f}", f"{error:+.1%}"]
        lines.append([*line, *(f"{cell[r]['staleness']:.2f}" for r in ("measured", *errors))])
    means = {rule: f"{sum(all_of) / len(all_of):.1%}" for rule, all_of in errors.items()}
    lines.append(["mean error", "", "", means["constant"], "", means["falling"], "", "", ""])
    return table(head, lines)


if __name__ == "__main__":
    simulate(sys.argv[1:])
    before, _, after = PAGE.read_text().partition(MARKS[0])
    text = rows_table(json.loads(RESULT.read_text()))
    PAGE.write_text(before + MARKS[0] + text + MARKS[1] + after.partition(MARKS[1])[2])
