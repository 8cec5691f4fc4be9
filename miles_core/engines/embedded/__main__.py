"""``python -m miles_core.engines.embedded``; see :mod:`.command`."""

from __future__ import annotations

from miles_core.lifeline import Lifeline

_GRACE = 5.0
"""Seconds to end in by itself: a step may be under way in the engine's thread."""


def main() -> None:
    """Watch the parent, and only then import what takes seconds."""
    lifeline = Lifeline(grace=_GRACE)
    from .command import main as serve

    serve(lifeline)


if __name__ == "__main__":
    main()
