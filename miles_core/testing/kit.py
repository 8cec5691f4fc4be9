"""What a check works with, the table of kinds, and how one check is run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from miles_core.contracts.component import Component, Example

__all__ = ["ENGINE_VERSION", "KINDS", "Case", "Check", "Kind", "Skipped", "check_title", "checks_of", "run_check"]

CHECK_SECONDS = 180.0
"""A check that waits longer for a component has found that it hangs."""


ENGINE_VERSION = 7
"""Policy version at which the checks start engines."""


class Skipped(Exception):
    """A check that cannot be made here; the message says why."""


class Case:
    """One component under one check: makes instances of it, and is the workbench of its example.

    `settings` and `inputs` replace those of the component's own example. Use it as a context manager: what it lent
    is gone at the end.
    """

    def __init__(
        self,
        component: type[Component[Any]],
        *,
        settings: Mapping[str, Any] | None = None,
        inputs: tuple[Any, ...] | None = None,
    ) -> None:
        self.component = component
        self._settings = settings
        self._inputs = inputs
        self._stack = contextlib.ExitStack()
        self._numbers = itertools.count()
        self._root = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="miles-check-")))
        self.directory = self.new_directory()

    def __enter__(self) -> Case:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def new_directory(self) -> Path:
        """Another empty directory."""
        path = self._root / str(next(self._numbers))
        path.mkdir()
        return path

    @functools.cached_property
    def tokenizer(self) -> Path:
        """See `Workbench.tokenizer`."""
        from miles_core.testing.tokenizers import write_tokenizer

        return write_tokenizer(self.new_directory())

    def serve(self, answer: Callable[[Any], Any]) -> str:
        """See `Workbench.serve`."""
        from miles_core.testing.serving import json_service, served

        return self._stack.enter_context(served(lambda: json_service(answer)))

    def engine(self) -> str:
        """See `Workbench.engine`. It serves `ENGINE_VERSION`."""
        from miles_core.testing.stub_engine import StubEngine, hashed_script, served_stub

        stub = StubEngine(hashed_script(256, 64), version=ENGINE_VERSION, vocabulary=256)
        return self._stack.enter_context(served_stub(stub)).url

    @functools.cached_property
    def example(self) -> Example:
        """The component's example, with the case's own settings and inputs in it. Raises `Skipped` when it is
        unavailable."""
        for requirement in self.component.requires:
            module = requirement.key.removeprefix("import:")
            if module != requirement.key and importlib.util.find_spec(module) is None:
                raise Skipped(f"{module} is not installed, and {requirement.reason}")
        if self._settings is not None and self._inputs is not None:
            return Example(settings=self._settings, inputs=self._inputs)
        example = self.component.example(self)
        if example.unavailable and self._settings is None:
            raise Skipped(example.unavailable)
        return Example(
            settings=example.settings if self._settings is None else self._settings,
            inputs=example.inputs if self._inputs is None else self._inputs,
        )

    def create(self, **changes: Any) -> Any:
        """A new instance, its section that of the example with `changes`."""
        settings = {**self.example.settings, **changes}
        return self.component(self.component.Config.model_validate(settings))


Check = Callable[[Case], Awaitable[None] | None]
"""Raises `AssertionError` with a sentence that says which law is broken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of component: the contract (`module:class`) of its hook, the module of its checks, and whether it lives
    in the trainer alone, so that importing it may import torch; `torch` says that its checks compute with it."""

    hook: str
    contract: str
    checks: str
    trainer: bool = False
    torch: bool = False

    @property
    def name(self) -> str:
        """The hook without its prefix, as `miles plugins new` takes it."""
        return self.hook.removeprefix("miles_")

    def load_contract(self) -> type[Component[Any]]:
        module, _, name = self.contract.partition(":")
        contract: type[Component[Any]] = getattr(importlib.import_module(f"miles_core.contracts.{module}"), name)
        return contract


_TABLE = (
    Kind(hook="miles_model_families", contract="families:ModelFamily", checks="families"),
    Kind(hook="miles_message_matchers", contract="matchers:MessageMatcher", checks="matchers"),
    Kind(hook="miles_agent_environments", contract="environments:AgentEnvironment", checks="agent_environments"),
    Kind(
        hook="miles_generate_environments", contract="environments:GenerateEnvironment", checks="generate_environments"
    ),
    Kind(hook="miles_rollout_environments", contract="environments:RolloutEnvironment", checks="rollout_environments"),
    Kind(hook="miles_sandboxes", contract="sandboxes:Sandbox", checks="sandboxes"),
    Kind(hook="miles_data_sources", contract="sources:DataSource", checks="sources"),
    Kind(hook="miles_rewards", contract="rewards:Reward", checks="rewards"),
    Kind(hook="miles_group_filters", contract="filters:GroupFilter", checks="filters"),
    Kind(
        hook="miles_advantage_estimators",
        contract="objective:AdvantageEstimator",
        checks="estimators",
        trainer=True,
        torch=True,
    ),
    Kind(hook="miles_loss_terms", contract="objective:LossTerm", checks="terms", trainer=True, torch=True),
    Kind(hook="miles_corrections", contract="objective:Correction", checks="corrections", trainer=True, torch=True),
    Kind(hook="miles_engines", contract="engines:Engine", checks="engines", torch=True),
    Kind(hook="miles_train_backends", contract="backends:TrainBackend", checks="backends", trainer=True, torch=True),
    Kind(hook="miles_weight_transports", contract="transports:WeightTransport", checks="transports", torch=True),
    Kind(
        hook="miles_precision_contracts",
        contract="precision:PrecisionContract",
        checks="precision",
        trainer=True,
        torch=True,
    ),
    Kind(hook="miles_launchers", contract="launchers:Launcher", checks="launchers"),
    Kind(hook="miles_trackers", contract="trackers:Tracker", checks="trackers"),
)
KINDS: Mapping[str, Kind] = {kind.hook: kind for kind in _TABLE}
"""Every registration hook, in the order of the hook page."""


def checks_of(hook: str) -> tuple[Check, ...]:
    """The checks of a kind: those for every component, then its own."""
    from miles_core.testing.checks.generic import generic_checks

    kind = KINDS[hook]
    own: tuple[Check, ...] = importlib.import_module(f"miles_core.testing.checks.{kind.checks}").CHECKS
    return (*generic_checks(kind), *own)


def check_title(check: Check) -> str:
    """The law as words: the function's name."""
    function = check.func if isinstance(check, functools.partial) else check
    return str(getattr(function, "__name__", function)).replace("_", " ")


def run_check(check: Check, hook: str, case: Case) -> None:
    """Run one check to its end. Raises `AssertionError` with what it found, or `Skipped`.

    What the component raised, where the check expects nothing of the kind, is the cause of such an error.
    """
    own = not isinstance(check, functools.partial) and check.__module__.rpartition(".")[2] == KINDS[hook].checks
    if own and KINDS[hook].torch and importlib.util.find_spec("torch") is None:
        raise Skipped("needs torch: install miles-core[train]")
    try:
        if inspect.iscoroutinefunction(check):
            asyncio.run(_bounded(check(case)))
        else:
            check(case)
    except Skipped:
        raise
    except Exception as error:
        if isinstance(error, AssertionError) and _is_a_checks_own(error):
            raise
        raise AssertionError(f"it raised {type(error).__name__} where it has to work: {error}") from error


def _is_a_checks_own(error: AssertionError) -> bool:
    """Whether the kit raised it, and not an `assert` of the component's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("miles_core.testing.")


async def _bounded(awaitable: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(CHECK_SECONDS) as limit:
            await awaitable
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise AssertionError(f"the component did not come back within {CHECK_SECONDS:.0f} s") from error
