"""A replica: one full file of weights on a reader's host, brought from entry to entry in place.

The file has the layout of a full snapshot. Beside it, FILE.json says which entry it holds; it is replaced when every
tensor was verified. A reader that dies in between finds, by their checksums, which tensors have already moved.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from miles_core.contracts.transports import TensorInfo
from miles_transport_diskdelta.chain import Chain
from miles_transport_diskdelta.codec import CorruptBlock, apply
from miles_transport_diskdelta.durable import replace_file
from miles_transport_diskdelta.manifest import (
    DELTA,
    FULL,
    ChainError,
    Entry,
    Part,
    Reference,
    digest_of,
    layout,
    width_of,
)

__all__ = ["Replica", "in_threads"]

T = TypeVar("T")
R = TypeVar("R")

_READ_BYTES = 4 << 20


class Replica:
    """Weights in the file `path`; `held` is None until `bring` was called once."""

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        self.path = path
        self._threads = threads
        self._state = path.with_name(f"{path.name}.json")
        self._tensors: tuple[TensorInfo, ...] = ()
        self.held: Reference | None = None
        self._known: dict[str, str] = {}
        """Checksums of tensors whose bytes this process has verified, or written and verified."""
        if self._state.exists() and path.exists():
            self._restore()

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return self._tensors

    def bytes_of(self) -> dict[str, NDArray[np.uint8]]:
        """Every tensor's bytes, mapped for reading."""
        return self._slices("r")

    def bring(self, chain: Chain, target: int) -> Entry:
        """Make the file hold entry `target` of the chain, every tensor verified.

        Goes from delta to delta; from the last full snapshot where that is fewer bytes, or where what is held is not
        what the deltas were made from, or has a wrong checksum. Raises `ChainError`, or `OSError` (a full disk).
        """
        entry = chain.entry(target)
        if self.held == entry.reference and self.path.exists():
            return entry
        try:
            steps = None if self.held is None else chain.between(self.held, target)
        except ChainError:
            steps = None
        if steps is not None and sum(s.files[DELTA] for s in steps) <= sum(t.nbytes for t in entry.tensors):
            try:
                self.follow(chain, steps)
                return entry
            except ChainError:
                pass  # damaged here or in the chain: the snapshot decides
        snapshot = chain.full_before(target)
        self.load(chain, snapshot)
        self.follow(chain, chain.between(snapshot.reference, target))
        return entry

    def remove(self) -> None:
        """Delete the files. Who has mapped them keeps the pages. Idempotent."""
        self.path.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)
        self.held, self._tensors = None, ()
        self._known.clear()

    def _restore(self) -> None:
        state = orjson.loads(self._state.read_bytes())
        tensors = tuple(TensorInfo(**{**t, "shape": tuple(t["shape"])}) for t in state["tensors"])
        if self.path.stat().st_size == layout(tensors)[1]:
            self._tensors = tensors
            self.held = Reference(sequence=state["sequence"], digest=digest_of(tensors))

    def _hold(self, entry: Entry) -> None:
        self._tensors, self.held = entry.tensors, entry.reference
        state = {"sequence": entry.sequence, "tensors": [dataclasses.asdict(t) for t in entry.tensors]}
        replace_file(self._state, orjson.dumps(state))

    def _slices(self, mode: str) -> dict[str, NDArray[np.uint8]]:
        offsets, _ = layout(self._tensors)
        data = np.memmap(self.path, np.uint8, mode=mode)  # type: ignore[call-overload]
        return {t.name: np.asarray(data[offsets[t.name] : offsets[t.name] + t.nbytes]) for t in self._tensors}

    def load(self, chain: Chain, entry: Entry) -> None:
        """Copy a full snapshot beside the file in use, verify it, and put it in its place."""
        self._state.unlink(missing_ok=True)
        self._known.clear()
        self._tensors, self.held = entry.tensors, None
        offsets, size = layout(entry.tensors)
        temporary = self.path.with_name(f".{self.path.name}.loading")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a full disk is an error here, and not a signal at a mapped page
        finally:
            os.close(descriptor)
        data = np.memmap(temporary, np.uint8, mode="r+")
        with _Reading(chain.path(entry.sequence) / FULL) as file:

            def copy(tensor: TensorInfo) -> None:
                offset = offsets[tensor.name]
                target = np.asarray(data[offset : offset + tensor.nbytes])
                self._settle(tensor, file.into(target, offset), entry)

            in_threads(copy, entry.tensors, self._threads)
        os.replace(temporary, self.path)
        self._hold(entry)

    def follow(self, chain: Chain, steps: Sequence[Entry]) -> None:
        """Apply deltas. After a failure nothing is held: some tensors may have moved."""
        for entry in steps:
            self.held = None
            if [t.name for t in entry.tensors] != [t.name for t in self._tensors]:
                raise ChainError(f"entry {entry.sequence} has other tensors than its base")
            slices = self._slices("r+")
            with _Reading(chain.path(entry.sequence) / DELTA) as file:

                def move(
                    pair: tuple[TensorInfo, Part],
                    entry: Entry = entry,
                    slices: dict[str, NDArray[np.uint8]] = slices,
                    file: _Reading = file,
                ) -> None:
                    self._move(*pair, slices[pair[0].name], file, entry)

                in_threads(move, list(zip(entry.tensors, entry.parts, strict=True)), self._threads)
            self._hold(entry)

    def _move(self, tensor: TensorInfo, part: Part, target: NDArray[np.uint8], file: _Reading, entry: Entry) -> None:
        """One tensor from the base's bytes to its own. What is there is checked first: XOR must happen exactly once."""
        now = self._known.get(tensor.name) or xxhash.xxh3_128_hexdigest(target.data)
        if now == tensor.checksum:
            self._known[tensor.name] = now
            return
        self._known.pop(tensor.name, None)
        if part.encoding in ("same", "xor") and now != part.base_checksum:
            raise ChainError(
                f"{tensor.name}: {self.path} holds {now}, and entry {entry.sequence} is made from {part.base_checksum}"
            )
        if part.encoding == "whole":
            self._settle(tensor, file.into(target, part.offset), entry)
            return
        if part.encoding == "same":
            raise ChainError(f"{tensor.name}: entry {entry.sequence} calls it unchanged, with another checksum")
        block = file.read(part.offset, part.stored)
        if xxhash.xxh3_128_hexdigest(block) != part.stored_checksum:
            raise ChainError(f"{tensor.name}: its block in entry {entry.sequence} has a wrong checksum")
        try:
            self._settle(tensor, apply(target, block, width_of(tensor), part.encoding), entry)
        except CorruptBlock as error:
            raise ChainError(f"{tensor.name}: its block in entry {entry.sequence}: {error}") from error

    def _settle(self, tensor: TensorInfo, found: str, entry: Entry) -> None:
        if found != tensor.checksum:
            raise ChainError(
                f"{tensor.name}: after entry {entry.sequence} it has checksum {found}, expected {tensor.checksum}"
            )
        self._known[tensor.name] = found


class _Reading:
    """A file of an entry, read at offsets from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _Reading:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise ChainError(f"{self._path} is gone: the entry was collected meanwhile") from error
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, size: int) -> memoryview:
        data = np.empty(size, np.uint8)
        self.into(data, offset, hashed=False)
        return data.data

    def into(self, target: NDArray[np.uint8], offset: int, *, hashed: bool = True) -> str:
        """Fill `target`; the xxh3-128 of what came. Raises `ChainError` where the file ends early."""
        hasher, done = xxhash.xxh3_128(), 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done : done + _READ_BYTES].data], offset + done)
            if count == 0:
                raise ChainError(f"{self._path} ends at {offset + done}; it was truncated")
            if hashed:
                hasher.update(target[done : done + count].data)
            done += count
        return hasher.hexdigest()


def in_threads(function: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """Results in order. The first error is raised once all have ended: nobody writes any more then."""
    if threads == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
