"""A tiny Llama with random weights and a byte-level tokenizer: for tests, first looks and the tiny example run.

About 107 thousand parameters. Random, not pretrained: a task with a dense reward (the share of an answer's
characters that are of the asked kind) is learnt by reinforcement alone in some twenty steps.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

__all__ = ["CHAT_TEMPLATE", "REVISION", "build_tiny", "tiny_config", "tiny_tokenizer"]

REVISION = 2
"""Part of the cache key: raise it when what is built changes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Whole words are built by left-to-right merges, so text has several tokenisations, as with a real vocabulary.
_WORDS = ("system", "user", "assistant", "tool", "hello", "digits", "capitals", "Ġthe", "Ġof")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: 3 special tokens, 256 bytes, and the pieces of a few words. ChatML template, no added BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        prefixes = [word[:end] for end in range(1, len(word) + 1)]
        for shorter, longer in pairwise(prefixes):
            if (shorter, longer[-1]) not in merges:
                merges.append((shorter, longer[-1]))
                pieces.append(longer)
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=tiny_config().max_position_embeddings,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_config() -> LlamaConfig:
    """Two layers, 64 wide, grouped-query attention, tied embeddings: every shape a real Llama has."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def build_tiny(target: Path, *, seed: int) -> None:
    """Write the model of this seed. The same seed and torch version give the same bytes."""
    import torch
    from transformers import LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = tiny_config()
    assert len(tokenizer) <= config.vocab_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
