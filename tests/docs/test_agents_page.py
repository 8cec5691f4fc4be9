"""docs/howto/agents.md says what the tests with real agents do: the same versions, variables and files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.agents.clients import ALL, Client

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "agents.md").read_text()
SUPPORT = ROOT / "tests" / "support" / "agents"
DESK = SimpleNamespace(url="BASE_URL", session=SimpleNamespace(token="TOKEN"))


def test_the_table_has_the_pinned_versions() -> None:
    pinned = set(json.loads((SUPPORT / "package.json").read_text())["dependencies"].values())
    for name in ("requirements.txt", "no-dependencies.txt"):
        pinned |= set(re.findall(r"^(?:litellm|mini-swe-agent)==(.+)$", (SUPPORT / name).read_text(), re.MULTILINE))
    said = {line.split("|")[2].strip() for line in PAGE.splitlines() if re.match(r"\| \w", line)} - {"version"}
    assert said == pinned


@pytest.mark.parametrize("client", [c for c in ALL if not c.name.startswith("litellm")], ids=repr)
def test_variables_and_commands_are_on_the_page(client: Client, tmp_path: Path) -> None:
    for name, value in client.environment(DESK, tmp_path).items():  # type: ignore[arg-type]
        if value.startswith("{"):
            assert value in PAGE.splitlines()
        else:
            assert f"\n{name}={value.replace(str(tmp_path), 'DIRECTORY')}\n" in PAGE
    program, *arguments = client.command("TASK")
    assert " ".join([Path(program).name, *arguments]) in PAGE
    for file in tmp_path.iterdir():
        assert file.read_text() in PAGE
