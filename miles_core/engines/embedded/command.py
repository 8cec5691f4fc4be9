"""The command line of ``python -m miles_core.engines.embedded``: serve a model directory on 127.0.0.1.

Prints one JSON line ``{"url", "pid"}`` on standard output when it serves. Ends on SIGTERM, SIGINT, and when
standard input reaches its end: a parent that dies takes its engine along.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import uvicorn

from miles_core.eventloop import run
from miles_core.garbage import settle

from .engine import Engine
from .protocol import Limits
from .runner import DTYPES, ModelRunner, load_model
from .server import EngineApp
from .weights import WeightStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from miles_core.lifeline import Lifeline

    from .sequence import Decoder

ROW_TOKENS = 2048
"""Default pool: so many tokens for each running sequence."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m miles_core.engines.embedded", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face model directory")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="intra-op threads; 0 takes all cores")
    parser.add_argument("--max-running", type=int, default=32, help="sequences that decode together")
    parser.add_argument(
        "--max-total-tokens", type=int, help=f"tokens in the KV pool (default {ROW_TOKENS} for each of --max-running)"
    )
    parser.add_argument("--context-length", type=int, help="longest prompt plus output (default: the model's)")
    parser.add_argument("--max-prefill-tokens", type=int, default=1024, help="prompt tokens a step")
    parser.add_argument("--weight-version", default="0", help="policy version of the directory's weights")
    parser.add_argument("--wait-for-weights", action="store_true", help="answer 503 until the first commit_weights")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--stream-interval", type=int, default=16, help="tokens between two events of a stream")
    options = parser.parse_args(arguments)
    options.threads = options.threads or os.cpu_count() or 1
    if options.threads < 1:
        parser.error(f"--threads: at least 0, not {options.threads}")
    for name in ("max_running", "stream_interval", "max_prefill_tokens", "max_total_tokens", "context_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1, not {value}")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model: {options.model} is no model directory (it has no config.json)")
    return options


def build(options: argparse.Namespace) -> tuple[Engine, EngineApp]:
    """Load the model and put engine and routes around it."""
    torch.set_num_threads(options.threads)
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    total = options.max_total_tokens or ROW_TOKENS * options.max_running
    config = model.config.get_text_config()
    context = min(options.context_length or config.max_position_embeddings, config.max_position_embeddings, total)
    runner = ModelRunner(model, slots=total, rows=options.max_running)
    runner.warm_up()
    weights = WeightStore(model, threads=options.threads)
    decoder = _load_decoder(options.model)
    engine = Engine(
        runner=runner,
        weights=weights,
        decoder=decoder,
        version=None if options.wait_for_weights else str(options.weight_version),
        max_running=options.max_running,
        max_total_tokens=total,
        max_prefill_tokens=options.max_prefill_tokens,
        threads=options.threads,
        stream_interval=options.stream_interval,
    )
    eos = _eos_token_ids(model)
    limits = Limits(
        vocab_size=config.vocab_size,
        context_length=context,
        has_tokenizer=decoder is not None,
        has_experts=runner.routes.supported,
        eos_token_ids=eos,
    )
    info = {
        "model_path": str(options.model),
        "tokenizer_path": str(options.model) if decoder is not None else None,
        "is_generation": True,
        "dtype": options.dtype,
        "device": str(runner.device),
        "vocab_size": config.vocab_size,
        "context_length": context,
        "eos_token_ids": sorted(eos),
        "has_routed_experts": runner.routes.supported,
    }
    return engine, EngineApp(engine=engine, weights=weights, limits=limits, info=info)


def _load_decoder(path: Path) -> Decoder | None:
    """Return the directory's tokenizer, None when it has none."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer

    return cast("Decoder", AutoTokenizer.from_pretrained(path))


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the end-of-sequence ids of the generation config, else of the model config."""
    for config in (model.generation_config, model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


async def serve(options: argparse.Namespace, lifeline: Lifeline) -> None:
    """Serve until told to end."""
    engine, app = build(options)
    listener = socket.create_server(("127.0.0.1", options.port), backlog=2048)
    # Accepted connections inherit it. asyncio sets it only on sockets made with an explicit protocol number, and
    # without it an answer's body waits 40 ms for the acknowledgement of its headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(
        app.app, log_level=options.log_level, access_log=False, lifespan="off", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)

    def end() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn stops on these, then raises them once more for whoever was there before: that is us, not the default.
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    settle()
    engine.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    lifeline.on_end = end
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    print(json.dumps({"url": url, "pid": os.getpid()}), flush=True)
    try:
        await serving
    finally:
        engine.close()


def main(lifeline: Lifeline) -> None:
    """Run the command line."""
    options = parse_arguments()
    logging.basicConfig(level=options.log_level.upper(), stream=sys.stderr)
    run(serve(options, lifeline))
