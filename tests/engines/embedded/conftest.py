"""Tiny random models on disk, and engines over them in this process."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from miles_core.engines.embedded.command import build, parse_arguments  # noqa: E402
from miles_core.engines.embedded.engine import Engine, StepError  # noqa: E402
from miles_core.engines.embedded.protocol import parse_generate  # noqa: E402

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 2,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "mistral_window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=6),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2, tie_word_embeddings=False
    ),
}


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a family's tiny random model."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return make


class Harness:
    """An engine in this process, and blocking calls on it."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        options = parse_arguments(["--model", str(directory), "--threads", "1", *arguments])
        self.engine: Engine
        self.engine, self.app = build(options)
        self.engine.start()

    def submit(self, *bodies: dict[str, Any]) -> Callable[[], list[dict[str, Any]]]:
        """Queue one request a body; the result waits for all answers, in order."""
        waiting = []
        for body in bodies:
            requests, _ = parse_generate(body, self.app._limits)
            answers: queue.Queue[Any] = queue.Queue()
            self.engine.submit(requests, lambda _, answer, answers=answers: answers.put(answer))
            waiting.append(answers)

        def collect() -> list[dict[str, Any]]:
            results = []
            for answers in waiting:
                answer = answers.get(timeout=60)
                if isinstance(answer, StepError):
                    raise answer
                results.append(answer)
            return results

        return collect

    def generate(self, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
        return self.submit(*bodies)()

    def call(self, command: Callable[[], Any]) -> Any:
        return self.engine.call(command).result(timeout=60)

    def together(self, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
        """Answer requests that were all queued before the first of them ran."""
        self.call(lambda: self.engine.pause("in_place"))
        collect = self.submit(*bodies)
        self.call(self.engine.resume)
        return collect()


@pytest.fixture
def start(model_directory: Callable[[str], Path]) -> Iterator[Callable[..., Harness]]:
    """Return a function that starts an engine over a family's model."""
    running: list[Harness] = []

    def make(family: str, *arguments: str) -> Harness:
        running.append(Harness(model_directory(family), *arguments))
        return running[-1]

    yield make
    for harness in running:
        harness.engine.close()


def body(ids: list[int], **sampling: Any) -> dict[str, Any]:
    """Return a request with log-probs; ``sampling`` are its sampling parameters."""
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}


def prompts(count: int, *, shared: int = 0, low: int = 1, high: int = 40, seed: int = 0) -> list[list[int]]:
    """Return ragged random prompts that begin with the same ``shared`` tokens."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    prefix = ids(shared)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [prefix + ids(length) for length in lengths]
