"""The rules for plugins, each with the plugin that breaks it."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from miles_core import hookimpl
from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.filters import GroupFilter
from miles_core.data.group import Group
from miles_core.errors import DuplicateNameError, PluginError, PluginLoadError, UnknownNameError
from miles_core.plugins import PluginManager


class Keep(GroupFilter[ComponentConfig]):
    """Keeps everything."""

    def drop_reason(self, group: Group, rewards: list[float]) -> str | None:
        return None


class Offers:
    def __init__(self, **components: object) -> None:
        self.components = components

    @hookimpl
    def miles_group_filters(self) -> Any:
        return self.components


class Entry:
    """An entry point as importlib.metadata gives it."""

    def __init__(self, name: str, load: object, distribution: str = "", value: str = "") -> None:
        self.name = name
        self.value = value or f"{name}_module"
        self.dist = SimpleNamespace(name=distribution or f"dist-{name}", version="1.2")
        self._load = load

    def load(self) -> object:
        if isinstance(self._load, Exception):
            raise self._load
        return self._load


def discovered(entries: Iterable[Entry], **options: Any) -> PluginManager:
    manager = PluginManager(**options)
    manager.load_entry_points(entries)  # type: ignore[arg-type]
    return manager


def test_components_are_found_by_name_and_attributed() -> None:
    manager = discovered([Entry("b", Offers(two=Keep)), Entry("a", Offers(one=Keep))])
    assert [p.name for p in manager.plugins] == ["a", "b"], "sorted by entry-point name"
    assert manager.names("miles_group_filters") == ("one", "two")
    assert manager.find("miles_group_filters", "two").plugin == "b"


def test_two_distributions_with_one_entry_point_name() -> None:
    entries = [Entry("x", Offers(), "left"), Entry("x", Offers(), "right", value="elsewhere")]
    with pytest.raises(DuplicateNameError, match=r"left 1\.2 and right 1\.2"):
        discovered(entries)


def test_one_distribution_seen_twice_is_one_plugin() -> None:
    plugin = Offers(one=Keep)
    assert len(discovered([Entry("x", plugin, "d"), Entry("x", plugin, "d")]).plugins) == 1


def test_two_plugins_with_one_component_name() -> None:
    with pytest.raises(DuplicateNameError, match=r"'same'.*'a'.*'b'"):
        discovered([Entry("a", Offers(same=Keep)), Entry("b", Offers(same=Keep))])


def test_failed_import_is_a_listed_warning() -> None:
    manager = discovered([Entry("bad", ImportError("no module named quux")), Entry("good", Offers(one=Keep))])
    assert [f.name for f in manager.failures] == ["bad"]
    for part in ("dist-bad 1.2", "bad_module", "quux", "MILES_DISABLE_PLUGINS=bad"):
        assert part in manager.failures[0].message
    assert manager.names("miles_group_filters") == ("one",)


def test_failed_import_is_fatal_when_enabled() -> None:
    with pytest.raises(PluginLoadError, match="quux"):
        discovered([Entry("bad", ImportError("quux"))], enable=["bad"])


def test_enable_picks_and_refuses_the_unknown() -> None:
    manager = discovered([Entry("a", Offers(one=Keep)), Entry("b", Offers(two=Keep))], enable=["b"])
    assert manager.names("miles_group_filters") == ("two",)
    with pytest.raises(UnknownNameError, match="did you mean 'abc'"):
        discovered([Entry("abc", Offers())], enable=["abd"])


def test_disabled_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_DISABLE_PLUGINS", " a , c")
    assert [p.name for p in discovered([Entry("a", Offers()), Entry("b", Offers())]).plugins] == ["b"]


def _bad_plugins() -> dict[str, tuple[object, str]]:
    class Unknown:
        @hookimpl
        def miles_no_such_hook(self) -> None: ...

    class Defaulted:
        @hookimpl
        def miles_run_finished(self, run: object, error: object = None) -> None: ...

    class Extra:
        @hookimpl
        def miles_run_started(self, run: object, nonsense: object) -> None: ...

    return {
        "class": (Offers, "register an instance"),
        "no hook": (ModuleType("empty"), "implements no hook"),
        "unknown hook": (Unknown(), "miles_no_such_hook"),
        "default": (Defaulted(), "default for argument 'error'"),
        "extra argument": (Extra(), "nonsense"),
        "not a mapping": (Offers.__new__(Offers), "components"),
        "instance for class": (Offers(one=Keep(ComponentConfig())), "expected a subclass"),
        "no component": (Offers(one=int), "expected a subclass"),
        "empty name": (Offers(**{"": Keep}), "non-empty string"),
    }


@pytest.mark.parametrize("case", _bad_plugins())
def test_unusable_plugin_is_refused_and_leaves_nothing(case: str) -> None:
    plugin, message = _bad_plugins()[case]
    manager = PluginManager()
    with pytest.raises((PluginLoadError, AttributeError), match=message):
        manager.register(plugin, name="bad")
    assert manager.plugins == ()
    assert manager.registrations() == ()
    manager.register(Offers(one=Keep), name="bad")


def test_unknown_component_lists_what_there_is() -> None:
    manager = discovered([Entry("a", Offers(nonzero=Keep))])
    with pytest.raises(UnknownNameError, match="did you mean 'nonzero'"):
        manager.find("miles_group_filters", "nonzeros")


def test_create_refuses_another_kind() -> None:
    from miles_core.contracts.rewards import Reward

    manager = discovered([Entry("a", Offers(one=Keep))])
    with pytest.raises(PluginError, match="not a Reward"):
        manager.create("miles_group_filters", "one", {}, Reward)


def test_what_a_component_raises_carries_its_plugin() -> None:
    class Raises(Keep):
        def __init__(self, config: ComponentConfig) -> None:
            raise RuntimeError("no luck")

    manager = discovered([Entry("a", Offers(one=Raises))])
    with pytest.raises(RuntimeError) as caught:
        manager.create("miles_group_filters", "one", {}, GroupFilter)
    assert "component 'one' of plugin 'a'" in caught.value.__notes__[0]


def test_event_hooks_run_in_name_order_and_are_attributed() -> None:
    calls: list[str] = []

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        @hookimpl
        def miles_group_dropped(self, group_id: str) -> None:
            calls.append(f"{self.name}:{group_id}")
            if self.name == "b":
                raise ValueError("stop")

    manager = discovered([Entry(n, Listener(n)) for n in ("b", "a", "c")])
    with pytest.raises(ValueError, match="stop") as caught:
        manager.emit("miles_group_dropped", run=None, group_id="g", reason="r")
    assert calls == ["a:g", "b:g"]
    assert "plugin 'b'" in caught.value.__notes__[0]


def test_batch_ready_is_chained() -> None:
    class Adds:
        @hookimpl
        def miles_batch_ready(self, batch: Any) -> Any:
            return batch + 1

    class Leaves:
        @hookimpl
        def miles_batch_ready(self, run: Any) -> Any:
            return None

    manager = discovered([Entry("a", Adds()), Entry("b", Leaves()), Entry("c", Adds())])
    assert manager.chain("miles_batch_ready", "batch", 1, run=None) == 3


def test_the_core_registers_like_everybody() -> None:
    manager = PluginManager.discover()
    assert "core" in [p.name for p in manager.plugins]
    assert all(r.plugin for r in manager.registrations())
    assert not [f for f in manager.failures if f.distribution == "miles-core"]
