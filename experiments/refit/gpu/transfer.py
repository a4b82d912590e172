"""Measures vLLM's own transfer between processes, without a server.

    python transfer.py --out DIRECTORY --parts vllm.tar.xz [--seconds 75] [--device cpu --tiny]
    python transfer.py --out DIRECTORY --table

The trainer is this process: VLLMPublisher or DistributedPublisher. The receiver is another one,
with the calls of a vLLM server over HTTP and vLLM's own engine end behind them (vllm_parts.py); its
model is the named tensors, copied as a loader does. After each transfer both ends must have the
same checksum.
"""

# pyright: basic, reportMissingImports=false
# Runs with files of vLLM that the development environment does not have.
from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import torch
import vllm_parts
from aiohttp import web
from model import QWEN3_4B, TINY, RandomWeights

GIB, MIB = 2**30, 2**20
SEEDS = (1, 2)
ROOT = Path(__file__).resolve().parents[3]


def checksum(tensors: dict[str, torch.Tensor]) -> int:
    """A sum over all bits of all tensors, in which their order counts."""
    total = 0
    for number, tensor in enumerate(tensors.values(), 1):
        words = tensor.flatten().view(torch.int16 if tensor.itemsize == 2 else torch.int32)
        odd = int(words[1::2].sum(dtype=torch.int64))
        total += number * (int(words.sum(dtype=torch.int64)) + 3 * odd)
    return total % 2**61


def prepare_vllm(parts: Path, device: str) -> None:
    """Unpack vLLM's files and make them importable; on a CPU gloo broadcasts in NCCL's place."""
    site = Path(tempfile.mkdtemp(prefix="vllm-parts-"))
    with tarfile.open(parts) as archive:
        archive.extractall(site, filter="data")
    vllm_parts.install(site)
    if device == "cpu":
        from tests.vllm import over_gloo

        over_gloo.install()


# --- the receiver ------------------------------------------------------------------------------


class Receiver:
    """The engine's end: the calls of a vLLM server, and a group of torch.distributed."""

    def __init__(self, given: argparse.Namespace) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        self.weights = RandomWeights(TINY if given.tiny else QWEN3_4B, given.device)
        self.device = torch.device(given.device)
        model: Any = torch.nn.Module()
        model.load_weights = self.load_weights
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
        backend: Any = SimpleNamespace(backend=given.backend)
        self.engine = WeightTransferEngineFactory.create_engine(backend, config, self.device, model)
        self.version = ""
        self.members: Any = None
        self.thread = ThreadPoolExecutor(1)

    def load_weights(self, named: Any) -> set[str]:
        loaded: set[str] = set()
        for name, tensor in named:
            self.weights.tensors[name].copy_(tensor)
            loaded.add(name)
        return loaded

    def call(self, name: str, body: Any) -> Any:
        if name == "init_weight_transfer_engine":
            info = self.engine.parse_init_info(body["init_info"])
            return self.engine.init_transfer_engine(info)
        if name == "update_weights":
            return self.engine.update_weights(body["update_info"])
        if name == "finish_weight_update":
            self.version = body["weight_version"]
            return self.engine.finish_weight_update()
        if name == "start_weight_update":
            return self.engine.start_weight_update()
        if name == "join":
            return self.join(body)
        if name == "receive":
            return self.receive(body["tensors"])
        settle(self.device)
        return {"version": self.version, "checksum": checksum(self.weights.tensors)}

    def join(self, group: dict[str, Any]) -> None:
        import torch.distributed

        distributed: Any = torch.distributed
        c10d = distributed.distributed_c10d
        store: Any = distributed.TCPStore(group["address"], group["port"], None, False)
        for prefix in (group["name"], f"{group['name']}/", f"{self.device.type}/"):
            store = distributed.PrefixStore(prefix, store)
        if group["backend"] == "gloo":
            self.members = c10d.ProcessGroupGloo(store, 1, 2)
            return
        options = c10d.ProcessGroupNCCL.Options()
        options.global_ranks_in_group = []
        self.members = c10d.ProcessGroupNCCL(store, 1, 2, options)

    def receive(self, tensors: list[Any]) -> None:
        import torch.distributed

        distributed: Any = torch.distributed
        own = [self.weights.tensors[name] for name in tensors]
        row = torch.empty(sum(t.nbytes for t in own), dtype=torch.uint8, device=self.device)
        options = distributed.distributed_c10d.BroadcastOptions()
        options.rootRank = 0
        self.members.broadcast([row], options).wait()
        for tensor, part in zip(own, row.split([t.nbytes for t in own]), strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        settle(self.device)

    async def serve(self, port: int) -> None:
        async def answer(request: web.Request) -> web.Response:
            body = await request.json() if request.can_read_body else None
            name = request.match_info["name"]
            loop = asyncio.get_running_loop()
            return web.json_response(await loop.run_in_executor(self.thread, self.call, name, body))

        app = web.Application(client_max_size=GIB)
        app.router.add_post("/{name}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the trainer -------------------------------------------------------------------------------


class Engine:
    """The receiver as the publishers see an engine."""

    capabilities = SimpleNamespace(ranks=1)

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self.name = f"127.0.0.1:{port}"
        self._session = session
        self._groups: set[object] = set()
        self._label = 0

    async def call(self, name: str, body: object = None) -> Any:
        async with self._session.post(f"http://{self.name}/{name}", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{name}: {await answer.text()}")
            return await answer.json()

    async def version(self) -> int:
        return self._label

    async def join_transfer(self, group: int, info: Any) -> None:
        await self.call("init_weight_transfer_engine", {"init_info": info})
        self._groups.add(group)

    def in_transfer(self, group: int) -> bool:
        return group in self._groups

    async def begin_update(self) -> None:
        await self.call("start_weight_update")

    async def receive_transfer(self, info: object) -> None:
        await self.call("update_weights", {"update_info": info})

    async def end_update(self, version: int) -> None:
        await self.call("finish_weight_update", {"weight_version": str(version)})
        self._label = version


class GroupEngine(Engine):
    """The receiver as an engine that joins a group."""

    async def join_group(self, group: Any, *, rank_offset: int) -> None:
        body = {key: getattr(group, key) for key in ("name", "address", "port", "backend")}
        await self.call("join", body)
        self._groups.add(group.name)

    def in_group(self, name: str) -> bool:
        return name in self._groups

    async def leave_group(self, name: str) -> None:
        self._groups.discard(name)

    async def receive(self, tensors: Any, *, group: str, load_format: str | None = None) -> None:
        await self.call("receive", {"tensors": [tensor.name for tensor in tensors]})


class Run:
    """All measurements of one run; rows are on the disk as they are made."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.cuda = given.device == "cuda"
        self.file = given.out / "transfer.jsonl"
        self.until = time.monotonic() + given.seconds
        # The engine is on the first GPU and the trainer on the last, as in the other phases.
        last = f"cuda:{torch.cuda.device_count() - 1}"
        self.apart = last if self.cuda else "cpu"
        self.version = 0

    def write(self, **row: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    async def way(self, name: str, method: Any, backend: str = "nccl") -> None:
        """One way with a receiver of its own; a failure ends only this way."""
        if self.given.only not in ("", name):
            return None
        if time.monotonic() > self.until:
            return self.write(kind="note", way=name, text="no time left")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, __file__, "--receive", str(port), "--backend", backend]
        command += ["--parts", str(self.given.parts), "--out", str(self.given.out)]
        command += ["--device", "cuda:0" if self.cuda else "cpu"]
        command += ["--tiny"] if self.given.tiny else []
        process = subprocess.Popen(command)  # noqa: ASYNC220 (it blocks for milliseconds)
        started = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=60)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                kind = GroupEngine if name == "distributed" else Engine
                engine = kind(port, session)
                while True:
                    try:
                        await engine.call("state")
                        break
                    except aiohttp.ClientConnectionError:
                        if process.poll() is not None or time.monotonic() > started + 60:
                            raise
                        await asyncio.sleep(0.1)
                await asyncio.wait_for(method(name, engine), max(5, self.until - time.monotonic()))
        except BaseException as error:  # Also what a thread of NCCL raises.
            self.write(kind="error", way=name, error=f"{type(error).__name__}: {error}"[:1000])
        finally:
            process.kill()
            process.wait()

    async def repeat(
        self, way: str, engine: Engine, publisher: Any, weights: RandomWeights, **facts: Any
    ) -> None:
        for number in range(-1, self.given.repeats):
            self.version += 1
            weights.draw(SEEDS[self.version % 2])
            await self.once(way, engine, publisher, weights, repeat=number, **facts)

    async def once(
        self, way: str, engine: Engine, publisher: Any, weights: RandomWeights, **facts: Any
    ) -> None:
        started = time.perf_counter()
        await publisher.prepare(self.version)
        prepared = time.perf_counter()
        if patches := getattr(publisher, "_patches", None):
            facts["sent_bytes"] = sum(p.indices.nbytes + p.values.nbytes for p in patches)
        outcomes = await publisher.publish(self.version, [engine])
        ended = time.perf_counter()
        state = await engine.call("state")
        failure = next((repr(error) for error in outcomes.values() if error is not None), None)
        self.write(
            kind="transfer",
            way=way,
            **facts,
            bytes=weights.bytes,
            prepare_s=prepared - started,
            publish_s=ended - prepared,
            gb_s=weights.bytes / (ended - prepared) / 1e9,
            failure=failure,
            verified=failure is None and state["checksum"] == checksum(weights.tensors),
        )

    # --- the ways ------------------------------------------------------------------------------

    async def vllm(self, way: str, engine: Engine) -> None:
        """vLLM's packed broadcast or its handles of GPU memory, in buckets of three sizes."""
        from aprilsched import VLLMPublisher

        backend: Any = way.removeprefix("vllm_")
        device = "cuda:0" if self.cuda and backend == "ipc" else self.apart
        weights = RandomWeights(TINY if self.given.tiny else QWEN3_4B, device)
        for bucket in (GIB // 2, GIB, 2 * GIB):
            publisher = VLLMPublisher(weights.named, backend=backend, bucket_bytes=bucket)
            await self.repeat(way, engine, publisher, weights, bucket_bytes=bucket)
            if self.cuda and bucket == GIB and backend == "nccl":
                await self.pending(engine, publisher, weights)
            publisher._drop()

    async def sparse(self, way: str, engine: Engine) -> None:
        """Only what changed, at three shares of changed elements; first everything."""
        from aprilsched import VLLMPublisher

        weights = RandomWeights(TINY if self.given.tiny else QWEN3_4B, self.apart)
        publisher = VLLMPublisher(weights.named, backend="sparse_nccl")
        self.version += 1
        weights.draw(SEEDS[0])
        await self.once(way, engine, publisher, weights, share=1.0)
        for share in (0.01, 0.03, 0.3):
            for number in range(2):
                self.version += 1
                for tensor in weights.tensors.values():
                    tensor.copy_(torch.where(torch.rand_like(tensor) < share, -tensor, tensor))
                settle(torch.device(weights.device))
                await self.once(way, engine, publisher, weights, share=share, repeat=number)

    async def pending(self, engine: Engine, publisher: Any, weights: RandomWeights) -> None:
        """The optimizer's step is still queued on the GPU when the update starts."""
        self.version += 1
        torch.cuda.set_device(weights.device)
        for tensor in weights.tensors.values():
            tensor.neg_()  # The first call of a kernel waits for the GPU.
        torch.cuda._sleep(2_000_000_000)  # Cycles of the clock: about one second.
        for tensor in weights.tensors.values():
            tensor.neg_()
        await self.once("vllm_nccl", engine, publisher, weights, pending=True)

    async def group(self, way: str, engine: Engine) -> None:
        """A broadcast from the trainer's tensors over torch.distributed."""
        from aprilsched import DistributedPublisher

        backend = "nccl" if self.cuda else "gloo"
        weights = RandomWeights(TINY if self.given.tiny else QWEN3_4B, self.apart)
        settings: Any = {"backend": backend, "device": self.apart, "bucket_bytes": GIB // 2}
        publisher = DistributedPublisher(weights.named, **settings)
        await self.repeat(way, engine, publisher, weights, bucket_bytes=GIB // 2)


async def measure(given: argparse.Namespace) -> None:
    prepare_vllm(given.parts, given.device)
    run = Run(given)
    versions: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if run.cuda:
        from torch.cuda import nccl

        versions["nccl"] = ".".join(map(str, nccl.version()))
        versions["gpus"] = torch.cuda.device_count()
    run.write(kind="machine", **versions)
    await run.way("vllm_nccl", run.vllm)
    if run.cuda:
        await run.way("vllm_ipc", run.vllm, "ipc")
    await run.way("distributed", run.group)
    await run.way("vllm_sparse_nccl", run.sparse, "sparse_nccl")


def markdown(path: Path) -> str:
    """The medians of each way without its warm-up; a row that is not verified stands out."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    problems: list[str] = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] in ("error", "note"):
            problems.append(f"{row['way']}: {row.get('error') or row['text']}")
        elif row["kind"] == "transfer" and row.get("repeat", 0) >= 0:
            what = f"{row['bucket_bytes'] / 2**30:g} GiB" if "bucket_bytes" in row else ""
            if "share" in row:
                what = f"{row['share']:.0%} changed"
            groups[row["way"], "step still queued" if row.get("pending") else what].append(row)
    lines = [
        "| way | bucket or share | prepare | publish | GB/s | sent | verified |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (way, what), rows in groups.items():
        middle = {
            key: statistics.median(row[key] for row in rows)
            for key in ("prepare_s", "publish_s", "gb_s")
        }
        sent = statistics.median(row.get("sent_bytes", row["bytes"]) for row in rows)
        verified = sum(row["verified"] for row in rows)
        lines.append(
            f"| {way} | {what} | {middle['prepare_s'] * 1e3:,.1f} ms "
            f"| {middle['publish_s'] * 1e3:,.1f} ms | {middle['gb_s']:.3g} "
            f"| {sent / 1e9:.3g} GB | {verified} of {len(rows)} |"
        )
    return "\n".join([*lines, "", *problems])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", type=Path, help="archive of vllm_parts.FILES")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--only", default="", help="the one way to measure")
    parser.add_argument("--receive", type=int, help="port at which to be the receiver")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--table", action="store_true", help="print the table of an earlier run")
    given = parser.parse_args()
    if given.table:
        print(markdown(given.out / "transfer.jsonl"))
        return
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    sys.path.insert(0, str(ROOT))
    if given.receive is not None:
        prepare_vllm(given.parts, given.device)
        asyncio.run(Receiver(given).serve(given.receive))
    asyncio.run(measure(given))
    os._exit(0)  # A thread that hangs in a collective must not keep the process.


if __name__ == "__main__":
    main()
