"""A tiny tokenizer, a scripted engine, and short ways to make tasks and samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from miles_core.contracts.engines import Generation, Sampling
from miles_core.contracts.environments import EpisodeTask
from miles_core.contracts.rewards import Sample
from miles_core.data.group import Episode, Prompt
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.data.trajectory import Status
from miles_core.rollout.ledger import Ledger

END = "<|im_end|>"


@pytest.fixture(autouse=True)
def _closed_ledgers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every ledger that a test opens: a connection that is left to the collector is a warning, thus an error."""
    opened: list[Ledger] = []
    open_ledger = Ledger.__init__

    def remember(ledger: Ledger, path: Path) -> None:
        open_ledger(ledger, path)
        opened.append(ledger)

    monkeypatch.setattr(Ledger, "__init__", remember)
    yield
    for ledger in opened:
        ledger.close()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """Byte-level, with merges that decoding and encoding again would find where a model did not sample them."""
    directory = tmp_path_factory.mktemp("tokenizer")
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), (">", "Ċ")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<|im_start|>", END)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return load_tokenizer(directory)


class ScriptedEngine:
    """Answers with the scripted ids in turn; log-probs and versions tell positions apart."""

    def __init__(self, *turns: tuple[Sequence[int], str], routes: tuple[int, int] | None = None) -> None:
        self.turns = list(turns)
        self.routes = routes
        self.requests: list[tuple[list[int], Sampling, str]] = []

    async def generate(
        self, input_ids: Sequence[int], sampling: Sampling, *, routing_key: str = "", priority: int = 0
    ) -> Generation:
        ids, reason = self.turns[len(self.requests)]
        self.requests.append((list(input_ids), sampling, routing_key))
        number = len(self.requests)
        length = len(input_ids) + len(ids)
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array([-0.5 * number - 0.01 * i for i in range(len(ids))], np.float32),
            versions=np.full(len(ids), number, np.int32),
            finish_reason=reason,
            engine="http://engine",
            prompt_tokens=len(input_ids),
            cached_tokens=0,
            started=float(number),
            finished=float(number) + 0.5,
            routed_experts=None
            if self.routes is None
            else np.arange(length - 1, dtype=np.int32)[:, None, None] * np.ones((1, *self.routes), np.int32),
        )


@pytest.fixture
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine


def make_prompt(**fields: Any) -> Prompt:
    defaults: dict[str, Any] = {"prompt_id": "p:1", "messages": ({"role": "user", "content": "hello"},)}
    return Prompt(**(defaults | fields))


@pytest.fixture(scope="session")
def make_task() -> Callable[..., EpisodeTask]:
    def make(*, max_tokens: int = 0, max_new_tokens: int = 64, **fields: Any) -> EpisodeTask:
        return EpisodeTask(
            prompt=make_prompt(**fields),
            group_id="g",
            episode_id="g.0",
            sampling=Sampling(max_new_tokens=max_new_tokens),
            seed=7,
            max_tokens=max_tokens,
        )

    return make


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., Sample]:
    def make(response: str, label: Any = None, *, episode: str = "g.0", **metadata: Any) -> Sample:
        return Sample(
            prompt=make_prompt(label=label, metadata=metadata),
            response=response,
            messages=({"role": "assistant", "content": response},),
            episode=Episode(
                episode_id=episode, prompt_id="p:1", group_id="g", status=Status.COMPLETED, trajectories=()
            ),
        )

    return make
