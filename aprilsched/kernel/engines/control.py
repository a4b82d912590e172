"""Control calls of a server over HTTP, each repeated until its outcome is known."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec

from aprilsched.errors import (
    EngineProtocolError,
    EngineRejected,
    EngineRestarted,
    EngineUnreachable,
    InconsistentWeights,
)
from aprilsched.kernel.engines.base import GenerationRequest, PauseMode, label_parts
from aprilsched.kernel.engines.failures import UNREADABLE, Answer, quote
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.stream import FOREIGN, version_number
from aprilsched.kernel.engines.transport import Transport
from aprilsched.kernel.values.bounds import AT_LEAST_1, check_range
from aprilsched.kernel.values.capabilities import Capabilities

T = TypeVar("T")


_BAD_REQUEST = 400
_CONFLICT = 409


def decode(engine: str, what: str, body: bytes, kind: type[T], *, program: str) -> T:
    """Decode `body` as a `kind`, or raise an error that names the call and the server's program."""
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise EngineProtocolError(
            engine, f"does not answer {what} like {program} ({quote(str(error))})."
        ) from error


def _folder_mark(folder: str) -> str:
    return f"{zlib.crc32(folder.encode()):08x}" if folder else ""


@dataclass(frozen=True, slots=True)
class Questions:
    """The calls to one server that change nothing; they need no admin key.

    Attributes:
        engine: the server's name, for errors.
        program: the name of the server's program, for errors.
        server: takes the calls.
        timeout: seconds for each call, its retries included.
    """

    engine: str
    program: str
    server: Transport
    timeout: float

    async def ask(
        self,
        path: str,
        body: object = None,
        *,
        accept: tuple[int, ...] = (200,),
        query: Mapping[str, str] | None = None,
        at_most: int | None = None,
    ) -> Answer:
        """GET `path`, or POST `body` there; errors as :meth:`Transport.call`."""
        return await self.server.call(
            "GET" if body is None else "POST",
            path,
            body,
            timeout=self.timeout,
            accept=accept,
            admin=False,
            query=query,
            at_most=at_most,
        )

    async def get(self, path: str, kind: type[T], *, at_most: int | None = None) -> T:
        """GET `path` as a `kind`; errors as :meth:`ask` and :meth:`read`."""
        return self.read(path, await self.ask(path, at_most=at_most), kind)

    def read(self, path: str, answer: Answer, kind: type[T]) -> T:
        """Decode the answer of `path` as a `kind`.

        Raises:
            EngineProtocolError: if it is none.
        """
        return decode(self.engine, f"/{path}", answer.body, kind, program=self.program)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The properties that a server reported when it was opened.

    Attributes:
        model_path: the model that the server was started with, or the folder that it loaded last.
        label: the label of the weights, as the server spells it.
        vocab_size: smallest token id that may crash the server; None if unknown.
        process: identifies the server's process, as opposed to a later one at its address.
        context_tokens: limit on the tokens of a prompt and its response together; None if unknown.
        drafter: its method of speculative decoding, as the server spells it; empty without one.
        own_draft: whether the drafts come from a model that an update of the weights leaves as it
            is.
        graph_requests: size of the largest batch with a CUDA graph; None if unknown.
        conservativeness: factor of what SGLang reserves for running requests; None if unknown.
        is_gateway: whether it is a gateway of this package.
    """

    model_path: str
    label: str
    capabilities: Capabilities
    vocab_size: int | None
    process: object
    context_tokens: int | None = None
    drafter: str = ""
    own_draft: bool = False
    graph_requests: int | None = None
    conservativeness: float | None = None
    is_gateway: bool = False


def graph_requests(config: Any, *path: str, ranks: int) -> int | None:
    """Return the size at `path` in a server's report on its CUDA graphs, of all data-parallel
    `ranks`; None for none."""
    for name in path:
        found = cast("dict[str, Any]", config) if isinstance(config, dict) else {}
        config = None if found.get("backend") == "disabled" else found.get(name)
    return config * ranks if isinstance(config, int) and config > 0 else None


FactsT = TypeVar("FactsT", bound=Facts)


class Control(Generic[FactsT]):
    """The state of one server, and the checks around its control calls.

    A subclass implements the calls of the server's program: `pause`, `flush`, `resume`,
    `ask_label`, `_ask_process`, `set_label`, `_release` and `_wake`.
    """

    _program: str
    """The name of the program, as errors have it."""

    def __init__(
        self,
        name: str,
        server: Transport,
        limits: HttpLimits,
        *,
        stream_interval: int,
        first_version: int | None,
    ) -> None:
        check_range(AT_LEAST_1, stream_interval=stream_interval)
        self.name = name
        """Host and port; also the path, if several servers share them."""
        self._server = server
        self._limits = limits
        self._stream_interval = stream_interval
        self._first_version = first_version
        self._questions = Questions(name, self._program, server, limits.control_timeout)
        self._facts: FactsT | None = None
        self._released: frozenset[str] = frozenset()
        self._groups: set[str] = set()
        """The groups of trainers that the server's process is in."""
        self._open_update = ""
        """Name of the update that was started and has not succeeded; empty if there is none."""
        self._runs: tuple[str, ...] = ()
        """Names of the processes whose labels count, this one's first; any if it is empty."""
        self._shown = self._foreign = ""
        """The label that the server has shown last, and one that is not the run's."""
        self._folder = ""
        """The folder that the server has loaded last, if it shows it."""
        self._marks_folder = self._is_fresh = False
        """Whether labels name the folder, which shows a load without a label; and whether the label
        is taken as it is until :meth:`keep_label`."""

    @property
    def facts(self) -> FactsT:
        """The properties that the server reported when it was opened."""
        if self._facts is None:
            raise EngineUnreachable(self.name, "is not open; call open() before using it.")
        return self._facts

    @property
    def capabilities(self) -> Capabilities:
        """The server's capabilities; available after it was opened."""
        return self.facts.capabilities

    @property
    def label(self) -> str:
        """The label of the weights that the server had when it was opened."""
        return self.facts.label

    async def version(self) -> int:
        """Ask for the policy version; raise if the weights are inconsistent."""
        # The server is asked in any case: that it is lost matters more than its weights.
        self._shown = await self.ask_label()
        version = self._version_of(self._shown)
        if self._open_update:
            raise InconsistentWeights(
                self.name,
                f"{self._open_update} failed, so its weights are a mixture of old and new; it "
                "needs a complete refit.",
            )
        mark = self._shown.split("@")[2:]
        compared = mark and self._marks_folder and not self._is_fresh
        other = compared and mark != [_folder_mark(self._folder)]
        if version == FOREIGN or other or self._shown == self._foreign != "":
            shown = f'has weights labelled "{quote(self._shown)}"'
            if other:
                shown = f"{shown}, but from {quote(self._folder)}"
            raise InconsistentWeights(self.name, f"{shown}, which this run has not loaded.")
        return version

    def join_run(self, name: str, former: str, *, decimal: bool, fresh: bool = False) -> None:
        """See :meth:`aprilsched.kernel.engines.base.HasLabel.join_run`."""
        self._runs, self._is_fresh = (name, former), fresh
        # A trainer may load weights before it labels them, and a gateway that was restarted may
        # show another of its engines' folders.
        self._marks_folder = not (decimal or self.facts.is_gateway)
        number, run = label_parts(self.label)
        trusted = decimal or not former or self._first_version is not None
        self._foreign = self.label if number and not run and not trusted else ""

    async def keep_label(self, *, known: bool = True) -> None:
        """See :meth:`aprilsched.kernel.engines.base.HasLabel.keep_label`."""
        name, (number, run) = self._runs[0], label_parts(self._shown)
        if known and run != name and (number or run):
            await self.set_label(self._name_of(self._version_of(self._shown)))
        self._runs, self._is_fresh = (name,), False

    async def verify(self) -> int:
        """Ask for the policy version; raise if the process is not the one that was opened."""
        await self._check_process()
        return await self.version()

    async def _check_process(self) -> None:
        if await self._ask_process() != self.facts.process:
            raise EngineRestarted(
                self.name,
                "was restarted since it was opened, so it has the weights that it was started "
                "with; it is opened again.",
            )

    def expect_weights(self) -> None:
        """Mark the weights as inconsistent, because another client may start loading some."""
        self._open_update = "an update by the trainer"

    async def accept_weights(self, version: int, *, label: bool = False) -> None:
        """Mark the weights as `version`; raise if the server reports another version."""
        await self._check_process()
        if label:
            await self.ask_label()  # The trainer may have loaded another folder.
            await self.set_label(self._name_of(version))
        shown = await self.ask_label()
        if self._version_of(shown) != version:
            raise EngineRejected(
                self.name,
                f'names its weights "{quote(shown)}" and not "{self._name_of(version)}"; let the '
                "trainer label them with the decimal version, or use label=True.",
                status=_CONFLICT,
            )
        self._open_update = self._foreign = ""

    async def release(self, tags: Sequence[str]) -> None:
        """Release memory; the server must be paused with retract."""
        if twice := sorted(self._released.intersection(tags)):
            raise self._conflict(f"{twice[0]} is released already; release each part once.")
        await self._change_memory(self._release(tags), self._released.union(tags))

    async def wake(self, tags: Sequence[str]) -> None:
        """Take released memory back."""
        if awake := sorted(set(tags) - self._released):
            raise self._conflict(f"{awake[0]} was not released; wake only what was.")
        await self._change_memory(self._wake(tags), self._released.difference(tags))

    async def _change_memory(self, call: Awaitable[None], after: frozenset[str]) -> None:
        before, self._released = self._released, after
        try:
            await call
        except (EngineRejected, EngineUnreachable):
            self._released = before
            raise

    def _check_awake(self) -> None:
        """Refuse to continue while any of the server's memory is released."""
        if self._released:
            raise self._conflict(f"its {min(self._released)} is released; wake it first.")

    async def pause(self, mode: PauseMode) -> None:
        """See :meth:`aprilsched.kernel.engines.base.Engine.pause`."""
        raise NotImplementedError

    async def flush(self) -> None:
        """See :meth:`aprilsched.kernel.engines.base.Engine.flush`."""
        raise NotImplementedError

    async def resume(self) -> None:
        """See :meth:`aprilsched.kernel.engines.base.Engine.resume`."""
        raise NotImplementedError

    async def ask_label(self) -> str:
        """Ask for the label of the weights that the server has now."""
        raise NotImplementedError

    async def _ask_process(self) -> object:
        """Ask for what distinguishes the process that answers now from others."""
        raise NotImplementedError

    async def set_label(self, label: str) -> None:
        """Label the weights that the server has."""
        raise NotImplementedError

    async def _release(self, tags: Sequence[str]) -> None:
        raise NotImplementedError

    async def _wake(self, tags: Sequence[str]) -> None:
        raise NotImplementedError

    def _name_of(self, version: int, folder: Path | None = None) -> str:
        """The label of a version, of `folder` or of the one that was loaded last."""
        mark = _folder_mark(str(folder or self._folder)) if self._marks_folder else ""
        number = str(version - (self._first_version or 0))
        return "@".join(filter(None, (number, *self._runs[:1], mark)))

    def _version_of(self, label: str) -> int:
        return version_number(label, self._first_version or 0, self._runs)

    @contextmanager
    def _update(self, what: str) -> Generator[None]:
        """One update; the weights are inconsistent unless it succeeds."""
        self._open_update = what
        yield
        self._open_update = ""

    def _check_request(self, request: GenerationRequest) -> None:
        """Refuse a request that the server must not get.

        Raises:
            EngineRejected: if a token id is beyond the vocabulary: the lookup in the embedding
                fails, which crashes SGLang 0.5.21 and vLLM 0.32.
        """
        vocab = self.facts.vocab_size
        largest = int(request.input_ids.max(initial=0))
        if vocab is not None and largest >= vocab:
            raise self._refused(
                f"holds token id {largest}, and the model knows {vocab}; tokenize the prompt with "
                "this model's tokenizer.",
            )

    def _refused(self, why: str) -> EngineRejected:
        """The error of a request that the server does not get."""
        return EngineRejected(self.name, f"the request {why}", status=_BAD_REQUEST)

    def _conflict(self, why: str) -> EngineRejected:
        return EngineRejected(self.name, why, status=_CONFLICT)

    async def _control(
        self, path: str, body: object = None, *, accept: tuple[int, ...] = (200,)
    ) -> Answer:
        return await self._server.call(
            "POST", path, body, timeout=self._limits.control_timeout, accept=accept
        )
