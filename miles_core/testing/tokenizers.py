"""A tiny byte-level tokenizer, made without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

__all__ = ["CHATML", "CHAT_TEMPLATE", "write_tokenizer"]

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens of ChatML vocabularies; the last one ends a turn."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'developer', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('role ' ~ message.role) }}{% endif %}"
    "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Merges that reach over the places where messages meet, and words that a model may sample in other pieces.
_MERGES = (
    ("Ċ", "Ċ"),
    (">", "Ċ"),
    ("Ċ", "<"),
    ("u", "s"),
    ("us", "e"),
    ("use", "r"),
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
)


def write_tokenizer(directory: Path, *, special: Iterable[str] = CHATML, added: Iterable[str] = ()) -> Path:
    """Write one into `directory`: 256 bytes, a few merges, the `special` tokens (control tokens), the `added` ones (not
    special, like Qwen's `<tool_call>`), and the ChatML chat template. Returns `directory`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in dict.fromkeys(special)])
    tokenizer.add_tokens([AddedToken(name) for name in dict.fromkeys(added)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": CHATML[-1], "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
