"""Peak memory of a whole run, all of its processes together, and the largest of each (Linux).

    python benchmarks/peak_memory.py [CONFIG] [--steps N]

Proportional set size, from /proc/PID/smaps_rollup: a page that processes share counts once, so that the weights which
trainer and engine map together are not counted twice.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found, pending = [], [pid]
    while pending:
        current = pending.pop()
        found.append(current)
        try:
            pending += [int(c) for c in Path(f"/proc/{current}/task/{current}/children").read_text().split()]
        except OSError:
            continue
    return found


def name_of(pid: int) -> str:
    """What a process of a run is."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    for part, name in (("engines.embedded", "engine"), ("training.worker", "trainer")):
        if part in command:
            return name
    return "controller"


def proportional_set_size(pid: int) -> int:
    """Bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "examples" / "quickstart.toml")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "miles_core.cli.main", "train", str(options.config), "--quiet"]
        for setting in (f"run.directory={scratch}", "run.name=memory", f"run.steps={options.steps}"):
            command += ["--set", setting]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            sizes: dict[str, int] = {}
            for pid in tree(process.pid):
                try:
                    sizes[name_of(pid)] = sizes.get(name_of(pid), 0) + proportional_set_size(pid)
                except OSError:
                    continue
            sizes["all together"] = sum(sizes.values())
            for name, size in sizes.items():
                peaks[name] = max(size, peaks.get(name, 0))
            time.sleep(1.0)
        if process.returncode:
            raise SystemExit(f"the run ended with status {process.returncode}")
    print(f"{options.config.stem}, {options.steps} steps, peak proportional set size")
    for name, size in sorted(peaks.items(), key=lambda item: item[1]):
        print(f"{name:<14} {size / (1 << 30):>6.2f} GiB")


if __name__ == "__main__":
    main()
