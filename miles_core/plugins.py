"""Discovery, selection, validation and attribution of plugins: a typed façade over pluggy.

Rules beyond pluggy's own, each because the silent alternative was observed: entry points load in sorted order;
two owners of one name are an error that names both; every load failure names distribution, version, entry point
and fix; unknown hooks, classes registered for instances, and defaults on hook arguments are errors at load.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import importlib_metadata
import pluggy

from miles_core import hookspecs
from miles_core.contracts.component import Component
from miles_core.errors import (
    DuplicateNameError,
    PluginError,
    PluginLoadError,
    UnknownNameError,
    boundary,
    nearest,
)

__all__ = ["ENTRY_POINT_GROUP", "LoadFailure", "PluginInfo", "PluginManager", "Registration", "hookimpl"]

ENTRY_POINT_GROUP = "miles.plugins"
hookimpl = pluggy.HookimplMarker(hookspecs.PROJECT)

ComponentT = TypeVar("ComponentT", bound="Component[Any]")


def _registration_hooks() -> tuple[str, ...]:
    """Hooks whose spec takes no argument are the registration hooks, in the order of the page."""
    return tuple(
        name
        for name, function in vars(hookspecs).items()
        if name.startswith("miles_") and not inspect.signature(function).parameters
    )


REGISTRATION_HOOKS = _registration_hooks()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PluginInfo:
    """One loaded plugin, as `miles plugins list` shows it."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...]
    load_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadFailure:
    """A plugin that did not load. Fatal when the config enables it, a listed warning otherwise."""

    name: str
    distribution: str
    version: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A component class, and the plugin and hook that offered it."""

    hook: str
    name: str
    component: type[Component[Any]]
    plugin: str


class PluginManager:
    """The plugins of one process, and the components they registered.

    `enable` lists plugin names to load (None: all installed). `block` names plugins that must not load, beyond
    the comma-separated environment variable `MILES_DISABLE_PLUGINS`.
    """

    def __init__(self, *, enable: Sequence[str] | None = None, block: Iterable[str] = ()) -> None:
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._infos: dict[str, PluginInfo] = {}
        self._components: dict[str, dict[str, Registration]] = {hook: {} for hook in REGISTRATION_HOOKS}
        self._enable = None if enable is None else frozenset(enable)
        environment = os.environ.get("MILES_DISABLE_PLUGINS", "")
        self._blocked = {*block, *(name.strip() for name in environment.split(",") if name.strip())}
        self.failures: list[LoadFailure] = []

    @classmethod
    def discover(cls, *, enable: Sequence[str] | None = None) -> PluginManager:
        """A manager with every selected entry point of the group `miles.plugins` loaded.

        Raises `DuplicateNameError` for two distributions that claim one name, `PluginLoadError` for an enabled
        plugin that fails to load, `UnknownNameError` for an enabled plugin that is not installed.
        """
        manager = cls(enable=enable)
        manager.load_entry_points(importlib_metadata.entry_points(group=ENTRY_POINT_GROUP))
        return manager

    def load_entry_points(self, entry_points: Iterable[importlib_metadata.EntryPoint]) -> None:
        """Load the selected ones in sorted order."""
        chosen: dict[str, importlib_metadata.EntryPoint] = {}
        for entry in sorted(entry_points, key=lambda e: (e.name, _owner(e)[0])):
            previous = chosen.get(entry.name)
            if previous is not None:
                if _owner(previous) == _owner(entry) and previous.value == entry.value:
                    continue  # one distribution seen twice on sys.path
                raise DuplicateNameError(
                    f"entry point {entry.name!r} of group {ENTRY_POINT_GROUP!r} is claimed by two distributions: "
                    f"{' '.join(_owner(previous))} and {' '.join(_owner(entry))}; uninstall one of them"
                )
            chosen[entry.name] = entry
        if self._enable is not None:
            missing = sorted(self._enable - set(chosen) - set(self._infos))
            if missing:
                raise UnknownNameError(
                    f"[plugins] enable names {missing[0]!r}, which is not installed: "
                    f"{nearest(missing[0], list(chosen))}"
                )
        for name, entry in chosen.items():
            if name in self._blocked or (self._enable is not None and name not in self._enable):
                continue
            self._load(entry)

    def _load(self, entry: importlib_metadata.EntryPoint) -> None:
        distribution, version = _owner(entry)
        begin = time.perf_counter()
        try:
            self.register(entry.load(), name=entry.name, distribution=distribution, version=version, begin=begin)
        except DuplicateNameError:
            raise
        except Exception as error:
            message = (
                f"plugin {entry.name!r} ({entry.value}) of {distribution} {version} failed to load: "
                f"{type(error).__name__}: {error}; fix or reinstall it (pip install --force-reinstall {distribution}), "
                f"or block it with MILES_DISABLE_PLUGINS={entry.name}"
            )
            if self._enable is not None:
                raise PluginLoadError(message) from error
            self.failures.append(
                LoadFailure(name=entry.name, distribution=distribution, version=version, message=message)
            )

    def register(
        self,
        plugin: object,
        *,
        name: str,
        distribution: str = "(registered in code)",
        version: str = "",
        begin: float | None = None,
    ) -> None:
        """Register one plugin (a module or an instance) and take in its components.

        Raises `PluginLoadError` when it is not a usable plugin, `DuplicateNameError` for a name that is taken; the
        manager is then as it was.
        """
        begin = time.perf_counter() if begin is None else begin
        if name in self._infos:
            raise DuplicateNameError(
                f"two plugins are named {name!r}: {self._infos[name].distribution}, {distribution}"
            )
        if isinstance(plugin, type):
            raise PluginLoadError(f"plugin {name!r} is the class {plugin.__qualname__}: register an instance of it")
        hooks = tuple(sorted(self._implemented(plugin, name)))
        try:
            self._pluggy.register(plugin, name=name)
            self._pluggy.check_pending()
        except pluggy.PluginValidationError as error:
            self._pluggy.unregister(name=name)
            raise PluginLoadError(f"plugin {name!r}: {error}; hooks: {', '.join(_all_hooks())}") from error
        try:
            found = [r for hook in hooks if hook in REGISTRATION_HOOKS for r in self._offered(plugin, name, hook)]
        except Exception:
            self._pluggy.unregister(name=name)
            raise
        for registration in found:
            self._components[registration.hook][registration.name] = registration
        self._infos[name] = PluginInfo(
            name=name,
            distribution=distribution,
            version=version,
            hooks=hooks,
            load_seconds=time.perf_counter() - begin,
        )

    def _implemented(self, plugin: object, name: str) -> Iterator[str]:
        """Names of the hooks that `plugin` implements; raises for a plugin that implements none, or wrongly."""
        count = 0
        for attribute in dir(plugin):
            options = self._pluggy.parse_hookimpl_opts(plugin, attribute)
            if options is None:
                continue
            count += 1
            defaults = [
                p.name
                for p in inspect.signature(getattr(plugin, attribute)).parameters.values()
                if p.default is not inspect.Parameter.empty
            ]
            if defaults:
                raise PluginLoadError(
                    f"plugin {name!r}: hook {attribute} has a default for argument {defaults[0]!r}; pluggy would "
                    "silently never pass it: remove the default"
                )
            yield options.get("specname") or attribute
        if not count:
            raise PluginLoadError(
                f"plugin {name!r} implements no hook: decorate at least one function with miles_core.hookimpl; "
                f"hooks: {', '.join(_all_hooks())}"
            )

    def _offered(self, plugin: object, plugin_name: str, hook: str) -> list[Registration]:
        caller = getattr(self._pluggy.hook, hook)
        implementation = next(i for i in caller.get_hookimpls() if i.plugin is plugin)
        with boundary(plugin=plugin_name, component="*", hook=hook):
            offered = implementation.function()
        if offered is None:
            return []
        if not isinstance(offered, Mapping):
            raise PluginLoadError(
                f"plugin {plugin_name!r}: {hook} returned {type(offered).__name__}, expected a mapping of names to "
                "component classes"
            )
        found = []
        for name, component in offered.items():
            if not isinstance(name, str) or not name:
                raise PluginLoadError(
                    f"plugin {plugin_name!r}: {hook} has the key {name!r}, expected a non-empty string"
                )
            if not (isinstance(component, type) and issubclass(component, Component)):
                raise PluginLoadError(
                    f"plugin {plugin_name!r}: {hook}[{name!r}] is {component!r}, expected a subclass of the contract"
                )
            owner = self._components[hook].get(name)
            if owner is not None:
                raise DuplicateNameError(
                    f"{hook}: the name {name!r} is registered by two plugins: {owner.plugin!r} "
                    f"({self._infos[owner.plugin].distribution}) and {plugin_name!r}; block one with "
                    f"MILES_DISABLE_PLUGINS, or rename one"
                )
            found.append(Registration(hook=hook, name=name, component=component, plugin=plugin_name))
        return found

    # What was found.

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        return tuple(self._infos.values())

    def registrations(self, hook: str | None = None) -> tuple[Registration, ...]:
        """All components, or those of one hook, sorted by hook (in page order) and name."""
        hooks = REGISTRATION_HOOKS if hook is None else (hook,)
        return tuple(self._components[h][name] for h in hooks for name in sorted(self._components[h]))

    def names(self, hook: str) -> tuple[str, ...]:
        return tuple(sorted(self._components[hook]))

    def find(self, hook: str, name: str) -> Registration:
        """The component of that name. Raises `UnknownNameError` that lists what is registered."""
        found = self._components[hook].get(name)
        if found is None:
            failed = "".join(f"\n  not loaded: {f.message}" for f in self.failures)
            raise UnknownNameError(
                f"no {hook.removeprefix('miles_').replace('_', ' ')} named {name!r}: "
                f"{nearest(name, list(self._components[hook]))}{failed}"
            )
        return found

    def create(self, hook: str, name: str, settings: Mapping[str, Any], kind: type[ComponentT]) -> ComponentT:
        """An instance of the component, configured from `settings` (validated by its own `Config`)."""
        registration = self.find(hook, name)
        with boundary(plugin=registration.plugin, component=name, hook=hook):
            config = registration.component.Config.model_validate(dict(settings))
            instance = registration.component(config)
        if not isinstance(instance, kind):
            raise PluginError(
                f"{hook}[{name!r}] of plugin {registration.plugin!r} is a {type(instance).__name__}, "
                f"not a {kind.__name__}"
            )
        return instance

    # Event hooks.

    def emit(self, hook: str, **arguments: object) -> None:
        """Call an event hook of every plugin, in order; what one raises carries its name."""
        for implementation in self._implementations(hook):
            with boundary(plugin=implementation.plugin_name, component="*", hook=hook):
                self._call(implementation, arguments)

    def chain(self, hook: str, argument: str, value: Any, **arguments: object) -> Any:
        """Call a hook of every plugin in turn, each seeing as `argument` what the one before it returned."""
        for implementation in self._implementations(hook):
            with boundary(plugin=implementation.plugin_name, component="*", hook=hook):
                replaced = self._call(implementation, {**arguments, argument: value})
            value = value if replaced is None else replaced
        return value

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        caller = getattr(self._pluggy.hook, hook)
        return sorted(cast("list[pluggy.HookImpl]", caller.get_hookimpls()), key=lambda i: i.plugin_name)

    @staticmethod
    def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, object]) -> Any:
        function: Callable[..., Any] = implementation.function
        return function(*(arguments[name] for name in implementation.argnames))


def _owner(entry: importlib_metadata.EntryPoint) -> tuple[str, str]:
    """(distribution, version) that an entry point belongs to."""
    if entry.dist is None:
        return "(unknown distribution)", ""
    return entry.dist.name, entry.dist.version


def _all_hooks() -> tuple[str, ...]:
    return tuple(name for name in vars(hookspecs) if name.startswith("miles_"))
