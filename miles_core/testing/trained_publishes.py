"""A trainer and an embedded engine with a transport between them: what the engine holds and serves is what was trained.

For tests of transports on real models; the conformance suite checks the laws on stub engines. Needs torch and
transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.engines import Sampling
from miles_core.data.group import Batch, Episode, Group, Prompt
from miles_core.data.trajectory import Status, Trajectory
from miles_core.engines.pool import EnginePool
from miles_core.sync.transaction import publish

if TYPE_CHECKING:
    from miles_core.contracts.backends import WeightStream
    from miles_core.contracts.transports import WeightTransport

__all__ = ["engine_here", "publishes_tied_experts", "train_and_publish", "write_tied_experts"]

_PROMPT = list(range(5, 37))


@contextlib.asynccontextmanager
async def engine_here(directory: Path, dtype: str) -> AsyncIterator[list[str]]:
    """An embedded engine that waits for weights, in this process; yields its URL in a list."""
    import uvicorn

    from miles_core.engines.embedded.command import build, parse_arguments

    arguments = ["--model", str(directory), "--dtype", dtype, "--threads", "1", "--max-running", "4"]
    engine, app = build(parse_arguments([*arguments, "--wait-for-weights"]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app.app, log_level="warning", lifespan="off"))
        engine.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield [f"http://127.0.0.1:{listener.getsockname()[1]}"]
        finally:
            server.should_exit = True
            await serving
            engine.close()


async def train_and_publish(
    transport: WeightTransport[Any],
    directory: Path,
    run_directory: Path,
    *,
    dtype: str = "float32",
    backend: Mapping[str, Any] | None = None,
    serving: Callable[[Path, str], AbstractAsyncContextManager[list[str]]] = engine_here,
) -> list[dict[str, str]]:
    """Publish a model, train a step, twice more; the engine's checksums after each of the three publishes.

    `dtype` of the engine, `backend` settings of `fsdp`. One prompt is sampled from every time: a prefix that older
    weights computed would show. Raises `AssertionError` where the engine's checksums are not the trainer's, or its
    log-probs of what it sampled differ by more than 1e-4 (float32) or 0.15 (bfloat16).
    """
    from miles_core.contracts.backends import BackendStart
    from miles_core.training.fsdp import FsdpBackend
    from miles_core.training.outgoing import in_dtype
    from miles_core.training.settings import FsdpConfig

    trainer = FsdpBackend(FsdpConfig.model_validate({"learning_rate": 1e-2, **(backend or {})}))
    trainer.start(BackendStart(model_directory=directory, dtype=dtype, seed=0, temperature=1.0, total_steps=10))
    sender, receiver = transport.sender(run_directory), transport.receiver(run_directory)
    objective, held = _likelihood(), []

    def weights() -> WeightStream:
        return in_dtype(trainer.named_weights(), dtype)

    async def transfer(session: Mapping[str, object]) -> None:
        await asyncio.to_thread(sender.transfer, published, weights(), session)

    async with serving(directory, dtype) as urls:
        pool = EnginePool(urls, deadline=60.0, wait_for_weights=True)
        try:
            for version in (1, 2, 3):
                published = await asyncio.to_thread(sender.send, version, weights())
                await publish(published, receiver, pool, mode="retract", transport="tested", transfer=transfer)
                held.append(dict(await pool.checksums(urls[0])))
                assert held[-1] == published.checksums, f"version {version}: other checksums than the trainer's"
                answer = await pool.generate(_PROMPT, Sampling(max_new_tokens=6, ignore_eos=True))
                assert set(answer.versions.tolist()) == {version}, f"served under {answer.versions}"
                served = _trajectory(answer.token_ids.tolist(), answer.logprobs.tolist())
                (trained,) = trainer.logprobs([served])
                off = float(np.abs(served.logprobs - trained)[len(_PROMPT) :].max())
                assert off < (1e-4 if dtype == "float32" else 0.15), f"version {version}: log-probs are {off} apart"
                trainer.train_step(_batch(version), objective)
        finally:
            await pool.close()
            await receiver.close()
            sender.close()
    return held


def write_tied_experts(directory: Path) -> None:
    """A tiny Qwen3-MoE with random weights: two layers of six experts, and one matrix for embedding and head."""
    import torch
    from transformers import Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).save_pretrained(directory)


async def publishes_tied_experts(transport: WeightTransport[Any], directory: Path, *, dtype: str) -> None:
    """`train_and_publish` such a model; the head is sent once, changes with every step, and every expert by itself."""
    write_tied_experts(directory / "model")
    held = await train_and_publish(transport, directory / "model", directory, dtype=dtype)
    assert "lm_head.weight" not in held[0]
    assert len({one["model.embed_tokens.weight"] for one in held}) == len(held)
    assert sum(".experts." in name for name in held[0]) == 2 * 6 * 3


def _likelihood() -> Any:
    from miles_core.contracts.component import ComponentConfig
    from miles_core.objective.compose import WeightedTerm, compose
    from miles_core.objective.none import NoAdvantages
    from miles_core.objective.supervised import Supervised

    term = WeightedTerm(name="supervised", term=Supervised(ComponentConfig()))
    return compose(estimator=NoAdvantages(ComponentConfig()), terms=[term])


def _trajectory(answer: list[int], logprobs: list[float]) -> Trajectory:
    ids = [*_PROMPT, *answer]
    sampled = np.arange(len(ids)) >= len(_PROMPT)
    return Trajectory(
        token_ids=np.array(ids, np.int32),
        loss_mask=sampled,
        logprobs=np.array([0.0] * len(_PROMPT) + logprobs, np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        prompt_id="p",
        group_id="g",
        episode_id="e",
        trajectory_id="t",
        reward=1.0,
    )


def _batch(seed: int) -> Batch:
    one = _trajectory(np.random.default_rng(seed).integers(3, 90, 12).tolist(), [-4.0] * 12)
    episode = Episode(
        episode_id="e", prompt_id="p", group_id="g", status=Status.COMPLETED, trajectories=(one,), reward=1.0
    )
    group = Group(group_id="g", prompt=Prompt(prompt_id="p", messages=()), episodes=(episode,))
    return Batch(groups=(group,), policy_version=0, step=0)
