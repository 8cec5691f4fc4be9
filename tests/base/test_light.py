"""The base stays light: no torch, and a start that a person does not notice."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "pyarrow", "reasoning_gym", "math_verify")


def _cpu_seconds(code: str, *, runs: int = 5) -> float:
    """Least CPU time of an interpreter that runs `code`: the least is what it costs when nobody else disturbs."""
    script = f"{code}\nimport resource; u = resource.getrusage(resource.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"
    times = []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        times.append(float(done.stdout.splitlines()[-1]))
    return min(times)


HELP = """
import sys
sys.argv = ["miles", "--help"]
from miles_core.cli.main import main
try:
    main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize(("code", "budget"), [("import miles_core", 0.080), (HELP, 0.250)], ids=["import", "help"])
def test_start_costs_little_cpu(code: str, budget: float) -> None:
    assert _cpu_seconds(code) - _cpu_seconds("pass") < budget


@pytest.mark.parametrize("code", ["import miles_core", HELP], ids=["import", "help"])
def test_start_imports_nothing_heavy(code: str) -> None:
    script = f"{code}\nimport sys; found = [m for m in {HEAVY!r} if m in sys.modules]; assert not found, found"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_plugins_and_preflight_load_no_torch() -> None:
    script = (
        "from pathlib import Path\n"
        "from miles_core.config.load import load_config\n"
        "from miles_core.config.preflight import preflight\n"
        "from miles_core.plugins import PluginManager\n"
        "preflight(load_config(Path('examples/tiny.toml')), PluginManager.discover())\n"
        "import sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
