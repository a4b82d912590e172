"""Submits examples/ray_trainer.py to a Ray cluster as a job: all of its parts are actors.

::

    pip install 'ray[default]'
    python deploy/ray_job.py http://HEAD:8265

The nodes need SGLang, and the folder must be on a disk that all of them have. A job that is
submitted again goes on where the last one ended.
"""

from __future__ import annotations

import sys
from typing import Any

JOB: dict[str, Any] = {
    "entrypoint": (
        "python examples/ray_trainer.py Qwen/Qwen3-4B --servers 2 --host node"
        " --folder /shared/aprilsched --steps 100"
    ),
    "entrypoint_num_cpus": 1,
    "runtime_env": {
        "working_dir": ".",
        "excludes": ["/.venv*", "/.browser", "/dist", "/experiments", "/notebooks", "/runs"],
        # Beside what the node has: SGLang brings its own torch.
        "pip": ["${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}[ray]"],
    },
    "metadata": {"project": "aprilsched"},
}


def main() -> None:
    """Submit the job, and print its name."""
    from ray.job_submission import JobSubmissionClient

    print(JobSubmissionClient(sys.argv[1]).submit_job(**JOB))


if __name__ == "__main__":
    main()
