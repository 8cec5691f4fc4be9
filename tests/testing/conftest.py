"""Puts this directory on the path, so that tests and the interpreters that they start can import `planted_faults`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
