"""What tests start in the place of an SGLang server that spans several nodes.

The first rank is the embedded engine behind SGLang's HTTP API, and the others only wait. Each
writes where the ranks meet.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--dist-init-addr", required=True)
    parser.add_argument("--tp-size", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True)
    given = parser.parse_args()
    meets = given.folder / f"{given.dist_init_addr}-{given.node_rank}"
    meets.write_text(f"{os.getpid()} {given.nnodes} {given.tp_size}")
    if given.node_rank > 0:
        time.sleep(3600)
    serve = ["-m", "aprilsched", "serve-sim", "--host", given.host, "--port", given.port]
    os.execv(sys.executable, [sys.executable, *serve])  # noqa: S606
