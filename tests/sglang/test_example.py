"""examples/sglang.toml from end to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_example_runs_and_its_audit_is_clean(server_python: str, tmp_path: Path) -> None:
    settings = (f"run.directory={tmp_path}", f"engine.python={server_python}")
    _miles("train", "examples/sglang.toml", *(part for setting in settings for part in ("--set", setting)))
    audit = _miles("audit", str(tmp_path / "sglang"))
    assert "hard mismatches: 0" in audit


def _miles(*arguments: str) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "miles_core.cli.main", *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
