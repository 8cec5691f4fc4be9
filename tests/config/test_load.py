"""Loading: origins, includes, overrides, and every problem at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.config.load import load_config
from miles_core.config.origins import flatten, read_toml
from miles_core.errors import ConfigError

GOOD = """\
[run]
name = "a"
steps = 3

[model]
path = "tiny:0"

[data]
use = "jsonl"
path = "x.jsonl"

[reward]
use = "exact"

[sampling]
max_new_tokens = 4

[schedule]
batch_groups = 2
group_size = 4
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return path


def test_every_value_knows_its_origin(good: Path) -> None:
    loaded = load_config(good, ["run.seed=7"])
    assert loaded.origin("run.steps") == f"{good}:3"
    assert loaded.origin("data.path") == f"{good}:10"
    assert loaded.origin("run.seed") == "--set run.seed=7"
    assert loaded.origin("model.dtype") == "default"
    assert set(flatten(loaded.resolved())) >= set(loaded.origins), "an origin for no value"


def test_config_is_frozen(good: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(good).config.run.steps = 5


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.steps=9", ("run", "steps"), 9),
        ("run.name=b", ("run", "name"), "b"),
        ('run.name="b"', ("run", "name"), "b"),
        ("schedule.episode_timeout=1.5", ("schedule", "episode_timeout"), 1.5),
        ("run.export=false", ("run", "export"), False),
    ],
)
def test_override_values_are_toml(good: Path, override: str, key: tuple[str, str], value: object) -> None:
    config = load_config(good, [override]).config
    assert getattr(getattr(config, key[0]), key[1]) == value


def test_override_of_a_short_section(good: Path) -> None:
    good.write_text(GOOD + '\n[engine]\nuse = "embedded"\n')
    config = load_config(good, ["engine.max_running=3", "backend.learning_rate=1e-5"]).config
    assert config.engine.use == "embedded"
    assert config.engine.settings == {"max_running": 3}
    assert config.backend.use == "fsdp"


def test_short_form_of_a_section(good: Path) -> None:
    good.write_text(GOOD.replace('[reward]\nuse = "exact"\n', "").replace("[run]", 'reward = "exact"\n[run]', 1))
    assert load_config(good).config.reward.use == "exact"


def test_includes_merge_below_and_keep_their_origins(tmp_path: Path, good: Path) -> None:
    top = tmp_path / "top.toml"
    top.write_text('include = ["good.toml"]\n[run]\nsteps = 11\n[data]\nuse = "reasoning_gym"\nfamilies = ["a"]\n')
    loaded = load_config(top)
    assert loaded.config.run.steps == 11
    assert loaded.origin("run.steps") == f"{top}:3"
    assert loaded.origin("run.name") == f"{tmp_path / 'good.toml'}:2"
    assert loaded.config.data.settings == {"families": ["a"]}, (
        "another component does not inherit the keys of the old one"
    )


def test_includes_that_include_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('include = ["b.toml"]\n')
    (tmp_path / "b.toml").write_text('include = ["a.toml"]\n')
    with pytest.raises(ConfigError, match=r"a\.toml → b\.toml → a\.toml"):
        load_config(tmp_path / "a.toml")


def test_all_problems_at_once_with_origin_and_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(GOOD.replace("steps = 3", "stesp = 3").replace("batch_groups = 2", "batch_groups = 0"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    keys = {p.key for p in caught.value.problems}
    assert keys == {"run.steps", "run.stesp", "schedule.batch_groups"}
    text = str(caught.value)
    assert f"{path}:3" in text
    assert "did you mean 'steps'" in text
    assert f"{path}:19" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [("a = ", "not valid TOML"), ("include = 3", "list of file names"), ('include = ["none.toml"]', "cannot read")],
)
def test_unreadable_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


@pytest.mark.parametrize("override", ["run.steps", "=3", ""])
def test_malformed_overrides(good: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_config(good, [override])


def test_lines_of_tables_arrays_and_multiline_strings(tmp_path: Path) -> None:
    path = tmp_path / "l.toml"
    path.write_text('a = """\nb = 1\n[c]\n"""\n[[t]]\nx = 1\n[[t]]\nx = 2\n[t.s]\ny = {z = 1}\n')
    _, origins = read_toml(path)
    lines = {k: int(v.rpartition(":")[2]) for k, v in origins.items()}
    assert lines == {"a": 1, "t.0.x": 6, "t.1.x": 8, "t.1.s.y.z": 10}
