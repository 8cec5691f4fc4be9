"""Tests import their support module by name, whatever the import mode."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _no_disk_is_waited_for(monkeypatch):
    """Synced or not, a process that ends leaves the same files: only a host that loses power does not."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
