"""One vLLM server over HTTP, and fleets of such servers.

- A pause is ``mode=keep``. It returns when no further step samples, and with ``clear_cache`` every
  running request has given up its KV (0.32; its help text claims that this is ignored).
- vLLM moves the weights of a model to the meta device before it reads a checkpoint, so a load that
  fails leaves none, and the next token ends the process. The previous folder is loaded again.
- A server that was put to sleep continues by itself as soon as its last part is awake. Its cache is
  therefore woken by :meth:`VLLMEngine.resume`, when the server is ready for the next token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aprilsched.errors import EngineRejected
from aprilsched.kernel.engines.base import CLAIM_INTERVAL_S, CLAIM_S, GenerationRequest, PauseMode
from aprilsched.kernel.engines.failures import Answer
from aprilsched.kernel.engines.fleet import ListedFleet, UrlFleet
from aprilsched.kernel.engines.load import EngineLoad
from aprilsched.kernel.engines.server import HttpEngine
from aprilsched.kernel.engines.stream import version_number
from aprilsched.kernel.engines.vllm.loads import read_load
from aprilsched.kernel.engines.vllm.server_info import (
    LOADING,
    ServerFacts,
    pause_questions,
    paused,
    probe,
    server_process,
    weight_label,
)
from aprilsched.kernel.engines.vllm.tokens_api import PREFIX, EventReader, generate_body

_BAD_REQUEST = 400
_NOT_FOUND = 404
_FAILED = 500
_OF_SGLANG = {"custom_params", "ebnf", "json_schema", "regex", "stop_regex", "structural_tag"}
"""SGLang's sampling parameters that change the sampled tokens. vLLM ignores unknown names (0.32),
so it would silently sample from another distribution."""
_LOAD_SECONDS = 5.0
"""The bound is short, because the caller asks for a load again soon."""


class VLLMEngine(HttpEngine[ServerFacts]):
    """One vLLM server, started with ``VLLM_SERVER_DEV_MODE=1 vllm serve … --tokens-only``.

    Args:
        url: URL where the server listens, as ``http://host:port``.
        admin_key: key for control calls. vLLM asks for none; a proxy before it may.
        api_key: the server's ``--api-key``, for generation.
        stream_interval: tokens between two events of a stream; a server with a larger
            ``--stream-interval`` keeps to that.
        limits: timeouts and sizes.
        first_version: version of the weights that the server labels "0"; with it, the labels are
            the trainer's own, and a resumed run takes decimal numbers for its versions.

    Raises:
        ConfigError: if `url`, a key or `stream_interval` cannot be used.
    """

    _program = "vLLM"
    _loaded: str | None = None
    """The folder of the server's weights; None if unknown."""
    _transfer: int | None = None
    """The group of a trainer's transfer that the server's process is in."""
    _asleep: frozenset[str] = frozenset()
    """The released parts of the server's memory: its cache is woken later than requested."""

    _claimed = False
    """Whether no other owner was found when it was claimed."""

    async def _probe(self) -> ServerFacts:
        facts = await probe(self._questions)
        if self._facts is None or self._facts.process != facts.process:
            self._released = self._asleep = frozenset()
            self._loaded = None if version_number(facts.label) else facts.model_path
            self._transfer = None
        return facts

    # --- generation ----------------------------------------------------------------------------

    def _check_request(self, request: GenerationRequest) -> None:
        super()._check_request(request)
        sampling = request.sampling
        if sampling.request or sampling.keep:
            raise self._refused(
                "asks for fields of a request or an answer, which are carried to SGLang alone; "
                "leave request and keep out.",
            )
        if request.media and not self.capabilities.media:
            raise self._refused("has media, and the model understands none; leave media out.")
        if ignored := sorted(_OF_SGLANG & sampling.extra.keys()):
            why = f"has {', '.join(ignored)}, in SGLang's name, which vLLM ignores; leave it out."
            raise self._refused(why)
        temperature = request.sampling.temperature
        if temperature not in (0, 1) and not self.facts.logprobs_mode.startswith("processed"):
            raise self._refused(
                f"has the temperature {temperature:g}, and the server gives logprobs from before "
                "the temperature; start it with --logprobs-mode processed_logprobs.",
            )

    def _post(self, request: GenerationRequest) -> tuple[str, dict[str, Any]]:
        body = generate_body(request, stream_interval=self._stream_interval)
        return "inference/v1/generate", body

    def _reader(self, request: GenerationRequest) -> EventReader:
        return EventReader(self.name, request, self._version_of)

    async def _abort(self, request_id: str, timeout: float) -> None:  # noqa: ASYNC109
        body = {"request_ids": [PREFIX + request_id]}
        await self._transport.call("POST", "abort_requests", body, timeout=timeout)

    # --- control -------------------------------------------------------------------------------

    async def is_paused(self) -> bool | None:
        """Whether the server is paused."""
        return await paused(self._questions)

    async def claim(self) -> bool:
        """See :class:`~aprilsched.kernel.engines.base.Claimable`. vLLM keeps no claims, so only a
        paused server shows its owner: by the questions after its pause that it counts. An owner
        asks once a second, unless its process stalls."""
        if not self._claimed and await paused(self._questions):
            before = await pause_questions(self._questions)
            for _ in range(int(CLAIM_S / CLAIM_INTERVAL_S)):
                await asyncio.sleep(CLAIM_INTERVAL_S)
                if await pause_questions(self._questions) > before:
                    return False
        self._claimed = True
        return True

    async def disclaim(self) -> None:
        """See :class:`~aprilsched.kernel.engines.base.Claimable`."""
        self._claimed = False

    async def load(self, *, metrics: bool = False) -> EngineLoad:
        """Ask for the server's load; see :class:`~aprilsched.kernel.engines.load.ReportsLoad`."""
        asked = replace(self._questions, timeout=min(_LOAD_SECONDS, self._limits.control_timeout))
        return await read_load(asked, self.facts, metrics=metrics)

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding. The mode is always sent: vLLM's default aborts every request."""
        cleared = "true" if mode == "retract" else "false"
        await self._ask("pause", {"mode": "keep", "clear_cache": cleared})

    async def flush(self) -> None:
        """Drop all cached KV, including the KV of requests that an in-place pause keeps."""
        answer = await self._ask("reset_prefix_cache", {"reset_running_requests": "true"})
        if not self._questions.read("reset_prefix_cache", answer, dict[str, Any])["success"]:
            raise self._conflict("did not drop its cached KV, which something still uses.")

    async def resume(self) -> None:
        """Continue after a pause; refused while any of the server's memory is released."""
        self._check_awake()
        if self._asleep:
            await self._wake_up("kv_cache")
        await self._ask("resume")

    async def released(self) -> frozenset[str]:
        """Return the memory parts released now; none if the server was restarted since."""
        if self._released and await self._ask_process() != self.facts.process:
            self._released = self._asleep = frozenset()
        return self._released

    async def _release(self, tags: Sequence[str]) -> None:
        if "weights" in tags and "weights" not in self._asleep:
            # The weights are copied to the CPU. The cache goes with them.
            await self._ask("sleep", {"level": "1", "mode": "keep"})
            self._asleep = frozenset({"kv_cache", "weights"})
        elif "kv_cache" in tags and not self._asleep:
            await self._ask("release_kv_cache_memory")
            self._asleep = frozenset({"kv_cache"})

    async def _wake(self, tags: Sequence[str]) -> None:
        if "weights" in tags:
            await self._wake_up("weights")

    async def _wake_up(self, tag: str) -> None:
        await self._ask("wake_up", {"tags": tag})
        self._asleep -= {tag}

    # --- weights -------------------------------------------------------------------------------

    async def ask_label(self) -> str:
        label = await weight_label(self._questions)
        if label == LOADING and not self._open_update:
            self._open_update = "an update of another client"
        return label

    async def _ask_process(self) -> object:
        return await server_process(self._questions)

    async def set_label(self, label: str) -> None:
        await self._control("update_weight_version", {"new_version": label})

    async def update_from_disk(self, path: Path, version: int) -> None:
        """Load `path` as `version`; the server itself reads the path.

        A checkpoint in which tensors are missing is loaded without an error (0.32).
        """
        with self._update(f"loading {path}"):
            before = await self.ask_label()
            await self.set_label(LOADING)
            try:
                await self._reload(str(path))
            except EngineRejected:
                if self._loaded is not None and before != LOADING:
                    await self._reload(self._loaded)
                    await self.set_label(before)
                    self._open_update = ""
                raise
            await self.set_label(self._name_of(version))
            self._loaded = str(path)

    async def _reload(self, path: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._load("collective_rpc", body)

    async def _load(
        self, path: str, body: object = None, *, accept: tuple[int, ...] = (200,)
    ) -> None:
        # The server closes the connection after a failure, without saying so.
        await self._transport.call(
            "POST",
            path,
            body,
            timeout=self._limits.update_timeout,
            headers={"Connection": "close"},
            accept=accept,
        )

    async def join_transfer(self, group: int, info: Mapping[str, Any]) -> None:
        """Join a trainer's transfer; see
        :class:`~aprilsched.kernel.weights.vllm_transfer.VLLMPublisher`.

        The server must have been started with ``--weight-transfer-config``.
        """
        await self._load("init_weight_transfer_engine", {"init_info": info})
        self._transfer = group

    def in_transfer(self, group: int) -> bool:
        """Whether the server is in the group of a transfer."""
        return self._transfer == group

    async def begin_update(self) -> None:
        """Start an update by transfer; an update that a failure left open is closed first."""
        if self._open_update:
            await self._load("finish_weight_update", accept=(200, _BAD_REQUEST, _FAILED))
        self._open_update, self._loaded = "a transfer", None
        await self.set_label(LOADING)
        await self._load("start_weight_update")

    async def receive_transfer(self, info: object) -> None:
        """Receive and load the weights that the trainer sends."""
        await self._load("update_weights", {"update_info": info})

    async def end_update(self, version: int) -> None:
        """End the update; the weights are `version` from now on."""
        await self._load("finish_weight_update", {"weight_version": self._name_of(version)})
        self._open_update = ""

    # --- adapters ------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load a LoRA adapter in addition to the others, while requests generate."""
        body = {"lora_name": name, "lora_path": str(path)}
        timeout = self._limits.update_timeout
        await self._transport.call("POST", "v1/load_lora_adapter", body, timeout=timeout)

    async def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter; requests that run with it continue."""
        await self._transport.call(
            "POST",
            "v1/unload_lora_adapter",
            {"lora_name": name},
            timeout=self._limits.update_timeout,
            accept=(200, _NOT_FOUND),
        )

    async def _ask(self, path: str, query: Mapping[str, str] | None = None) -> Answer:
        timeout = self._limits.control_timeout
        return await self._transport.call("POST", path, timeout=timeout, query=query)


class VLLMFleet(UrlFleet[VLLMEngine]):
    """The vLLM servers at `urls`; the arguments are as in :class:`~aprilsched.SGLangFleet`, and the
    settings as in :class:`~aprilsched.kernel.engines.vllm.engine.VLLMEngine`."""

    _engine_type = VLLMEngine


class VLLMListedFleet(ListedFleet[VLLMEngine]):
    """The vLLM servers that a function lists, as they join and leave; the arguments are as in
    :class:`~aprilsched.SGLangListedFleet`."""

    _engine_type = VLLMEngine
