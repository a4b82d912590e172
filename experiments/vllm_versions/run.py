"""Every token of 100,000 against its version, on real vLLM servers on a CPU.

``python experiments/vllm_versions/run.py`` starts two servers with a tiny model and runs each
straggler rule and rolling refits, with the weights of six models in turn. Each result is added to
result.json when it is there; ``--kind`` runs some of them again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.library import arguments, machine, say, write
from tests.sglang.server import write_model
from tests.vllm.conftest import KEY
from tests.vllm.held import KINDS, run_and_check
from tests.vllm.server import VLLMServer, server_python

MODELS = 6


def main() -> None:
    parser = arguments(__doc__, out=Path(__file__).parent / "result.json")
    parser.add_argument("--batches", type=int, default=20, help="of each kind, 16 rollouts each")
    parser.add_argument("--kind", nargs="*", choices=list(KINDS), default=list(KINDS))
    given = parser.parse_args()
    python = server_python()
    if python is None:
        raise SystemExit("There is no vLLM here; run `make .venv-vllm`.")
    found: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [
            write_model(folder / f"model-{seed}", seed=seed, python=python)
            for seed in range(MODELS)
        ]
        servers = [
            VLLMServer(models[0], folder / f"{number}.txt", "--api-key", KEY) for number in range(2)
        ]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait_ready()
            for kind in given.kind:
                began = time.monotonic()
                held = asyncio.run(
                    run_and_check(
                        [server.url for server in servers],
                        *(models, folder, python, kind, given.batches),
                    )
                )
                seconds = round(time.monotonic() - began)
                found[kind] = {**asdict(held), "seconds": seconds, "machine": machine()}
                say(kind, found[kind])
                write(given.out, found, shown={"tokens": sum(f["tokens"] for f in found.values())})
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    main()
