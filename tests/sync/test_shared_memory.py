"""Buffers of the shared-memory sender: used again, never under a reader."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from miles_core.contracts.transports import Published  # noqa: E402
from miles_core.data.checksums import checksum  # noqa: E402
from miles_core.sync.shared_memory import SharedMemorySender  # noqa: E402
from miles_core.sync.staging import aligned_offsets  # noqa: E402


@pytest.fixture
def sender() -> Iterator[SharedMemorySender]:
    sender = SharedMemorySender()
    yield sender
    sender.close()


def send(sender: SharedMemorySender, version: int, large: int = 400_000) -> Published:
    generator = torch.Generator().manual_seed(version)
    weights = [
        ("a", torch.randn(large, generator=generator)),
        ("empty", torch.zeros(0)),
        ("b", torch.ones(3) * version),
    ]
    published = sender.send(version, iter(weights))
    assert [tensor.checksum for tensor in published.tensors] == [checksum(t.numpy().tobytes()) for _, t in weights]
    assert holds(published)
    return published


def path_of(published: Published) -> Path:
    return Path(str(published.address["path"]))


def holds(published: Published) -> bool:
    """Whether the file has the version's bytes."""
    data = path_of(published).read_bytes()
    offsets, _ = aligned_offsets(tensor.nbytes for tensor in published.tensors)
    parts = [data[start : start + t.nbytes] for start, t in zip(offsets, published.tensors, strict=True)]
    return [checksum(part) for part in parts] == [tensor.checksum for tensor in published.tensors]


def test_two_buffers_in_turn(sender: SharedMemorySender) -> None:
    versions = [send(sender, version) for version in range(5)]
    assert len({path_of(published) for published in versions}) == 2
    assert holds(versions[3])
    assert holds(versions[4])
    assert not holds(versions[2])


def test_a_buffer_that_is_read_is_left_alone(sender: SharedMemorySender) -> None:
    first = send(sender, 1)
    reader = os.open(path_of(first), os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    size = os.fstat(reader).st_size
    before = os.pread(reader, size, 0)
    later = [send(sender, version) for version in (2, 3, 4)]
    assert path_of(first) not in {path_of(published) for published in later}
    assert os.pread(reader, size, 0) == before
    os.close(reader)


def test_the_same_version_again_leaves_the_one_before(sender: SharedMemorySender) -> None:
    send(sender, 1)
    before = send(sender, 2)
    send(sender, 3)
    again = send(sender, 3)
    assert holds(before)
    assert holds(again)


def test_versions_may_grow(sender: SharedMemorySender) -> None:
    for version, large in enumerate((1000, 900_000, 10, 2_000_000, 300)):
        send(sender, version, large)


def test_nobody_reads_a_buffer_that_is_written(sender: SharedMemorySender) -> None:
    old = path_of(send(sender, 1))
    send(sender, 2)
    refused = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        descriptor = os.open(old, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(descriptor)
        refused.append(True)

    assert path_of(sender.send(3, weights())) == old
    assert refused


def test_a_stream_that_fails_leaves_the_last_version(sender: SharedMemorySender) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        raise OSError("the trainer died")

    send(sender, 1)
    last = send(sender, 2)
    with pytest.raises(OSError, match="died"):
        sender.send(3, broken())
    assert holds(last)
    assert len(list(path_of(last).parent.iterdir())) == 1
    send(sender, 3)
    assert holds(last)
