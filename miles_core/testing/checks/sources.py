"""Laws of data sources: rows are a pure function of their index.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

from typing import Any

from miles_core.data.group import Prompt
from miles_core.errors import DataError
from miles_core.testing.kit import Case, Check

__all__ = ["CHECKS"]

MOST_ROWS = 64


def length_is_stable(case: Case) -> None:
    source, other = case.create(), case.create()
    length = len(source)
    assert length > 0, "the example's source has no rows"
    source.prompt(0)
    assert len(source) == length == len(other), "the length changes from call to call or instance to instance"


def a_row_reads_twice_equal(case: Case) -> None:
    source, other = case.create(), case.create()
    for index in range(_rows(source)):
        first = source.prompt(index)
        assert isinstance(first, Prompt), f"row {index} is a {type(first).__name__}, expected a Prompt"
        assert first == source.prompt(index), f"row {index} differs when it is read again"
    for index in reversed(range(_rows(other))):
        assert other.prompt(index) == source.prompt(index), f"row {index} depends on what was read before it"


def prompt_ids_are_unique(case: Case) -> None:
    source = case.create()
    seen: dict[str, int] = {}
    for index in range(_rows(source)):
        name = source.prompt(index).prompt_id
        assert name, f"row {index} has an empty prompt_id"
        assert name not in seen, f"rows {seen.get(name)} and {index} share the prompt_id {name!r}"
        seen[name] = index


def another_epoch_says_so_in_the_id(case: Case) -> None:
    source = case.create()
    for index in range(min(_rows(source), 8)):
        first, later = source.prompt(index, epoch=0), source.prompt(index, epoch=1)
        assert first == later or first.prompt_id != later.prompt_id, (
            f"row {index} is another prompt in epoch 1 under the id {first.prompt_id!r} of epoch 0"
        )


def prompts_are_chat_messages(case: Case) -> None:
    source = case.create()
    for index in range(_rows(source)):
        messages: tuple[Any, ...] = source.prompt(index).messages
        assert isinstance(messages, tuple), f"row {index}: messages are a {type(messages).__name__}, expected a tuple"
        assert messages, f"row {index} has no messages"
        assert all(isinstance(m, dict) and m.get("role") and "content" in m for m in messages), (
            f"row {index}: {messages!r:.200} are no chat messages with role and content"
        )


def an_index_outside_is_an_index_error(case: Case) -> None:
    source = case.create()
    for index in (len(source), -1, len(source) + 1000):
        try:
            found = source.prompt(index)
        except IndexError:
            continue
        except Exception as error:
            raise AssertionError(f"row {index} raises {type(error).__name__}, expected IndexError") from error
        raise AssertionError(f"row {index} of {len(source)} gives {found.prompt_id!r}, expected IndexError")


def scan_gives_a_verdict_a_row(case: Case) -> None:
    source = case.create()
    if len(source) > 100_000:  # procedural: as long as it is told to be
        return
    verdicts = list(source.scan())
    assert len(verdicts) == len(source), f"scan() gives {len(verdicts)} verdicts for {len(source)} rows"
    assert verdicts == [None] * len(source), f"scan() refuses rows of the example: {next(v for v in verdicts if v)}"


def a_missing_file_is_a_data_error_that_names_it(case: Case) -> None:
    if "path" not in case.component.Config.model_fields:
        return
    missing = str(case.new_directory() / "no-such-file")
    try:
        len(case.create(path=missing))
    except DataError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"a missing file raises {type(error).__name__}: {error}; expected DataError") from error
    else:
        raise AssertionError("a source over a missing file has a length, expected DataError")
    assert "no-such-file" in said, f"the error does not name the file: {said}"


CHECKS: tuple[Check, ...] = (
    length_is_stable,
    a_row_reads_twice_equal,
    prompt_ids_are_unique,
    another_epoch_says_so_in_the_id,
    prompts_are_chat_messages,
    an_index_outside_is_an_index_error,
    scan_gives_a_verdict_a_row,
    a_missing_file_is_a_data_error_that_names_it,
)


def _rows(source: Any) -> int:
    return min(len(source), MOST_ROWS)
