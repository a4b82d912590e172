"""Servers in Ray actors, with the methods of verl's own and nothing else of verl."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.testing.server import SimServer
from aprilsched.testing.threaded import ThreadedServer

VOCAB_SIZE = 256
EOS = 2
"""Ends one response in 256 at each token, so that there are a few very long ones."""
TIME_SCALE = 2.0
"""Seconds for each second of an H200. A response of 1,000 tokens takes several steps of the
trainer."""
WEIGHTS = "APRILSCHED_TEST_WEIGHTS"
"""Variable with the folder of the weights, in which step-N has those of step N."""


class Server:
    """A server as verl's actors have it, and the worker that loads its weights."""

    def __init__(self, weights: str) -> None:
        self._weights = Path(weights)
        self._server = ThreadedServer(
            SimServer(
                SimConfig(stream_at_pause=False, vocab_size=VOCAB_SIZE, eos_token_id=EOS),
                time_scale=TIME_SCALE,
            )
        )
        self._server.start()
        self.global_steps: int | None = None

    def get_server_address(self) -> tuple[str, int]:
        host, port = self._server.url.removeprefix("http://").split(":")
        return host, int(port)

    def abort_all_requests(self) -> None:
        self._post("pause_generation", mode="abort")

    def resume_generation(self) -> None:
        self._post("continue_generation")

    def release_kv_cache(self) -> None:
        self._post("release_memory_occupation", tags=["kv_cache"])

    def resume_kv_cache(self) -> None:
        self._post("resume_memory_occupation", tags=["kv_cache"])
        self._post("flush_cache")

    def execute_checkpoint_engine(self, method: str, *_: Any, **__: Any) -> None:
        """Take part in what the trainer does before and after the weights."""

    def update_weights(self, global_steps: int) -> None:
        self._post(
            "update_weights_from_disk",
            model_path=str(self._weights / f"step-{global_steps}"),
            flush_cache=True,
        )
        self.global_steps = global_steps

    def label(self) -> str:
        with urllib.request.urlopen(f"{self._server.url}/model_info") as answer:
            return json.load(answer)["weight_version"]

    def _post(self, path: str, **body: Any) -> None:
        _post(f"{self._server.url}/{path}", body)


class SGLangServer(Server):
    """A real server, which verl's SGLangHttpServer would have in its process; `models` are the
    weights of even and of odd steps."""

    def __init__(self, url: str, models: tuple[Path, Path]) -> None:
        self._url = url
        self._models = models
        self.global_steps = None

    def get_server_address(self) -> tuple[str, int]:
        host, port = self._url.removeprefix("http://").split(":")
        return host, int(port)

    def release_kv_cache(self) -> None:
        """As with ``free_cache_engine=False``."""

    def resume_kv_cache(self) -> None:
        """As with ``free_cache_engine=False``."""

    def update_weights(self, global_steps: int) -> None:
        folder = str(self._models[global_steps % 2])
        self._post("update_weights_from_disk", model_path=folder, flush_cache=False)
        # Of verl's ServerAdapter.
        self._post("flush_cache")
        self.global_steps = global_steps

    def label(self) -> str:
        return self._get("model_info")["weight_version"]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}") as answer:
            return json.load(answer)

    def _post(self, path: str, **body: Any) -> None:
        _post(f"{self._url}/{path}", body)


class VLLMServer(SGLangServer):
    """The same of verl's vLLMHttpServer."""

    def abort_all_requests(self) -> None:
        self._post("pause?mode=abort")

    def resume_generation(self) -> None:
        self._post("resume")

    def update_weights(self, global_steps: int) -> None:
        given = {"weights_path": str(self._models[global_steps % 2])}
        self._post("collective_rpc", method="reload_weights", kwargs=given)
        self._post("reset_prefix_cache")
        self.global_steps = global_steps

    def label(self) -> str:
        return self._get("weight_info")["weight_version"]


def _post(url: str, body: object) -> None:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()
