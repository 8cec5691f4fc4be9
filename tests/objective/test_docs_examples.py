"""The term and the estimator of docs/objectives.md obey the laws of their kinds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles_core.testing.checks import estimators, terms
from miles_core.testing.kit import Case

PAGE = Path(__file__).parents[2] / "docs" / "objectives.md"


def component(hook: str, name: str):
    """What the page's block with this hook registers."""
    (text,) = [t for t in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S) if f"def {hook}" in t]
    namespace = {"__name__": "snippet"}
    exec(compile(text, str(PAGE), "exec"), namespace)
    lines = [line for line in text.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 30
    return namespace[hook]()[name]


@pytest.mark.parametrize("check", terms.CHECKS, ids=lambda c: c.__name__)
def test_the_term(check):
    with Case(component("miles_loss_terms", "confidence")) as case:
        check(case)


@pytest.mark.parametrize("check", estimators.CHECKS, ids=lambda c: c.__name__)
def test_the_estimator(check):
    with Case(component("miles_advantage_estimators", "behind_the_best")) as case:
        check(case)
