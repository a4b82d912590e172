"""Clients' names for the versions of the weights, and the folders that these came from."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from aprilsched.errors import ConfigError, StoreError
from aprilsched.kernel.values.files import read_regular, written_whole

log = logging.getLogger("aprilsched")

_MAX_CHARACTERS = 256
_MAX_LABELS = 1000
"""Number of labels that are kept. Older versions appear as numbers."""


class Weights(msgspec.Struct, frozen=True):
    """Weights that were loaded through the gateway."""

    label: str
    folder: str = ""
    """The folder they were loaded from; empty if they came in calls."""
    stamp: str = ""
    """State of its files, by :func:`~aprilsched.agents.gateway.updates.stamp_of`."""
    tokenizer: str = ""
    """Folder of the gateway's tokenizer at that time; a folder of weights may have none."""


class Labels:
    """The label and the folder of each version, in memory and in a file.

    Args:
        path: the file; None keeps the labels in memory only.

    Attributes:
        tokenizer: folder of the gateway's tokenizer.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.tokenizer = ""
        self._path = path
        self._weights: dict[int, Weights] = {}

    def __getitem__(self, version: int) -> str:
        """Return the label of a version; a version without one is a decimal number."""
        return self.weights(version).label

    def __contains__(self, version: int) -> bool:
        return version in self._weights

    def weights(self, version: int) -> Weights:
        """What is known of a version."""
        return self._weights.get(version) or Weights(str(version))

    def open(self) -> None:
        """Read the labels of the prior process, if there is a file.

        Raises:
            StoreError: if the file is damaged or cannot be read.
        """
        if self._path is None:
            return
        try:
            self._weights = msgspec.json.decode(read_regular(self._path), type=dict[int, Weights])
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            raise StoreError(
                f"The labels in {self._path} cannot be read ({error}); remove the file, and "
                "versions that were loaded before are shown as numbers."
            ) from error

    @staticmethod
    def check(label: str) -> None:
        """Refuse a label that cannot be used.

        Raises:
            ConfigError: if it is empty or longer than 256 characters.
        """
        if not 0 < len(label) <= _MAX_CHARACTERS:
            raise ConfigError(
                f"The label of the weights must have 1 to {_MAX_CHARACTERS} characters, got "
                f"{len(label)}."
            )

    def name(self, version: int, label: str, folder: str = "", stamp: str = "") -> None:
        """Label `version` from now on, and keep where it comes from.

        If the file cannot be written, the error is logged and the new weights are used anyway.
        """
        self._weights[version] = Weights(label, folder, stamp, self.tokenizer)
        for old in sorted(self._weights)[:-_MAX_LABELS]:
            del self._weights[old]
        if self._path is None:
            return
        try:
            with written_whole(self._path) as file:
                file.write(msgspec.json.encode(self._weights))
        except OSError as error:
            log.error("the label of version %d is not saved: %s", version, error)
