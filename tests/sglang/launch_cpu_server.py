"""Starts an SGLang server without a GPU; the server environment's Python runs it.

As a script it becomes the server. As a module of module_runner.py it forks servers, which then need
not import SGLang: that takes nine tenths of the CPU time of a boot.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

import stand_ins

_PR_SET_PDEATHSIG = 1


def main(log: str, *arguments: str) -> int:
    """Fork a server that writes into `log`; returns its process id, which is also its group."""
    run = _loaded()
    return forked(lambda: run(arguments), log)


def forked(run: Callable[[], object], log: str) -> int:
    """Call `run` in a process group of its own, which writes into `log`; returns its process id."""
    # No process waits for the servers; as a zombie, a dead one would look alive.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()  # A collection in a server would copy all pages that they share.
    if child := os.fork():
        return child
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        # It does not outlive the tests, of which a dead process stops no server.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, stream)
        # The answers to the tests are not this process's.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir(os.path.dirname(log))
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


@functools.cache
def _loaded() -> Callable[[Sequence[str]], None]:
    """What runs a server, with all that it imports."""
    stand_ins.install()
    stand_ins.fork()
    stand_ins.doze()

    import sglang.srt.entrypoints.http_server  # noqa: F401
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    def run(arguments: Sequence[str]) -> None:
        sys.argv = ["launch_cpu_server.py", *arguments]
        if "--enable-lora" in arguments:
            stand_ins.unpin()
        if "--enable-dp-attention" in arguments:
            stand_ins.unpin()
            stand_ins.join_ranks()
        if "--enable-return-routed-experts" in arguments:
            stand_ins.unpin()
            stand_ins.unregister()
        if "--enable-hierarchical-cache" in arguments:
            stand_ins.unpin()
            stand_ins.unregister()
            stand_ins.copy_kv()
        run_server(prepare_server_args(list(arguments)))

    return run


if __name__ == "__main__":
    _loaded()(sys.argv[1:])
