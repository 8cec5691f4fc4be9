"""The publisher is killed at every point; see `crash_driver.py`."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from pathlib import Path


def test_readers_see_only_complete_entries(tmp_path):
    driver = Path(__file__).with_name("crash_driver.py")
    done = subprocess.run([sys.executable, str(driver), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)
    total = collections.Counter(name for names in points.values() for name in names)
    print({title: len(names) for title, names in points.items()}, dict(total))
    for call in ("write", "torn write", "fsync", "rename", "mkdir", "unlink", "rmdir"):
        assert total[call] > 0, f"the publisher never came to {call}"
    assert sum(total.values()) >= 100
