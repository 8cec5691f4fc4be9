"""Mapped files: one mapping a file, a lock as long as it is in use, and none of an old copy."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from miles_core.engines.embedded.mapped import MappedFiles


def writable(path: Path) -> bool:
    """Whether a sender could take the file for another version."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_a_file_is_mapped_once_and_locked_while_it_is_held(tmp_path: Path) -> None:
    path, files = tmp_path / "weights", MappedFiles()
    path.write_bytes(b"one" * 5000)
    first = files.hold(str(path))
    second = files.hold(str(path))
    assert first.data is second.data
    assert not writable(path)
    del first
    assert not writable(path)
    del second
    assert writable(path)


def test_what_is_written_later_is_seen_and_what_the_engine_writes_stays_its_own(tmp_path: Path) -> None:
    path, files = tmp_path / "weights", MappedFiles()
    path.write_bytes(b"a" * 8192)
    held = files.hold(str(path))
    with path.open("r+b") as file:
        file.write(b"b")
    assert bytes(held.data[:2]) == b"ba"
    held.data[0] = ord("c")
    assert path.read_bytes()[:1] == b"b"
    files.forget()
    assert bytes(files.hold(str(path)).data[:1]) == b"b"


def test_a_file_that_grew_or_was_replaced_is_mapped_anew(tmp_path: Path) -> None:
    path, files = tmp_path / "weights", MappedFiles()
    path.write_bytes(b"a" * 4096)
    files.hold(str(path))
    with path.open("ab") as file:
        file.write(b"b" * 4096)
    assert len(files.hold(str(path)).data) == 8192
    old = files.hold(str(path))
    path.unlink()
    path.write_bytes(b"c" * 100)
    assert bytes(files.hold(str(path)).data) == b"c" * 100
    assert bytes(old.data[:1]) == b"a"


def test_what_is_being_written_or_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    path, files = tmp_path / "weights", MappedFiles()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="empty"):
        files.hold(str(path))
    path.write_bytes(b"a")
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        files.hold(str(path))
    os.close(descriptor)
    assert bytes(files.hold(str(path)).data) == b"a"
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        files.hold(str(path))
    assert len(os.listdir("/proc/self/fd")) == before
