"""`docs/nightly/crashes.md`, from what the nightly chains wrote down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.runs.crashing import COMBINATIONS, STALENESS, STEPS

__all__ = ["table_of"]

_HEAD = f"""# Crashes

What the nightly chains found when they last ran. A chain is one run of `examples/tiny.toml`, {STEPS} steps of 2 groups,
that is killed with SIGKILL at random moments, and resumed whenever it stopped, until it ends. It ends *as it must* when

- synchronous: ledger, rollouts, metrics, evaluation points and exported weights are bit-identical to those of the
  uninterrupted run;
- asynchronous: every issued prompt is trained once, dropped with its reason, or open behind the last step; every
  version has its batch; no trained token is staler than {STALENESS}; and the audit finds no mismatch.

The session server lives in the controller's process. *Gone* is the longest time, in seconds, until the last process of
a run that stopped had ended.

| victim | mode | chains | kills | run went on | run stopped, and was resumed | ended as it must | otherwise | gone |
|---|---|---|---|---|---|---|---|---|
"""


def table_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """The page; `lines` are chains."""
    rows = []
    for victim, mode in COMBINATIONS:
        own = [line for line in lines if (line["victim"], line["mode"]) == (victim, mode)]
        if not own:
            continue
        kills = [kill for line in own for kill in line["kills"]]
        followed = [kill[0] for kill in kills]
        good = sum(line["ended"] == "as it must" for line in own)
        gone = max((kill[2] for kill in kills), default=0.0)
        cells = (victim, mode, len(own), len(kills), followed.count("went on"), followed.count("stopped"), good)
        rows.append(f"| {' | '.join(map(str, cells))} | {len(own) - good} | {gone:.1f} |")
    total = sum(len(line["kills"]) for line in lines)
    seeds = sorted({line["seed"] for line in lines})
    return _HEAD + "\n".join(rows) + f"\n\n{total} kills in all; seeds {seeds[0]} to {seeds[-1]}.\n"
