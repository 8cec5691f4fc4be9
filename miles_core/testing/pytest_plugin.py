"""Fixtures for plugin tests, loaded by pytest wherever miles-core is installed."""

from __future__ import annotations

import pytest

from miles_core.plugins import PluginManager

__all__ = ["miles_plugins"]


@pytest.fixture
def miles_plugins() -> PluginManager:
    """An isolated plugin manager: the core's own plugin and nothing that happens to be installed."""
    from miles_core import defaults

    manager = PluginManager()
    manager.register(defaults, name="core", distribution="miles-core")
    return manager
