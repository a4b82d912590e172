"""What processes of their own import the library, the tests and the packages from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_path() -> str:
    """The value of PYTHONPATH for another process."""
    return os.pathsep.join((str(ROOT), *filter(None, sys.path)))
