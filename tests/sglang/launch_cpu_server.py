"""Start an SGLang server without a GPU; run by the server environment's Python.

SGLang spawns its scheduler, and a spawned process imports this file again under another name:
the stand-ins are therefore installed in the module body, not under ``__main__``.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import sys

import stand_ins

stand_ins.install()
if "--enable-lora" in sys.argv:
    stand_ins.unpin()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
