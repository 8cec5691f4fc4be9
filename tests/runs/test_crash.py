"""Kill −9 at random moments, resume, and lose nothing: synchronous runs end bit-identical to the uninterrupted one,
asynchronous ones with every prompt accounted for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.runs.crashing import (
    COMBINATIONS,
    STEPS,
    Chain,
    Mode,
    Victim,
    check_asynchronous,
    crash,
    outcome,
    reference,
)

pytest.importorskip("torch")
IN_CI = 7
"""Kills of each victim in each mode: 42."""
NIGHTLY_CHAINS, NIGHTLY_KILLS = 5, 10
"""Chains of each victim in each mode, and kills of each: 300."""


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return outcome(reference(tmp_path_factory.mktemp("uninterrupted"), "sync"))


def check(chain: Chain, mode: Mode, expected: dict[str, object]) -> None:
    if mode == "async":
        check_asynchronous(chain.path)
        return
    found = outcome(chain.path)
    for part in expected:
        assert found[part] == expected[part], part


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "mode"), COMBINATIONS)
def test_a_killed_run_loses_nothing(
    uninterrupted: dict[str, object], tmp_path: Path, victim: Victim, mode: Mode
) -> None:
    chain = crash(tmp_path, victim, mode, seed=0, kills=IN_CI)
    check(chain, mode, uninterrupted)
    assert len(chain.kills) == IN_CI, f"the run ended after {len(chain.kills)} kills: raise STEPS = {STEPS}"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 100 + NIGHTLY_CHAINS))
@pytest.mark.parametrize(("victim", "mode"), COMBINATIONS)
def test_three_hundred_kills_lose_nothing(
    uninterrupted: dict[str, object],
    tmp_path: Path,
    nightly_table: Path,
    victim: Victim,
    mode: Mode,
    seed: int,
) -> None:
    chain = crash(tmp_path, victim, mode, seed=seed, kills=NIGHTLY_KILLS)
    try:
        check(chain, mode, uninterrupted)
        ended = "as it must"
    except AssertionError:
        ended = "otherwise"
        raise
    finally:
        kills = [(k.followed, k.step, k.gone_seconds) for k in chain.kills]
        line = {"victim": victim, "mode": mode, "seed": seed, "kills": kills, "ended": ended}
        with nightly_table.open("a") as file:
            file.write(json.dumps(line) + "\n")


def test_the_table_counts_kills_and_chains(tmp_path: Path) -> None:
    from tests.runs.crash_table import table_of

    kills = [["went on", 3, 0.0], ["stopped", 4, 1.5]]
    lines = [{"victim": "engine", "mode": "async", "seed": s, "kills": kills, "ended": "as it must"} for s in (1, 2)]
    text = table_of(lines)
    assert "| engine | async | 2 | 4 | 2 | 2 | 2 | 0 | 1.5 |" in text
    assert Counter(text)["\n"] > 4
