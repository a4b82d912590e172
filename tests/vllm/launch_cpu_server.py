"""Starts vLLM's command line; the server environment's Python runs it.

The server's processes are forks of the first one. vLLM spawns them on a CPU, and each would import
the same packages again, which takes most of the time of a boot.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import multiprocessing
import sys

if __name__ == "__main__":
    from vllm.utils import system_utils

    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")

    if "--weight-transfer-config" in sys.argv:
        import over_gloo

        over_gloo.install()

    from vllm.entrypoints.cli.main import main

    main()
