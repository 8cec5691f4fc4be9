"""One GGUF file to one Hugging Face directory: float32 safetensors, config, tokenizer, generation config.

The values of a quantised file are kept exactly: every GGUF block format dequantises to float32 without rounding.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["convert_gguf"]

_STRING = 8  # GGUF value type, GGUF specification "Metadata value types"


def convert_gguf(path: Path, target: Path) -> None:
    """Write `target` so that `from_pretrained(target)` works without gguf, accelerate or this module.

    Raises `ModelError` when transformers cannot read the architecture or the file is damaged.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        quantised = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"model file {path}: transformers could not read it as GGUF ({type(error).__name__}: {error}). It needs "
            "the packages gguf and accelerate (extra 'train') and an architecture that transformers converts"
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]

    # save_pretrained refuses a model that was loaded quantised, so the weights move to a plain one.
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = quantised.generation_config
    _restore_pre_tokenizer(tokenizer, path)
    tokenizer.model_max_length = config.max_position_embeddings
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _restore_pre_tokenizer(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Put back the splitting rule that the GGUF names and transformers ignores.

    SmolLM splits digits before the byte-level rule, so that two spaces before a number are one token. llama.cpp,
    `LLAMA_VOCAB_PRE_TYPE_SMOLLM`.
    """
    from tokenizers import pre_tokenizers

    if _metadata_string(path, "tokenizer.ggml.pre") == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def _metadata_string(path: Path, key: str) -> str | None:
    """A string value of the GGUF header (GGUF specification: length-prefixed key, type, length-prefixed value)."""
    needle = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", _STRING)
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(needle)
        if at < 0:
            return None
        at += len(needle)
        (length,) = struct.unpack("<Q", data[at : at + 8])
        return data[at + 8 : at + 8 + length].decode()
