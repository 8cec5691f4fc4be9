"""Kills a publisher before every system call that changes a file, and inside of every write; prints what was tried.

Run as a script, in a process of its own without threads: it forks a child for each point.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from diskdelta_support import holds, raw
from miles_transport_diskdelta.chain import Chain
from miles_transport_diskdelta.manifest import ChainError
from miles_transport_diskdelta.replica import Replica
from miles_transport_diskdelta.writer import ChainWriter

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
SCENARIOS = {"first full set": 0, "delta": 1, "delta with a snapshot": 3, "delta and collection": 4}
"""Number of versions published before the one that is killed; every third has a snapshot."""
DIED = 9


def arm(point: int, torn: bool, names: list[str]) -> None:
    """Die at the `point`-th call from now on."""

    def wrap(name):
        real = getattr(os, name)

        def call(*arguments, **options):
            names.append(name)
            if len(names) == point:
                if torn and name == "write":
                    real(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
                os._exit(DIED)
            return real(*arguments, **options)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def publish_and_die(directory: Path, before: int, point: int, torn: bool, report: Path) -> None:
    writer = ChainWriter(directory / "chain", directory / "snapshot", snapshot_every=3)
    for version in range(before):
        writer.publish(version, raw(version))
    names: list[str] = []
    arm(point, torn, names)
    writer.publish(before, raw(before))
    report.write_text(json.dumps(names))
    os._exit(0)


def check(directory: Path, before: int) -> None:
    """What readers and the next publisher find."""
    chain = Chain(directory / "chain")
    sequences = chain.sequences()
    assert sequences or before == 0, "the chain is gone"
    for sequence in sequences:
        chain.entry(sequence)
    if sequences:
        last = chain.entry(sequences[-1])
        assert last.version in (before - 1, before), last.version
        for start in sequences:
            reader = Replica(directory / f"reader-{start}")
            for target in (start, sequences[-1]):
                try:
                    entry = reader.bring(chain, target)
                except ChainError:
                    assert target == start < sequences[-1], "the last entry cannot be read"
                    continue
                assert holds(reader, entry.version), f"entry {target}"
    writer = ChainWriter(directory / "chain", directory / "snapshot", snapshot_every=3)
    entry = writer.publish(before + 1, raw(before + 1))
    assert not [p for p in os.listdir(directory / "chain") if p.startswith(".")], "left behind"
    reader = Replica(directory / "reader")
    reader.bring(chain, entry.sequence)
    assert holds(reader, before + 1)
    writer.close()


def main(scratch: Path) -> None:
    os.fsync = lambda descriptor: None  # it is a point to die at; a killed process loses no page that was not synced
    points: dict[str, list[str]] = {}
    for title, before in SCENARIOS.items():
        names: list[str] = []
        for torn in (False, True):
            point = 0
            while True:
                point += 1
                if torn and names[point - 1 : point] not in ([], ["write"]):
                    continue
                directory = scratch / "one"
                directory.mkdir()
                child = os.fork()
                if child == 0:
                    publish_and_die(directory, before, point, torn, scratch / "report")
                _, status = os.waitpid(child, 0)
                code = os.waitstatus_to_exitcode(status)
                assert code in (0, DIED), f"{title}: the publisher failed at point {point}: {code}"
                check(directory, before)
                shutil.rmtree(directory)
                if code == 0:
                    break
            names = json.loads((scratch / "report").read_text())
            assert len(names) == point - 1
            tried = [name for name in names if not torn or name == "write"]
            points[title] = points.get(title, []) + [f"torn {name}" if torn else name for name in tried]
    print(json.dumps(points))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
