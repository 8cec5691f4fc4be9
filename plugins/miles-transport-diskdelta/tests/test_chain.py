"""Chains: long ones, readers that are late, and everything that may be wrong with one."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from diskdelta_support import holds, new_reader, raw
from miles_transport_diskdelta import replica as replica_module
from miles_transport_diskdelta.chain import Chain
from miles_transport_diskdelta.manifest import DELTA, FULL, MANIFEST, ChainError
from miles_transport_diskdelta.replica import Replica
from miles_transport_diskdelta.writer import ChainWriter


@pytest.fixture
def writer(tmp_path):
    made = ChainWriter(tmp_path / "chain", tmp_path / "snapshot", snapshot_every=100, whole_above=0.5)
    yield made
    made.close()


def publish(writer, *versions, seed=0):
    return [writer.publish(version, raw(version, seed=seed)) for version in versions]


@pytest.mark.parametrize(("encoding", "threads"), [("xor", 1), ("overwrite", 3)])
def test_200_versions_with_snapshots_and_collection(tmp_path, encoding, threads):
    writer = ChainWriter(
        tmp_path / "chain", tmp_path / "snapshot", encoding=encoding, snapshot_every=20, threads=threads
    )
    near, late = Replica(tmp_path / "near", threads=threads), new_reader(tmp_path, "late")
    for version in range(200):
        (entry,) = publish(writer, version)
        near.bring(writer.chain, entry.sequence)
        assert holds(near, version)
        if version in (30, 80, 199):  # 50 behind, then 119: its entries are gone
            if version == 80:
                assert late.held.sequence == 30
            late.bring(writer.chain, entry.sequence)
            assert holds(late, version)
            writer.chain.register("late", entry.sequence, lease=0 if version == 80 else 60)
        assert len(writer.chain.sequences()) <= 41 or version <= 81
    fulls = [s for s in writer.chain.sequences() if writer.chain.entry(s).is_full]
    assert fulls == [180]
    assert writer.chain.sequences()[0] == 180
    writer.close()


def test_a_registered_reader_keeps_what_it_needs(tmp_path):
    writer = ChainWriter(tmp_path / "chain", tmp_path / "snapshot", snapshot_every=2)
    publish(writer, 0)
    writer.chain.register("slow", 0, lease=60)
    writer.chain.register("quick", 5, lease=60)
    publish(writer, *range(1, 10))
    assert writer.chain.sequences() == list(range(1, 10))
    assert writer.chain.readers() == {"slow": 0, "quick": 5}
    writer.chain.register("slow", 0, lease=-1)
    publish(writer, 10)
    assert writer.chain.sequences()[0] == 6
    writer.chain.unregister("quick")
    publish(writer, 11)
    assert writer.chain.sequences()[0] == 10
    writer.close()


def test_50_behind_goes_by_deltas_when_they_are_fewer_bytes(tmp_path, writer, monkeypatch):
    reader = new_reader(tmp_path)
    reader.bring(writer.chain, publish(writer, 0)[0].sequence)
    last = publish(writer, *range(1, 4))[-1]
    monkeypatch.setattr(Replica, "load", lambda *arguments: pytest.fail("read a snapshot"))
    reader.bring(writer.chain, last.sequence)
    assert holds(reader, 3)


def test_two_readers_at_their_own_pace(tmp_path, writer):
    one, two = new_reader(tmp_path, "one"), new_reader(tmp_path, "two")
    for version in range(12):
        (entry,) = publish(writer, version)
        one.bring(writer.chain, entry.sequence)
        if version % 5 == 4:
            two.bring(writer.chain, entry.sequence)
            assert holds(two, version)
        assert holds(one, version)


def test_a_reader_goes_back(tmp_path, writer):
    entries = publish(writer, 0, 1, 2)
    reader = new_reader(tmp_path)
    for version in (2, 1, 0, 2):
        reader.bring(writer.chain, entries[version].sequence)
        assert holds(reader, version)


def test_a_foreign_base_is_left_for_the_snapshot(tmp_path, writer):
    other = ChainWriter(tmp_path / "other", tmp_path / "other-snapshot")
    reader = new_reader(tmp_path)
    reader.bring(other.chain, publish(other, 0, seed=7)[0].sequence)
    entry = publish(writer, 0, 1)[-1]
    reader.bring(writer.chain, entry.sequence)
    assert holds(reader, 1)
    other.close()


def test_a_reader_with_a_wrong_byte_takes_the_snapshot(tmp_path, writer):
    entries = publish(writer, 0, 1)
    reader = new_reader(tmp_path)
    reader.bring(writer.chain, entries[0].sequence)
    for position in (3, reader.path.stat().st_size - 1):
        reader = new_reader(tmp_path)
        reader.bring(writer.chain, entries[0].sequence)
        with reader.path.open("r+b") as file:
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1]))
        reader = new_reader(tmp_path)  # as after a restart: nothing is known of its bytes
        reader.bring(writer.chain, entries[1].sequence)
        assert holds(reader, 1)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_delta_is_never_applied_twice(tmp_path, encoding):
    """A reader that died after it moved every tensor, and before it said so."""
    writer = ChainWriter(tmp_path / "chain", tmp_path / "snapshot", encoding=encoding)
    entries = publish(writer, 0, 1)
    reader = new_reader(tmp_path)
    reader.bring(writer.chain, entries[0].sequence)
    state = (tmp_path / "reader.json").read_bytes()
    reader.bring(writer.chain, entries[1].sequence)
    (tmp_path / "reader.json").write_bytes(state)
    again = new_reader(tmp_path)
    assert again.held == entries[0].reference
    again.bring(writer.chain, entries[1].sequence)
    assert holds(again, 1)
    writer.close()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("moved", range(6))
def test_a_reader_that_died_between_two_tensors(tmp_path, monkeypatch, encoding, moved):
    writer = ChainWriter(tmp_path / "chain", tmp_path / "snapshot", encoding=encoding)
    entries = publish(writer, 0, 1)
    reader = new_reader(tmp_path)
    reader.bring(writer.chain, entries[0].sequence)
    real, left = Replica._move, [moved]

    def dies(self, *arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        real(self, *arguments)

    monkeypatch.setattr(Replica, "_move", dies)
    with pytest.raises(KeyboardInterrupt):
        reader.bring(writer.chain, entries[1].sequence)
    monkeypatch.undo()
    assert reader.held is None, "half moved, and called a version"
    for again in (reader, new_reader(tmp_path)):
        again.bring(writer.chain, entries[1].sequence)
        assert holds(again, 1)
    writer.close()


def _flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def _truncate(path, position):
    with path.open("r+b") as file:
        file.truncate(position)


@pytest.mark.parametrize("damage", [_flip, _truncate])
@pytest.mark.parametrize("name", [MANIFEST, DELTA, FULL])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_damage_is_found_or_gone_around(tmp_path, damage, name, share):
    """Entries 0 (full), 1, 2, 3 (full), 4: entry 3 is damaged. A reader ends at true weights, or at an error."""
    writer = ChainWriter(tmp_path / "chain", tmp_path / "snapshot", snapshot_every=3)
    writer.chain.register("all", -1, lease=60)
    entries = publish(writer, *range(5))
    assert entries[3].is_full
    fresh, follower = new_reader(tmp_path, "fresh"), new_reader(tmp_path, "follower")
    follower.bring(writer.chain, 2)
    path = writer.chain.path(3) / name
    damage(path, int(share * path.stat().st_size))
    for reader in (fresh, follower):
        try:
            reader.bring(writer.chain, 4)
        except ChainError:
            assert reader.held is None or holds(reader, reader.held.sequence)
        else:
            assert holds(reader, 4)
    if name == FULL and damage is _flip:
        assert holds(follower, 4), "the follower needs no snapshot"
    publish(writer, 5, 6, 7)  # the publisher's own copy goes on, or is replaced by a full set
    for reader in (fresh, follower):
        reader.bring(writer.chain, 7)
        assert holds(reader, 7)
    writer.close()


def test_swapped_versions_are_refused(tmp_path, writer):
    publish(writer, 0, 1, 2)
    chain = writer.chain
    os.rename(chain.path(1), tmp_path / "x")
    os.rename(chain.path(2), chain.path(1))
    os.rename(tmp_path / "x", chain.path(2))
    with pytest.raises(ChainError, match="in another's place"):
        new_reader(tmp_path).bring(chain, 2)
    os.rename(chain.path(1), tmp_path / "x")
    os.rename(chain.path(2), chain.path(1))
    os.rename(tmp_path / "x", chain.path(2))  # back again; and now the deltas alone
    os.rename(chain.path(1) / DELTA, tmp_path / "x")
    os.rename(chain.path(2) / DELTA, chain.path(1) / DELTA)
    os.rename(tmp_path / "x", chain.path(2) / DELTA)
    with pytest.raises(ChainError):
        new_reader(tmp_path).bring(chain, 2)


def test_a_gap_is_an_error_where_no_snapshot_follows_it(tmp_path, writer):
    publish(writer, 0, 1, 2)
    shutil.rmtree(writer.chain.path(1))
    with pytest.raises(ChainError, match="No such file"):
        new_reader(tmp_path).bring(writer.chain, 2)


def test_a_full_disk_publishes_nothing_and_the_base_stays(tmp_path, monkeypatch):
    """At every write of a delta with a snapshot; then the next publish succeeds, from the same base."""
    writer = ChainWriter(tmp_path / "chain", tmp_path / "snapshot", snapshot_every=1)
    publish(writer, 0)
    reader = new_reader(tmp_path)
    real, points, version = os.write, 0, 1
    while True:
        calls = [0]

        def write(descriptor, data, calls=calls, allowed=points):
            calls[0] += 1
            if calls[0] > allowed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, data)

        before = writer.chain.sequences()
        monkeypatch.setattr(os, "write", write)
        try:
            entry = publish(writer, version)[0]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            monkeypatch.undo()
            assert writer.chain.sequences() == before
            points += 1
            continue
        monkeypatch.undo()
        break
    assert points >= 5
    assert entry.base.sequence == before[-1]
    reader.bring(writer.chain, entry.sequence)
    assert holds(reader, 1)
    writer.close()


def test_a_full_disk_at_a_reader(tmp_path, writer, monkeypatch):
    entries = publish(writer, 0, 1)
    reader = new_reader(tmp_path)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(replica_module.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        reader.bring(writer.chain, entries[0].sequence)
    monkeypatch.undo()
    reader.bring(writer.chain, entries[1].sequence)
    assert holds(reader, 1)


def test_a_failed_stream_does_not_move_the_base(tmp_path, writer):
    """What failed is not what the next delta is made against."""
    first = publish(writer, 0)[0]

    def fails():
        for count, tensor in enumerate(raw(1)):
            if count == 3:
                raise RuntimeError("a rank died")
            yield tensor

    with pytest.raises(RuntimeError, match="a rank died"):
        writer.publish(1, fails())
    assert writer.chain.sequences() == [first.sequence]
    entry = publish(writer, 2)[0]
    assert entry.base == first.reference
    reader = new_reader(tmp_path)
    reader.bring(writer.chain, first.sequence)
    reader.bring(writer.chain, entry.sequence)
    assert holds(reader, 2)


def test_two_publishers_are_refused(tmp_path, writer):
    with pytest.raises(ChainError, match="another process publishes"):
        ChainWriter(tmp_path / "chain", tmp_path / "elsewhere")
    with pytest.raises(ChainError, match="another run keeps its snapshot"):
        ChainWriter(tmp_path / "second", tmp_path / "snapshot")
    publish(writer, 0)


def test_a_resumed_publisher_writes_a_full_set(tmp_path):
    for start in (0, 3):
        writer = ChainWriter(tmp_path / "chain", tmp_path / "snapshot")
        entries = publish(writer, start, start + 1, seed=start)
        assert [entry.is_full for entry in entries] == [True, False]
        writer.close()
    assert Chain(tmp_path / "chain").sequences() == [2, 3] or Chain(tmp_path / "chain").sequences() == [0, 1, 2, 3]


def test_the_same_version_again_is_the_same_entry(writer):
    first, second = publish(writer, 4, 4)
    assert first == second
    assert writer.chain.sequences() == [0]


def test_other_tensors_than_before_are_named(writer):
    publish(writer, 0)
    with pytest.raises(ChainError, match="still"):
        writer.publish(1, list(raw(1))[:-1])
    added = [*raw(1), ("new", "uint8", (1,), next(iter(raw(1)))[3][:1])]
    with pytest.raises(ChainError, match="new"):
        writer.publish(1, added)
    assert writer.chain.sequences() == [0]


def test_what_changed_much_is_whole_and_what_did_not_is_nothing(writer):
    entry = publish(writer, 0, 1)[1]
    kinds = {t.name: p.encoding for t, p in zip(entry.tensors, entry.parts, strict=True)}
    assert kinds["norm"] == "whole"
    assert kinds["still"] == kinds["empty"] == "same"
    assert kinds["embed"] == "xor"
