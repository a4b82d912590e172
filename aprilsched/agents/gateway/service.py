"""The scheduler behind a gateway, from start to stop, and the known facts of the fleet."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from aprilsched import __version__
from aprilsched.agents.chat.streamed_text import Texts
from aprilsched.agents.dialects.sglang import PromptsBody
from aprilsched.agents.gateway.admission import Admission
from aprilsched.agents.gateway.control import ControlCalls, cancel_all
from aprilsched.agents.gateway.labels import Labels
from aprilsched.agents.gateway.responses import Responses
from aprilsched.agents.gateway.settings import GatewaySettings, for_clients
from aprilsched.agents.gateway.updates import FromDisk, ranks_of
from aprilsched.agents.serving.refusals import Refused
from aprilsched.errors import AprilschedError, ConfigError, RefitError
from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.engines.server import facts_of
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.shell.prompt_queue import PromptQueue
from aprilsched.kernel.shell.rollouts import RolloutScheduler
from aprilsched.kernel.store.sqlite import SqliteStore
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.figures.metrics import Metrics
from aprilsched.observe.figures.table import Clients

log = logging.getLogger("aprilsched")

_REASONS = {400: "invalid", 401: "key", 404: "unknown", 405: "unknown", 413: "large", 503: "busy"}
"""Reasons for refused requests in the metrics, by the HTTP status of the answer."""
_RETRY_DELAY_S = 1.0
"""Seconds before the next batch is requested again while no engine can generate."""


class UnknownModel(Refused):
    """A request names a model that is not served."""

    status = 404


class Service:
    """A fleet and its scheduler, as the handlers of a gateway see them.

    Args:
        fleet: the engines; they are opened and closed with the service.
        settings: its limits.
        config: settings of the scheduler; settings for a trainer's batches are replaced.
        listeners: telemetry of the run.

    Attributes:
        admission: accepts requests.
        controls: runs the control calls of clients.
        labels: the names of versions.
        responses: the open responses.
        clients: figures of the clients.
        texts: the tokenizer.
        random_seed: distinguishes this process from a later one at its address, as a server's seed
            does.

    Raises:
        ConfigError: if a setting cannot work.
    """

    generate_body = PromptsBody

    def __init__(
        self,
        fleet: Fleet,
        *,
        settings: GatewaySettings,
        config: SchedulerConfig,
        listeners: Sequence[AnyListener] = (),
    ) -> None:
        self.settings = settings
        self.fleet = fleet
        self.clients = Clients(
            responses=lambda: len(self.responses), paused=lambda: self.controls.held
        )
        figures = LiveFigures()
        self.metrics = Metrics(figures, self.clients)
        self.responses = Responses(
            withdraw=lambda group_id, why: self._scheduler.withdraw(group_id, why),
            state=lambda: self._scheduler.state,
            first_token=partial(self.metrics.observe, "gateway/first_token_seconds"),
        )
        self.random_seed = secrets.randbelow(2**31)
        self.texts = Texts(settings.tokenizer, settings.response_template)
        store = settings.store
        self._stored = store is not None
        config = for_clients(config, settings)
        prompts = PromptQueue(together_s=0)
        self._fleet_wait_s = config.health.fleet_wait_s
        self._scheduler = RolloutScheduler(
            fleet,
            prompts,
            config=config,
            listeners=[self.responses, figures, self.metrics, *listeners],
            store=None if store is None else SqliteStore(store),
        )
        # Clients get the label with each response, and can check it themselves.
        self._scheduler.trust_weights()
        self.labels = Labels(None if store is None else Path(f"{store}-labels.json"))
        self.admission = Admission(self.responses, prompts, settings, config)
        self.controls = ControlCalls(
            self._scheduler,
            fleet,
            self.responses,
            self.labels,
            is_stored=self._stored,
            within_s=config.timeouts.control_s,
        )
        self._delivering: asyncio.Task[None] | None = None
        self._closing = AsyncExitStack()

    @property
    def label(self) -> str:
        """The label of the fleet's weights, set by the client that loaded them."""
        return self.labels[self._scheduler.version]

    @property
    def model_path(self) -> str:
        """The folder of the model that the engines have loaded."""
        return self.controls.model_path

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self.settings.served_model_name or self.model_path

    def check_model(self, name: str) -> None:
        """Refuse another model's name if the operator has set the name of the served model.

        Raises:
            UnknownModel: if `name` is another model.
        """
        known = self.settings.served_model_name
        if known is not None and name not in ("", known):
            raise UnknownModel(f"The model {name} is not served here; ask for {known}.")

    @property
    def in_use(self) -> list[str]:
        """Names of the engines that are in use."""
        return list(self._scheduler.state.fleet.control.engines)

    @property
    def ready(self) -> bool:
        """Whether a request would generate now."""
        return bool(self.in_use) and not self.admission.draining and not self.controls.held

    async def alive(self) -> bool:
        """Return whether the scheduler runs, even while it waits for an engine or stops."""
        return not self._failed.done()

    async def healthy(self) -> bool:
        """Return whether an engine is in use and the gateway is not stopping.

        This generates nothing, so it also works during a pause.
        """
        return bool(self.in_use) and not self.admission.draining

    def running(self) -> int:
        """Number of requests that engines have."""
        return self._scheduler.state.in_flight.open_attempts

    def waiting(self) -> int:
        """Number of requests that no engine has: not launched yet, or waiting to be sent."""
        return self.responses.to_launch + len(self._scheduler.state.in_flight.queue)

    def model_facts(self) -> dict[str, Any]:
        """The name of the model; only the engines know more about it."""
        return {"served_model_name": self.model_name}

    def server_facts(self) -> dict[str, Any]:
        """What SGLang's clients look up, and the engines under ``gateway``.

        A weight group needs one rank for each rank of all engines, so `tp_size` is their number.
        """
        saved = (self._scheduler.store_error or "saved") if self._stored else None
        # The gateway's answers resemble those of the engines' oldest release.
        found = [re.findall(r"\d+", each.capabilities.server)[:3] for each in self.fleet.engines]
        controls = self.controls
        return {
            "skip_tokenizer_init": not self.texts.there,
            "tp_size": ranks_of(controls.takers) or 1,
            "enable_lora": False,
            # How an engine stores its KV is not visible to clients.
            "enable_hierarchical_cache": False,
            **self._room(),
            "random_seed": self.random_seed,
            "version": ".".join(min(found, key=lambda parts: [int(part) for part in parts])),
            "gateway": {
                "aprilsched": __version__,
                "engines": [
                    {"name": name, "mode": controls.mode_of(name)} for name in controls.names
                ],
                "store": saved,
            },
        }

    def rank_loads(self) -> list[dict[str, Any]]:
        """Return the requests of the gateway in the form of a server of one rank."""
        load = {
            "timestamp": time.time(),
            "num_running_reqs": self.running(),
            "num_waiting_reqs": self.waiting(),
            **self._room(),
        }
        return [load]

    def _room(self) -> dict[str, int]:
        """Return the running requests and KV tokens that fit on all engines that report them."""
        found = [engine.capabilities for engine in self.fleet.engines]
        return {
            "max_running_requests": sum(each.max_running_requests or 0 for each in found),
            "max_total_num_tokens": sum(each.kv_tokens or 0 for each in found),
        }

    @property
    def vocab_size(self) -> int | None:
        """Smallest number of token ids among the engines that report it."""
        facts = filter(None, map(facts_of, self.fleet.engines))
        return min((f.vocab_size for f in facts if f.vocab_size is not None), default=None)

    @property
    def context_tokens(self) -> int | None:
        """Maximum tokens of a prompt with its response on every engine; None if unknown."""
        facts = filter(None, map(facts_of, self.fleet.engines))
        known = (f.context_tokens for f in facts if f.context_tokens is not None)
        return self.texts.context(min(known, default=None))

    def answered(self, status: str, seconds: float) -> None:
        """Count a request by the status of its answer, and observe how long it took."""
        self.clients.requests[status] += 1
        self.metrics.observe("gateway/request_seconds", seconds)

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error of this HTTP status."""
        stopping = status == web.HTTPServiceUnavailable.status_code and self.admission.draining
        reason = "stopping" if stopping else _REASONS.get(status)
        self.clients.refusals[reason or "failed"] += 1

    async def open(self) -> None:
        """Open the fleet and start delivery; call :meth:`close` even if this fails.

        Raises:
            EngineError: if an engine cannot be used.
            ConfigError: if the engines cannot be used together, or if the store is a trainer's.
            StoreError: if the store cannot be used.
        """
        self.labels.open()
        self._failed: asyncio.Future[AprilschedError] = asyncio.get_running_loop().create_future()
        self._scheduler.republish_with(FromDisk(self.labels))
        await self._closing.enter_async_context(self._scheduler)
        for batch in self._scheduler.state.delivery.batches_again:
            # Restore it before delivery, because its client may reconnect at once.
            self.responses.restore(batch)
        if self.responses.foreign:
            raise ConfigError(
                f"{self.settings.store} has the run of a trainer; give the gateway a store of its "
                "own."
            )
        first = facts_of(self.fleet.engines[0])
        version = self._scheduler.version
        if first is not None:
            # The first engine may be on standby with other weights.
            self.controls.model_path = self.labels.weights(version).folder or first.model_path
        await self.texts.open(self.model_path, self.labels.weights(version).tokenizer)
        self.labels.tokenizer = self.texts.folder
        if first is not None and version not in self.labels:
            self.labels.name(version, first.label)
        if self._stored:
            self.admission.expire_later()
        self._delivering = asyncio.create_task(self._deliver(), name="aprilsched gateway")

    async def close(self) -> None:
        """End the scheduler, and close the fleet."""
        self.admission.close()
        await self.controls.close()
        if self._delivering is not None:
            await cancel_all([self._delivering])
            self._delivering = None
        await self._closing.aclose()

    async def wait_failed(self) -> AprilschedError:
        """Wait until the scheduler ends by itself because the fleet is lost; return the cause."""
        return await asyncio.shield(self._failed)

    async def _deliver(self) -> None:
        """Take every rollout as soon as it is complete, until the scheduler ends."""
        logged, ends_at = None, 0.0
        while True:
            try:
                batch = await self._scheduler.next_batch()
            except RefitError:
                cause = self.controls.stranded_cause
                if cause is not None and logged != cause:
                    log.error("new requests get 503: %s", cause)
                    ends_at = time.monotonic() + self._fleet_wait_s
                logged = cause
                if cause is not None:
                    # Responses with tokens wait for the next update, as they do for a lost fleet.
                    self.responses.fail_waiting(cause, everything=time.monotonic() >= ends_at)
                await asyncio.sleep(_RETRY_DELAY_S)
                continue
            except AprilschedError as error:
                setting = "fleet_wait_s (--fleet-wait-s)"
                error.args = (str(error).replace("health.fleet_wait_s", setting),)
                self.admission.draining = True
                self.responses.fail_all(str(error))
                self._failed.set_result(error)
                return
            logged = None
            self.responses.deliver(batch)


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
"""The key under which the handlers find their service in the application."""
