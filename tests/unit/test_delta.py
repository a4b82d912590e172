"""Tests the publisher of changed elements: files, hosts that miss versions, damage and crashes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from aprilsched.errors import ConfigError, EngineError
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.weights.delta import DeltaPublisher, bits
from aprilsched.kernel.weights.delta_file import apply_delta, encode, write
from aprilsched.kernel.weights.publisher import RepublishingPublisher
from tests.sglang.trained import tensors


class Trainer:
    """Weights of several types, of which a step changes a share."""

    def __init__(self) -> None:
        generator = self.generator = torch.Generator().manual_seed(0)
        self.weights: dict[str, Tensor] = {
            "a": torch.randn(70, 33, generator=generator).bfloat16(),
            "b": torch.randn(501, generator=generator),
            "c": torch.randn(7, generator=generator).half(),
        }

    def step(self, share: float = 0.03) -> None:
        for tensor in self.weights.values():
            tensor[torch.rand(tensor.shape, generator=self.generator) < share] *= -1

    def named(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


class Host:
    """An engine on a host of its own: its checkpoint, the files that arrived, what it loaded."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.files: list[str] = []
        self.loaded: dict[str, Tensor] = {}
        self.version = 0
        self.before_patch: Callable[[Path], None] = lambda file: None
        self.damage: dict[str, float] = {}

    async def update_from_disk(self, path: Path, version: int) -> None:
        self.loaded, self.version = dict(tensors(self.folder)), version

    def patch(self, file: Path) -> bool:
        self.before_patch(file)
        self.files.append(file.name)
        if file.name in self.damage:  # On its way to this host.
            self.folder.mkdir(exist_ok=True)
            file = Path(shutil.copy(file, self.folder))
            flip(file, self.damage[file.name])
        return apply_delta(file, self.folder)

    def has(self, weights: dict[str, Tensor]) -> bool:
        return self.loaded.keys() == weights.keys() and all(
            self.loaded[name].dtype == tensor.dtype
            and self.loaded[name].shape == tensor.shape
            and torch.equal(bits(self.loaded[name]), bits(tensor))
            for name, tensor in weights.items()
        )


class World:
    """A trainer and two hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "config.json").write_text("{}")
        self.trainer = Trainer()
        self.hosts = [Host(name, folder / name) for name in ("first", "second")]
        self.publisher = self.restarted()
        self.version = 0

    def restarted(self) -> DeltaPublisher:
        by_name = {host.name: host for host in self.hosts}
        return DeltaPublisher(
            self.folder / "shared",
            lambda: self.trainer.named(),
            config=self.folder / "config.json",
            local=self.folder / "not used by these hosts",
            patch=lambda name, file: by_name[name].patch(file),
        )

    async def update(self, hosts: Sequence[Host] | None = None) -> dict[str, Any]:
        self.version += 1
        engines = cast(Sequence[Engine], self.hosts if hosts is None else hosts)
        await self.publisher.prepare(self.version)
        outcomes = await self.publisher.publish(self.version, engines)
        for host in hosts or self.hosts:
            if outcomes[host.name] is None:
                assert host.has(self.trainer.weights)
                assert host.version == self.version
        return dict(outcomes)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_changes_alone_are_written_and_patched_before_the_pause(world: World):
    assert set((await world.update()).values()) == {None}
    full = world.publisher.written_bytes
    world.trainer.step(0.01)
    await world.publisher.prepare(2)
    assert [host.files for host in world.hosts] == [["full.bin", "delta.bin"]] * 2
    world.version = 1
    world.trainer.step(0.0)
    await world.update()
    assert world.publisher.written_bytes < full / 5
    for share in (0.0, 0.0005, 0.3, 0.9, 1.0):
        world.trainer.step(share)
        await world.update()
    assert "full.bin" not in world.hosts[0].files[1:]
    assert not isinstance(world.publisher, RepublishingPublisher)  # So rolling refits refuse it.


async def test_checkpoint_names_types_as_safetensors_does(world: World):
    names = {
        "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64",
        "C64": "complex64", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
        "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
        "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
    }  # fmt: skip
    row = torch.arange(64, dtype=torch.uint8) % 2
    types = {name: getattr(torch, each) for name, each in names.items()}
    world.trainer.weights = {name: row.clone().view(each) for name, each in types.items()}
    await world.publisher.prepare(1)
    (full,) = (world.folder / "shared").rglob("full.bin")
    assert apply_delta(full, world.folder / "first")
    data = (world.folder / "first" / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    assert {name: entry["dtype"] for name, entry in header.items()} == {
        name: name for name in names
    }


def down(file: Path) -> None:
    raise OSError("the host is down")


async def test_a_host_that_missed_a_version_gets_all_weights_and_others_do_not(world: World):
    await world.update()
    world.trainer.step()
    world.hosts[1].before_patch = down
    await world.update(world.hosts[:1])
    world.hosts[1].before_patch = lambda file: None
    world.trainer.step()
    await world.update()
    assert world.hosts[0].files == ["full.bin", "delta.bin", "delta.bin"]
    assert world.hosts[1].files == ["full.bin", "delta.bin", "full.bin"]
    world.trainer.step()
    await world.update()
    assert world.hosts[1].files[-1] == "delta.bin"


def flip(file: Path, at: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 1.0])
async def test_a_damaged_delta_or_checkpoint_is_replaced_by_all_weights(world: World, at: float):
    await world.update()
    world.trainer.step(0.2)
    world.hosts[0].damage = {"delta.bin": at}
    await world.update()
    assert world.hosts[0].files == ["full.bin", "delta.bin", "full.bin"]
    assert world.hosts[1].files == ["full.bin", "delta.bin"]
    world.hosts[0].damage = {}
    world.trainer.step()
    flip(world.hosts[0].folder / "model.safetensors", at)
    await world.update()
    assert world.hosts[0].files[-2:] == ["delta.bin", "full.bin"]
    assert world.hosts[1].files[-1] == "delta.bin"


async def test_a_damaged_state_file_needs_all_weights(world: World):
    await world.update()
    (world.hosts[0].folder / "aprilsched-delta.json").write_text("")
    world.trainer.step()
    await world.update()
    assert world.hosts[0].files == ["full.bin", "delta.bin", "full.bin"]


async def test_a_host_that_gets_no_valid_file_does_not_load(world: World):
    world.hosts[1].damage = {"full.bin": 0.5}
    outcomes = await world.update()
    assert outcomes["first"] is None
    assert isinstance(outcomes["second"], EngineError)
    assert "full.bin was not applied" in str(outcomes["second"])
    assert world.hosts[1].version == 0


CRASH = """
import os, sys
from pathlib import Path
from aprilsched.kernel.weights import delta_file
replace = delta_file._replace
def crash(flat, entry, payload):
    replace(flat, entry, payload)
    os._exit(9)
delta_file._replace = crash
delta_file.apply_delta(Path(sys.argv[1]), Path(sys.argv[2]))
"""


async def test_a_crash_amid_a_patch_is_continued_by_the_same_delta_only(world: World):
    await world.update()
    world.trainer.step(0.3)

    def crash(file: Path) -> None:
        died = subprocess.run([sys.executable, "-c", CRASH, file, world.hosts[0].folder])
        assert died.returncode == 9

    world.hosts[0].before_patch = crash
    await world.update()
    assert world.hosts[0].files[-1] == "delta.bin"
    # The trainer dies after it has written the next delta; a host dies while it patches.
    world.trainer.step(0.3)
    await world.publisher.prepare(3)
    world.version = 3
    world.trainer.step(0.3)
    await world.publisher.prepare(4)
    world.publisher = world.restarted()
    world.version = 4
    world.hosts[0].before_patch = lambda file: None
    await world.update()
    assert [host.files[-1] for host in world.hosts] == ["full.bin"] * 2


async def test_a_crash_amid_a_patch_and_another_delta_needs_all_weights(world: World):
    await world.update()
    world.trainer.step(0.3)

    def crash(file: Path) -> None:
        subprocess.run([sys.executable, "-c", CRASH, file, world.hosts[0].folder])
        raise OSError("the host died")

    world.hosts[0].before_patch = crash
    outcomes = await world.update()
    assert isinstance(outcomes["first"], OSError)
    state = json.loads((world.hosts[0].folder / "aprilsched-delta.json").read_text())
    assert state.keys() == {"name", "next"}
    world.hosts[0].before_patch = lambda file: None
    world.trainer.step()
    await world.update()
    assert world.hosts[0].files[-2:] == ["delta.bin", "full.bin"]


async def test_other_types_shapes_and_names_are_written_whole(world: World):
    weights = world.trainer.weights
    weights["tied"] = weights["a"]
    await world.update()
    world.trainer.step()  # Both names of a tensor change.
    await world.update()
    assert world.hosts[0].files == ["full.bin", "delta.bin"]
    for change in (
        lambda: weights.update(b=weights["b"].bfloat16()),
        lambda: weights.update(c=torch.ones(8, dtype=torch.float16)),
        lambda: weights.update(a=weights["a"].T, tied=weights["a"].T),
        lambda: weights.pop("tied"),
        lambda: weights.update(new=torch.zeros(3)),
        lambda: weights.update(empty=torch.zeros(0), scalar=torch.tensor(2.0)),
    ):
        change()
        await world.update()
        assert world.hosts[0].files[-1] == "full.bin"
        world.trainer.step()
        await world.update()
        assert world.hosts[0].files[-1] == "delta.bin"


async def test_weights_that_break_off_leave_nothing_wrong_behind(world: World):
    await world.update()
    world.trainer.step()

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "a", world.trainer.weights["a"]
        raise ZeroDivisionError

    world.publisher._weights = broken  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ZeroDivisionError):
        await world.publisher.prepare(2)
    with pytest.raises(ConfigError, match="version 2 was not prepared"):
        await world.publisher.publish(2, [])
    world.publisher._weights = world.trainer.named  # pyright: ignore[reportPrivateUsage]
    await world.update()
    world.publisher._weights = dict  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ConfigError, match="gave no tensors"):
        await world.publisher.prepare(3)


async def test_engines_of_this_host_share_one_checkpoint(tmp_path: Path):
    world = World(tmp_path)
    one, two = world.hosts
    one.folder = two.folder = tmp_path / "local"
    publisher = DeltaPublisher(
        tmp_path / "shared",
        world.trainer.named,
        config=tmp_path / "config.json",
        local=tmp_path / "local",
    )
    for version in (1, 2, 3):
        world.trainer.step()
        await publisher.prepare(version)
        assert set((await publisher.publish(version, cast(Any, world.hosts))).values()) == {None}
        assert one.has(world.trainer.weights)
        assert two.has(world.trainer.weights)
    kept = sorted(path.name for path in (tmp_path / "shared").iterdir())
    assert kept == ["version-00000002", "version-00000003"]
    with pytest.raises(ConfigError, match="`config` must be"):
        DeltaPublisher(tmp_path, dict, config=tmp_path / "none.json", local=tmp_path)


@pytest.mark.parametrize("item", ["u1", "u2", "u4", "u8"])
def test_every_form_of_a_delta_restores_every_change(tmp_path: Path, item: str):
    """Dense, sparse and far apart changes; the shortest form is chosen for each."""
    random = np.random.default_rng(0)
    size = 200_000
    old = random.integers(0, 100, size).astype(item)
    (tmp_path / "config.json").write_text("{}")
    described = {"dtype": {"u1": "U8", "u2": "BF16", "u4": "F32", "u8": "I64"}[item]}
    described |= {"shape": [size], "item": old.itemsize}
    whole, none, values = encode(old, None)
    write(tmp_path / "full.bin", "0", "", {"t": (whole | described, none, values)}, [old])
    forms: set[str] = set()
    changes = [np.zeros(0, int), np.array([size - 1]), np.array([0, size // 2, size - 1])]
    changes += [np.flatnonzero(random.random(size) < share) for share in (0.002, 0.1, 0.2, 0.9)]
    changes += [np.arange(size)]
    for number, indices in enumerate(changes):
        new = old.copy()
        new[indices] += 1
        entry, places, values = encode(new, indices)
        forms.add(entry["form"])
        file = tmp_path / f"delta-{number}.bin"
        written = write(file, "1", "0", {"t": (entry | described, places, values)}, [new])
        assert written < min(len(indices) * 2 + new[indices].nbytes, new.nbytes) + 400
        assert apply_delta(tmp_path / "full.bin", tmp_path / "local")
        assert apply_delta(file, tmp_path / "local")
        assert apply_delta(file, tmp_path / "local")  # It has it already.
        data = (tmp_path / "local" / "model.safetensors").read_bytes()
        assert data[-new.nbytes :] == new.tobytes()
    assert forms == {"u1", "u2", "u4", "all"}


def test_the_command_patches_and_shows_whether_it_did(tmp_path: Path):
    old = np.arange(10, dtype=np.uint16)
    (tmp_path / "config.json").write_text("{}")
    for name, previous, indices in (("full", "", None), ("delta", "another", np.array([3]))):
        entry, places, values = encode(old, indices)
        entry |= {"dtype": "BF16", "shape": [10], "item": 2}
        write(tmp_path / f"{name}.bin", name, previous, {"t": (entry, places, values)}, [old])
    command = [sys.executable, "-m", "aprilsched.kernel.weights.delta_file"]
    for file, code in (("full.bin", 0), ("delta.bin", 1)):
        ended = subprocess.run([*command, tmp_path / file, tmp_path / "local"], check=False)
        assert ended.returncode == code
