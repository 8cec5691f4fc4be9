"""Many attempts on one server, and what came of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import httptools

from tests.support.fuzzing.mutations import Attempt, Valid, attempt
from tests.support.fuzzing.sockets import exchange

__all__ = ["ALLOWED", "Outcome", "hammer"]

ALLOWED = frozenset((502, 503))
"""What a failing engine is answered with."""
_RENEWED = 300
_SHOWN = 400


@dataclasses.dataclass
class Outcome:
    """`statuses` of all answers; `unanswered` attempts held no whole request, or the connection was closed on them;
    `wrong` says which attempts were answered as none may be."""

    statuses: Counter[int] = dataclasses.field(default_factory=Counter)
    kinds: Counter[str] = dataclasses.field(default_factory=Counter)
    unanswered: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


def hammer(
    address: tuple[str, int],
    valid: Callable[[], Sequence[Valid]],
    *,
    seed: int,
    numbers: range,
    allowed: frozenset[int] = ALLOWED,
) -> Outcome:
    """Send the attempts of `numbers`. `valid` gives the whole requests, and is asked again every few hundred attempts:
    sessions fill up."""
    outcome = Outcome()
    whole: Sequence[Valid] = ()
    for number in numbers:
        if (number - numbers.start) % _RENEWED == 0:
            whole = valid()
        one = attempt(seed, number, whole)
        try:
            answers = exchange(address, one.data)
        except (TimeoutError, httptools.HttpParserError, ConnectionRefusedError) as error:
            outcome.wrong.append(_told(seed, number, one, repr(error)))
            continue
        outcome.statuses.update(answers)
        outcome.kinds[one.kind] += 1
        outcome.unanswered += not answers
        bad = [status for status in answers if status >= 500 and status not in allowed]
        if bad:
            outcome.wrong.append(_told(seed, number, one, f"answered {bad}"))
    return outcome


def _told(seed: int, number: int, one: Attempt, what: str) -> str:
    return f"seed {seed} attempt {number} ({one.kind}): {what}: {one.data[:_SHOWN]!r}"
