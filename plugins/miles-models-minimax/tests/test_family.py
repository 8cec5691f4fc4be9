"""MiniMax against the package renderers, and what it does not render."""

from __future__ import annotations

import pytest
from miles_models_minimax.family import MiniMaxConfig, MiniMaxFamily

from miles_core.testing.families import assert_equal, plain_conversations, vocabulary
from miles_core.testing.other_renderers import as_renderer


def test_equals_the_package_renderers_where_that_is_append_only(tmp_path):
    family = MiniMaxFamily(MiniMaxConfig())
    theirs = as_renderer("minimax-m2", {}, vocabulary(family, tmp_path))
    assert_equal(family, theirs, plain_conversations(300, reasoning=True, turns=1))


def test_a_later_system_message_is_refused():
    talk = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(ValueError, match="first message"):
        MiniMaxFamily(MiniMaxConfig()).segments(talk)


@pytest.mark.parametrize("missing", ["</invoke>", "</parameter>", '<invoke name="f">'])
def test_a_block_with_a_broken_call_is_content(missing, tmp_path):
    family = MiniMaxFamily(MiniMaxConfig())
    tokenizer = vocabulary(family, tmp_path)
    text = '\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'.replace(missing, "", 1)
    call, called, thought = map(tokenizer.special, ("<minimax:tool_call>", "</minimax:tool_call>", "</think>"))
    found = family.parse([thought, call, *tokenizer.encode(text), called], tokenizer)
    assert not found.tool_calls
    assert found.content == f"<minimax:tool_call>{text}</minimax:tool_call>"
    assert found.malformed == (found.content,)
