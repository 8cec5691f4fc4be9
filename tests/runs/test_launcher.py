"""Processes of a run: ready lines, logs in errors, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.launchers import ProcessSpec
from miles_core.errors import EnvironmentFailure
from miles_core.runs.launcher import LocalLauncher

WAITS = "import sys; print('{\"ok\": true}', flush=True); sys.stdin.read()"


def spec(tmp_path: Path, code: str, **changes: object) -> ProcessSpec:
    return ProcessSpec(name="child", command=[sys.executable, "-c", code], log=tmp_path / "child.log", **changes)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_ready_line_and_stop(tmp_path: Path) -> None:
    launcher = LocalLauncher(ComponentConfig())
    process = await launcher.launch(spec(tmp_path, WAITS))
    assert process.ready == {"ok": True}
    assert process.alive()
    assert await process.stop() == 0
    assert await process.stop() == 0, "idempotent"


async def test_a_process_that_ignores_eof_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, time; c = subprocess.Popen(['sleep', '60']); "
        "print('{\"pid\": %d}' % c.pid, flush=True); time.sleep(60)"
    )
    launcher = LocalLauncher(ComponentConfig())
    process = await launcher.launch(spec(tmp_path, code))
    child = int(str(process.ready["pid"]))
    await process.stop(grace=0.2)
    await asyncio.sleep(0.1)
    assert not alive(process.pid)
    assert not alive(child) or Path(f"/proc/{child}/stat").read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('why I died', file=sys.stderr); sys.exit(3)", r"ended with status 3[\s\S]*why I died"),
        ("print('hello', flush=True); import time; time.sleep(60)", "ready line"),
        ("print('[1]', flush=True); import time; time.sleep(60)", "expected a JSON object"),
        ("import time; time.sleep(60)", "was not ready after 1 s"),
    ],
)
async def test_a_process_that_does_not_come_up(tmp_path: Path, code: str, message: str) -> None:
    launcher = LocalLauncher(ComponentConfig())
    with pytest.raises(EnvironmentFailure, match=message):
        await launcher.launch(spec(tmp_path, code, ready_timeout=1.0))


def test_children_end_when_the_controller_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from miles_core.contracts.component import ComponentConfig
        from miles_core.contracts.launchers import ProcessSpec
        from miles_core.runs.launcher import LocalLauncher
        async def main():
            p = await LocalLauncher(ComponentConfig()).launch(ProcessSpec(name="c", command=[sys.executable, "-c",
            {WAITS!r}], log=Path({str(tmp_path / "log")!r})))
            print(p.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """)
    controller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    child = int(controller.stdout.readline())
    controller.kill()
    controller.wait()
    controller.stdout.close()
    end = time.monotonic() + 10
    while alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(child)
