"""Clients' names for the versions of the weights."""

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


class Labels:
    """The label of each version, in memory and in a file.

    Args:
        path: the file; None keeps the labels in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._labels: dict[int, str] = {}

    def __getitem__(self, version: int) -> str:
        """Return the label of a version; a version without one is a decimal number."""
        return self._labels.get(version, str(version))

    def __contains__(self, version: int) -> bool:
        return version in self._labels

    def open(self) -> None:
        """Read the labels of the prior process, if there is a file.

        Raises:
            StoreError: if the file is damaged or cannot be read.
        """
        if self._path is None:
            return
        try:
            self._labels = msgspec.json.decode(read_regular(self._path), type=dict[int, str])
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

    def name(self, version: int, label: str) -> None:
        """Label `version` from now on.

        If the file cannot be written, the error is logged and the new weights are used anyway.
        """
        self._labels[version] = label
        for old in sorted(self._labels)[:-_MAX_LABELS]:
            del self._labels[old]
        if self._path is None:
            return
        try:
            with written_whole(self._path) as file:
                file.write(msgspec.json.encode(self._labels))
        except OSError as error:
            log.error("the label of version %d is not saved: %s", version, error)
