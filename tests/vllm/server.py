"""Starts vLLM on a CPU with a tiny random model."""

from __future__ import annotations

import os
from pathlib import Path

from tests.sglang.server import CpuServer

HERE = Path(__file__).parent
ENVIRONMENT = "APRILSCHED_VLLM_PYTHON"


def server_python() -> Path | None:
    """Return the Python that has vLLM, or None."""
    default = HERE.parents[1] / ".venv-vllm" / "bin" / "python"
    python = Path(os.environ.get(ENVIRONMENT, default))
    return python if python.is_file() else None


class VLLMServer(CpuServer):
    """One server; see :class:`CpuServer`."""

    launcher = "tests.vllm.launch_cpu_server"
    # The first call is slow on a busy machine, and no test is about that.
    ready_path = "/server_info?config_format=json"

    def _python(self) -> Path:
        python = server_python()
        assert python is not None
        return python

    def _environment(self) -> dict[str, str]:
        return {
            "VLLM_SERVER_DEV_MODE": os.environ.get("VLLM_SERVER_DEV_MODE", "1"),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Otherwise the model would run in a process of its own, and the two processes would
            # each use a whole core to wait for each other.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def _arguments(self) -> list[str]:
        return [
            str(self.model),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "64"),
            *("--skip-tokenizer-init", "--enforce-eager", "--tokens-only"),
            *self._extra,
        ]
