"""A chain: a directory of numbered entries, that one publisher extends and any number of readers follow.

::

    publisher.lock              locked (flock) by the one publisher
    00000017/manifest.json      an entry; the name is its sequence number, which never goes back
    00000017/delta.bin          from entry 16 to entry 17
    00000017/full.bin           every k-th entry: all tensors
    readers/NAME.json           what a reader holds, and until when it says so
    .writing-17, .removing-12   of the publisher; no reader looks at them

Sequence numbers are the chain's own: a run that is resumed from an older checkpoint may publish a version number once
more, with other weights, in a later entry.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import orjson

from miles_transport_diskdelta.durable import replace_file, sync_directory
from miles_transport_diskdelta.manifest import FULL, ChainError, Entry, Reference

__all__ = ["Chain", "DirectoryLock"]

_WRITING, _REMOVING = ".writing-", ".removing-"


class Chain:
    """What stands in a directory; reads it anew at every call."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, sequence: int) -> Path:
        return self.directory / f"{sequence:08d}"

    def temporary(self, sequence: int) -> Path:
        """Where an entry is written before it gets its name."""
        return self.directory / f"{_WRITING}{sequence}"

    def sequences(self) -> list[int]:
        """Of all complete entries, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(name) for name in os.listdir(self.directory) if name.isdigit())

    def entry(self, sequence: int) -> Entry:
        """Raises `ChainError` when it is not there, or damaged."""
        return Entry.load(self.path(sequence), sequence)

    def last_of(self, version: int | None) -> Entry:
        """The last entry, or the last of a version. Raises `ChainError` when there is none."""
        for sequence in reversed(self.sequences()):
            entry = self.entry(sequence)
            if version is None or entry.version == version:
                return entry
        wanted = "no entry" if version is None else f"no entry of version {version}"
        raise ChainError(f"{self.directory}: {wanted}; complete are {_listed(self.sequences())}")

    def between(self, held: Reference, target: int) -> list[Entry]:
        """The entries that lead from what a reader holds to `target`, in order. Raises `ChainError` for a gap, and for
        a base that is not the reader's."""
        entries = []
        for sequence in range(held.sequence + 1, target + 1):
            entry = self.entry(sequence)
            if entry.base != held:
                raise ChainError(f"entry {sequence} is not made from what is held ({held.sequence}, {held.digest})")
            entries.append(entry)
            held = entry.reference
        if held.sequence != target:
            raise ChainError(f"entry {target} is before what is held ({held.sequence})")
        return entries

    def full_before(self, target: int) -> Entry:
        """The last full entry at `target` or before it that can be read. Raises `ChainError`."""
        damaged: ChainError | None = None
        for sequence in reversed(self.sequences()):
            if sequence <= target:
                try:
                    entry = self.entry(sequence)
                except ChainError as error:
                    damaged = error
                    continue
                if entry.is_full:
                    return entry
        raise ChainError(
            f"{self.directory}: no full snapshot at entry {target} or before it; complete are "
            f"{_listed(self.sequences())}"
        ) from damaged

    # Readers.

    def register(self, name: str, sequence: int, lease: float) -> None:
        """Say that reader `name` holds `sequence`, and that entries after it are kept for it for `lease` seconds."""
        directory = self.directory / "readers"
        directory.mkdir(exist_ok=True)
        replace_file(directory / f"{name}.json", orjson.dumps({"sequence": sequence, "expires": time.time() + lease}))

    def unregister(self, name: str) -> None:
        (self.directory / "readers" / f"{name}.json").unlink(missing_ok=True)

    def readers(self) -> dict[str, int]:
        """Name → sequence of the readers whose lease has not run out."""
        found = {}
        for path in sorted((self.directory / "readers").glob("*.json")):
            told = orjson.loads(path.read_bytes())
            if told["expires"] > time.time():
                found[path.stem] = int(told["sequence"])
        return found

    # For the publisher, which holds the lock.

    def clean(self) -> None:
        """Remove what a publisher that died left half written, or half removed."""
        for path in self.directory.glob(f"{_WRITING}*"):
            shutil.rmtree(path)
        for path in self.directory.glob(f"{_REMOVING}*"):
            shutil.rmtree(path)

    def collect(self) -> list[int]:
        """Remove entries that nobody needs; their sequence numbers. Kept are the last full snapshot before the newest
        entry, everything after it, and what follows the entry that a registered reader holds."""
        sequences = self.sequences()
        full = [sequence for sequence in sequences[:-1] if (self.path(sequence) / FULL).exists()]
        keep_from = min([full[-1] if full else sequences[0], *(held + 1 for held in self.readers().values())])
        removed = [sequence for sequence in sequences if sequence < keep_from]
        for sequence in removed:
            hidden = self.directory / f"{_REMOVING}{sequence}"
            os.rename(self.path(sequence), hidden)  # at once: no reader ever sees half an entry
            shutil.rmtree(hidden)
        return removed

    def complete(self, sequence: int) -> None:
        """Give a written entry its name. From here on readers see it."""
        temporary = self.temporary(sequence)
        sync_directory(temporary)
        os.rename(temporary, self.path(sequence))
        sync_directory(self.directory)


class DirectoryLock:
    """A file that one process at a time holds (flock); the system lets go of it when the process ends. Raises
    `ChainError` with `refusal` while another does."""

    def __init__(self, path: Path, refusal: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise ChainError(f"{path}: {refusal}") from error

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def _listed(sequences: Sequence[int]) -> str:
    return f"{sequences[0]} to {sequences[-1]} ({len(sequences)})" if sequences else "none"
