"""Message matchers: when is a message replayed by a client the one that was stored."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from miles_core.contracts.component import Component, ConfigT

__all__ = ["MessageMatcher"]


class MessageMatcher(Component[ConfigT], abc.ABC):
    """Maps a message to a canonical digest; two messages match when their digests are equal.

    A digest makes matching transitive and a history of n messages cost n digests. `merges_histories` is true
    when different histories can get equal digests: the run says so at start-up.
    """

    merges_histories: ClassVar[bool] = False

    @abc.abstractmethod
    def digest(self, message: Mapping[str, Any]) -> bytes:
        """16 bytes or more. Never raises for a well-formed message; malformed tool arguments count as raw text."""
