"""Faults of data sources."""

from __future__ import annotations

import dataclasses
import itertools

from miles_core.rollout.sources.jsonl import JsonlSource
from planted_faults import scaffolded

Good = scaffolded("data_sources")
GOOD = (Good, JsonlSource)


class Grows(Good):
    """Longer every time."""

    def __init__(self, config):
        super().__init__(config)
        self.count = itertools.count(10)

    def __len__(self):
        return next(self.count)


class Empty(Good):
    """No rows."""

    def __len__(self):
        return 0


class Stream(Good):
    """Gives the next row, whichever is asked for."""

    def __init__(self, config):
        super().__init__(config)
        self.count = itertools.count()

    def prompt(self, index, *, epoch=0):
        return super().prompt(next(self.count) % len(self), epoch=epoch)


class Remembers(Good):
    """The first row that is read names all others."""

    first = None

    def prompt(self, index, *, epoch=0):
        self.first = index if self.first is None else self.first
        return dataclasses.replace(super().prompt(index, epoch=epoch), label=f"{self.first}:{index}")


class Rows(Good):
    """Rows that are no prompts."""

    def prompt(self, index, *, epoch=0):
        return {"messages": super().prompt(index, epoch=epoch).messages}


class SharedIds(Good):
    """Two rows, one id."""

    def prompt(self, index, *, epoch=0):
        return dataclasses.replace(super().prompt(index, epoch=epoch), prompt_id=f"row-{index // 2}")


class NoIds(Good):
    """No id."""

    def prompt(self, index, *, epoch=0):
        return dataclasses.replace(super().prompt(index, epoch=epoch), prompt_id="")


class FreshInSilence(Good):
    """Another epoch, another row, the same id."""

    def prompt(self, index, *, epoch=0):
        return dataclasses.replace(super().prompt(index, epoch=epoch), label=str(epoch))


class PlainText(Good):
    """A prompt that is text."""

    def prompt(self, index, *, epoch=0):
        return dataclasses.replace(super().prompt(index, epoch=epoch), messages="2 + 2 =")


class NoMessages(Good):
    """Asks nothing."""

    def prompt(self, index, *, epoch=0):
        return dataclasses.replace(super().prompt(index, epoch=epoch), messages=())


class NoRole(Good):
    """Nobody says it."""

    def prompt(self, index, *, epoch=0):
        return dataclasses.replace(super().prompt(index, epoch=epoch), messages=({"content": "x"},))


class FromTheEnd(Good):
    """Counts from the end, as lists do."""

    def prompt(self, index, *, epoch=0):
        return super().prompt(index % len(self), epoch=epoch)


class KeyErrors(Good):
    """Raises the wrong error."""

    def prompt(self, index, *, epoch=0):
        if not 0 <= index < len(self):
            raise KeyError(index)
        return super().prompt(index, epoch=epoch)


class ScansHalf(Good):
    """Looks at every other row."""

    def scan(self):
        return itertools.islice(super().scan(), 0, None, 2)


class ScanRefuses(Good):
    """Refuses a row that it gives."""

    def scan(self):
        return (ValueError("no") if i == 2 else verdict for i, verdict in enumerate(super().scan()))


class RawError(JsonlSource):
    """Lets the operating system's error through."""

    def open(self):
        with open(self.path, "rb") as stream:
            stream.readline()
        return super().open()


class Forgiving(JsonlSource):
    """A missing file is an empty one."""

    def open(self):
        try:
            return super().open()
        except Exception:
            return 1


FAULTS = {
    "length_is_stable": (Grows, Empty),
    "a_row_reads_twice_equal": (Stream, Remembers, Rows),
    "prompt_ids_are_unique": (SharedIds, NoIds),
    "another_epoch_says_so_in_the_id": (FreshInSilence,),
    "prompts_are_chat_messages": (PlainText, NoMessages, NoRole),
    "an_index_outside_is_an_index_error": (FromTheEnd, KeyErrors),
    "scan_gives_a_verdict_a_row": (ScansHalf, ScanRefuses),
    "a_missing_file_is_a_data_error_that_names_it": (RawError, Forgiving),
}
