"""Prompts from a JSON Lines file: one object a line, UTF-8 (jsonlines.org)."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from miles_core.contracts.component import Example, Workbench
from miles_core.errors import DataError
from miles_core.rollout.sources.rows import EXAMPLE_ROWS, RowSource

__all__ = ["JsonlSource"]


class JsonlSource(RowSource):
    """Only line offsets are held in memory; a line is read and parsed when its row is asked for."""

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """Three rows."""
        path = bench.directory / "rows.jsonl"
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in EXAMPLE_ROWS))
        return Example(settings={"path": str(path)})

    def open(self) -> int:
        """See `RowSource.open`. The last line may lack its newline; an empty line is a malformed row, as any other."""
        offsets = array("Q", [0])
        try:
            with Path(self.path).open("rb") as stream:
                for line in stream:
                    offsets.append(offsets[-1] + len(line))
        except OSError as error:
            raise DataError(f"cannot be read ({error.strerror or error})", file=self.path) from error
        self._offsets = offsets
        return len(offsets) - 1

    def read(self, row: int) -> Mapping[str, Any]:
        """See `RowSource.read`."""
        start, stop = self._offsets[row], self._offsets[row + 1]
        with Path(self.path).open("rb") as stream:
            stream.seek(start)
            line = stream.read(stop - start)
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            what = f"is no JSON: {error}" if line.strip() else "is empty; delete it, a row is never skipped"
            raise DataError(f"the line {what}", file=self.path, line=row + 1) from error
        if not isinstance(value, dict):
            raise DataError(f"the line holds {type(value).__name__}, not an object", file=self.path, line=row + 1)
        return value
