"""From a table's rows to prompts: what `jsonl`, `parquet` and `datasets` share."""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson
from pydantic import field_validator

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.sources import DataSource
from miles_core.data.group import Prompt
from miles_core.errors import DataError

__all__ = ["EXAMPLE_ROWS", "ExampleMessage", "RowConfig", "RowSource", "chat", "split_slice"]

PLACEHOLDER = "{prompt}"
_SLICE = re.compile(r"^(?P<path>.*)\[(?P<start>\d*):(?P<stop>\d*)\]$", re.DOTALL)
EXAMPLE_ROWS = tuple({"prompt": f"{n} + {n} =", "label": str(2 * n), "level": n} for n in range(1, 4))
"""Rows of the examples that the conformance kit tries these sources with."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ExampleMessage(ComponentConfig):
    """One message of a few-shot example."""

    role: Literal["user", "assistant"]
    """Who says it."""
    content: str
    """What is said."""


class RowConfig(ComponentConfig):
    """Section `[data]` of `jsonl`, `parquet` and `datasets`. An empty key means that there is no such field."""

    path: str
    """File (or directory, for `datasets`) with an optional slice of rows: `train.jsonl[100:200]`. A relative path
    starts at the directory in which the run starts."""
    prompt_key: str = "prompt"
    """Field with the prompt: a string, or a list of chat messages."""
    label_key: str = "label"
    """Field with the reference answer; empty for data without answers."""
    metadata_key: str = ""
    """Field with a mapping for rewards and environments; when empty, all other fields together are the metadata."""
    tools_key: str = ""
    """Field with the tools (a list of Chat Completions tool objects, or its JSON text); empty for none."""
    system: str = ""
    """System prompt of rows that bring none; none is added when empty."""
    template: str = PLACEHOLDER
    """Text of the user's message: `{prompt}` stands for the prompt, every other brace for itself."""
    examples: tuple[ExampleMessage, ...] = ()
    """Few-shot examples: messages between the system prompt and the question."""

    @field_validator("template")
    @classmethod
    def _has_placeholder(cls, value: str) -> str:
        if PLACEHOLDER not in value:
            raise ValueError(f"must contain {PLACEHOLDER}, where the prompt goes")
        return value


def split_slice(path: str) -> tuple[str, int, int | None]:
    """(path, start, stop) of `path[start:stop]`; (path, 0, None) without a slice."""
    match = _SLICE.match(path)
    if match is None:
        return path, 0, None
    return match["path"], int(match["start"] or 0), int(match["stop"]) if match["stop"] else None


def chat(
    messages: Sequence[Mapping[str, Any]], *, system: str, template: str, examples: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """A prompt's messages with the system prompt, the examples and the template put in.

    A system prompt that the messages bring stays; the template is put around the last message when a user said it.
    """
    head: list[Mapping[str, Any]] = []
    rest = list(messages)
    if rest[0]["role"] in ("system", "developer"):
        head = [rest.pop(0)]
    elif system:
        head = [{"role": "system", "content": system}]
    if rest and rest[-1]["role"] == "user" and isinstance(rest[-1]["content"], str):
        rest[-1] = {**rest[-1], "content": template.replace(PLACEHOLDER, rest[-1]["content"])}
    return (*head, *examples, *rest)


class RowSource(DataSource[RowConfig]):
    """A table on disk. Subclasses open it and answer for a row; rows are numbered over the whole file."""

    Config = RowConfig

    def __init__(self, config: RowConfig) -> None:
        super().__init__(config)
        self.path, self._start, self._stop = split_slice(config.path)
        self._rows: int | None = None

    @abc.abstractmethod
    def open(self) -> int:
        """Open the table at `path`; its number of rows. Raises `DataError`. Called once."""

    @abc.abstractmethod
    def read(self, row: int) -> Mapping[str, Any]:
        """Row `row` of the whole table. Raises `DataError`."""

    def __len__(self) -> int:
        """Rows in the slice. Raises `DataError` when the table cannot be read or the slice reaches outside it."""
        if self._rows is None:
            total = self.open()
            stop = total if self._stop is None else self._stop
            if not self._start < stop <= total:
                raise DataError(f"rows {self._start} to {stop} are asked for, but it has {total} rows", file=self.path)
            self._rows = stop - self._start
        return self._rows

    def prompt(self, index: int, *, epoch: int = 0) -> Prompt:
        """See `DataSource.prompt`; a row is the same in every epoch. The line of a `DataError` counts from 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {self.config.path}, which has {len(self)}")
        row = self._start + index
        return _RowReader(self.config, self.path, row + 1).prompt(self.read(row))


class _RowReader:
    """Reads one row; knows where it stands."""

    def __init__(self, config: RowConfig, file: str, line: int) -> None:
        self._config = config
        self._file = file
        self._line = line

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        config = self._config
        messages = self._messages(self._field(row, config.prompt_key, "prompt_key"))
        used = {config.prompt_key}
        label = None
        if config.label_key:
            label = self._field(row, config.label_key, "label_key")
            used.add(config.label_key)
        tools: tuple[Mapping[str, Any], ...] = ()
        if config.tools_key:
            tools = self._tools(self._field(row, config.tools_key, "tools_key"))
            used.add(config.tools_key)
        if config.metadata_key:
            metadata = self._field(row, config.metadata_key, "metadata_key")
            if not isinstance(metadata, Mapping):
                raise self._error(f"is {_kind(metadata)}, expected an object", config.metadata_key)
        else:
            metadata = {key: value for key, value in row.items() if key not in used}
        return Prompt(
            prompt_id=f"{self._file.rstrip('/').rsplit('/', 1)[-1]}:{self._line}",
            messages=chat(
                messages,
                system=config.system,
                template=config.template,
                examples=[example.model_dump() for example in config.examples],
            ),
            label=label,
            metadata=metadata,
            tools=tools,
        )

    def _error(self, message: str, field: str | None = None) -> DataError:
        return DataError(message, file=self._file, line=self._line, field=field)

    def _field(self, row: Mapping[str, Any], key: str, option: str) -> Any:
        if row.get(key) is None:
            state = "is null" if key in row else "is missing"
            raise self._error(f"{state}; the row has {', '.join(map(str, row)) or 'no fields'} (set {option})", key)
        return row[key]

    def _messages(self, value: Any) -> list[Mapping[str, Any]]:
        key = self._config.prompt_key
        if isinstance(value, str):
            if not value:
                raise self._error("is empty", key)
            return [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise self._error(f"is {_kind(value)}, expected text or a list of messages that is not empty", key)
        for number, message in enumerate(value):
            if not isinstance(message, Mapping):
                raise self._error(f"message {number} is {_kind(message)}, expected an object", key)
            if message.get("role") not in _ROLES:
                raise self._error(
                    f"message {number} has role {message.get('role')!r}; allowed: {', '.join(_ROLES)}", key
                )
            content = message.get("content")
            if not isinstance(content, str | list) and not message.get("tool_calls"):
                raise self._error(f"message {number} has content {_kind(content)}, expected text or blocks", key)
        return [{name: part for name, part in message.items() if part is not None} for message in value]

    def _tools(self, value: Any) -> tuple[Mapping[str, Any], ...]:
        key = self._config.tools_key
        if isinstance(value, str):
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError as error:
                raise self._error(f"is text, but no JSON: {error}", key) from error
        if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
            raise self._error(f"is {_kind(value)}, expected a list of tool objects", key)
        return tuple(value)


def _kind(value: Any) -> str:
    """What a value is, in words for an error message."""
    if value is None:
        return "null"
    if value == [] and isinstance(value, list):
        return "an empty list"
    return f"of type {type(value).__name__}"
