"""Starts a script as a fresh process for each measurement, and reads the result that it prints."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

__all__ = ["machine", "measured"]


def measured(script: str, *arguments: object) -> dict[str, Any]:
    """What `script` prints as JSON, in a fresh process."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def machine() -> dict[str, Any]:
    """Where the figures are from."""
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
