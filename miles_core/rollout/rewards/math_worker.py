"""Child process of the `math` reward: JSON lines in, JSON lines out, in order, until stdin ends.

math-verify bounds its work with SIGALRM, which only a main thread may use; hence a process, not a thread.
Request: {"gold": [texts], "answer": text, "seconds": whole seconds}. Answer: {"score": 0 or 1}, or {"error": text}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["judge", "main"]


def judge(gold: list[str], answer: str, seconds: int) -> float:
    """1 when `answer` is mathematically equal to one of `gold`. Raises `ValueError` for gold that is no mathematics."""
    from math_verify import parse, verify

    parsed = [parse(_anchored(text), parsing_timeout=seconds) for text in gold]
    for text, value in zip(gold, parsed, strict=True):
        if not value:
            raise ValueError(f"the reference answer {text!r} is no expression that math-verify reads")
    found = parse(answer, parsing_timeout=seconds)
    return float(any(verify(value, found, timeout_seconds=seconds) for value in parsed))


def _anchored(text: str) -> str:
    """A bare reference answer, put where math-verify looks for LaTeX."""
    return text if "$" in text or "\\boxed" in text or "\\[" in text else f"\\boxed{{{text}}}"


def _answer(line: str) -> dict[str, Any]:
    request = json.loads(line)
    try:
        return {"score": judge(request["gold"], request["answer"], request["seconds"])}
    except Exception as error:  # reported to the parent, which raises
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve requests. Whatever the libraries print goes to stderr: stdout carries answers alone."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        answers.write(json.dumps(_answer(line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
