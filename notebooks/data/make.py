"""Makes the two runs of the notebooks again: ``python notebooks/data/make.py``, ten seconds.

Eight embedded engines, the same prompts and lengths for both policies. Modelled time, so
every machine writes the same bytes; a change of the scheduler may change them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNS = ("sync", "april")
FILES = ("config.toml", "events.jsonl", "summary.json")
MOST_BYTES = 2_000_000
SETTINGS = [
    "--batches=5",
    "--burn-in=1",
    "--batch-groups=16",
    "--group-size=8",
    "--train-seconds=2",
    "--sim.engines=8",
    "--sim.max-running=32",
    "--sim.refit-seconds=0.5",
    # A chunk for every 96 tokens: less makes a larger log, and more hides when a response began.
    "--sim.stream-interval=96",
]


def make() -> None:
    """Replace the runs next to this file.

    Raises:
        SystemExit: if they are larger than a repository should hold.
    """
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / "runs"
        command = [sys.executable, "-m", "aprilsched", "simulate", f"--policy={','.join(RUNS)}"]
        command += [*SETTINGS, f"--out={made}", "--json", "--quiet"]
        subprocess.run(command, check=True)  # noqa: S603 (our own program)
        for run in RUNS:
            shutil.rmtree(HERE / run, ignore_errors=True)
            (HERE / run).mkdir()
            for file in FILES:
                shutil.copyfile(made / run / file, HERE / run / file)
    size = sum((HERE / run / file).stat().st_size for run in RUNS for file in FILES)
    if size > MOST_BYTES:
        raise SystemExit(f"The runs have {size:,} bytes, more than {MOST_BYTES:,}.")


if __name__ == "__main__":
    make()
