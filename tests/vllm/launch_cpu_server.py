"""Forks servers of vLLM from a process that has imported it, as its namesake does for SGLang.

The server's processes are forks too. vLLM spawns them on a CPU, and each would import the same
packages again, which takes most of the time of a boot.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import multiprocessing
import sys

from launch_cpu_server import forked

from tests.vllm import over_gloo


def main(log: str, *arguments: str) -> int:
    """Fork a server that writes into `log`; returns its process id, which is also its group."""
    for stand_in in ("vllm", "vllm._custom_ops"):
        # SGLang's servers need them if vLLM is not installed.
        if not hasattr(sys.modules.get(stand_in), "__file__"):
            sys.modules.pop(stand_in, None)

    import vllm.entrypoints.openai.api_server  # noqa: F401
    from vllm.entrypoints.cli.main import main as vllm_main
    from vllm.utils import system_utils

    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")

    def run() -> None:
        sys.argv = ["vllm", "serve", *arguments]
        if "--weight-transfer-config" in arguments:
            over_gloo.install()
        if any("sparse_nccl" in argument for argument in arguments):
            over_gloo.keep_linear_weights()
        vllm_main()

    return forked(run, log)
