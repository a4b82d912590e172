"""The control calls of SGLang: each is bounded in time, and none of them generates.

The safe order around a refit is pause(retract), flush, update, resume. SGLang starts a pause
without waiting until it takes effect, but it keeps the order of later calls.

A server does not check the order of memory calls: it crashes if it wakes memory that was not
released, and a continue call is executed even while its memory is released.

A server takes new weights while it is paused, and its cache is left alone:

- A server whose update failed half-way holds weights of two versions under its old label, so only
  the client's record shows that they are inconsistent.
- A separate call sets the version after all weights have arrived: a version sent with the last
  bucket would name weights that are not finalized yet.
- Weights are written in place. SGLang 0.5.21 claims to roll back a failed load from disk, but
  loads the same broken directory again (read in its source); only a load that failed before the
  first tensor leaves the old weights intact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tenacity import AsyncRetrying, retry_if_result, wait_exponential

from aprilsched.errors import ControlTimeout, EngineError, EngineRejected
from aprilsched.kernel.engines.base import GenerationRequest, PauseMode
from aprilsched.kernel.engines.control import Control
from aprilsched.kernel.engines.failures import Answer, quote
from aprilsched.kernel.engines.load import EngineLoad
from aprilsched.kernel.engines.refit import RefitGroup, TensorMeta
from aprilsched.kernel.engines.sglang.loads import read_load
from aprilsched.kernel.engines.sglang.probe import ServerFacts
from aprilsched.kernel.engines.sglang.wire import (
    ModelInfo,
    ServerProcess,
    UpdateAnswer,
    generate_body,
)

_BUSY = _REFUSED = 400
_PAUSED = 503
_FLUSH_POLL_SECONDS = 0.05
_LOAD_SECONDS = 5.0
"""The bound is short, because the caller asks for a load again soon."""
_MESSAGE_BYTES = 1024
_UNTOUCHED = ("Failed to get",)
"""Starts of the messages of a load from disk that failed before the first tensor."""


class ServerControl(Control[ServerFacts]):
    """The control calls of an engine, and those that change its weights."""

    _program = "SGLang"

    async def is_paused(self) -> bool | None:
        """Return whether the server is paused, or None if unknown (before SGLang had /ready)."""
        answer = await self._questions.ask("ready", accept=(200, _PAUSED, 404))
        return None if answer.status == 404 else answer.status == _PAUSED

    async def load(self, *, metrics: bool = False) -> EngineLoad:
        """Ask for the server's load; see :class:`~aprilsched.kernel.engines.load.ReportsLoad`."""
        asked = replace(self._questions, timeout=min(_LOAD_SECONDS, self._limits.control_timeout))
        return await read_load(asked, enabled=self.facts.metrics, metrics=metrics)

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding. The mode is always sent: SGLang's default aborts every request."""
        await self._control("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue after a pause; refused while any of the server's memory is released."""
        self._check_awake()
        await self._continue()

    async def _continue(self) -> None:
        await self._control("continue_generation", {"torch_empty_cache": False})

    async def flush(self) -> None:
        """Drop all cached KV; ask again at "busy", since a pause may not have taken effect yet.

        A hierarchical cache is also busy while it copies KV, and ends no copy in a pause (0.5.23).
        Such a server continues between two attempts.
        """
        refused = ""

        async def attempt() -> Answer:
            nonlocal refused
            if refused and self.facts.tiered:
                await self.pause("retract")
            answer = await self._control("flush_cache", accept=(200, _BUSY))
            refused = quote(answer.body[:_MESSAGE_BYTES].decode("utf-8", "replace"))
            if answer.status == _BUSY and self.facts.tiered:
                await self._continue()
            return answer

        again = AsyncRetrying(
            retry=retry_if_result(lambda answer: answer.status == _BUSY),
            wait=wait_exponential(multiplier=_FLUSH_POLL_SECONDS, max=1.0),
        )
        try:
            async with asyncio.timeout(self._limits.flush_timeout):
                await again(attempt)
        except TimeoutError as error:
            raise ControlTimeout(
                self.name,
                f"flush_cache was refused for {self._limits.flush_timeout:g} s ({refused}); "
                "pause with retract before it, and end the requests of other clients.",
            ) from error

    async def released(self) -> frozenset[str]:
        """Return the memory parts released now; none if the server was restarted since."""
        await self._forget_releases_of_prior_run()
        return self._released

    async def _release(self, tags: Sequence[str]) -> None:
        if self.facts.tiered and not self._released:
            # A release crashes a server that still copies KV, and a flush waits for the copies.
            await self.flush()
        await self._call_memory("release_memory_occupation", tags)

    async def _wake(self, tags: Sequence[str]) -> None:
        await self._call_memory("resume_memory_occupation", tags)

    async def _call_memory(self, path: str, tags: Sequence[str]) -> None:
        # The call is not repeated: a second wake kills the server.
        await self._server.call(
            "POST",
            path,
            {"tags": list(tags)},
            timeout=self._limits.control_timeout,
            repeatable=False,
        )

    async def _forget_releases_of_prior_run(self) -> None:
        """A server that is not paused was restarted, so it has all of its memory."""
        if self._released and await self.is_paused() is False:
            self._released = frozenset()

    # --- weights -------------------------------------------------------------------------------

    async def ask_label(self) -> str:
        shown = await self._questions.get("model_info", ModelInfo)
        self._folder = shown.model_path
        return shown.weight_version

    async def _ask_process(self) -> object:
        return await self._questions.get("server_info", ServerProcess)

    async def set_label(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await self._control("update_weight_version", body)

    # --- from disk -----------------------------------------------------------------------------

    async def update_from_disk(self, path: Path, version: int) -> None:
        """Load `path` as `version`; the server itself reads the path."""
        self._check_draft()
        before = self._open_update
        with self._update(f"loading {path}"):
            try:
                # The default is the format that the server was started with: a server that
                # was started with dummy weights would load nothing.
                await self._load(
                    "update_weights_from_disk",
                    {
                        "model_path": str(path),
                        "load_format": "auto",
                        "weight_version": self._name_of(version, path),
                    },
                )
            except EngineRejected as error:
                if any(message in str(error) for message in _UNTOUCHED):
                    self._open_update = before
                raise

    def _check_draft(self) -> None:
        """Refuse an update that SGLang would load into a draft model of other tensors too."""
        if self._target:
            raise EngineError(
                self.name,
                f"drafts with {self.facts.drafter}, and would load this update into its draft "
                "model too; publish by broadcast or from tensors, or draft without a model.",
            )

    @property
    def _target(self) -> Mapping[str, str]:
        """The field that keeps an update off a draft model with tensors of its own."""
        apart = self.facts.own_draft and self.facts.update_sessions
        return {"selector": "target"} if apart else {}

    # --- in buckets ----------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """Start an update; a session that a failure left open is closed first."""
        self._open_update = "an update"
        if not self.facts.update_sessions:
            return
        selected = {"selector": "all", **self._target}
        opened = await self._control("begin_weight_update", selected, accept=(200, _REFUSED))
        if opened.status == _REFUSED:
            await self._control("end_weight_update", {})
            await self._control("begin_weight_update", selected)

    async def end_update(self, version: int) -> None:
        """Finalize and label the weights; SGLang's default would abort all requests."""
        if self.facts.update_sessions:
            await self._control("end_weight_update", {})
        await self.ask_label()  # Another program may have loaded a folder since.
        await self.set_label(self._name_of(version))
        self._open_update = ""

    async def join_group(self, group: RefitGroup, *, rank_offset: int) -> None:
        """Join the trainer's group; returns when all members have joined."""
        if self.facts.pipelined:
            raise EngineError(
                self.name,
                "cannot join a group: SGLang gives two stages of a pipeline the same rank; start "
                "it with --pp-size 1, or publish from disk.",
            )
        await self._load(
            "init_weights_update_group",
            {
                "master_address": group.address,
                "master_port": group.port,
                "rank_offset": rank_offset,
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": group.backend,
            },
            loads=False,
        )
        self._groups.add(group.name)

    def in_group(self, name: str) -> bool:
        """Whether the server joined the group and was not restarted since."""
        return name in self._groups

    async def leave_group(self, name: str) -> None:
        """Leave a group; a group that the server does not know is ignored."""
        self._groups.discard(name)
        await self._control(
            "destroy_weights_update_group", {"group_name": name}, accept=(200, _REFUSED)
        )

    async def receive(
        self,
        tensors: Sequence[TensorMeta],
        *,
        group: str,
        load_format: str | None = "flattened_bucket",
    ) -> None:
        """Receive one bucket that rank 0 broadcasts."""
        await self._load(
            "update_weights_from_distributed",
            {
                "names": [tensor.name for tensor in tensors],
                "dtypes": [tensor.dtype for tensor in tensors],
                "shapes": [list(tensor.shape) for tensor in tensors],
                "group_name": group,
                "load_format": load_format,
                **self._target,
            },
        )

    async def update_from_tensors(
        self, serialized: Sequence[str], *, load_format: str | None
    ) -> None:
        """Load one bucket from the trainer's own memory."""
        await self._load(
            "update_weights_from_tensor",
            {
                "serialized_named_tensors": list(serialized),
                "load_format": load_format,
                **self._target,
            },
        )

    async def update_from_sockets(self, handles: Mapping[str, str], version: int) -> None:
        """Load from a checkpoint-engine on the server's machine."""
        self._check_draft()
        with self._update("an update from a checkpoint-engine"):
            await self._load(
                "update_weights_from_ipc",
                {"zmq_handles": dict(handles), "weight_version": self._name_of(version)},
            )

    # --- adapters ------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load a LoRA adapter in addition to the others, while requests generate."""
        await self._load(
            "load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, loads=False
        )

    async def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter.

        The server waits for the adapter's last request and loads no other adapter until then. It
        remembers the path: a request that names the adapter again would load it again.
        """
        await self._server.call(
            "POST",
            "unload_lora_adapter",
            {"lora_name": name},
            timeout=self._limits.update_timeout,
            accept=(200, _REFUSED),
        )

    # --- calls ---------------------------------------------------------------------------------

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        """The body that asks for `request`."""
        interval, priority = self._stream_interval, self.capabilities.priority
        seeded = self.facts.one_seed
        return generate_body(request, stream_interval=interval, priority=priority, one_seed=seeded)

    async def _load(self, path: str, body: Mapping[str, Any], *, loads: bool = True) -> None:
        """Make a long call that is never repeated and whose answer reports whether it succeeded."""
        if loads:
            # Flushing here would kill the scheduler if a request runs or waits, and aborting
            # would end every straggler.
            body = {**body, "flush_cache": False, "abort_all_requests": False}
        answer = await self._server.call(
            "POST",
            path,
            body,
            timeout=self._limits.update_timeout,
            accept=(200, _REFUSED),
            repeatable=False,
        )
        outcome = self._questions.read(path, answer, UpdateAnswer)
        if not outcome.success:
            message = quote(outcome.message or outcome.error_message or "")
            raise EngineRejected(self.name, f"{path} failed ({message}).", status=answer.status)

    def _check_request(self, request: GenerationRequest) -> None:
        super()._check_request(request)
        if request.media or request.sampling.request:
            self._check_fields(request)

    def _check_fields(self, request: GenerationRequest) -> None:
        """Refuse what SGLang would ignore without a word."""
        facts = self.facts
        if unseen := {media.kind for media in request.media} - facts.capabilities.media:
            why = f"has {', '.join(sorted(unseen))}, which the model does not understand; leave"
            raise self._refused(f"{why} media out.")
        unknown = request.sampling.request.keys() - facts.request_fields
        if unknown and facts.request_fields:
            why = f"has {', '.join(sorted(unknown))}, which the server does not know; correct"
            raise self._refused(f"{why} request.")
