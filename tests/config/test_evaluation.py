"""What each placement of evaluation needs, and what does nothing with it: told before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.config.load import load_config
from miles_core.config.preflight import preflight
from miles_core.plugins import PluginManager

ROOT = Path(__file__).parents[2]
FUNCTION = "evaluation.callable=bench.py:measure"


def problems(*overrides: str) -> dict[str, str]:
    loaded = load_config(ROOT / "examples" / "tiny.toml", overrides)
    return {p.key: p.message for p in preflight(loaded, PluginManager.discover()).problems}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("evaluation.placement=dedicated",),
        ("evaluation.placement=dedicated", "evaluation.engine={use='embedded', threads=1}", "evaluation.overflow=skip"),
        ("evaluation.placement=external", FUNCTION, "evaluation.datasets=[]", "evaluation.timeout=60"),
    ],
)
def test_placements_that_fit(overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert problems(*overrides) == {}


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (("evaluation.placement=external", "evaluation.datasets=[]"), "evaluation.callable", "needs one"),
        ((FUNCTION,), "evaluation.callable", "does nothing"),
        (("evaluation.placement=external", FUNCTION), "evaluation.datasets", "data of its own"),
        (("evaluation.placement=dedicated", "evaluation.datasets=[]"), "evaluation.datasets", "no data set"),
        (("evaluation.placement=dedicated", "transport=broadcast"), "evaluation.placement", "one fleet"),
        (
            ("evaluation.placement=dedicated", "evaluation.engine=nosuch"),
            "evaluation.engine",
            "no engines of this name",
        ),
        (("evaluation.placement=dedicated", "run.mode=supervised"), "evaluation.placement", "nothing to sample with"),
        (("evaluation.overflow=skip",), "evaluation.overflow", "does nothing"),
        (("evaluation.engine=embedded",), "evaluation.engine", "does nothing"),
    ],
)
def test_placements_that_do_not(
    overrides: tuple[str, ...], key: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert message in problems(*overrides)[key]
