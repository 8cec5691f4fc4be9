"""Marks and fixtures of the tests with real agents.

`MILES_AGENT_CLIENTS` is a directory with the clients of tests/support/agents; `nox -s agents` makes one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.testing.tokenizers import write_tokenizer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.agents)


@pytest.fixture(scope="session", autouse=True)
def _clients() -> None:
    if not os.environ.get("MILES_AGENT_CLIENTS"):
        pytest.skip("MILES_AGENT_CLIENTS is not set; run `nox -s agents`")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
