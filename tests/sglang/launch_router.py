"""Starts SGLang's router; the server environment's Python runs it.

Its own command line does not offer every policy, and imports SGLang where that is installed.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import json
import sys

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs

if __name__ == "__main__":
    Router.from_args(RouterArgs(**json.loads(sys.argv[1]))).start()
