"""The base of every component: a typed config section, and needs and limits stated as data.

A component is a class. A plugin registers the class under a name; the run builds one instance from the config
section that names it. `requires` and `conflicts` let `miles check` explain an illegal combination in a second,
before anything starts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

__all__ = ["Component", "ComponentConfig", "Conflict", "ConfigT", "Requirement"]


class ComponentConfig(BaseModel):
    """Base of a component's config section: frozen, unknown keys refused, one docstring a field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


ConfigT = TypeVar("ConfigT", bound=ComponentConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requirement:
    """The run config must have `key` (dotted) at one of `values`; an import path when `key` is `import:NAME`.

    `reason` completes the sentence "needs KEY in VALUES, because …".
    """

    key: str
    values: tuple[Any, ...] = ()
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conflict:
    """The run config must not have `key` (dotted) at any of `values`; `reason` completes "cannot …, because …"."""

    key: str
    values: tuple[Any, ...]
    reason: str


class Component(Generic[ConfigT]):
    """A configured component. Subclasses name their section's model as `Config`."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig
    requires: ClassVar[tuple[Requirement, ...]] = ()
    conflicts: ClassVar[tuple[Conflict, ...]] = ()

    def __init__(self, config: ConfigT) -> None:
        self.config = config
