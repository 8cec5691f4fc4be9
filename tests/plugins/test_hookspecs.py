"""The hook page is complete, typed and documented."""

from __future__ import annotations

import inspect

import pytest

from miles_core import hookspecs
from miles_core.plugins import REGISTRATION_HOOKS, PluginManager

HOOKS = [name for name in vars(hookspecs) if name.startswith("miles_")]
KINDS = {
    "miles_model_families",
    "miles_message_matchers",
    "miles_agent_environments",
    "miles_generate_environments",
    "miles_rollout_environments",
    "miles_sandboxes",
    "miles_data_sources",
    "miles_rewards",
    "miles_group_filters",
    "miles_advantage_estimators",
    "miles_loss_terms",
    "miles_corrections",
    "miles_engines",
    "miles_train_backends",
    "miles_weight_transports",
    "miles_precision_contracts",
    "miles_launchers",
    "miles_trackers",
}


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_documented_and_typed(name: str) -> None:
    function = getattr(hookspecs, name)
    assert len((function.__doc__ or "").split()) >= 8
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def test_one_registration_hook_a_kind() -> None:
    assert set(REGISTRATION_HOOKS) == KINDS


@pytest.mark.parametrize("name", sorted(set(HOOKS) - KINDS))
def test_event_hooks_name_the_run_first(name: str) -> None:
    assert next(iter(inspect.signature(getattr(hookspecs, name)).parameters)) == "run"


def test_the_core_offers_every_kind_that_the_design_gives_it() -> None:
    manager = PluginManager.discover(enable=["core"])
    without = {hook for hook in REGISTRATION_HOOKS if not manager.names(hook)}
    assert without <= {"miles_message_matchers", "miles_rollout_environments", "miles_precision_contracts"}
