"""Writes result.json: each part is one section, which is written as soon as it is complete."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.frontier.measured import Figures

__all__ = ["HERE", "rounded", "section", "write_section"]

HERE = Path(__file__).parent


def rounded(figures: Figures) -> dict[str, float]:
    """With the digits that mean something."""
    return {name: float(f"{value:.4g}") for name, value in asdict(figures).items()}


def section(name: str, path: Path = HERE / "result.json") -> Any:
    """What was written under this name."""
    return json.loads(path.read_text(encoding="utf-8"))[name]


def write_section(name: str, content: object, path: Path = HERE / "result.json") -> None:
    """Write it beside the other sections."""
    everything: dict[str, Any] = {}
    if path.exists():
        everything = json.loads(path.read_text(encoding="utf-8"))
    everything[name] = content
    path.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
