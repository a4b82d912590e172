"""Takes the picture of the live view that is in the documentation.

``python -m experiments.live_picture.picture`` runs eight embedded engines in modelled time up to a
moment in the middle of the run. It draws the view as on a terminal of 100 columns, and takes a
picture of it in the tests' browser (``make .browser`` fetches it).
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from aprilsched.config import SchedulerConfig
from aprilsched.core.messages.facts import Fact
from aprilsched.engines.sim import SimConfig
from aprilsched.runs.settings import RunSettings, SimSettings
from aprilsched.runs.setup import prepare, summary_of
from aprilsched.simulation import Costs, Simulation
from aprilsched.telemetry.base import TokenChunks
from aprilsched.telemetry.live.live_model import LiveModel, RunFacts, Snapshot
from aprilsched.telemetry.live.view import frame
from aprilsched.telemetry.live_figures import LiveFigures
from tests.support.browser import launched, opened

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "live.png"
WIDTH, HEIGHT = 100, 30
ENGINES = 8
SETTINGS = RunSettings(
    batches=60,
    seed=0,
    train_seconds=2.0,
    sim=SimSettings(engines=ENGINES, refit_seconds=0.5, stream_interval=16, reward_seconds=1.0),
    scheduler=SchedulerConfig(
        batch_groups=256,
        group_size=8,
        over_provision=1.5,
        pace="asynchronous",
    ),
)
BATCHES = 14
"""Number of batches that are run; no more are needed after the moment."""
MOMENT = 260.39
"""Seconds of the run: after an update, some contexts are recomputed and others grow already."""
THEME = TerminalTheme(
    background=(17, 19, 24),
    foreground=(214, 217, 224),
    normal=[
        (60, 64, 72), (224, 92, 92), (87, 187, 108), (222, 184, 92),
        (96, 150, 240), (193, 120, 221), (72, 187, 205), (200, 204, 212),
    ],
    bright=[
        (120, 126, 138), (240, 120, 120), (120, 210, 138), (240, 205, 120),
        (130, 175, 250), (210, 150, 235), (110, 210, 222), (235, 237, 242),
    ],
)  # fmt: skip
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: {background}; }}
pre {{ display: inline-block; margin: 0; padding: 14px 18px; color: {foreground};
  background: {background}; font: 15px/1.25 "DejaVu Sans Mono", monospace; }}
</style><pre>{code}</pre>"""


class Shutter:
    """Takes a snapshot at the moment."""

    def __init__(self, model: LiveModel, moment: float) -> None:
        self.taken: Snapshot | None = None
        self._model = model
        self._moment = moment

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        if now >= self._moment and self.taken is None:
            self.taken = self._model.snapshot()

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        self.on_facts((), now)


def snapshot(moment: float) -> Snapshot:
    """The run at that moment."""
    setup, sim = prepare(SETTINGS), SETTINGS.sim
    summary = summary_of(setup)
    groups = setup.config.batch_groups
    figures = LiveFigures(meter=summary.meter, batch_groups=groups, clock=None)
    facts = RunFacts(
        title="run",
        where="runs/20261121T190412Z-0",
        batches=SETTINGS.batches,
        batch_groups=groups,
        modelled=True,
    )
    model = LiveModel(facts, figures)
    shutter = Shutter(model, moment)
    simulation = Simulation(
        setup.config,
        setup.prompts,
        engines=sim.engines,
        engine=SimConfig(
            max_running=sim.max_running,
            kv_tokens=sim.kv_tokens,
            stream_interval=sim.stream_interval,
            make_tokens=False,
        ),
        costs=Costs(
            refit_seconds=sim.refit_seconds,
            train_seconds=SETTINGS.train_seconds,
            reward_seconds=sim.reward_seconds,
        ),
        batches=BATCHES,
        listeners=[summary, figures, model, shutter],
    )
    simulation.run()
    assert shutter.taken is not None
    return shutter.taken


def page(taken: Snapshot) -> str:
    """The view of it as a web page."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True)
    console.print(frame(taken, width=WIDTH, height=HEIGHT))
    return console.export_html(theme=THEME, code_format=PAGE, inline_styles=True)


def main() -> None:
    taken = snapshot(MOMENT)
    with tempfile.TemporaryDirectory() as name:
        html = Path(name) / "live.html"
        html.write_text(page(taken), encoding="utf-8")
        with launched() as browser, opened(browser, html) as opened_page:
            assert opened_page.errors == []
            opened_page.page.locator("pre").screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
