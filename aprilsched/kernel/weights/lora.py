"""Publishes LoRA adapters as versions, each under its own name and in addition to those in use.

The trainer writes the adapter into a directory and the engines read it (megabytes, where weights
are gigabytes). The trainer holds the base model and the adapter in training; the engines hold the
same base model, which is never refitted. Nothing is paused: requests of an older adapter end with
that adapter, and its KV is never shared with another adapter's.

- An adapter's directory stays for as long as an engine may read it: a server that keeps a limited
  number of adapters in memory loads an evicted one again from its path.
- A name stands for one adapter: if an earlier run left one under it, that is unloaded first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from aprilsched.errors import ConfigError, EngineRejected
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import TakesAdapters
from aprilsched.kernel.weights.disk import VersionsOnDisk
from aprilsched.kernel.weights.threads import call_each


class LoraPublisher:
    """Publishes LoRA adapters in the PEFT layout.

    SGLang needs ``--enable-lora --max-lora-rank RANK --lora-target-modules MODULE…``, and
    ``--max-loras-per-batch`` of at least 3: the base model, the new adapter, and the one with
    which stragglers still sample; more where several versions may be in flight.

    Args:
        directory: directory on storage that the trainer and every engine see under the same path.
            Each version becomes ``directory/version-00000007``.
        save: function that writes adapter_config.json and adapter_model.safetensors into the empty
            directory that it is given, as PEFT's ``model.save_pretrained`` does. A plain function
            runs in a thread; a coroutine function is awaited.
        keep: number of versions that stay on the disk, besides those that an engine has loaded.
        name: prefix of the adapters' names on the engines; runs that share engines need different
            ones.

    Raises:
        ConfigError: if `keep` is below 1 or `name` is empty.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save: Callable[[Path], object],
        *,
        keep: int = 2,
        name: str = "policy",
    ) -> None:
        if not name:
            raise ConfigError("name is empty; adapters need one on the engines.")
        self._versions = VersionsOnDisk(directory, check=_check_adapter, keep=keep)
        self._save = save
        self._name = name
        self._loaded: dict[int, set[str]] = {}
        """The names of the engines that may read each version."""

    def adapter_name(self, version: int) -> str:
        """The name of the adapter of `version` on the engines, such as "policy-v7"."""
        return f"{self._name}-v{version}"

    def path(self, version: int) -> Path:
        """The path of the adapter of `version`, which may not exist yet."""
        return self._versions.path(version)

    def holds(self, version: int) -> bool:
        """Whether `version` can still be published."""
        return self.path(version).is_dir()

    async def prepare(self, version: int) -> None:
        """Write `version` while the engines generate.

        Raises:
            ConfigError: if what was written is not an adapter.
        """
        await self._versions.write(version, self._save)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Let every engine load the adapter of `version`, in parallel, while it generates.

        Raises:
            ConfigError: if `version` was not prepared.
        """
        await self._versions.check(self.path(version))
        outcomes = await call_each(engines, lambda engine: self._load(engine, version))
        if not any(outcomes.values()):
            await self._versions.forget(version, self._loaded)
        return outcomes

    async def retire(self, version: int, engine: Engine) -> None:
        """Unload the adapter of `version` from `engine`.

        No request may still sample with it: SGLang waits for an adapter's last request and
        loads no other adapter until then.

        Raises:
            EngineError: if the engine does not answer, or refuses.
        """
        if isinstance(engine, TakesAdapters):
            await engine.unload_adapter(self.adapter_name(version))
        engines = self._loaded.get(version, set())
        engines.discard(engine.name)
        if not engines:
            self._loaded.pop(version, None)

    async def _load(self, engine: Engine, version: int) -> None:
        if not isinstance(engine, TakesAdapters) or not engine.capabilities.adapters:
            raise ConfigError(
                f"{engine.name} does not serve LoRA adapters; start it with --enable-lora, or use "
                "another publisher for it."
            )
        name, path = self.adapter_name(version), self.path(version)
        self._loaded.setdefault(version, set()).add(engine.name)
        try:
            await engine.load_adapter(name, path)
        except EngineRejected:
            # An earlier run, or an update that failed elsewhere, may have left this name.
            await engine.unload_adapter(name)
            await engine.load_adapter(name, path)


def _check_adapter(path: Path) -> None:
    names = ("adapter_config.json", "adapter_model.safetensors")
    if not all((path / name).is_file() for name in names):
        raise ConfigError(
            f"{path} holds no LoRA adapter; it needs {names[0]} and {names[1]}, as PEFT writes "
            "them."
        )
