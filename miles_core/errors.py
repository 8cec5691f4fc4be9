"""The exception tree of miles-core, and the boundary that attributes plugin failures.

::

    MilesError
    ├── ConfigError             one or many problems in a run config (exit status 2)
    ├── PluginError             a plugin could not be found, loaded or trusted
    │   ├── PluginLoadError     its import or registration failed
    │   ├── DuplicateNameError  two owners claim one name
    │   └── UnknownNameError    the config names what nobody registers
    ├── DataError               a data row is malformed: file, line, field
    ├── ModelError              a model reference cannot be resolved, read or converted
    ├── EngineError             an inference engine refused or failed
    │   ├── EngineRefusal       it said 4xx: the request is at fault, never retried
    │   └── EngineUnavailable   transport error or 5xx: retried under a deadline
    ├── EnvironmentFailure      infrastructure of an episode failed: status `failed`, never reward 0
    ├── RewardError             a reward is missing, non-finite or not a number
    ├── NumericsError           NaN or infinity: the step is refused
    ├── PublishError            a policy version did not reach every engine
    ├── LedgerError             a state transition that would lose or double a group
    └── RunDirectoryError       a run directory is in use, incomplete or of another run

Every message says what failed, where the value came from, what is allowed and how to fix it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = [
    "ConfigError",
    "DataError",
    "DuplicateNameError",
    "EngineError",
    "EngineRefusal",
    "EngineUnavailable",
    "EnvironmentFailure",
    "LedgerError",
    "MilesError",
    "ModelError",
    "NumericsError",
    "PluginError",
    "PluginLoadError",
    "Problem",
    "PublishError",
    "RewardError",
    "RunDirectoryError",
    "UnknownNameError",
    "boundary",
    "nearest",
]


class MilesError(Exception):
    """Base of every error that miles-core raises on purpose. Survives pickling as it is, whatever its constructor
    takes: errors travel from trainer processes to the controller."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, dict(self.__dict__))


def _restored(kind: type[MilesError], arguments: tuple[Any, ...], state: dict[str, Any]) -> MilesError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(state)
    return error


class PluginError(MilesError):
    """A plugin could not be found, loaded or trusted."""


class PluginLoadError(PluginError):
    """An entry point failed to import, or what it gave is not a usable plugin."""


class DuplicateNameError(PluginError):
    """Two distributions claim one entry point, or two plugins one component name."""


class UnknownNameError(PluginError):
    """No registered component has the requested name."""


class DataError(MilesError):
    """A data row is malformed. Carries where it stands."""

    def __init__(self, message: str, *, file: str, line: int | None = None, field: str | None = None) -> None:
        place = file if line is None else f"{file}:{line}"
        super().__init__(f"{place}: {message}" if field is None else f"{place}: field {field!r}: {message}")
        self.file = file
        self.line = line
        self.field = field


class ModelError(MilesError):
    """A model reference cannot be resolved, read or converted."""


class EngineError(MilesError):
    """An inference engine refused or failed."""


class EngineRefusal(EngineError):
    """The engine answered 4xx: the request itself is at fault and is never retried."""


class EngineUnavailable(EngineError):
    """A transport error or 5xx that outlived its retries."""


class EnvironmentFailure(MilesError):
    """The infrastructure of an episode failed. The episode is `failed`; it never becomes a reward of 0."""


class RewardError(MilesError):
    """A reward is missing, non-finite or not a number."""


class NumericsError(MilesError):
    """NaN or infinity reached a loss, an advantage or a gradient. The optimizer has not moved."""


class PublishError(MilesError):
    """A policy version was not acknowledged by every engine. The version did not advance."""


class LedgerError(MilesError):
    """A state transition that would lose a group, or count one twice."""


class RunDirectoryError(MilesError):
    """A run directory is in use, incomplete, or belongs to another run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with a run config.

    `key` is the dotted key; `origin` says where its value came from (`run.toml:12`, `--set`, `default`);
    `message` what is wrong and what is allowed; `hint` how to fix it.
    """

    key: str
    message: str
    origin: str = ""
    value: object = None
    hint: str = ""

    def __str__(self) -> str:
        where = f" ({self.origin})" if self.origin else ""
        value = "" if self.value is None else f" = {self.value!r}"
        hint = f"\n    fix: {self.hint}" if self.hint else ""
        return f"{self.key}{value}{where}: {self.message}{hint}"


class ConfigError(MilesError):
    """All problems of a config at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n".join([f"{head} in the config:", *(f"- {p}" for p in self.problems)]))


def nearest(name: str, allowed: Sequence[str]) -> str:
    """A sentence that lists what is allowed and, when one is close, what was probably meant.

    >>> nearest("grop", ["grpo", "ppo"])
    "allowed: grpo, ppo; did you mean 'grpo'?"
    """
    if not allowed:
        return "none is registered"
    listing = f"allowed: {', '.join(sorted(allowed))}"
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"{listing}; did you mean {close[0]!r}?" if close else listing


@contextmanager
def boundary(*, plugin: str, component: str, hook: str) -> Iterator[None]:
    """Attribute whatever a plugin's code raises, once, at the seam where the core calls it.

    The exception keeps its type and traceback; it gains one note that names plugin, component and hook.
    """
    try:
        yield
    except Exception as error:
        note = f"raised in component {component!r} of plugin {plugin!r} (hook {hook})"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
