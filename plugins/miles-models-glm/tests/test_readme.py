"""The section that the README shows works."""

from __future__ import annotations

import tomllib
from pathlib import Path

from miles_models_glm.family import GlmConfig


def test_the_readme_shows_a_section_that_works():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    section = tomllib.loads(text.split("```toml\n")[1].split("```")[0])["model"]["family"]
    assert section.pop("use") == "glm"
    GlmConfig.model_validate(section)
