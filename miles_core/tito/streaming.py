"""Streaming a reply while it is sampled: what of it is certain, and what of that the client has not got yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_core.contracts.families import ModelFamily, Tokenizer
from miles_core.errors import EngineError

__all__ = ["Progress", "cut_at_stop"]


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """`text` up to the first stop string in it, and which one that is."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return text, None
    at, stop = min(found)
    return text[:at], stop


class Progress:
    """One streamed turn. `tokens` takes the ids sampled so far, `take` gives the text that became certain since the
    last time. Both are called in the event loop; `changed(progress)` is called when there may be something to take.

    Reading a long reply again for every token would be quadratic, so beyond a few hundred tokens it is read again only
    once it has grown by a few hundredths.
    """

    def __init__(
        self, family: ModelFamily[Any], tokenizer: Tokenizer, stops: Sequence[str], changed: Callable[[Progress], None]
    ) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._changed = changed
        self._read = 0
        self._certain = ("", "")
        self._taken = ("", "")

    def tokens(self, ids: Sequence[int]) -> None:
        """All ids of the turn so far. Raises `EngineError` when they contradict what the client was already sent: the
        request was moved to another engine, which samples again."""
        if len(ids) - self._read <= self._read // 64:
            return
        self._read = len(ids)
        partial = self._family.partial(ids, self._tokenizer)
        content, stop = cut_at_stop(partial.content, self._stops)
        if stop is None and self._stops:
            content = content[: max(0, len(content) - max(map(len, self._stops)) + 1)]
        self._advance(partial.reasoning or "", content)
        self._changed(self)

    def finish(self, message: Mapping[str, Any]) -> None:
        """The whole reply, before it is recorded. Raises as `tokens` does."""
        self._advance(message.get("reasoning_content") or "", message.get("content") or "")

    def take(self) -> tuple[str, str]:
        """Reasoning and content that became certain since the last call."""
        new = (self._certain[0][len(self._taken[0]) :], self._certain[1][len(self._taken[1]) :])
        self._taken = self._certain
        return new

    def _advance(self, reasoning: str, content: str) -> None:
        for what, said in zip((reasoning, content), self._taken, strict=True):
            if not what.startswith(said):
                raise EngineError(
                    "the reply no longer begins with what was streamed of it: its engine failed, and another one "
                    "sampled it again; nothing was recorded, send the request again"
                )
        self._certain = (reasoning, content)
