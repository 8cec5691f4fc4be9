"""Rows to prompts: every format gives the same prompts, every malformed row says where it stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from miles_core.contracts.sources import DataSource
from miles_core.errors import DataError
from miles_core.rollout.sources.arrow import DatasetsSource, ParquetSource
from miles_core.rollout.sources.jsonl import JsonlSource
from miles_core.rollout.sources.rows import RowConfig, split_slice

ROWS = [{"prompt": f"What is {n} + {n}?", "label": str(2 * n), "level": n} for n in range(10)]


def jsonl(directory: Path, rows: list[Any]) -> str:
    path = directory / "train.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def parquet(directory: Path, rows: list[Any]) -> str:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), directory / "train.parquet", row_group_size=3)
    return str(directory / "train.parquet")


def datasets(directory: Path, rows: list[Any]) -> str:
    """What `Dataset.save_to_disk(num_shards=2)` writes."""
    path = directory / "train"
    path.mkdir()
    table = pa.Table.from_pylist(rows)
    names = []
    for number, part in enumerate((table.slice(0, 4), table.slice(4))):
        names.append(f"data-{number:05}-of-00002.arrow")
        with pa.OSFile(str(path / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")
    return str(path)


FORMATS = [(jsonl, JsonlSource), (parquet, ParquetSource), (datasets, DatasetsSource)]
Format = tuple[Callable[[Path, list[Any]], str], type[DataSource[Any]]]


def source(directory: Path, rows: list[Any], part: str = "", **options: Any) -> JsonlSource:
    return JsonlSource(RowConfig(path=jsonl(directory, rows) + part, **options))


@pytest.mark.parametrize("form", FORMATS)
def test_rows_become_prompts(tmp_path: Path, form: Format):
    write, kind = form
    rows = kind(RowConfig(path=write(tmp_path, ROWS)))
    assert len(rows) == 10
    for index, row in enumerate(ROWS):
        prompt = rows.prompt(index, epoch=3)
        assert prompt.messages == ({"role": "user", "content": row["prompt"]},)
        assert prompt.label == row["label"]
        assert prompt.metadata == {"level": index}
        assert prompt.prompt_id.endswith(f":{index + 1}")
    assert list(rows.scan()) == [None] * 10


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("part", "expected"), [("[2:5]", [2, 3, 4]), ("[7:]", [7, 8, 9]), ("[:1]", [0]), ("", list(range(10)))]
)
def test_a_slice_is_part_of_the_path(tmp_path: Path, form: Format, part: str, expected: list[int]):
    write, kind = form
    rows = kind(RowConfig(path=write(tmp_path, ROWS) + part))
    assert [rows.prompt(i).metadata["level"] for i in range(len(rows))] == expected
    assert rows.prompt(0).prompt_id.endswith(f":{expected[0] + 1}")  # the id is the row's, whatever the slice


@pytest.mark.parametrize("part", ["[5:20]", "[3:3]", "[4:2]"])
def test_a_slice_outside_the_file_is_refused(tmp_path: Path, part: str):
    with pytest.raises(DataError, match="but it has 10 rows"):
        len(source(tmp_path, ROWS, part))


def test_a_path_may_hold_brackets():
    assert split_slice("data[v2]/train.jsonl") == ("data[v2]/train.jsonl", 0, None)
    assert split_slice("data[v2]/train.jsonl[1:]") == ("data[v2]/train.jsonl", 1, None)


def test_rows_outside_the_source(tmp_path: Path):
    with pytest.raises(IndexError):
        source(tmp_path, ROWS).prompt(10)


def test_system_template_and_examples(tmp_path: Path):
    prompt = source(
        tmp_path,
        ROWS,
        system="Be brief.",
        template=r"Q: {prompt} Answer in \boxed{}.",
        examples=[{"role": "user", "content": "What is 9 + 9?"}, {"role": "assistant", "content": "18"}],
    ).prompt(1)
    assert [(m["role"], m["content"]) for m in prompt.messages] == [
        ("system", "Be brief."),
        ("user", "What is 9 + 9?"),
        ("assistant", "18"),
        ("user", r"Q: What is 1 + 1? Answer in \boxed{}."),
    ]


def test_messages_keep_their_own_system_prompt(tmp_path: Path):
    messages = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "hi", "name": None}]
    prompt = source(tmp_path, [{"prompt": messages, "label": 1}], system="Other.", template="<{prompt}>").prompt(0)
    assert prompt.messages == (messages[0], {"role": "user", "content": "<hi>"})


def test_other_keys(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"question": "q", "meta": {"a": 1}, "other": 2, "tools": json.dumps(tools)}]
    prompt = source(tmp_path, rows, prompt_key="question", label_key="", metadata_key="meta", tools_key="tools").prompt(
        0
    )
    assert (prompt.label, prompt.metadata, prompt.tools) == (None, {"a": 1}, tuple(tools))


@pytest.mark.parametrize(
    ("row", "options", "field", "reason"),
    [
        ({"label": 1}, {}, "prompt", "is missing; the row has label"),
        ({"prompt": None, "label": 1}, {}, "prompt", "is null"),
        ({"prompt": "", "label": 1}, {}, "prompt", "is empty"),
        ({"prompt": [], "label": 1}, {}, "prompt", "is an empty list"),
        ({"prompt": 3, "label": 1}, {}, "prompt", "is of type int, expected text or a list"),
        ({"prompt": ["x"], "label": 1}, {}, "prompt", "message 0 is of type str"),
        (
            {"prompt": [{"role": "judge", "content": "x"}], "label": 1},
            {},
            "prompt",
            "message 0 has role 'judge'; allowed",
        ),
        ({"prompt": [{"role": "user"}], "label": 1}, {}, "prompt", "message 0 has content null"),
        ({"prompt": "x"}, {}, "label", r"is missing.*set label_key"),
        ({"prompt": "x", "label": 1, "m": 2}, {"metadata_key": "m"}, "m", "is of type int, expected an object"),
        ({"prompt": "x", "label": 1, "t": "{"}, {"tools_key": "t"}, "t", "is text, but no JSON"),
        ({"prompt": "x", "label": 1, "t": [1]}, {"tools_key": "t"}, "t", "expected a list of tool objects"),
    ],
)
def test_malformed_rows_name_file_line_and_field(
    tmp_path: Path, row: Any, options: dict[str, str], field: str, reason: str
):
    rows = source(tmp_path, [{"prompt": "fine", "label": 0, "m": {}, "t": []}, row], **options)
    rows.prompt(0)
    with pytest.raises(DataError, match=reason) as caught:
        rows.prompt(1)
    assert (caught.value.file, caught.value.line, caught.value.field) == (str(tmp_path / "train.jsonl"), 2, field)
    found = list(rows.scan())
    assert found[0] is None
    assert isinstance(found[1], DataError)


@pytest.mark.parametrize(
    ("line", "reason"), [("", "is empty"), ("{", "is no JSON"), ("[1]", "holds list, not an object")]
)
def test_a_line_that_is_no_row_is_never_skipped(tmp_path: Path, line: str, reason: str):
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"prompt": "a", "label": 1}}\n{line}\n{{"prompt": "b", "label": 2}}')
    rows = JsonlSource(RowConfig(path=str(path)))
    assert len(rows) == 3
    assert rows.prompt(2).label == 2
    with pytest.raises(DataError, match=rf"train.jsonl:2: the line {reason}"):
        rows.prompt(1)


@pytest.mark.parametrize("kind", [JsonlSource, ParquetSource, DatasetsSource])
def test_what_is_not_there_or_something_else(tmp_path: Path, kind: type[DataSource[Any]]):
    with pytest.raises(DataError, match="nowhere"):
        len(kind(RowConfig(path=str(tmp_path / "nowhere"))))
    (tmp_path / "empty").write_text("")
    with pytest.raises(DataError):
        len(kind(RowConfig(path=str(tmp_path / "empty"))))


def test_a_directory_of_several_splits_asks_for_one(tmp_path: Path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=f"name one: {tmp_path}/train, {tmp_path}/test"):
        len(DatasetsSource(RowConfig(path=str(tmp_path))))


def test_template_without_its_placeholder_is_refused():
    with pytest.raises(ValidationError, match=r"must contain \{prompt\}"):
        RowConfig(path="x", template="no place")
