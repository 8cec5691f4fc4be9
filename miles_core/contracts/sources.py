"""Data sources: where prompts come from."""

from __future__ import annotations

import abc
from collections.abc import Iterator

from miles_core.contracts.component import Component, ConfigT
from miles_core.data.group import Prompt

__all__ = ["DataSource"]


class DataSource(Component[ConfigT], abc.ABC):
    """A finite, indexable set of prompts, passed over epoch by epoch.

    The order of an epoch is a pure function of (seed, epoch, index) and is made by the core
    (`miles_core.rollout.order`), so a source only has to answer for a row. Reading a row twice gives equal prompts.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Rows in one epoch. Raises `DataError` when the source cannot be read."""

    @abc.abstractmethod
    def prompt(self, index: int, *, epoch: int = 0) -> Prompt:
        """Row `index` (0 to len − 1). `prompt_id` is stable and unique within the source; a procedural source may
        use `epoch` to give fresh rows every pass, and says so in the id.

        Raises `DataError` with file, line and field for a malformed row; a row is never skipped.
        """

    def scan(self) -> Iterator[Exception | None]:
        """Check every row (`miles check --data`): yields None for a good row, its error for a bad one."""
        for index in range(len(self)):
            try:
                self.prompt(index)
            except (ValueError, LookupError, TypeError, OSError) as error:
                yield error
            except Exception as error:
                from miles_core.errors import DataError

                if not isinstance(error, DataError):
                    raise
                yield error
            else:
                yield None
