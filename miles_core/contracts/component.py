"""The base of every component: a typed config section, and needs and limits stated as data.

A component is a class. A plugin registers the class under a name; the run builds one instance from the config
section that names it. `requires` and `conflicts` let `miles check` explain an illegal combination in a second,
before anything starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

__all__ = ["Component", "ComponentConfig", "ConfigT", "Conflict", "Example", "Requirement", "Workbench"]


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
    """The run config must not have `key` (dotted) at any of `values`; `reason` completes "cannot …, because …". Without
    values: the config must not have the key, or a table of that name, at all."""

    key: str
    values: tuple[Any, ...]
    reason: str


class Workbench(Protocol):
    """What the conformance kit lends a component for its example; all of it is gone after the check."""

    @property
    def directory(self) -> Path:
        """An empty directory, for files that the settings name."""
        ...

    @property
    def tokenizer(self) -> Path:
        """A directory with a tiny byte-level tokenizer and a ChatML chat template."""
        ...

    def serve(self, answer: Callable[[Any], Any]) -> str:
        """URL of a service on this host that answers a JSON post of `x` with the JSON of `answer(x)`."""
        ...

    def engine(self) -> str:
        """URL of an inference server without a model that speaks SGLang's native protocol, for engines that reach
        servers which others run."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """What the conformance kit tries a component with.

    `settings` are its config section. `inputs` is what the checks of some kinds want beside it:

    | kind | `inputs` |
    |---|---|
    | rewards | (`Prompt`, response text) pairs that can be scored, of which at least one earns other than 0 |
    | model families | names of special tokens that no rendering shows but parsing looks up |
    | weight transports | one subclass of `miles_core.testing.stub_engine.StubEngine` that speaks its protocol |
    | trackers | one function from the run directory to (kind, step, name, value) rows, where they can be read back |

    `unavailable` says why the component cannot be tried here ("needs an account: set E2B_API_KEY"); the checks that
    need an instance are then skipped, and say so.
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple[Any, ...] = ()
    unavailable: str = ""


class Component(Generic[ConfigT]):
    """A configured component. Subclasses name their section's model as `Config`."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig
    requires: ClassVar[tuple[Requirement, ...]] = ()
    conflicts: ClassVar[tuple[Conflict, ...]] = ()

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """How the conformance kit tries this component. Override it when a key of the section is required, or when it
        needs something beside it; default: an empty section."""
        return Example()
