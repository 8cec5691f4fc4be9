"""Real SGLang servers, started once, and what publishes to them.

`MILES_SGLANG_PYTHON` is the interpreter of a virtual environment with SGLang and tests/support/sglang_cpu;
`nox -s sglang` builds one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import EngineStart, PauseMode
from miles_core.contracts.events import VersionPublished
from miles_core.engines.pool import EnginePool
from miles_core.engines.sglang import SglangConfig, SglangEngine
from miles_core.models.facts import model_facts
from miles_core.runs.launcher import LocalLauncher
from miles_core.sync.broadcast import BroadcastConfig, BroadcastTransport
from miles_core.sync.transaction import publish
from miles_core.testing.tiny import tiny_model

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session")
def server_python() -> str:
    python = os.environ.get("MILES_SGLANG_PYTHON", "")
    if not python:
        pytest.skip("MILES_SGLANG_PYTHON is not set; run `nox -s sglang`")
    return python


class Background:
    """An event loop in a thread: launched processes belong to it, tests have loops of their own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Servers:
    """An engine component with launched servers."""

    def __init__(
        self, background: Background, python: str, directory: Path, *, model: Path, arguments: tuple[str, ...]
    ) -> None:
        self.background = background
        self.model = model
        self.launcher = LocalLauncher(ComponentConfig())
        self.engine = SglangEngine(
            SglangConfig(
                python=python,
                device="cpu",
                arguments=("--max-total-tokens", "4096", *arguments),
                environment={"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
            )
        )
        start = EngineStart(
            model_directory=model,
            dtype="float32",
            run_directory=directory,
            wait_for_weights=True,
            policy_version=0,
            environment={},
        )
        self.urls: list[str] = background.run(self.engine.start(self.launcher, start))

    def close(self) -> None:
        self.background.run(self.engine.stop())
        self.background.run(self.launcher.close())


@pytest.fixture(scope="session")
def background() -> Iterator[Background]:
    background = Background()
    yield background
    background.close()


@pytest.fixture(scope="module")
def serve(
    background: Background, server_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Servers]]:
    with contextlib.ExitStack() as stack:

        def start(model: Path, *arguments: str) -> Servers:
            directory = tmp_path_factory.mktemp("servers")
            servers = Servers(background, server_python, directory, model=model, arguments=arguments)
            stack.callback(servers.close)
            return servers

        yield start


class Publishing:
    """A fleet of one module's servers, and a model that plays the trainer."""

    def __init__(self, servers: Servers) -> None:
        self.urls = servers.urls
        self.engine = servers.engine
        facts = model_facts(servers.model)
        self.pool = EnginePool(
            servers.urls,
            deadline=120.0,
            routed_experts=bool(facts.experts_per_token),
            experts_per_token=facts.experts_per_token,
            wait_for_weights=True,
            vocabulary=facts.vocabulary,
        )
        transport = BroadcastTransport(BroadcastConfig(bucket_mb=1, timeout=60.0))
        self._sender, self._receiver = transport.sender(Path()), transport.receiver(Path())

    async def publish(self, version: int, model: Any, *, mode: PauseMode = "retract") -> VersionPublished:
        witness = self.engine.witness()
        for name, tensor in weights_of(model):
            witness.see(name, tensor)

        published = dataclasses.replace(self._sender.send(version, weights_of(model)), expected=witness.expected())

        async def transfer(session: Any) -> None:
            await asyncio.to_thread(self._sender.transfer, published, weights_of(model), session)

        return await publish(published, self._receiver, self.pool, mode=mode, transport="broadcast", transfer=transfer)

    async def close(self) -> None:
        await self._receiver.discard(self.urls[0], None)  # type: ignore[arg-type]
        await self._receiver.close()
        await self.pool.close()
        self._sender.close()


@contextlib.asynccontextmanager
async def publishing(servers: Servers) -> AsyncIterator[Publishing]:
    ends = Publishing(servers)
    try:
        yield ends
    finally:
        await ends.close()


def weights_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Under checkpoint names, one tensor an expert, tied weights once."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, parameter in model.named_parameters():
        yield from revert_weight_conversion(model, {name: parameter.detach()}).items()


def perturbed(directory: Path, seed: int) -> Any:
    """The model of a directory with every weight moved a little."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def logprobs_of(model: Any, ids: list[int], start: int) -> Any:
    """Log-prob of every token from `start` on, given those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return logits[torch.arange(start - 1, len(ids) - 1), torch.tensor(ids[start:])].numpy()


@pytest.fixture(scope="session")
def moe_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE with random weights and the tiny tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from miles_core.models.tiny import tiny_tokenizer

    directory = tmp_path_factory.mktemp("moe")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )
    ).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def dense_directory() -> Path:
    return tiny_model()
