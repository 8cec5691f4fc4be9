"""An engine whose parent dies ends, at whatever moment that is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_a_parent_that_dies_while_the_engine_imports_leaves_nobody(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "miles_core.engines.embedded", "--model", str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said, complained = process.communicate(timeout=60)  # standard input ends at once
    assert process.returncode == 1
    assert not said
    assert b"config.json" not in complained, "it came as far as its arguments: torch was imported for nobody"


def test_an_end_that_hangs_is_made_short(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from miles_core.lifeline import Lifeline\n"
        "lifeline = Lifeline(grace=0.2)\n"
        "lifeline.on_end = lambda: None\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 1
    process.stdout.close()


def test_a_standard_input_that_is_no_pipe_ends_nobody() -> None:
    """An engine that a user puts into the background reads `/dev/null`."""
    program = (
        "import time\n"
        "from miles_core.lifeline import Lifeline\n"
        "Lifeline(grace=0.0)\n"
        "time.sleep(0.5)\n"
        "print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"still here\n")
