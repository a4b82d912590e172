"""Measures how long a report takes to be written and to open, for logs of up to a million lines."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from aprilsched.analysis.report.page import write_report
from experiments.report_opening.long_log import write_long_run
from tests.support.browser import DESKTOP, PHONE, launched, opened

DRAWN = "document.documentElement.dataset.drawn"


def measure(lines: int, times: int) -> dict[str, object]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / f"{lines}-lines"
        written = write_long_run(folder, lines)
        before = time.process_time()
        path, _ = write_report(folder)
        cpu = time.process_time() - before
        row: dict[str, object] = {
            "lines": written,
            "load": round(os.getloadavg()[0], 1),
            "report_cpu_s": round(cpu, 2),
            "page_mb": round(path.stat().st_size / 1e6, 2),
        }
        with launched() as browser:
            for name, viewport in (("desktop", DESKTOP), ("phone", PHONE)):
                found: list[float] = []
                for _ in range(times):
                    with opened(browser, path, viewport=viewport) as page:
                        page.page.wait_for_selector("html[data-drawn]", state="attached")
                        found.append(float(page.evaluate(DRAWN)) / 1000)
                row[f"open_s_{name}"] = [round(statistics.median(found), 2), round(max(found), 2)]
    return row


def main() -> None:
    """Write the rows to --out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [measure(lines, arguments.times) for lines in arguments.lines]
    text = json.dumps(rows, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
