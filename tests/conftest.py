"""Settings of all tests: hypothesis without deadlines and speed checks, because the machines are shared, and the long
tests first, so that no process of several is left alone with one at the end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

MADE_ONCE = ("finished_run", "found_by_ranks", "installed_plugins")
"""Fixtures that take so long to make that all tests of one go to one process."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for fixture in MADE_ONCE:
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(fixture))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
