"""The subprocess sandbox: output, limits, and nothing left behind, by counting."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from miles_core.errors import EnvironmentFailure
from miles_core.rollout.sandboxes.subprocess import SubprocessSandbox, SubprocessSandboxConfig

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are counted in /proc")


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[SubprocessSandbox]:
    made = SubprocessSandbox(SubprocessSandboxConfig(directory=str(tmp_path), max_output_bytes=1000))
    await made.start()
    yield made
    await made.stop()
    assert list(tmp_path.iterdir()) == []


def count(word: str) -> int:
    """Processes with `word` in their command line, zombies left out."""
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                found += word.encode() in (entry / "cmdline").read_bytes()
            except OSError:
                continue
    return found


async def test_output_status_directory_and_environment(sandbox: SubprocessSandbox):
    result = await sandbox.exec("echo out; echo err >&2; echo $A > f; exit 3", timeout=10, env={"A": "1"})
    assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (3, b"out\n", b"err\n", False)
    assert (sandbox.root / "f").read_text() == "1\n"
    made = await sandbox.exec("mkdir sub && cd sub && pwd", timeout=10)
    again = await sandbox.exec("pwd", cwd="sub", timeout=10)
    assert made.stdout == again.stdout


async def test_secrets_of_the_run_are_not_inherited(sandbox: SubprocessSandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_SECRET", "s3")
    result = await sandbox.exec("env", timeout=10)
    assert b"s3" not in result.stdout
    assert f"HOME={sandbox.root}".encode() in result.stdout


async def test_output_is_bounded(sandbox: SubprocessSandbox):
    result = await sandbox.exec("head -c 5000 /dev/zero", timeout=10)
    assert len(result.stdout) == 1000


@linux
async def test_timeout_kills_the_command_with_its_children(sandbox: SubprocessSandbox):
    """A child in the group, one that made its own session, and output up to then."""
    begin = time.perf_counter()
    result = await sandbox.exec("echo so far; sleep 7781 & setsid sleep 7782 & sleep 7783", timeout=0.3)
    assert result.timed_out
    assert result.stdout == b"so far\n"
    assert result.exit_code != 0
    assert time.perf_counter() - begin < 5
    assert [count(f"sleep\0{n}") for n in (7781, 7782, 7783)] == [0, 0, 0]


@linux
async def test_background_processes_live_until_stop(tmp_path: Path):
    sandbox = SubprocessSandbox(SubprocessSandboxConfig(directory=str(tmp_path)))
    await sandbox.start()
    begin = time.perf_counter()
    result = await sandbox.exec("sleep 7784 & setsid sleep 7785 & echo up", timeout=10)
    assert result.stdout == b"up\n"
    assert time.perf_counter() - begin < 5  # a child that holds the output open does not hold the call
    await asyncio.sleep(0.1)
    assert count("sleep\x007784") == 1
    assert count("sleep\x007785") == 1
    await sandbox.stop()
    assert count("sleep\x007784") + count("sleep\x007785") == 0
    assert list(tmp_path.iterdir()) == []


@linux
async def test_cancelled_command_leaves_nothing(sandbox: SubprocessSandbox):
    running = asyncio.ensure_future(sandbox.exec("sleep 7786 & sleep 7787", timeout=100))
    while not count("sleep\x007787"):
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert count("sleep\x007786") + count("sleep\x007787") == 0


async def test_commands_side_by_side_do_not_mix(sandbox: SubprocessSandbox):
    results = await asyncio.gather(*(sandbox.exec(f"echo {n}", timeout=10) for n in range(8)))
    assert [r.stdout for r in results] == [f"{n}\n".encode() for n in range(8)]


async def test_files_go_in_and_come_out(sandbox: SubprocessSandbox, tmp_path_factory: pytest.TempPathFactory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "tree" / "deep").mkdir(parents=True)
    (outside / "tree" / "deep" / "f").write_text("x")
    await sandbox.upload(outside / "tree", "in/tree")
    assert (await sandbox.exec("cat in/tree/deep/f", timeout=10)).stdout == b"x"
    await sandbox.download("in/tree/deep/f", outside / "back" / "f")
    assert (outside / "back" / "f").read_text() == "x"
    for path in ("../up", "/etc/passwd"):
        with pytest.raises(ValueError, match="outside the sandbox"):
            await sandbox.upload(outside / "tree", path)
        with pytest.raises(ValueError, match="outside the sandbox"):
            await sandbox.download(path, outside / "no")


async def test_directories_without_rights_are_removed_too(sandbox: SubprocessSandbox):
    await sandbox.exec("mkdir -p a/b && touch a/b/f && chmod 0 a/b a", timeout=10)


async def test_stop_is_idempotent_and_final(tmp_path: Path):
    sandbox = SubprocessSandbox(SubprocessSandboxConfig(directory=str(tmp_path)))
    await sandbox.stop()
    await sandbox.start()
    await sandbox.stop()
    await sandbox.stop()
    with pytest.raises(EnvironmentFailure, match="not started, or stopped"):
        await sandbox.exec("true", timeout=1)


async def test_place_that_cannot_be_had():
    with pytest.raises(EnvironmentFailure, match="no temporary directory"):
        await SubprocessSandbox(SubprocessSandboxConfig(directory="/nowhere/at/all")).start()
