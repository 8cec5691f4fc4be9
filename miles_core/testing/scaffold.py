"""`miles plugins new`: a whole distribution with one working component, its tests and its README."""

from __future__ import annotations

import dataclasses
import re
import string
from importlib import resources
from pathlib import Path

from miles_core.errors import DuplicateNameError, PluginError, UnknownNameError, nearest
from miles_core.testing.kit import KINDS

__all__ = ["create_plugin", "plugin_files"]

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
"""Names of distributions (packaging.python.org, "Names and normalization")."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Wording:
    """What the templates say of a kind. `suffix` ends the class name, `snippet` shows a config that uses it."""

    title: str
    suffix: str
    suite: str
    snippet: str
    extra: str = ""


_WORDINGS = {
    "model_families": _Wording(
        title="A model family", suffix="Family", suite="FamilySuite", snippet='[model]\nfamily = "$entry"'
    ),
    "message_matchers": _Wording(
        title="A message matcher", suffix="Matcher", suite="MatcherSuite", snippet='[sessions]\nmatcher = "$entry"'
    ),
    "agent_environments": _Wording(
        title="An agent environment",
        suffix="Agent",
        suite="AgentEnvironmentSuite",
        snippet='[environment]\nuse = "$entry"\nturns = 2',
    ),
    "generate_environments": _Wording(
        title="A generate environment",
        suffix="Environment",
        suite="GenerateEnvironmentSuite",
        snippet='[environment]\nuse = "$entry"\ninstruction = "Answer in one word."',
    ),
    "rollout_environments": _Wording(
        title="A rollout environment",
        suffix="Rollout",
        suite="RolloutEnvironmentSuite",
        snippet='[environment]\nuse = "$entry"\ngroup_size = 8',
    ),
    "sandboxes": _Wording(
        title="A sandbox", suffix="Sandbox", suite="SandboxSuite", snippet='[sandbox]\nuse = "$entry"\nnice = 10'
    ),
    "data_sources": _Wording(
        title="A data source", suffix="Source", suite="DataSourceSuite", snippet='[data]\nuse = "$entry"\nsize = 1000'
    ),
    "rewards": _Wording(
        title="A reward",
        suffix="Reward",
        suite="RewardSuite",
        snippet='[reward]\nuse = "$entry"\nmost_characters = 100',
    ),
    "group_filters": _Wording(
        title="A group filter",
        suffix="Filter",
        suite="FilterSuite",
        snippet='[filters]\nuse = ["$entry"]\n\n[filters.$entry]\nleast = 0.5',
    ),
    "advantage_estimators": _Wording(
        title="An advantage estimator",
        suffix="Estimator",
        suite="EstimatorSuite",
        snippet='[objective]\nalgorithm = "$entry"',
        extra="train",
    ),
    "loss_terms": _Wording(
        title="A loss term",
        suffix="Term",
        suite="LossTermSuite",
        snippet='[objective]\nterms = ["$entry"]',
        extra="train",
    ),
    "corrections": _Wording(
        title="A correction",
        suffix="Correction",
        suite="CorrectionSuite",
        snippet='[objective]\ncorrections = ["$entry"]\n\n[objective.$entry]\nmost = 0.5',
        extra="train",
    ),
    "engines": _Wording(
        title="An engine",
        suffix="Engine",
        suite="EngineSuite",
        snippet='[engine]\nuse = "$entry"\nurls = ["http://127.0.0.1:30000"]',
        extra="train",
    ),
    "train_backends": _Wording(
        title="A train backend",
        suffix="Backend",
        suite="TrainBackendSuite",
        snippet='[backend]\nuse = "$entry"\nlearning_rate = 1e-5',
        extra="train",
    ),
    "weight_transports": _Wording(
        title="A weight transport",
        suffix="Transport",
        suite="TransportSuite",
        snippet='[transport]\nuse = "$entry"',
        extra="train",
    ),
    "precision_contracts": _Wording(
        title="A precision contract",
        suffix="Precision",
        suite="PrecisionSuite",
        snippet='[precision]\nuse = "$entry"',
        extra="train",
    ),
    "launchers": _Wording(
        title="A launcher",
        suffix="Launcher",
        suite="LauncherSuite",
        snippet='[launcher]\nuse = "$entry"\nprefix = ["nice", "-n", "5"]',
    ),
    "trackers": _Wording(
        title="A tracker",
        suffix="Tracker",
        suite="TrackerSuite",
        snippet='[trackers]\nuse = ["sqlite", "$entry"]',
    ),
}


def create_plugin(kind: str, name: str, into: Path) -> Path:
    """Write the distribution `miles-NAME` into the directory `into`; its path.

    `kind` is a registration hook without its prefix. Raises `UnknownNameError` for another kind, `PluginError` for a
    name that no distribution may have, or a directory that exists already, and `DuplicateNameError` for a component
    name that is taken in this environment.
    """
    if kind not in _WORDINGS:
        raise UnknownNameError(f"no plugin kind {kind!r}: {nearest(kind, list(_WORDINGS))}")
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"{name!r} is no name of a distribution: letters, digits, '-', '_' and '.' are allowed, the first and the "
            "last one a letter or digit"
        )
    name = re.sub(r"[-_.]+", "-", name).lower().removeprefix("miles-")
    entry = name.replace("-", "_")
    _refuse_taken(f"miles_{kind}", entry)
    target = into / f"miles-{name}"
    if target.exists():
        raise PluginError(f"{target.absolute()} exists already; choose another name, or another place with --into")
    for path, text in plugin_files(kind, name, entry).items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")
    return target


def plugin_files(kind: str, name: str, entry: str) -> dict[str, str]:
    """Every file of the distribution by its path in it."""
    from miles_core import __version__

    wording = _WORDINGS[kind]
    component = _template(f"components/{kind}.py.tmpl")
    values = {
        "distribution": f"miles-{name}",
        "package": f"miles_{entry}",
        "entry": entry,
        "hook": f"miles_{kind}",
        "title": wording.title,
        "suite": wording.suite,
        "class_name": _class_name(entry, wording.suffix, component),
        "snippet": string.Template(wording.snippet).substitute(entry=entry),
        "requirement": f"miles-core[{wording.extra}]" if wording.extra else "miles-core",
        "core_version": __version__,
    }
    sources = {
        "pyproject.toml": _template("pyproject.toml.tmpl"),
        "README.md": _template("README.md.tmpl"),
        f"miles_{entry}/__init__.py": _template("__init__.py.tmpl"),
        f"miles_{entry}/component.py": component,
        f"miles_{entry}/py.typed": "",
        f"tests/test_{entry}.py": _template("test_component.py.tmpl"),
    }
    return {path: string.Template(text).substitute(values) for path, text in sources.items()}


def _template(path: str) -> str:
    return resources.files("miles_core.testing").joinpath("templates", *path.split("/")).read_text(encoding="utf-8")


def _class_name(entry: str, suffix: str, template: str) -> str:
    """CamelCase of the name with the kind's suffix; `Miles` in front where that is no identifier, or is a name that the
    template itself imports (`data` would make `DataSource`)."""
    name = "".join(part[:1].upper() + part[1:] for part in entry.split("_")) + suffix
    taken = set(re.findall(r"\w+", template))
    while not name.isidentifier() or name in taken:
        name = f"Miles{name}"
    return name


def _refuse_taken(hook: str, entry: str) -> None:
    from miles_core.plugins import PluginManager

    manager = PluginManager.discover()
    for registration in manager.registrations(hook):
        if registration.name == entry:
            raise DuplicateNameError(
                f"{hook}: the name {entry!r} is registered by the plugin {registration.plugin!r}; choose another"
            )
    for info in manager.plugins:
        if info.name == entry:
            raise DuplicateNameError(f"a plugin {entry!r} is installed ({info.distribution}); choose another name")


assert set(_WORDINGS) == {kind.name for kind in KINDS.values()}
