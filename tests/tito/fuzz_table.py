"""`docs/nightly/fuzz.md`, from what a nightly run found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

__all__ = ["Run", "page"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Answers by status and attempts, of each kind; MiB resident a quarter of the way through the bytes, behind them,
    and at the end, each time after every session had ended."""

    statuses: Mapping[str, Mapping[int, int]]
    attempts: Mapping[str, int]
    unanswered: int
    before: float
    after: float
    last: float
    seconds: float
    seed: int


def page(run: Run) -> str:
    """The page."""
    codes = sorted({status for counts in run.statuses.values() for status in counts})
    names = {"bytes": "broken bytes", "documented": "schemathesis"}
    rows = [
        [names[kind], f"{run.attempts[kind]:,}", *(f"{counts.get(code, 0):,}" for code in codes)]
        for kind, counts in run.statuses.items()
    ]
    failed = sum(n for counts in run.statuses.values() for code, n in counts.items() if code >= 500)
    table = [["requests", "attempts", *map(str, codes)], ["---"] * (len(codes) + 2), *rows]
    return f"""# Fuzzing

What a nightly run found when it last ran: `miles serve sessions` over a stub engine, in a process of its own. *Broken
bytes* are sent over a raw socket: valid requests with values of the wrong type anywhere, cut or deeply nested JSON,
half surrogates, NUL, duplicate keys, wrong lengths, broken chunks, pipelined requests, bad headers and request lines.
*Schemathesis* makes requests from the server's own `GET /openapi.json`, half of them valid by it, and every answer must
be one that it documents. A connection may carry several requests, or none that is whole.

{chr(10).join("| " + " | ".join(row) + " |" for row in table)}

Answers with a status of 500 or above: {failed}. Attempts without an answer: {run.unanswered:,}, which held no whole
request or had their connection closed. Resident memory, measured after every session had ended: {run.before:.0f} MiB
after a quarter of the broken bytes, {run.after:.0f} MiB after all of them, {run.last:.0f} MiB at the end.
{run.seconds:.0f} seconds, seed {run.seed}.
"""
