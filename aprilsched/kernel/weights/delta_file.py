"""The file that brings one version to a host, and how it patches that host's checkpoint.

A file has the length of its JSON header in 8 bytes, the header, the values, and the CRC-32 of all.
A delta replaces elements of one version by those of the next one; a full file starts from nothing.
``python -m aprilsched.kernel.weights.delta_file FILE FOLDER`` applies one, with exit status 1 if
the folder needs a full file instead. It needs numpy, and neither torch nor a server.

- A checkpoint counts as a version only if every tensor has that version's checksum.
- A state file names the version. While it is patched, the file names both versions, and
  only the same delta may continue after a crash: replaced values can be replaced again.
- One process at a time patches a folder.
"""

from __future__ import annotations

import json
import logging
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("aprilsched")

CHECKPOINT = "model.safetensors"
_STATE, _LOCK, _CONFIG = "aprilsched-delta.json", ".aprilsched-delta.lock", "config.json"
_LENGTH_BYTES = 8
_CRC_BYTES = 4
Array = NDArray[Any]
Pieces = tuple[dict[str, Any], Array, Array]
"""What a file records of one tensor, the places of its new values, and the values."""


def encode(flat: Array, indices: Array | None) -> Pieces:
    """Describe the elements at `indices` (ascending) of a flat tensor; None stands for all.

    The places are distances of 1, 2 or 4 bytes, unless all elements are shorter.
    """
    if indices is not None:
        distances = np.diff(indices, prepend=-1) - 1
        places: Array = distances.astype(np.min_scalar_type(int(distances.max(initial=0))))
        if places.nbytes + len(indices) * flat.itemsize < flat.nbytes:
            return {"form": f"u{places.itemsize}"}, places, flat[indices]
    return {"form": "all"}, np.zeros(0, np.uint8), flat


def write(
    path: Path, name: str, previous: str, tensors: Mapping[str, Pieces], flats: Iterable[Array]
) -> int:
    """Write a file, whole or not at all; returns its size in bytes.

    Args:
        name: the version's unique name.
        previous: the name of the version that is patched; empty for a full file.
        tensors: by the tensor's name its description (with "dtype", "shape"), places and values.
        flats: the whole tensors, for their checksums.
    """
    at = 0
    for (entry, *arrays), crc in zip(tensors.values(), _checksums(flats), strict=True):
        entry |= {"crc": crc, "at": at, "bytes": [array.nbytes for array in arrays]}
        at += sum(entry["bytes"])
    header = {
        "name": name,
        "previous": previous,
        "tensors": {key: entry for key, (entry, *_) in tensors.items()},
    }
    text = json.dumps(header).encode()
    parts = [len(text).to_bytes(_LENGTH_BYTES, "little"), text]
    writing = path.with_name(f".{path.name}")
    crc = 0
    with writing.open("wb") as file:
        for part in (*parts, *(a for _, *arrays in tensors.values() for a in arrays)):
            data = part if isinstance(part, bytes) else part.view(np.uint8).data
            file.write(data)
            crc = zlib.crc32(data, crc)
        file.write(crc.to_bytes(_CRC_BYTES, "little"))
    writing.rename(path)
    return path.stat().st_size


def apply_delta(source: Path, folder: Path) -> bool:
    """Bring the checkpoint in `folder` to the version of the file `source`.

    Returns False if that needs another file: the folder has another version than the delta starts
    from, or the file or the checkpoint is damaged. The log has the reason.

    Raises:
        OSError: if a file cannot be read or written.
    """
    import fcntl  # Windows has none, and the package is imported there.

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            header, payload = _read(source)
            if _state(folder) == {"name": header["name"]}:
                return True
            if header["previous"]:
                _patch(header, payload, folder)
            else:
                _copy(header, payload, source, folder)
        except (ValueError, LookupError, FileNotFoundError) as error:
            log.warning("%s was not patched: %s source=%s", folder, error, source)
            return False
        return True


def _read(source: Path) -> tuple[dict[str, Any], Array]:
    data = np.memmap(source, np.uint8, "r")
    found = int.from_bytes(data[-_CRC_BYTES:].tobytes(), "little")
    if zlib.crc32(data[:-_CRC_BYTES].data) != found:
        raise ValueError("the file's checksum is wrong")
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    return json.loads(data[_LENGTH_BYTES:end].tobytes()), data[end:-_CRC_BYTES]


def _patch(header: dict[str, Any], payload: Array, folder: Path) -> None:
    state = _state(folder)
    if (
        state.get("name") != header["previous"]
        or state.get("next", header["name"]) != header["name"]
    ):
        raise ValueError(f"it has version {state}, and the delta starts from {header['previous']}")
    checkpoint = np.memmap(folder / CHECKPOINT, np.uint8, "r+")
    start, layout = _layout(checkpoint)
    _note(folder, {"name": header["previous"], "next": header["name"]})
    flats = {
        key: checkpoint[start + at["data_offsets"][0] : start + at["data_offsets"][1]]
        for key, at in layout.items()
    }
    for key, entry in header["tensors"].items():
        _replace(flats[key].view(f"u{entry['item']}"), entry, payload)
    _check(header, [flats[key] for key in header["tensors"]])
    _note(folder, {"name": header["name"]})


def _replace(flat: Array, entry: dict[str, Any], payload: Array) -> None:
    form, (first, second), at = entry["form"], entry["bytes"], entry["at"]
    values = payload[at + first : at + first + second].view(flat.dtype)
    places = payload[at : at + first]
    if form == "all":
        flat[:] = values
    else:
        flat[np.cumsum(places.view(form).astype(np.int64) + 1) - 1] = values


def _copy(header: dict[str, Any], payload: Array, source: Path, folder: Path) -> None:
    """Write the checkpoint anew, in the layout of safetensors."""
    tensors: dict[str, Any] = header["tensors"]
    end = 0
    layout: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for key, entry in tensors.items():
        offsets = [end, end := end + entry["bytes"][1]]
        layout[key] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": offsets}
    text = json.dumps(layout).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    _check(header, [payload[entry["at"] :][: entry["bytes"][1]] for entry in tensors.values()])
    (folder / _STATE).unlink(missing_ok=True)
    (folder / _CONFIG).write_bytes((source.parent / _CONFIG).read_bytes())
    writing = folder / f".{CHECKPOINT}"
    with writing.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        payload.tofile(file)
    writing.rename(folder / CHECKPOINT)
    _note(folder, {"name": header["name"]})


def _layout(checkpoint: Array) -> tuple[int, dict[str, Any]]:
    start = _LENGTH_BYTES + int.from_bytes(checkpoint[:_LENGTH_BYTES].tobytes(), "little")
    layout = json.loads(checkpoint[_LENGTH_BYTES:start].tobytes())
    layout.pop("__metadata__", None)
    return start, layout


def _check(header: dict[str, Any], flats: Sequence[Array]) -> None:
    for (key, entry), crc in zip(header["tensors"].items(), _checksums(flats), strict=True):
        if crc != entry["crc"]:
            raise ValueError(f"the checksum of {key} is wrong")


def _checksums(flats: Iterable[Array]) -> list[int]:
    """The CRC-32 of each tensor; zlib lets other threads run."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(zlib.crc32, (flat.view(np.uint8).data for flat in flats)))


def _state(folder: Path) -> dict[str, str]:
    try:
        return json.loads((folder / _STATE).read_text())
    except (FileNotFoundError, ValueError):  # It is empty after some power losses.
        return {}


def _note(folder: Path, state: dict[str, str]) -> None:
    writing = folder / f".{_STATE}"
    writing.write_text(json.dumps(state))
    writing.rename(folder / _STATE)


if __name__ == "__main__":
    sys.exit(not apply_delta(Path(sys.argv[1]), Path(sys.argv[2])))
