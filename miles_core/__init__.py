"""miles-core: reinforcement-learning post-training in which the trainer sees exactly what the policy sampled.

The package imports nothing heavy: the names below are loaded on first use (PEP 562), so that
``import miles_core`` costs a few milliseconds and never brings torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.config.load import load_config as load_config
    from miles_core.config.run import RunConfig as RunConfig
    from miles_core.data.group import Batch as Batch
    from miles_core.data.group import Episode as Episode
    from miles_core.data.group import Group as Group
    from miles_core.data.trajectory import Status as Status
    from miles_core.data.trajectory import Trajectory as Trajectory
    from miles_core.data.trajectory import Turn as Turn
    from miles_core.errors import MilesError as MilesError
    from miles_core.plugins import PluginManager as PluginManager
    from miles_core.plugins import hookimpl as hookimpl

__version__ = "0.1.0"

_HOMES = {
    "Batch": "miles_core.data.group",
    "Episode": "miles_core.data.group",
    "Group": "miles_core.data.group",
    "MilesError": "miles_core.errors",
    "PluginManager": "miles_core.plugins",
    "RunConfig": "miles_core.config.run",
    "Status": "miles_core.data.trajectory",
    "Trajectory": "miles_core.data.trajectory",
    "Turn": "miles_core.data.trajectory",
    "hookimpl": "miles_core.plugins",
    "load_config": "miles_core.config.load",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'miles_core' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
