"""Publishes weights through files that have only the changed elements.

The trainer compares its weights with a copy of the version before, in host memory, and writes what
changed. On each host of engines a checkpoint is patched while the engines generate, and they load
it in the pause: the network carries the changes, and the load reads local files.

- A host that lacks the previous version, or whose checkpoint fails the checksums after the patch,
  gets a full file. Until it has the version, its engines do not take it.
- The first version of a trainer is full, and so is one with other names, types or shapes.
- An engine that returns waits for the next update, since a host has one version at a time.

Most updates of bfloat16 weights are smaller than the distance to the next number, so most elements
stay as they are from one version to the next. Values are replaced and never added, so nothing
drifts, and a patch that was applied in part can be applied again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprilsched.errors import ConfigError, EngineError
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import RefitFromDisk
from aprilsched.kernel.values.extras import extra
from aprilsched.kernel.weights.delta_file import Pieces, apply_delta, encode, write
from aprilsched.kernel.weights.disk import DiskEngine, VersionsOnDisk
from aprilsched.kernel.weights.tensor_buckets import Weights, check_weights, read_each
from aprilsched.kernel.weights.threads import Takers, call_each, in_thread

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("aprilsched")

_DELTA, _FULL = "delta.bin", "full.bin"
_SHORTER = (("BFLOAT", "BF"), ("FLOAT", "F"), ("UINT", "U"), ("INT", "I"), ("COMPLEX", "C"))
"""How safetensors abbreviates torch's types: F8_E4M3 is torch.float8_e4m3fn, and float8_e4m3fnuz
keeps its ending."""


class DeltaPublisher:
    """Publishes what changed since the version before, and loads patched checkpoints.

    Args:
        directory: directory for the files, on storage that every host of engines reads.
        weights: returns an iterator, plain or asynchronous, over (name, tensor) of all weights,
            under their Hugging Face names, as whole tensors. It is called once for each version
            and read to its end.
        config: the model's config.json.
        local: directory of the patched checkpoint, under the same path on each host, on local
            storage with room for two checkpoints. Start no server from it.
        patch: function ``patch(engine_name, file)``, plain or asynchronous, that runs
            ``python -m aprilsched.kernel.weights.delta_file FILE LOCAL`` on the engine's host, and
            returns whether it succeeded (exit status 0). None: all engines are on this host.
        keep: number of versions whose files stay in `directory`.

    Attributes:
        written_bytes: the size of the files of the last version.

    Raises:
        ConfigError: if `keep` is below 1, `config` is missing, or `weights` is not a function.
    """

    loads_whole = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        weights: Weights,
        *,
        config: str | os.PathLike[str],
        local: str | os.PathLike[str],
        patch: Callable[[str, Path], Any] | None = None,
        keep: int = 2,
    ) -> None:
        check_weights(weights)
        self._versions = VersionsOnDisk(directory, check=lambda folder: None, keep=keep)
        self._weights = weights
        self._config = Path(config)
        if not self._config.is_file():
            raise ConfigError(f"`config` must be a config.json, got {config}.")
        self._local = Path(os.path.abspath(local))
        self._patch: Callable[[str, Path], Any] = patch or (
            lambda _, file: apply_delta(file, self._local)
        )
        self._last: dict[str, Tensor] = {}
        """A copy of the last version's weights in host memory, by name."""
        self._name = ""
        self._version: int | None = None
        self._members: Sequence[Engine] = ()
        """The engines of the last update, whose hosts are patched before the next pause."""
        self._ready: set[str] = set()
        """The engines whose hosts have the version that is prepared."""
        self._writing = asyncio.Lock()
        self.written_bytes = 0

    async def prepare(self, version: int) -> None:
        """Write what changed, and patch the engines' hosts while the engines generate.

        Raises:
            ConfigError: if torch is not installed, or `weights` yields nothing.
        """
        self._version = None
        await self._versions.write(version, self._write)
        self._version = version
        ready = await call_each(self._members, lambda engine: self._bring(engine, version))
        self._ready = {name for name, error in ready.items() if error is None}

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Let every engine load its host's checkpoint, in parallel.

        Raises:
            ConfigError: if `version` was not prepared.
        """
        if version != self._version:
            raise ConfigError(f"version {version} was not prepared, or a newer one was.")

        async def load(engine: DiskEngine) -> None:
            if engine.name not in self._ready:
                await self._bring(engine, version)
            await engine.update_from_disk(self._local, version)

        takers: Takers[DiskEngine] = Takers(engines, RefitFromDisk, "load weights from a disk")
        await takers.each(load)
        self._members = takers.left
        await self._versions.forget(version)
        return takers.outcomes

    async def _bring(self, engine: Engine, version: int) -> None:
        """Patch the checkpoint on the engine's host, by all weights if the changes do not fit."""
        folder = self._versions.path(version)
        delta, full = folder / _DELTA, folder / _FULL
        if delta.exists():
            if await self._apply(engine, delta):
                return
            log.warning("%s gets all weights version=%d", engine.name, version)
        async with self._writing:
            if not full.exists():
                await in_thread(self._write_full, full)
        if not await self._apply(engine, full):
            raise EngineError(engine.name, f"has no checkpoint: {full} was not applied.")

    async def _apply(self, engine: Engine, file: Path) -> bool:
        done = await in_thread(self._patch, engine.name, file)
        return bool(await done if inspect.isawaitable(done) else done)

    async def _write(self, folder: Path) -> None:
        """Write the next version into an empty folder."""
        previous, self._name = self._name, secrets.token_hex(8)
        before, self._last = self._last, {}
        found: dict[str, Pieces] = {}

        def add(name: str, tensor: Tensor) -> None:
            copy = tensor.detach().to("cpu", copy=True).contiguous()
            indices = changed_elements(before.pop(name, None), copy)
            self._last[name] = copy
            if indices is not None:
                found[name] = _described(encode(bits(copy).numpy(), indices.numpy()), tensor)

        await read_each(self._weights, add)
        if not self._last:
            raise ConfigError("weights() gave no tensors; it has to give all, each time.")
        await in_thread(shutil.copyfile, self._config, folder / "config.json")
        self.written_bytes = 0
        if before or found.keys() != self._last.keys():
            await in_thread(self._write_full, folder / _FULL)
        else:
            self.written_bytes = await in_thread(
                write, folder / _DELTA, self._name, previous, found, self._flats()
            )

    def _write_full(self, path: Path) -> None:
        pieces = {
            name: _described(encode(flat, None), tensor)
            for (name, tensor), flat in zip(self._last.items(), self._flats(), strict=True)
        }
        self.written_bytes += write(path, self._name, "", pieces, self._flats())

    def _flats(self) -> list[Any]:
        return [bits(tensor).numpy() for tensor in self._last.values()]


def changed_elements(last: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Return the flat indices of the changed elements (int64, ascending, on the tensor's device).

    None if there is no last tensor, or one of another dtype or shape. 0.0 and -0.0 differ.
    """
    if last is None or last.dtype != tensor.dtype or last.shape != tensor.shape:
        return None
    differs = bits(tensor) != bits(last.to(tensor.device))
    return differs.nonzero().flatten()


def bits(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor in one row, as integers of their size."""
    with extra("torch"):
        import torch
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().flatten().view(sizes[tensor.element_size()])


def _described(pieces: Pieces, tensor: Tensor) -> Pieces:
    dtype = str(tensor.dtype).removeprefix("torch.").upper()
    for long, short in _SHORTER:
        dtype = dtype.replace(long, short)
    dtype = dtype.removesuffix("FNU").removesuffix("FN")
    pieces[0].update(dtype=dtype, shape=list(tensor.shape), item=tensor.element_size())
    return pieces
