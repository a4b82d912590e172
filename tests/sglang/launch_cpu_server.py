"""Starts an SGLang server without a GPU; the server environment's Python runs it."""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import sys

import stand_ins

if __name__ == "__main__":
    stand_ins.install()
    stand_ins.fork()
    stand_ins.doze()
    if "--enable-lora" in sys.argv:
        stand_ins.unpin()
    if "--enable-return-routed-experts" in sys.argv:
        stand_ins.unpin()
        stand_ins.unregister()

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
