"""Disk deltas of one Adam step: bytes, GB/s of dense bytes, memory and the share of verification.

    python benchmarks/sync_delta.py [--megabytes N] [--repeats N] [--directory DIR]

Weights: float32 masters of normal distribution, σ = 0.02, in tensors of 64 MB as bfloat16. Gradients: normal, drawn
anew each step. `torch.optim.Adam` at learning rate 1e-6 takes eight steps on the masters; the base is what bfloat16
makes of them after the seventh, the version after it is that of the eighth. Four tensors are drawn, and used again and
again. Beside it, in the same run: memcpy, xxh3-128 alone, and the whole XOR compressed with zstd level 1. Rates are the
best of the repeats, over dense bytes. Needs miles-transport-diskdelta.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from miles_transport_diskdelta import codec
from miles_transport_diskdelta.replica import Replica
from miles_transport_diskdelta.writer import ChainWriter
from numpy.typing import NDArray

TENSOR_BYTES = 64_000_000
Pairs = list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]


def adam_step(count: int) -> Pairs:
    """(before, after) of each tensor, bfloat16 as bytes."""
    pairs = []
    for index in range(min(count, 4)):
        torch.manual_seed(index)
        master = torch.nn.Parameter(torch.randn(TENSOR_BYTES // 2) * 0.02)
        optimizer = torch.optim.Adam([master], lr=1e-6)
        versions = []
        for step in range(8):
            master.grad = torch.randn(TENSOR_BYTES // 2)
            optimizer.step()
            if step < 6:
                continue
            versions.append(master.detach().to(torch.bfloat16).view(torch.uint8).numpy())
        pairs.append((versions[0], versions[1]))
    return [(pairs[i % 4][0].copy(), pairs[i % 4][1].copy()) for i in range(count)]


def best(function: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    seconds, result = float("inf"), None
    for _ in range(repeats):
        begin = time.perf_counter()
        result = function()
        seconds = min(seconds, time.perf_counter() - begin)
    return seconds, result


class AnonymousMemory:
    """Most anonymous resident bytes beyond those at the start, sampled every millisecond."""

    def __enter__(self) -> AnonymousMemory:
        self._stop, self._start, self.peak = threading.Event(), self._now(), 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, self._now() - self._start)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def codec_table(pairs: Pairs, repeats: int) -> None:
    dense = sum(len(new) for _, new in pairs)
    scratch = [np.empty_like(new) for _, new in pairs]
    for target in scratch:
        target.fill(0)

    def row(what: str, seconds: float, size: int | None = None) -> None:
        share = "" if size is None else f"{size / dense:.2%}"
        print(f"| {what} | {dense / seconds / 1e9:.2f} | {share} |", flush=True)

    changed = sum(np.count_nonzero(a.view(np.uint16) != b.view(np.uint16)) for a, b in pairs) / (dense / 2)
    print(f"\n{dense / 1e9:.2f} GB, {changed:.2%} of the values changed\n")
    print("| | GB/s | of the dense bytes |\n|---|---|---|")
    row("memcpy", best(lambda: [np.copyto(t, n) for t, (_, n) in zip(scratch, pairs, strict=True)], repeats)[0])
    row("xxh3-128", best(lambda: [xxhash.xxh3_128_hexdigest(n.data) for _, n in pairs], repeats)[0])
    for encoding in ("xor", "overwrite"):
        blocks: list[bytes] = []
        for threads in (1, 2):
            with ThreadPoolExecutor(threads) as pool:
                mapping = map if threads == 1 else pool.map

                def encode(mapping: Any = mapping, encoding: Any = encoding) -> list[Any]:
                    return list(mapping(lambda pair: codec.encode(*pair, 2, encoding), pairs))

                seconds, encoded = best(encode, repeats)
            blocks = [b"".join(pieces) for pieces, _ in encoded]
            row(f"{encoding}: encode with checksum, {threads} thread(s)", seconds, sum(map(len, blocks)))
        for threads in (1, 2):
            with ThreadPoolExecutor(threads) as pool:
                mapping = map if threads == 1 else pool.map
                seconds = float("inf")
                for _ in range(repeats):
                    for target, (old, _) in zip(scratch, pairs, strict=True):
                        np.copyto(target, old)
                    begin = time.perf_counter()
                    found = list(mapping(lambda t, b, e=encoding: codec.apply(t, memoryview(b), 2, e), scratch, blocks))
                    seconds = min(seconds, time.perf_counter() - begin)
            assert found == [checksum for _, checksum in encoded]
            row(f"{encoding}: apply with checksum, {threads} thread(s)", seconds)
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    seconds, dense_blocks = best(lambda: [compressor.compress((a ^ b).data) for a, b in pairs], 1)
    row("dense XOR, zstd 1: encode, 1 thread", seconds, sum(map(len, dense_blocks)))

    def apply_dense() -> None:
        for target, block in zip(scratch, dense_blocks, strict=True):
            target ^= np.frombuffer(decompressor.decompress(block), np.uint8)

    row("dense XOR, zstd 1: apply, 1 thread", best(apply_dense, 1)[0])


def stream(pairs: Pairs, which: int) -> Iterator[Any]:
    """As a trainer gives them: a copy at a time."""
    for index, pair in enumerate(pairs):
        yield f"layer{index}", "bfloat16", (len(pair[which]) // 2,), pair[which].copy()


def chain_table(pairs: Pairs, directory: Path, threads: int) -> None:
    dense = sum(len(new) for _, new in pairs)
    bucket = 2 * TENSOR_BYTES
    writer = ChainWriter(directory / "chain", directory / "snapshot", bucket_bytes=bucket, threads=threads)
    reader = Replica(directory / "replica", threads=threads)
    reader.bring(writer.chain, writer.publish(0, stream(pairs, 0)).sequence)
    writer.publish(1, stream(pairs, 1))  # brings the writer's own copy to version 0
    reader.bring(writer.chain, 1)
    writer.publish(2, stream(pairs, 0))
    print(f"\n{threads} thread(s), bucket {bucket / 1e6:.0f} MB\n")
    begin = time.perf_counter()
    with AnonymousMemory() as memory:
        entry = writer.publish(3, stream(pairs, 1))
    publish = time.perf_counter() - begin
    begin = time.perf_counter()
    reader.bring(writer.chain, entry.sequence)
    bring = time.perf_counter() - begin
    hashing, _ = best(lambda: [xxhash.xxh3_128_hexdigest(n.data) for _, n in pairs], 2)
    print("| | |\n|---|---|")
    print(f"| publish (move own copy, encode, write, sync) | {publish:.2f} s, {dense / publish / 1e9:.2f} GB/s |")
    print(f"| peak memory of it | {memory.peak / 1e6:.0f} MB, {memory.peak / bucket:.2f} buckets |")
    print(f"| reader, two versions | {bring:.2f} s, {2 * dense / bring / 1e9:.2f} GB/s |")
    print(
        f"| one pass of xxh3-128, 1 thread | {hashing:.3f} s, {hashing / (publish + bring):.1%} of both |", flush=True
    )
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    pairs = adam_step(max(1, options.megabytes * 1_000_000 // TENSOR_BYTES))
    codec_table(pairs, options.repeats)
    for threads in (1, 2):
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            chain_table(pairs, Path(directory) / "run", threads)


if __name__ == "__main__":
    main()
