"""One class a kind, to subclass in a plugin's tests: every law of the kind becomes a test method.

::

    from miles_core.testing.suites import RewardSuite

    class TestLength(RewardSuite):
        component = Length
        settings = {"most": 20}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from miles_core.contracts.component import Component
from miles_core.testing.kit import Case, Check, Skipped, check_title, checks_of, run_check

__all__ = [
    "AgentEnvironmentSuite",
    "ComponentSuite",
    "CorrectionSuite",
    "DataSourceSuite",
    "EngineSuite",
    "EstimatorSuite",
    "FamilySuite",
    "FilterSuite",
    "GenerateEnvironmentSuite",
    "LauncherSuite",
    "LossTermSuite",
    "MatcherSuite",
    "PrecisionSuite",
    "RewardSuite",
    "RolloutEnvironmentSuite",
    "SandboxSuite",
    "TrackerSuite",
    "TrainBackendSuite",
    "TransportSuite",
]


class ComponentSuite:
    """Base of the suites. A subclass of one of them names its `component`, and `settings` or `inputs` (see
    `miles_core.contracts.component.Example`) where those of the component's own example are not the ones to test."""

    component: ClassVar[type[Component[Any]]]
    settings: ClassVar[Mapping[str, Any] | None] = None
    inputs: ClassVar[tuple[Any, ...] | None] = None

    def __init_subclass__(cls, *, hook: str = "", **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for check in checks_of(hook) if hook else ():
            name = f"test_{check_title(check).replace(' ', '_')}"
            setattr(cls, name, _method(check, hook))


def _method(check: Check, hook: str) -> Callable[[ComponentSuite], None]:
    def test(self: ComponentSuite) -> None:
        with Case(self.component, settings=self.settings, inputs=self.inputs) as case:
            try:
                run_check(check, hook, case)
            except Skipped as reason:
                pytest.skip(str(reason))

    test.__doc__ = check_title(check).capitalize() + "."
    return test


class FamilySuite(ComponentSuite, hook="miles_model_families"):
    """Model families."""


class MatcherSuite(ComponentSuite, hook="miles_message_matchers"):
    """Message matchers."""


class AgentEnvironmentSuite(ComponentSuite, hook="miles_agent_environments"):
    """Agent environments."""


class GenerateEnvironmentSuite(ComponentSuite, hook="miles_generate_environments"):
    """Generate environments."""


class RolloutEnvironmentSuite(ComponentSuite, hook="miles_rollout_environments"):
    """Rollout environments."""


class SandboxSuite(ComponentSuite, hook="miles_sandboxes"):
    """Sandboxes."""


class DataSourceSuite(ComponentSuite, hook="miles_data_sources"):
    """Data sources."""


class RewardSuite(ComponentSuite, hook="miles_rewards"):
    """Rewards."""


class FilterSuite(ComponentSuite, hook="miles_group_filters"):
    """Group filters."""


class EstimatorSuite(ComponentSuite, hook="miles_advantage_estimators"):
    """Advantage estimators."""


class LossTermSuite(ComponentSuite, hook="miles_loss_terms"):
    """Loss terms."""


class CorrectionSuite(ComponentSuite, hook="miles_corrections"):
    """Corrections."""


class EngineSuite(ComponentSuite, hook="miles_engines"):
    """Engines."""


class TrainBackendSuite(ComponentSuite, hook="miles_train_backends"):
    """Train backends."""


class TransportSuite(ComponentSuite, hook="miles_weight_transports"):
    """Weight transports."""


class PrecisionSuite(ComponentSuite, hook="miles_precision_contracts"):
    """Precision contracts."""


class LauncherSuite(ComponentSuite, hook="miles_launchers"):
    """Launchers."""


class TrackerSuite(ComponentSuite, hook="miles_trackers"):
    """Trackers."""
