"""A family of reasoning-gym that is imported alone gives the rows of the whole package, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("reasoning_gym")

FAMILIES = ("word_sequence_reversal", "basic_arithmetic", "letter_counting", "spell_backward", "puzzle24", "maze")
SCRIPT = """
import json, sys
families = sys.argv[2:]
if sys.argv[1] == "whole":
    import reasoning_gym
from miles_core.rollout.sources.reasoning_gym import entry
items = {name: [entry(name, {}, draw)["question"] for draw in range(3)] for name in families}
left = sorted(name for name in sys.modules if name.startswith("reasoning_gym"))
heavy = "matplotlib" in sys.modules
import reasoning_gym
made = len(reasoning_gym.create_dataset("spell_backward", size=2, seed=1)[0]["question"]) > 0
print(json.dumps({"items": items, "left": left, "heavy": heavy, "made": made}))
"""


def drawn(how: str, *families: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how, *families], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_rows_are_those_of_the_whole_package():
    assert drawn("alone", *FAMILIES)["items"] == drawn("whole", *FAMILIES)["items"]


def test_the_rest_of_the_package_is_neither_imported_nor_hidden():
    found = drawn("alone", "word_sequence_reversal")
    assert (found["left"], found["heavy"], found["made"]) == ([], False, True)


def test_a_family_without_a_module_of_its_own_comes_from_the_whole_package():
    assert drawn("alone", "gsm_symbolic")["items"] == drawn("whole", "gsm_symbolic")["items"]
