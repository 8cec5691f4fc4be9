"""Faults against the laws of every component, in rewards."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from miles_core.contracts.component import ComponentConfig, Conflict, Requirement
from miles_core.contracts.filters import GroupFilter
from planted_faults import imports_torch, scaffolded

Good = scaffolded("rewards")
GOOD = (Good,)


class Undocumented(Good):
    pass


class _Thawed(ComponentConfig):
    model_config = ConfigDict(frozen=False)


class Thawed(Good):
    """Its section can be changed."""

    Config = _Thawed


class _Foreign(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ForeignSection(Good):
    """Its section is another library's."""

    Config = _Foreign


class _Loose(ComponentConfig):
    model_config = ConfigDict(extra="ignore")


class Loose(Good):
    """A misspelled key has no effect."""

    Config = _Loose


class _Silent(ComponentConfig):
    told: int = 0
    """It says what it is."""
    silent: int = 0


class Silent(Good):
    """One key is a riddle."""

    Config = _Silent


class NoReason(Good):
    """A need without a reason."""

    requires = (Requirement(key="engine.use", values=("embedded",), reason=" "),)


class ListOfNeeds(Good):
    """A list can be changed by everybody."""

    requires = [Requirement(key="import:json", reason="it writes JSON")]  # noqa: RUF012


class NeedOfNothing(Good):
    """A need that no value meets."""

    requires = (Requirement(key="engine.use", reason="it needs an engine"),)


class TextForConflict(Good):
    """A limit in prose."""

    conflicts = ("engine.use = 'sglang'",)


class ConflictWithoutKey(Good):
    """A limit on nothing."""

    conflicts = (Conflict(key="", values=(1,), reason="it must not be"),)


class OfAnotherKind(GroupFilter[ComponentConfig]):
    """A filter, offered as a reward."""

    def drop_reason(self, group, rewards):
        return None


class _Required(ComponentConfig):
    path: str
    """A key without a default."""


class WithoutExample(Good):
    """Nobody says how to try it."""

    Config = _Required


class Abstract(Good):
    """Half a component."""

    def __new__(cls, config):
        raise TypeError("abstract")


FAULTS = {
    "class_is_documented": (Undocumented,),
    "config_is_frozen": (Thawed, ForeignSection),
    "config_refuses_unknown_keys": (Loose,),
    "config_keys_are_documented": (Silent,),
    "needs_and_limits_are_data": (NoReason, ListOfNeeds, NeedOfNothing, TextForConflict, ConflictWithoutKey),
    "instance_is_of_its_kind": (OfAnotherKind, WithoutExample, Abstract),
    "base_process_imports_no_torch": (imports_torch.HeavyReward,),
}
