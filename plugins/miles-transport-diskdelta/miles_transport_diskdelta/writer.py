"""The publisher's end of a chain: weights in, complete entries out."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from miles_core.contracts.transports import TensorInfo
from miles_core.sync.staging import aligned
from miles_transport_diskdelta.chain import Chain, DirectoryLock
from miles_transport_diskdelta.codec import Encoding, TooDense, encode
from miles_transport_diskdelta.durable import Output, checksum_of, write_file
from miles_transport_diskdelta.manifest import DELTA, FULL, MANIFEST, ChainError, Entry, Part, layout, width_of
from miles_transport_diskdelta.replica import Replica, in_threads

__all__ = ["ChainWriter", "RawTensor"]

RawTensor: TypeAlias = tuple[str, str, tuple[int, ...], NDArray[np.uint8]]
"""Checkpoint name, dtype name, shape, and the bytes in row-major order, uint8 [n]."""

_Encoded: TypeAlias = tuple[TensorInfo, Part, Sequence[bytes | memoryview]]


class ChainWriter:
    """The one publisher of the chain in `directory`. `snapshot` is where it keeps the weights that the next delta is
    made against: a replica like any reader's, which moves only from complete entry to complete entry.

    The first entry of a writer is a full set; every `snapshot_every`-th holds one too. A tensor of which more than the
    share `whole_above` of the elements changed is written whole. Tensors are taken from the stream until they are
    `bucket_bytes`, and encoded by `threads` threads, one a tensor.
    """

    def __init__(
        self,
        directory: Path,
        snapshot: Path,
        *,
        encoding: Encoding = "xor",
        snapshot_every: int = 20,
        whole_above: float = 0.25,
        bucket_bytes: int = 512 << 20,
        threads: int = 1,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        self.chain = Chain(directory)
        self._lock = DirectoryLock(
            directory / "publisher.lock",
            "another process publishes to this chain; give each run its own [transport] directory",
        )
        try:
            self._snapshot_lock = DirectoryLock(
                snapshot.with_name(f"{snapshot.name}.lock"),
                "another run keeps its snapshot there; give each run its own [transport] replicas",
            )
        except ChainError:
            self._lock.release()
            raise
        self.chain.clean()
        self._replica = Replica(snapshot, threads=threads)
        self._replica.remove()
        self._last: Entry | None = None
        self._since_full = 0
        self._encoding: Encoding = encoding
        self._snapshot_every = snapshot_every
        self._whole_above = whole_above
        self._bucket_bytes = bucket_bytes
        self._threads = threads

    def publish(self, version: int, weights: Iterable[RawTensor]) -> Entry:
        """Write the next entry; the entry, complete and durable. Weights that are the last entry's bit for bit, under
        its version, are that entry again.

        Raises `ChainError` when the tensors are not those of the entry before, `OSError` when it cannot be written:
        nothing has been published then, and the next attempt is made against the same base.
        """
        base = self._base()
        self.chain.clean()
        sequences = self.chain.sequences()
        sequence = sequences[-1] + 1 if sequences else 0
        temporary = self.chain.temporary(sequence)
        temporary.mkdir()
        try:
            entry = self._write(temporary, sequence, version, base, weights)
            if base is not None and base.version == version and base.reference.digest == entry.reference.digest:
                return base
            write_file(temporary / MANIFEST, entry.dump())
            self.chain.complete(sequence)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._last = entry
        self._since_full = 0 if entry.is_full else self._since_full + 1
        self.chain.collect()
        return entry

    def close(self) -> None:
        """Let go of the chain, which stays, and remove the snapshot. Idempotent."""
        self._replica.remove()
        self._snapshot_lock.release()
        self._lock.release()

    def _base(self) -> Entry | None:
        """The last entry, with the snapshot brought to it. None when there is none, or when the chain was damaged, so
        that readers too need a full set."""
        if self._last is None:
            return None
        try:
            return self._replica.bring(self.chain, self._last.sequence)
        except ChainError:
            return None

    def _write(
        self, temporary: Path, sequence: int, version: int, base: Entry | None, weights: Iterable[RawTensor]
    ) -> Entry:
        outputs: dict[str, Output] = {}
        encoded: list[tuple[TensorInfo, Part]] = []
        try:
            if base is not None:
                outputs[DELTA] = Output(temporary / DELTA)
            if base is None or self._since_full + 1 >= self._snapshot_every:
                outputs[FULL] = Output(temporary / FULL)
            for bucket in self._buckets(weights):
                for raw, (tensor, part, pieces) in zip(bucket, self._encode(bucket, base), strict=True):
                    if DELTA in outputs:
                        part = dataclasses.replace(part, offset=outputs[DELTA].size)
                        for piece in pieces:
                            outputs[DELTA].write(piece)
                    if FULL in outputs:
                        outputs[FULL].pad_to(aligned(outputs[FULL].size))
                        outputs[FULL].write(raw[3].data)
                    encoded.append((tensor, part))
                del raw, pieces
            tensors = tuple(tensor for tensor, _ in encoded)
            if base is not None and [t.name for t in base.tensors] != [t.name for t in tensors]:
                other = {t.name for t in base.tensors} ^ {t.name for t in tensors}
                raise ChainError(
                    f"version {version} has other tensors, or another order, than version {base.version}: "
                    f"{', '.join(sorted(other)[:5])}"
                )
            if FULL in outputs:
                outputs[FULL].pad_to(layout(tensors)[1])
            for output in outputs.values():
                output.finish()
        finally:
            for output in outputs.values():
                output.close()
        return Entry(
            sequence=sequence,
            version=version,
            base=None if base is None else base.reference,
            tensors=tensors,
            parts=() if base is None else tuple(part for _, part in encoded),
            files={name: output.size for name, output in outputs.items()},
        )

    def _buckets(self, weights: Iterable[RawTensor]) -> Iterator[list[RawTensor]]:
        bucket: list[RawTensor] = []
        size = 0
        for raw in weights:
            if bucket and size + len(raw[3]) > self._bucket_bytes:
                yield bucket
                bucket.clear()  # nobody holds a tensor of it any more when the next is gathered
                size = 0
            bucket.append(raw)
            size += len(raw[3])
        if bucket:
            yield bucket

    def _encode(self, bucket: Sequence[RawTensor], base: Entry | None) -> list[_Encoded]:
        if base is None:
            return in_threads(_whole, bucket, self._threads)
        held = {tensor.name: tensor for tensor in base.tensors}
        slices = self._replica.bytes_of()

        def one(raw: RawTensor) -> _Encoded:
            before = held.get(raw[0])
            if before is None or (before.dtype, before.shape) != (raw[1], raw[2]):
                other = "not there" if before is None else f"{before.dtype} {list(before.shape)}"
                raise ChainError(f"{raw[0]}: {raw[1]} {list(raw[2])}, but {other} in version {base.version}")
            return self._changes(raw, before, slices[raw[0]])

        return in_threads(one, bucket, self._threads)

    def _changes(self, raw: RawTensor, before: TensorInfo, base: NDArray[np.uint8]) -> _Encoded:
        name, dtype, shape, data = raw
        try:
            pieces, checksum = encode(base, data, width_of(before), self._encoding, whole_above=self._whole_above)
        except TooDense:
            tensor, part, written = _whole(raw)
            return tensor, dataclasses.replace(part, base_checksum=before.checksum), written
        tensor = TensorInfo(name=name, dtype=dtype, shape=shape, nbytes=len(data), checksum=checksum)
        part = Part(
            encoding=self._encoding if pieces else "same",
            offset=0,
            stored=sum(map(len, pieces)),
            stored_checksum=checksum_of(pieces),
            base_checksum=before.checksum,
        )
        return tensor, part, pieces


def _whole(raw: RawTensor) -> _Encoded:
    name, dtype, shape, data = raw
    checksum = xxhash.xxh3_128_hexdigest(data.data)
    tensor = TensorInfo(name=name, dtype=dtype, shape=shape, nbytes=len(data), checksum=checksum)
    part = Part(encoding="whole", offset=0, stored=len(data), stored_checksum=checksum, base_checksum="")
    return tensor, part, [data.data]
