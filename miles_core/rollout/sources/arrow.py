"""Prompts from Parquet files and from directories that Hugging Face `datasets` wrote with `save_to_disk`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from miles_core.contracts.component import Example, Workbench
from miles_core.errors import DataError
from miles_core.rollout.sources.rows import EXAMPLE_ROWS, RowSource

if TYPE_CHECKING:
    import pyarrow

__all__ = ["DatasetsSource", "ParquetSource"]


class _ArrowSource(RowSource):
    """A table in Arrow memory, of which single rows are turned into Python objects."""

    _table: pyarrow.Table

    def read(self, row: int) -> Mapping[str, Any]:
        """See `RowSource.read`."""
        values: dict[str, Any] = self._table.slice(row, 1).to_pylist()[0]
        return values


class ParquetSource(_ArrowSource):
    """One Parquet file."""

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """Three rows."""
        import pyarrow
        import pyarrow.parquet

        path = bench.directory / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(EXAMPLE_ROWS)), path)
        return Example(settings={"path": str(path)})

    def open(self) -> int:
        """See `RowSource.open`."""
        import pyarrow
        import pyarrow.parquet

        try:
            self._table = pyarrow.parquet.read_table(self.path, memory_map=True)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"cannot be read as Parquet ({error})", file=self.path) from error
        return int(self._table.num_rows)


class DatasetsSource(_ArrowSource):
    """One split of a saved data set: the directory that holds `state.json`. Read through pyarrow, memory-mapped."""

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """Three rows, as `save_to_disk` writes them."""
        import pyarrow

        table = pyarrow.Table.from_pylist(list(EXAMPLE_ROWS))
        with pyarrow.ipc.new_stream(str(bench.directory / "data.arrow"), table.schema) as stream:
            stream.write_table(table)
        state = {"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": None}
        (bench.directory / "state.json").write_bytes(orjson.dumps(state))
        return Example(settings={"path": str(bench.directory)})

    def open(self) -> int:
        """See `RowSource.open`. A directory of several splits is refused: name one of them."""
        import pyarrow

        directory = Path(self.path)
        splits = directory / "dataset_dict.json"
        if splits.is_file():
            names = orjson.loads(splits.read_bytes()).get("splits", [])
            raise DataError(
                f"holds several splits; name one: {', '.join(str(directory / name) for name in names)}", file=self.path
            )
        try:
            state = orjson.loads((directory / "state.json").read_bytes())
            files = [directory / entry["filename"] for entry in state["_data_files"]]
            tables = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all() for file in files]
            self._table = pyarrow.concat_tables(tables)
        except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
            raise DataError(
                f"is not a data set directory that save_to_disk wrote ({type(error).__name__}: {error})",
                file=self.path,
            ) from error
        if state.get("_indices_data_files"):
            raise DataError("has an indices mapping; call flatten_indices() before save_to_disk", file=self.path)
        return int(self._table.num_rows)
